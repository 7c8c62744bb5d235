"""How many windows a frame a live stream can afford: by the engine's idle share and the frames that come through."""

from __future__ import annotations

import math
import random

MOST = 4
_PERIOD_S = 2.0  # of one decision
_ENOUGH = 0.95  # of the frames that are offered must come through
_IDLE_TO_ADD = 0.3  # of the engine's time must be idle for one more window,
_IDLE_TO_KEEP = 0.05  # and for those there are
_FIRST_WAIT_S, _LONGEST_WAIT_S = 10.0, 160.0  # before one more window is tried again


class AutoCount:
    """Raises the number of windows while the engine idles, and lowers it where it does not or frames are lost.

    Args:
        max_fps: most frames a second that are wanted; None for all.
        seed: of the random part of waits: many streams of one engine do not raise their number at once.

    Attributes:
        count: how many windows a frame may have now.
    """

    def __init__(self, max_fps: float | None = None, seed: int = 0) -> None:
        self.max_fps = max_fps
        self.count = 1
        self._began: float | None = None
        self._offered = self._done = 0
        self._idle: tuple[float, float] | None = None  # clock and idle seconds of the engine at the last decision
        self._dice = random.Random(seed)
        self._wait_s, self._tried_s = _FIRST_WAIT_S, -math.inf

    def note_offered(self, seconds: float, idle: tuple[float, float] | None = None) -> None:
        """A frame is given to the engine.

        Args:
            seconds: time of the frame.
            idle: the clock now and for how many seconds the engine has idled so far; None where that is unknown.
        """
        if self._began is None or seconds < self._began:
            self._began, self._offered, self._done, self._idle = seconds, 0, 0, idle
            self._tried_s = seconds - self._wait_s * self._dice.random()
        passed = seconds - self._began
        if passed >= _PERIOD_S:
            self._decide(passed, seconds, self._idle_share(idle))
            self._began, self._offered, self._done, self._idle = seconds, 0, 0, idle
        self._offered += 1

    def note_done(self) -> None:
        """The result of a frame is there."""
        self._done += 1

    def _idle_share(self, idle: tuple[float, float] | None) -> float:
        """Which part of the time since the last decision the engine idled; 1 where that is unknown."""
        if idle is None or self._idle is None or idle[0] <= self._idle[0]:
            return 1.0
        return (idle[1] - self._idle[1]) / (idle[0] - self._idle[0])

    def _decide(self, passed: float, seconds: float, idle: float) -> None:
        wanted = self._offered if self.max_fps is None else min(self._offered, self.max_fps * passed)
        lost = self._done < _ENOUGH * wanted - 1  # one may be on its way
        if lost or idle < _IDLE_TO_KEEP:
            if self.count:
                self.count -= 1
                self._tried_s = seconds
                self._wait_s = min(_LONGEST_WAIT_S, 2 * self._wait_s)
        elif self.count < MOST and idle >= _IDLE_TO_ADD and seconds - self._tried_s >= self._wait_s:
            self.count += 1
            self._tried_s = seconds - self._wait_s * self._dice.random() + _PERIOD_S
