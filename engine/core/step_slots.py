"""The two step slots: which may be launched, which must be committed next. A pure state machine, no torch.

A slot is launched (its forward is on the stream), finalized (its sampling and its copy to the host are on theirs) and
committed (the host has read it); only then may it be launched again. Steps are finalized and committed in the order
of their launches. A step that cannot be launched or finalized is aborted: nothing of it will be read. Words after the
public write-up 'Popping the GPU Bubble'.
"""

from __future__ import annotations

from collections import deque
from enum import Enum


class SlotState(Enum):
    """Where a slot is in its round."""

    FREE = "free"
    LAUNCHED = "launched"
    FINALIZED = "finalized"


class StepSlots:
    """`depth` slots used in turn: 1 blocks after each step, 2 keeps one step ahead of the host."""

    __slots__ = ("_in_flight", "_next", "_states")

    def __init__(self, depth: int) -> None:
        if depth not in (1, 2):
            raise ValueError(f"depth is 1 or 2, not {depth}")
        self._states = [SlotState.FREE] * depth
        self._in_flight: deque[int] = deque()
        self._next = 0

    @property
    def depth(self) -> int:
        """Number of slots."""
        return len(self._states)

    @property
    def can_launch(self) -> bool:
        """Whether the next slot in turn is free."""
        return self._states[self._next] is SlotState.FREE

    @property
    def in_flight(self) -> int:
        """Slots launched and not yet committed."""
        return len(self._in_flight)

    def state(self, slot: int) -> SlotState:
        """State of a slot."""
        return self._states[slot]

    def launch(self) -> int:
        """Take the next slot in turn.

        Raises:
            RuntimeError: if it is not free.
        """
        slot = self._next
        self._move(slot, SlotState.FREE, SlotState.LAUNCHED)
        self._in_flight.append(slot)
        self._next = (slot + 1) % len(self._states)
        return slot

    def finalize(self, slot: int) -> None:
        """Note that the slot's sampling and copy are on their streams.

        Raises:
            RuntimeError: if it was not launched, or an older step is not finalized yet.
        """
        for older in self._in_flight:
            if older == slot:
                break
            if self._states[older] is not SlotState.FINALIZED:
                raise RuntimeError(f"slot {slot} is finalized before slot {older}, which is older")
        self._move(slot, SlotState.LAUNCHED, SlotState.FINALIZED)

    def commit(self, slot: int) -> None:
        """Note that the host has read the slot; it is free again.

        Raises:
            RuntimeError: if it was not finalized, or is not the oldest step.
        """
        if not self._in_flight or self._in_flight[0] != slot:
            raise RuntimeError(f"slot {slot} is not the oldest step")
        self._move(slot, SlotState.FINALIZED, SlotState.FREE)
        self._in_flight.popleft()

    def abort(self, slot: int) -> None:
        """Note that the slot's step has come to nothing; it is free, and next in turn again.

        Raises:
            RuntimeError: if it was not launched or is finalized already, or is not the newest step.
        """
        if not self._in_flight or self._in_flight[-1] != slot:
            raise RuntimeError(f"slot {slot} is not the newest step")
        self._move(slot, SlotState.LAUNCHED, SlotState.FREE)
        self._in_flight.pop()
        self._next = slot

    def _move(self, slot: int, old: SlotState, new: SlotState) -> None:
        if self._states[slot] is not old:
            raise RuntimeError(f"slot {slot} is {self._states[slot].value}, not {old.value}")
        self._states[slot] = new
