"""Continuous timestamps for a live source across reconnects."""

from __future__ import annotations

from fractions import Fraction

LIVE_BASE = Fraction(1, 90_000)
"""Time base of every live stream, the same as in RTP, WebRTC and MPEG-TS."""

_CLOCK_JUMP_S = 10.0  # a step that exceeds the elapsed time by this much means that the sender's clock was set
_WINDOW_S = 2.0
_WRONG_RATE = 2.0  # a clock that is this many times too fast or too slow is ignored


class LiveClock:
    """Converts the timestamps of a live source to one strictly increasing timeline, across all its connections.

    Frame intervals are those of the sender's timestamps. If these timestamps are missing, jump or run at a wrong rate,
    arrival times are used instead.
    """

    __slots__ = ("_arrived_at", "_offset", "_pts", "_rate", "_timestamp")

    def __init__(self) -> None:
        self._pts = -1
        self._offset = 0
        self._timestamp: int | None = None
        self._arrived_at: float | None = None
        self._rate = _RateCheck()

    def restart(self) -> None:
        """Prepare the clock for a new connection, whose timestamps may be unrelated to the previous timestamps."""
        self._timestamp = None
        self._rate = _RateCheck()

    def place(self, timestamp: int | None, at: float) -> int:
        """Return the presentation timestamp of a frame, in units of 1/90000 s. The first frame has timestamp 0.

        Args:
            timestamp: the sender's timestamp in units of 1/90000 s; None if the sender sends no timestamps.
            at: arrival time of the frame, in seconds on a monotonic clock.
        """
        passed = round((at - self._arrived_at) / LIVE_BASE) if self._arrived_at is not None else 0
        last, self._arrived_at = self._timestamp, at
        self._timestamp = timestamp
        if timestamp is None or self._rate.is_wrong(timestamp, at):
            self._timestamp = None
            self._pts = max(self._pts + 1, self._pts + passed)
            return self._pts
        if last is None or not 0 <= (timestamp - last) * LIVE_BASE <= passed * LIVE_BASE + _CLOCK_JUMP_S:
            self._offset = self._pts + max(1, passed) - timestamp
        self._pts = max(self._pts + 1, timestamp + self._offset)
        return self._pts


class _RateCheck:
    """Detects a sender's clock that runs less than half as fast, or more than twice as fast, as the local clock."""

    __slots__ = ("_at", "_timestamp", "_wrong")

    def __init__(self) -> None:
        self._timestamp: int | None = None
        self._at = 0.0
        self._wrong = 0

    def is_wrong(self, timestamp: int, at: float) -> bool:
        if self._wrong >= 2:
            return True
        if self._timestamp is None:
            self._timestamp, self._at = timestamp, at
        elif (passed := at - self._at) >= _WINDOW_S:
            theirs = float((timestamp - self._timestamp) * LIVE_BASE)
            # Once is not enough: a server may send buffered frames in a burst when a client connects.
            self._wrong = 0 if passed / _WRONG_RATE <= theirs <= passed * _WRONG_RATE else self._wrong + 1
            self._timestamp, self._at = timestamp, at
        return self._wrong >= 2
