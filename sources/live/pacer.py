"""Spreads frames that arrive in bursts over the time they stand for. Pure: the caller passes the time."""

from __future__ import annotations

_JUMP_S = 60.0  # a difference from the schedule that no network makes: the sender's clock was set
_WINDOW_S = 20.0  # two segments of HLS, which are 10 s at most as a rule


class Pacer:
    """The schedule of one stream.

    After a stall frames are due at once until they have caught up with the schedule. Only where every frame is late
    for 20 s, because the sender itself lost time, the schedule is moved.
    """

    def __init__(self) -> None:
        self._offset: float | None = None  # when a frame is due, after its timestamp
        self._window_at = 0.0
        self._least_late = 0.0  # of all frames in this window

    def delay(self, taken: float, now: float) -> float:
        """How long to wait until a frame is due, in seconds.

        Args:
            taken: the frame's timestamp in seconds.
            now: seconds on a growing clock.
        """
        if self._offset is None or abs(taken + self._offset - now) > _JUMP_S:
            self._offset = now - taken
            self._window_at, self._least_late = now, _JUMP_S
        ahead = taken + self._offset - now
        self._least_late = min(self._least_late, max(0.0, -ahead))
        if now - self._window_at >= _WINDOW_S:
            self._offset += self._least_late
            self._window_at, self._least_late = now, _JUMP_S
        return max(0.0, taken + self._offset - now)
