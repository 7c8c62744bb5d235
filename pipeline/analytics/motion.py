"""Where something moves on the frames of a stream, and the gate that keeps frames without movement from the engine.

`MotionMap` compares the brightness of a frame, 100 or 180 rows high, with that of the last second. The gate admits a
frame on which more changes than `motion_area`, the frames of the second after it, and one per heartbeat while nothing
moves. It reports idle periods to the stage that tracks, so that tracks do not expire. Knows frames only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import cv2
import numpy as np
from numpy.typing import NDArray

from saccade.pipeline.analytics.geometry import Point
from saccade.pipeline.analytics.settings import AnalyticsSettings

if TYPE_CHECKING:
    from saccade.sources import Frame

_ROWS = 100
FINE_ROWS = 180  # a person of 60 pixels in a 4K picture is 5 rows high
_LEAST_READ = 300  # rows of a large frame that are read
_CHANGED = 0.08  # of the contrast, that a pixel changes by where something moves
_CONTRAST = (4, 96)  # percentiles of the brightness whose distance is the contrast
_CONTRAST_FRAMES = 50  # over which it is averaged
_LEAST_CHANGE = 5.0  # levels of 255, above the noise of a dark image
_HOLD_S = 1.0  # admitted after the last change, so that what comes to rest is seen at rest
_LATE_S = 1.0  # within which a change is no news any more: with 10 s, where a person had stood moved for all of these
_MOST_KEPT = 256  # still times that no stage has asked for

Luma = NDArray[np.float32]
LumaReader = Callable[["Frame", int], NDArray[np.uint8] | None]
"""From a frame, every nth pixel's brightness, (rows, columns) uint8, without its image; None where that is needed. It
may be that of the frame before: what comes from a GPU is not waited for."""


@dataclass(slots=True, frozen=True)
class Motion:
    """What moves on a frame.

    Attributes:
        changed: (rows, n) bool, which parts of the frame differ from the last second, outside of masks.
        area: which fraction of the frame that is; 1 for the first frame.
    """

    changed: NDArray[np.bool_]
    area: float


class MotionMap:
    """Computes the motion of each frame of a stream once, for all who ask. Callable from one thread.

    Args:
        rows: of the map; its columns follow from the frame's shape.
        read: gives the brightness of frames that are not to be converted on the CPU; None to convert all.
    """

    def __init__(self, rows: int = _ROWS, read: LumaReader | None = None) -> None:
        self._rows, self._read = rows, read
        self._late: Luma | None = None  # the average of the last second or so
        self._masks: Sequence[Sequence[Point]] = ()
        self._watched: NDArray[np.bool_] | None = None
        self._contrast: deque[float] = deque(maxlen=_CONTRAST_FRAMES)
        self._last = 0.0
        self._newest: tuple[int, Motion] | None = None

    def see(self, frame: Frame, masks: Sequence[Sequence[Point]] = ()) -> Motion:
        """The motion on a frame; the polygons of `masks`, in fractions of the frame, do not count."""
        if self._newest is not None and self._newest[0] == frame.index and self._masks == masks:
            return self._newest[1]
        seconds = frame.pts * frame.time_base.numerator / frame.time_base.denominator
        motion = self._compare(self._luma(frame), masks, seconds)
        self._newest, self._last = (frame.index, motion), seconds
        return motion

    def _compare(self, luma: Luma, masks: Sequence[Sequence[Point]], seconds: float) -> Motion:
        if self._late is None or self._late.shape != luma.shape or self._masks != masks or self._watched is None:
            self._late, self._masks, self._watched = luma, masks, _watched(luma.shape, masks)
            return Motion(self._watched, 1.0)
        difference = luma - self._late
        difference -= np.median(difference[::2, ::2])  # where all becomes lighter or darker, nothing has moved
        least = max(_LEAST_CHANGE, _CHANGED * sum(self._contrast) / len(self._contrast))
        changed = (np.abs(difference) > least) & self._watched
        cv2.accumulateWeighted(luma, self._late, 1 - np.exp(-min(max(seconds - self._last, 0.0), 1.0) / _LATE_S))
        return Motion(changed, float(changed.mean()))

    def _luma(self, frame: Frame) -> Luma:
        """Brightness (rows, n) float32, 0 to 255, blurred; notes its contrast."""
        width, height = frame.width, frame.height
        size = max(1, round(width * self._rows / height)), self._rows
        step = max(1, height // max(_LEAST_READ, 2 * self._rows))
        read = None if self._read is None else self._read(frame, step)
        if read is not None:
            small = cv2.resize(read, size, interpolation=cv2.INTER_AREA)
        elif step > 1:
            # Green alone of every nth pixel: 0.4 ms at 1080p instead of 1.8 for all of them in three channels.
            green = np.ascontiguousarray(frame.image[::step, ::step, 1])
            small = cv2.resize(green, size, interpolation=cv2.INTER_AREA)
        else:
            small = cv2.cvtColor(cv2.resize(frame.image, size, interpolation=cv2.INTER_AREA), cv2.COLOR_RGB2GRAY)
        grey = cv2.GaussianBlur(small, (3, 3), 0)
        low, high = np.percentile(grey[::2, ::2], _CONTRAST)
        self._contrast.append(float(high - low))
        luma: Luma = grey.astype(np.float32)
        return luma


def _watched(shape: tuple[int, ...], masks: Sequence[Sequence[Point]]) -> NDArray[np.bool_]:
    """Where changes count: (rows, n) bool."""
    masked = np.zeros(shape, np.uint8)
    for polygon in masks:
        corners = np.array(polygon) * (shape[1], shape[0])
        cv2.fillPoly(masked, [np.round(corners).astype(np.int32)], 1)
    watched: NDArray[np.bool_] = masked == 0
    return watched


class MotionGate:
    """Admits frames on which something moves.

    Args:
        settings: its area, masks and heartbeat.
        motion: computes what moves; may be shared.
    """

    def __init__(self, settings: AnalyticsSettings | None = None, motion: MotionMap | None = None) -> None:
        self._settings = settings or AnalyticsSettings()
        self._motion = motion or MotionMap()
        self._last = 0.0  # times of the last frame, of the last change and of the last frame that was admitted
        self._moved = self._admitted = -np.inf
        self._refused: float | None = None  # time of the newest frame since then that was refused
        self._still: dict[int, float] = {}

    def configure(self, settings: AnalyticsSettings) -> None:
        """Take another area, other masks and another heartbeat from the next frame on. Callable from any thread."""
        self._settings = settings

    def admit(self, frame: Frame) -> bool:
        """Whether something moves on the frame, has just moved, or it is time to have a look."""
        seconds = frame.pts * frame.time_base.numerator / frame.time_base.denominator
        if seconds < self._last:  # a clock that began again
            self._moved = self._admitted = -np.inf
            self._refused = None
        if self._motion.see(frame, self._settings.motion_mask).area >= self._settings.motion_area:
            self._moved = seconds
        self._last = seconds
        due = seconds - self._admitted >= self._settings.motion_heartbeat
        if not due and seconds - self._moved > _HOLD_S:
            self._refused = seconds
            return False
        if self._refused is not None:
            self._still[frame.index] = self._refused - self._admitted
            while len(self._still) > _MOST_KEPT:
                del self._still[next(iter(self._still))]
        self._admitted, self._refused = seconds, None
        return True

    def still_before(self, index: int) -> float:
        """For how many seconds nothing moved before an admitted frame; to be asked once. Callable from any thread.

        It may stand for frames that were admitted before it and replaced by it.
        """
        return sum(self._still.pop(key, 0.0) for key in list(self._still) if key <= index)


StillBefore = Callable[[int], float]
"""For how many seconds nothing moved before the frame with this index."""
