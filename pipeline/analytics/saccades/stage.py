"""The saccades of one stream: windows for a frame that the engine gets next, and one list of boxes of its result.

`choose` runs in the thread that submits frames, `process` in the one that collects results.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from saccade.engine.results import Box, Detections, Result
from saccade.pipeline.analytics.geometry import Point
from saccade.pipeline.analytics.motion import FINE_ROWS, MotionMap
from saccade.pipeline.analytics.saccades.auto import AutoCount
from saccade.pipeline.analytics.saccades.memory import Found
from saccade.pipeline.analytics.saccades.planner import Look, Planner
from saccade.pipeline.analytics.track import time_of

if TYPE_CHECKING:
    from saccade.sources import Frame

_MOST_OPEN = 64  # frames whose windows are remembered until their result comes

InputSize = Callable[[int, int], tuple[int, int]]
"""From width and height of a frame to columns and rows in which the model sees it."""


@dataclass(slots=True, frozen=True)
class SaccadeSettings:
    """What a stream wants.

    Attributes:
        count: most windows a frame; None for as many as the engine has idle time for.
        sweep_s: within how many seconds each part of the frame is looked at.
        max_fps: most frames a second; None for all.
        masks: polygons in fractions of the frame in which motion does not count.
    """

    count: int | None = 0
    sweep_s: float = 5.0
    max_fps: float | None = None
    masks: Sequence[Sequence[Point]] = ()


@dataclass(slots=True, frozen=True)
class Looked:
    """A window of a frame, in fractions of it, and why it was looked at."""

    key: ClassVar[str] = "looks"
    reason: str
    x1: float
    y1: float
    x2: float
    y2: float

    def to_record(self, width: int, height: int) -> Mapping[str, Any]:
        """Its reason, and its corners in pixels and in fractions of the frame."""
        norm = self.x1, self.y1, self.x2, self.y2
        box = [round(value * side) for value, side in zip(norm, (width, height) * 2, strict=True)]
        return {"reason": self.reason, "box": box, "box_norm": [round(value, 4) for value in norm]}


class SaccadeStage:
    """Chooses windows, and holds small objects between two looks at them. Does nothing while no windows are wanted.

    Args:
        settings: what the stream wants.
        input_size: of the model.
        live: whether frames come at their own pace; `count` None is one window where they do not.
        motion: what moves, in `FINE_ROWS`; may be shared with a gate.
        idle_s: gives for how many seconds the engine has idled so far; None where that is unknown.
    """

    def __init__(
        self,
        settings: SaccadeSettings,
        input_size: InputSize,
        *,
        live: bool,
        motion: MotionMap | None = None,
        idle_s: Callable[[], float] | None = None,
    ) -> None:
        self._settings, self._input_size, self._live = settings, input_size, live
        self._motion, self._idle_s = motion or MotionMap(FINE_ROWS), idle_s
        self._auto = AutoCount(settings.max_fps, id(self))
        self._planner: Planner | None = None
        self._made_for: tuple[int, int, float, bool] | None = None
        self._open: dict[int, list[Look]] = {}
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> dict[str, int]:
        """How many windows were looked at, by reason."""
        with self._lock:
            return dict(self._counts)

    def configure(self, settings: SaccadeSettings) -> None:
        """Take other settings from the next frame on. Callable from any thread."""
        with self._lock:
            self._settings = settings
            self._auto.max_fps = settings.max_fps

    def choose(self, frame: Frame) -> list[Look]:
        """The windows of a frame that is given to the engine now."""
        settings, seconds = self._settings, time_of(frame)
        if settings.count == 0:
            return []
        idle = None if self._idle_s is None else (time.monotonic(), self._idle_s())
        with self._lock:
            self._auto.note_offered(seconds, idle)
            most = settings.count if settings.count is not None else self._auto.count if self._live else 1
            planner = self._planner_for(frame.width, frame.height, settings)
        if not planner.useful:
            return []
        motion = self._motion.see(frame, settings.masks)  # 1 ms, without the lock
        with self._lock:
            # Of the first frame nothing is known to move.
            changed, area = (None, 0.0) if motion.area >= 1 else (motion.changed, motion.area)
            looks = planner.choose(seconds, most, changed, area)
            self._open[frame.index] = looks
            while len(self._open) > _MOST_OPEN:
                del self._open[next(iter(self._open))]
        return looks

    def process(self, frame: Frame, result: Result) -> Result:
        """The result with the small objects that are expected where nobody looked, and with the windows."""
        with self._lock:
            for older in [index for index in self._open if index < frame.index]:
                del self._open[older]  # superseded in the engine
            looks = self._open.pop(frame.index, None)
            if looks is None or self._planner is None:
                return result
            self._auto.note_done()
            self._counts.update(look.reason for look in looks)
            width, height = frame.width, frame.height
            found = [Found(box.label, box.score, box.pixels(width, height)) for box in result.detections.boxes]
            held = self._planner.note(time_of(frame), looks, found)
        boxes = (*result.detections.boxes, *(_box(one, width, height) for one in held))
        windows = tuple(_looked(look, width, height) for look in looks)
        return replace(
            result,
            detections=Detections(boxes, result.detections.width, result.detections.height),
            extras={**result.extras, Looked.key: windows},
        )

    def _planner_for(self, width: int, height: int, settings: SaccadeSettings) -> Planner:
        wanted = width, height, settings.sweep_s, settings.count is None
        if self._planner is None or self._made_for != wanted:
            columns, rows = self._input_size(width, height)
            self._planner = Planner(width, height, columns, rows, settings.sweep_s, thrifty=settings.count is None)
            self._made_for = wanted
            self._open.clear()
        return self._planner


def _box(one: Found, width: int, height: int) -> Box:
    x1, y1, x2, y2 = (min(1.0, max(0.0, v / side)) for v, side in zip(one.box, (width, height) * 2, strict=True))
    return Box(one.label, one.score, x1, y1, x2, y2, predicted=True)


def _looked(look: Look, width: int, height: int) -> Looked:
    x1, y1, x2, y2 = look.rect
    return Looked(look.reason, x1 / width, y1 / height, x2 / width, y2 / height)
