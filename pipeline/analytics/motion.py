"""The gate that keeps frames on which nothing moves from the engine: brightness against what is usual, 100 rows high.

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

from saccade.pipeline.analytics.settings import AnalyticsSettings

if TYPE_CHECKING:
    from saccade.sources import Frame

_ROWS = 100
_CHANGED = 20  # levels of 255, after the contrast is stretched, that a pixel changes by where something moves
_CONTRAST = (4, 96)  # percentiles between which the levels are stretched
_CONTRAST_FRAMES = 50  # over which they are averaged: a lamp that goes on changes them only slowly
_LEAST_CONTRAST = 40.0  # or the noise of a dark image would be stretched to movement
_HOLD_S = 1.0  # admitted after the last change, so that what comes to rest is seen at rest
_USUAL_S, _USUAL_MOVING_S = 2.0, 10.0  # within which a change becomes usual, while still and while something moves
_MOST_KEPT = 256  # still times that no stage has asked for

Luma = NDArray[np.float32]


class MotionGate:
    """Admits frames on which something moves.

    Args:
        settings: its area, masks and heartbeat.
    """

    def __init__(self, settings: AnalyticsSettings | None = None) -> None:
        self._settings = settings or AnalyticsSettings()
        self._usual: Luma | None = None
        self._watched: NDArray[np.bool_] | None = None
        self._contrast: deque[tuple[float, float]] = deque(maxlen=_CONTRAST_FRAMES)
        self._last = 0.0  # times of the last frame, of the last change and of the last frame that was admitted
        self._moved = self._admitted = -np.inf
        self._refused: float | None = None  # time of the newest frame since then that was refused
        self._still: dict[int, float] = {}

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
        """For how many seconds nothing moved before an admitted frame; to be asked once. Callable from any thread."""
        return self._still.pop(index, 0.0)

    def _change(self, frame: Frame, seconds: float) -> float:
        """Which fraction of the frame differs from what is usual; all of it on the first one."""
        luma = self._luma(frame.image)
        if self._usual is None or self._usual.shape != luma.shape:
            self._usual, self._watched = luma, self._mask(luma.shape)
            return 1.0
        changed = (np.abs(luma - self._usual) > _CHANGED) & self._watched
        fraction = float(changed.mean())
        moving = fraction >= self._settings.motion_area
        passed = min(max(seconds - self._last, 0.0), 1.0)
        cv2.accumulateWeighted(luma, self._usual, 1 - np.exp(-passed / (_USUAL_MOVING_S if moving else _USUAL_S)))
        return fraction

    def _luma(self, image: NDArray[np.uint8]) -> Luma:
        """Brightness (100, n) float32, blurred, its contrast stretched to 0..255."""
        height, width = image.shape[:2]
        small = cv2.resize(image, (max(1, round(width * _ROWS / height)), _ROWS), interpolation=cv2.INTER_AREA)
        luma = cv2.GaussianBlur(cv2.cvtColor(small, cv2.COLOR_RGB2GRAY), (3, 3), 0).astype(np.float32)
        low, high = np.percentile(luma, _CONTRAST)
        self._contrast.append((float(low), float(high)))
        low, high = np.mean(self._contrast, axis=0)
        stretched: Luma = (luma - np.float32(low)) * np.float32(255 / max(high - low, _LEAST_CONTRAST))
        return stretched

    def _mask(self, shape: tuple[int, ...]) -> NDArray[np.bool_]:
        """Where changes count: (100, n) bool."""
        masked = np.zeros(shape, np.uint8)
        for polygon in self._settings.motion_mask:
            corners = np.array(polygon) * (shape[1], shape[0])
            cv2.fillPoly(masked, [np.round(corners).astype(np.int32)], 1)
        watched: NDArray[np.bool_] = masked == 0
        return watched


StillBefore = Callable[[int], float]
"""For how many seconds nothing moved before the frame with this index."""
