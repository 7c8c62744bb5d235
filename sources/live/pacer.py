"""Spreads frames that arrive in bursts over the time they stand for. Pure: the caller passes the time."""

from __future__ import annotations

_JUMP_S = 3.0  # a longer step forward is a clock that was set, unless frames come as seldom as that
_JUMP_STEPS = 4
_CATCH_UP = 0.1  # of the speed: nobody sees it, and 2 s are made up for in 20
_SLACK_S = 0.1  # in the comparison of two delays


class Pacer:
    """The schedule of one stream: when each frame is due.

    - A clock that falls, repeats a time or jumps forward: the schedule is anchored to the frame before.
    - A frame that comes late is due at once, and the schedule moves back by as much, so the frames that follow are
      spread as before. The delay is made up for by playing faster by a tenth.
    - If frames are late again because of that, the sender has lost the time for good, and the schedule stays.
    """

    def __init__(self) -> None:
        self._offset: float | None = None  # when a frame is due, after its timestamp
        self._taken = 0.0  # the timestamp before
        self._step = 0.0  # from one timestamp to the next, the last that grew
        self._interval = 0.0  # the last such step that was no jump
        self._behind = 0.0  # how much later than at first frames are due, as far as that is to be made up for
        self._regained = 0.0  # how much of that was made up for since the last late frame

    def delay(self, taken: float, now: float) -> float:
        """How long to wait until a frame is due, in seconds.

        Args:
            taken: the frame's timestamp in seconds.
            now: seconds on a growing clock.
        """
        if self._offset is None:
            self._offset = now - taken
        else:
            self._offset = self._follow(self._offset, taken)
        self._taken = taken
        late = now - taken - self._offset
        if late <= 0:
            return -late
        self._offset += late
        self._behind = self._behind + late if late > self._regained + _SLACK_S else 0.0
        self._regained = 0.0
        return 0.0

    def _follow(self, offset: float, taken: float) -> float:
        """The offset for the frame that follows the one before."""
        step = taken - self._taken
        if not 0 < step <= max(_JUMP_S, _JUMP_STEPS * self._step):
            self._step = step if step > 0 else self._step
            return self._taken + offset + self._interval - taken
        self._step = self._interval = step
        regained = min(self._behind, _CATCH_UP * step)
        self._behind -= regained
        self._regained += regained
        return offset - regained
