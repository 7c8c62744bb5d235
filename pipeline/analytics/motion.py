"""Detects motion in the frames of a stream. A gate drops frames without motion before the engine.

`MotionMap` scales the luma of a frame to 100 or 180 rows, and compares it with the average of about the last second.

`MotionGate` admits a frame if the changed area is at least `motion_area`, and also all frames of the following second.
While there is no motion, it admits one frame per heartbeat interval. It reports periods without motion to the tracking
stage, so that lost tracks do not expire in these periods.
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
FINE_ROWS = 180  # a person 60 pixels high in a 4K image is 5 rows high
_LEAST_READ = 300  # rows that are read of a large frame
_CHANGED = 0.08  # change of a moving pixel, as a fraction of the contrast
_CONTRAST = (4, 96)  # the contrast is the difference of these percentiles of the brightness
_CONTRAST_FRAMES = 50  # number of frames over which the contrast is averaged
_LEAST_CHANGE = 5.0  # in levels of 0 to 255, above the noise of a dark image
_HOLD_S = 1.0  # frames are admitted this long after the last change, so that the model sees objects come to rest
_LATE_S = 1.0  # time constant of the background; with 10 s, the place that a person left showed motion for 10 s
_MOST_KEPT = 256  # idle periods that no stage has read yet

Luma = NDArray[np.float32]
LumaReader = Callable[["Frame", int], NDArray[np.uint8] | None]
"""Returns the luma of every nth pixel of a frame as (rows, columns) uint8, without converting the image to RGB. Returns
None if the image must be converted. The luma can be that of the previous frame, because the reader does not wait for a
GPU."""


@dataclass(slots=True, frozen=True)
class Motion:
    """The motion in a frame.

    Attributes:
        changed: (rows, n) bool map of the pixels that differ from their recent average. False inside masks.
        area: changed fraction of the frame, from 0 to 1. It is 1 for the first frame.
    """

    changed: NDArray[np.bool_]
    area: float


class MotionMap:
    """Detects motion in the frames of a stream. Not thread-safe.

    The result for a frame is computed once, even if several callers request it.

    Args:
        rows: number of rows of the motion map. The number of columns follows from the aspect ratio of the frame.
        read: function that reads the luma of a frame in GPU memory. If None, frames are converted on the CPU.
    """

    def __init__(self, rows: int = _ROWS, read: LumaReader | None = None) -> None:
        self._rows, self._read = rows, read
        self._late: Luma | None = None  # the background: average of about the last second
        self._masks: Sequence[Sequence[Point]] = ()
        self._watched: NDArray[np.bool_] | None = None
        self._contrast: deque[float] = deque(maxlen=_CONTRAST_FRAMES)
        self._last = 0.0
        self._newest: tuple[int, Motion] | None = None

    def see(self, frame: Frame, masks: Sequence[Sequence[Point]] = ()) -> Motion:
        """Return the pixels of a frame that show motion, and their fraction of the frame.

        Args:
            frame: the frame.
            masks: polygons in which motion is ignored, in normalized coordinates (0 to 1).
        """
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
        difference -= np.median(difference[::2, ::2])  # a change of brightness of the whole frame is not motion
        least = max(_LEAST_CHANGE, _CHANGED * sum(self._contrast) / len(self._contrast))
        changed = (np.abs(difference) > least) & self._watched
        cv2.accumulateWeighted(luma, self._late, 1 - np.exp(-min(max(seconds - self._last, 0.0), 1.0) / _LATE_S))
        return Motion(changed, float(changed.mean()))

    def _luma(self, frame: Frame) -> Luma:
        """Return the luma of a frame, downscaled and blurred, as (rows, n) float32 from 0 to 255.

        Also record the contrast of the frame. The motion threshold depends on the contrast of recent frames.
        """
        width, height = frame.width, frame.height
        size = max(1, round(width * self._rows / height)), self._rows
        step = max(1, height // max(_LEAST_READ, 2 * self._rows))
        read = None if self._read is None else self._read(frame, step)
        if read is not None:
            small = cv2.resize(read, size, interpolation=cv2.INTER_AREA)
        elif step > 1:
            # Only the green channel of every nth pixel: 0.4 ms at 1080p, against 1.8 ms for all pixels and channels.
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
    """Return a boolean mask (rows, columns) that is False inside the mask polygons, where motion is ignored."""
    masked = np.zeros(shape, np.uint8)
    for polygon in masks:
        corners = np.array(polygon) * (shape[1], shape[0])
        cv2.fillPoly(masked, [np.round(corners).astype(np.int32)], 1)
    watched: NDArray[np.bool_] = masked == 0
    return watched


class MotionGate:
    """A gate that admits frames with motion.

    Args:
        settings: minimum changed area (`motion_area`), masks and heartbeat interval.
        motion: motion detector. The saccade stage can share it.
    """

    def __init__(self, settings: AnalyticsSettings | None = None, motion: MotionMap | None = None) -> None:
        self._settings = settings or AnalyticsSettings()
        self._motion = motion or MotionMap()
        self._last = 0.0  # times of the last frame, of the last change and of the last admitted frame
        self._moved = self._admitted = -np.inf
        self._refused: float | None = None  # time of the newest frame since then that was not admitted
        self._still: dict[int, float] = {}

    def configure(self, settings: AnalyticsSettings) -> None:
        """Apply new values of the motion area, masks and heartbeat interval from the next frame on. Thread-safe."""
        self._settings = settings

    def admit(self, frame: Frame) -> bool:
        """Return whether to process a frame: there was motion in the last second, or a heartbeat is due."""
        seconds = frame.pts * frame.time_base.numerator / frame.time_base.denominator
        if seconds < self._last:  # the clock restarted
            self._moved = self._admitted = -np.inf
            self._refused = None
        if self._moves(frame):
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

    def _moves(self, frame: Frame) -> bool:
        """Return whether the frame has motion."""
        return self._motion.see(frame, self._settings.motion_mask).area >= self._settings.motion_area

    def still_before(self, index: int) -> float:
        """Return how long there was no motion before an admitted frame, in seconds. Thread-safe.

        Periods before older frames are included if they have not been returned yet.

        Args:
            index: index of the frame.
        """
        return sum(self._still.pop(key, 0.0) for key in list(self._still) if key <= index)


StillBefore = Callable[[int], float]
"""Returns the duration of the period without motion before the frame with this index, in seconds."""


class CameraGate(MotionGate):
    """A gate that admits frames while the camera reports motion.

    If the camera's signals are unknown, it admits all frames.

    Args:
        settings: heartbeat interval of the gate.
        signals: returns the signals that the camera reports, such as motion, or None if they are unknown.
    """

    def __init__(
        self,
        settings: AnalyticsSettings | None = None,
        signals: Callable[[], frozenset[str] | None] = lambda: None,
    ) -> None:
        super().__init__(settings)
        self._signals = signals

    def _moves(self, frame: Frame) -> bool:
        signals = self._signals()
        return signals is None or "motion" in signals
