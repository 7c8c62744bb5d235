"""How many windows a frame a live stream can afford, from how many of its frames come through. Plain numbers."""

from __future__ import annotations

import math

MOST = 4
_PERIOD_S = 2.0  # of one decision
_ENOUGH = 0.95  # of the frames that are offered must come through
_FIRST_WAIT_S, _LONGEST_WAIT_S = 10.0, 160.0  # before one more window is tried again


class AutoCount:
    """Raises the number of windows while no frame is lost for it, and lowers it where frames are.

    Args:
        max_fps: most frames a second that are wanted; None for all.

    Attributes:
        count: how many windows a frame may have now.
    """

    def __init__(self, max_fps: float | None = None) -> None:
        self.max_fps = max_fps
        self.count = 1
        self._began: float | None = None
        self._offered = self._done = 0
        self._wait_s, self._tried_s = _FIRST_WAIT_S, -math.inf

    def note_offered(self, seconds: float) -> None:
        """A frame is given to the engine; `seconds` is its time."""
        if self._began is None or seconds < self._began:
            self._began, self._tried_s, self._offered, self._done = seconds, -math.inf, 0, 0
        passed = seconds - self._began
        if passed >= _PERIOD_S:
            self._decide(passed, seconds)
            self._began, self._offered, self._done = seconds, 0, 0
        self._offered += 1

    def note_done(self) -> None:
        """The result of a frame is there."""
        self._done += 1

    def _decide(self, passed: float, seconds: float) -> None:
        wanted = self._offered if self.max_fps is None else min(self._offered, self.max_fps * passed)
        if self._done < _ENOUGH * wanted - 1:  # one may be on its way
            if self.count:
                self.count -= 1
                self._tried_s = seconds
                self._wait_s = min(_LONGEST_WAIT_S, 2 * self._wait_s)
        elif self.count < MOST and seconds - self._tried_s >= self._wait_s:
            self.count += 1
            self._tried_s = seconds - self._wait_s + _PERIOD_S
