"""One continuous clock for the frames of all connections of a live source. The caller passes the time."""

from __future__ import annotations

from fractions import Fraction

LIVE_BASE = Fraction(1, 90_000)
"""Time base of every live stream, the same as in RTP, WebRTC and MPEG-TS."""

_CLOCK_JUMP_S = 10.0  # a step that exceeds the elapsed time by this much means that the sender's clock was set
_WINDOW_S = 2.0
_WRONG_RATE = 2.0  # a clock that is this many times too fast or too slow is ignored


class LiveClock:
    """Maps the timestamps of all connections to one strictly increasing integer clock.

    Within a connection, the intervals between the sender's timestamps are kept exactly. If the sender's clock restarts
    or jumps, the time elapsed here replaces the interval. If it runs at a wrong rate, elapsed time is used for the
    rest of the connection.
    """

    __slots__ = ("_arrived_at", "_offset", "_pts", "_rate", "_timestamp")

    def __init__(self) -> None:
        self._pts = -1
        self._offset = 0
        self._timestamp: int | None = None
        self._arrived_at: float | None = None
        self._rate = _RateCheck()

    def restart(self) -> None:
        """Start a new connection, whose sender's clock may be unrelated to the previous one's."""
        self._timestamp = None
        self._rate = _RateCheck()

    def place(self, timestamp: int | None, at: float) -> int:
        """Return the presentation timestamp of a frame, in units of 1/90000 s, from 0.

        Args:
            timestamp: the sender's timestamp in the same units; None if the sender gives none.
            at: time of the frame's arrival, in seconds on a monotonic clock.
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
    """Compares the sender's clock with the local clock in windows of two seconds.

    The clock counts as wrong after two consecutive windows that differ by a factor of two. A single window may be a
    burst: servers send buffered frames when a client joins.
    """

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
            self._wrong = 0 if passed / _WRONG_RATE <= theirs <= passed * _WRONG_RATE else self._wrong + 1
            self._timestamp, self._at = timestamp, at
        return self._wrong >= 2
