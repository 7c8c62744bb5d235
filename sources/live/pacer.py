"""Schedules frames at their presentation times if they arrive in bursts, as with HLS."""

from __future__ import annotations

_JUMP_S = 3.0  # a longer step means that the sender's clock was set, unless frames are that rare
_JUMP_STEPS = 4
_CATCH_UP = 0.1  # fraction of the speed: unnoticeable, and regains 2 s within 20 s
_SLACK_S = 0.1  # in the comparison of two delays


class Pacer:
    """Playback schedule of a live stream that arrives in bursts.

    A late frame is shown immediately, and all later frames are delayed by the same time. Playback then runs 10 % faster
    until it has caught up, or until the next late frame.
    """

    def __init__(self) -> None:
        self._offset: float | None = None  # due time of a frame minus its timestamp
        self._taken = 0.0  # previous timestamp
        self._step = 0.0  # last increase from one timestamp to the next
        self._interval = 0.0  # last such step that was not a jump
        self._behind = 0.0  # delay of the schedule that is still to be regained
        self._regained = 0.0  # delay regained since the last late frame

    def delay(self, taken: float, now: float) -> float:
        """Return the number of seconds until a frame should be shown; 0 if the frame is late.

        Args:
            taken: presentation timestamp of the frame in seconds.
            now: current time in seconds on a monotonic clock.
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
        """Return the display time of the next frame minus its timestamp, in seconds."""
        step = taken - self._taken
        if not 0 < step <= max(_JUMP_S, _JUMP_STEPS * self._step):
            self._step = step if step > 0 else self._step
            return self._taken + offset + self._interval - taken
        self._step = self._interval = step
        regained = min(self._behind, _CATCH_UP * step)
        self._behind -= regained
        self._regained += regained
        return offset - regained
