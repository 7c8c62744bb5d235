"""Chooses the number of zoom windows per frame of a live stream, from the engine's idle time and dropped frames."""

from __future__ import annotations

import math
import random

MOST = 4
_PERIOD_S = 2.0  # time between two decisions
_ENOUGH = 0.95  # fraction of the submitted frames that must be processed
_IDLE_TO_ADD = 0.3  # idle fraction of the engine's time that allows one more window
_IDLE_TO_KEEP = 0.05  # idle fraction that allows the current windows
_FIRST_WAIT_S, _LONGEST_WAIT_S = 10.0, 160.0  # before the next attempt to add a window


class AutoCount:
    """Chooses the number of zoom windows per frame: more if the engine is idle, fewer if it is busy or drops frames.

    Args:
        max_fps: highest frame rate that the stream needs; None for no limit.
        seed: seed of the random wait times before a window is added. Random times prevent all streams of an engine from
            adding a window at the same time.

    Attributes:
        count: current number of zoom windows per frame.
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
        """Count a frame that is submitted to the engine. Adjust the number of zoom windows every two seconds.

        Args:
            seconds: time of the frame, in seconds.
            idle: (current time, total idle time of the engine) in seconds, or None if unknown.
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
        """Count a frame that the engine has processed."""
        self._done += 1

    def _idle_share(self, idle: tuple[float, float] | None) -> float:
        """Return the fraction of time (0 to 1) that the engine was idle since the number of windows was last adjusted.

        Return 1 if the fraction is unknown.
        """
        if idle is None or self._idle is None or idle[0] <= self._idle[0]:
            return 1.0
        return (idle[1] - self._idle[1]) / (idle[0] - self._idle[0])

    def _decide(self, passed: float, seconds: float, idle: float) -> None:
        wanted = self._offered if self.max_fps is None else min(self._offered, self.max_fps * passed)
        lost = self._done < _ENOUGH * wanted - 1  # one frame may be in flight
        if lost or idle < _IDLE_TO_KEEP:
            if self.count:
                self.count -= 1
                self._tried_s = seconds
                self._wait_s = min(_LONGEST_WAIT_S, 2 * self._wait_s)
        elif self.count < MOST and idle >= _IDLE_TO_ADD and seconds - self._tried_s >= self._wait_s:
            self.count += 1
            self._tried_s = seconds - self._wait_s * self._dice.random() + _PERIOD_S
