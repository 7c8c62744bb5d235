"""The stage that adds zoom windows (saccades) to the frames of one stream, to detect small objects.

A zoom window is a small region of a frame that the model processes at full resolution. The stage chooses the windows
before inference. Afterwards, it adds predicted boxes of small objects that are outside the windows.

`choose` runs in the thread that submits frames. `process` runs in the thread that collects results.
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

_MOST_OPEN = 64  # maximum number of frames whose windows wait for their results

InputSize = Callable[[int, int], tuple[int, int]]
"""Map the width and height of a frame to the columns and rows of the model's input."""


@dataclass(slots=True, frozen=True)
class SaccadeSettings:
    """The settings of a stream's zoom windows (saccades), which detect small objects.

    Attributes:
        count: maximum number of zoom windows per frame; None adapts the number to the idle time of the engine.
        sweep_s: time in which zoom windows cover the whole frame once, in seconds.
        max_fps: highest frame rate that the stream needs; None for no limit.
        masks: polygons in which motion is ignored, in normalized coordinates (0 to 1).
    """

    count: int | None = 0
    sweep_s: float = 5.0
    max_fps: float | None = None
    masks: Sequence[Sequence[Point]] = ()


@dataclass(slots=True, frozen=True)
class Looked:
    """A processed zoom window of a frame, in normalized coordinates (0 to 1), and the reason for the window."""

    key: ClassVar[str] = "looks"
    reason: str
    x1: float
    y1: float
    x2: float
    y2: float

    def to_record(self, width: int, height: int) -> Mapping[str, Any]:
        """Return the zoom window as JSON: its reason, its corners in pixels, and its normalized corners (0 to 1)."""
        norm = self.x1, self.y1, self.x2, self.y2
        box = [round(value * side) for value, side in zip(norm, (width, height) * 2, strict=True)]
        return {"reason": self.reason, "box": box, "box_norm": [round(value, 4) for value in norm]}


class SaccadeStage:
    """Chooses the zoom windows of each frame, and predicts the positions of small objects outside the windows.

    Args:
        settings: settings of the zoom windows. The stage is inactive if `count` is 0.
        input_size: returns the size of the model's input for a frame, in pixels.
        live: whether the source is live. For a video file, a `count` of None means one zoom window per frame.
        motion: motion detector with `FINE_ROWS` rows. A motion gate can share it.
        idle_s: returns the total idle time of the engine, in seconds. None if unknown.
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
        """The number of zoom windows since the start of the stream, by reason (such as motion)."""
        with self._lock:
            return dict(self._counts)

    def configure(self, settings: SaccadeSettings) -> None:
        """Apply new settings from the next frame on. Thread-safe."""
        with self._lock:
            self._settings = settings
            self._auto.max_fps = settings.max_fps

    def choose(self, frame: Frame) -> list[Look]:
        """Return the zoom windows of a frame. Called before the frame is submitted to the engine."""
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
        motion = self._motion.see(frame, settings.masks)  # takes 1 ms, so it runs without the lock
        with self._lock:
            # The first frame has no motion map yet.
            changed, area = (None, 0.0) if motion.area >= 1 else (motion.changed, motion.area)
            looks = planner.choose(seconds, most, changed, area)
            self._open[frame.index] = looks
            while len(self._open) > _MOST_OPEN:
                del self._open[next(iter(self._open))]
        return looks

    def process(self, frame: Frame, result: Result) -> Result:
        """Add the zoom windows of the frame and the predicted boxes of small objects to the result."""
        with self._lock:
            for older in [index for index in self._open if index < frame.index]:
                del self._open[older]  # replaced by a newer frame in the engine
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
