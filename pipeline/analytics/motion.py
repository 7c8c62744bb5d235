"""The gate that keeps frames on which nothing moves from the engine: brightness against that of late, 100 rows high.

It admits a frame on which more changes than `motion_area`, those of the second after it, and one now and then while
nothing moves. What a still time is, it tells the stage that tracks, so that no track ends of it. Knows frames only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import cv2
import numpy as np
from numpy.typing import NDArray

from saccade.pipeline.analytics.geometry import Point
from saccade.pipeline.analytics.settings import AnalyticsSettings

if TYPE_CHECKING:
    from saccade.sources import Frame

_ROWS = 100
_CHANGED = 0.08  # of the contrast, that a pixel changes by where something moves
_CONTRAST = (4, 96)  # percentiles of the brightness whose distance is the contrast
_CONTRAST_FRAMES = 50  # over which it is averaged
_LEAST_CHANGE = 5.0  # levels of 255, above the noise of a dark image
_HOLD_S = 1.0  # admitted after the last change, so that what comes to rest is seen at rest
_LATE_S = 1.0  # within which a change is no news any more: with 10 s, where a person had stood moved for all of these
_MOST_KEPT = 256  # still times that no stage has asked for

Luma = NDArray[np.float32]


class MotionGate:
    """Admits frames on which something moves.

    Args:
        settings: its area, masks and heartbeat.
    """

    def __init__(self, settings: AnalyticsSettings | None = None) -> None:
        self._settings = settings or AnalyticsSettings()
        self._late: Luma | None = None  # the average of the last second or so
        self._masked: list[list[Point]] = []  # the areas without the watched ones
        self._watched: NDArray[np.bool_] | None = None
        self._contrast: deque[float] = deque(maxlen=_CONTRAST_FRAMES)
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
        if self._change(frame, seconds) >= self._settings.motion_area:
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

    def _change(self, frame: Frame, seconds: float) -> float:
        """Which fraction of the frame differs from how it was of late; all of it on the first one."""
        luma = self._luma(frame.image)
        polygons = self._settings.motion_mask
        if self._late is None or self._late.shape != luma.shape or polygons != self._masked:
            self._late, self._masked, self._watched = luma, polygons, _watched(luma.shape, polygons)
            return 1.0
        difference = luma - self._late
        difference -= np.median(difference)  # where all becomes lighter or darker, nothing has moved
        least = max(_LEAST_CHANGE, _CHANGED * sum(self._contrast) / len(self._contrast))
        changed = (np.abs(difference) > least) & self._watched
        cv2.accumulateWeighted(luma, self._late, 1 - np.exp(-min(max(seconds - self._last, 0.0), 1.0) / _LATE_S))
        return float(changed.mean())

    def _luma(self, image: NDArray[np.uint8]) -> Luma:
        """Brightness (100, n) float32, 0 to 255, blurred; notes its contrast."""
        height, width = image.shape[:2]
        small = cv2.resize(image, (max(1, round(width * _ROWS / height)), _ROWS), interpolation=cv2.INTER_AREA)
        grey = cv2.GaussianBlur(cv2.cvtColor(small, cv2.COLOR_RGB2GRAY), (3, 3), 0)
        low, high = np.percentile(grey[::2, ::2], _CONTRAST)
        self._contrast.append(float(high - low))
        luma: Luma = grey.astype(np.float32)
        return luma


def _watched(shape: tuple[int, ...], polygons: list[list[Point]]) -> NDArray[np.bool_]:
    """Where changes count: (100, n) bool."""
    masked = np.zeros(shape, np.uint8)
    for polygon in polygons:
        corners = np.array(polygon) * (shape[1], shape[0])
        cv2.fillPoly(masked, [np.round(corners).astype(np.int32)], 1)
    watched: NDArray[np.bool_] = masked == 0
    return watched


StillBefore = Callable[[int], float]
"""For how many seconds nothing moved before the frame with this index."""
