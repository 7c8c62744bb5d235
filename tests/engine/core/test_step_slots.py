"""The states of step slots against random acts: what is out of turn is refused."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.engine.core.scheduler import SlotState, StepSlots


@pytest.mark.parametrize("depth", [1, 2])
@given(
    acts=st.lists(st.tuples(st.sampled_from(["launch", "finalize", "commit", "abort"]), st.integers(0, 1)), max_size=40)
)
def test_slots_refuse_whatever_is_out_of_turn(depth: int, acts: list[tuple[str, int]]) -> None:
    slots, launched, finalized, turn = StepSlots(depth), deque[int](), deque[int](), 0
    for act, slot in acts:
        slot %= depth
        if act == "launch":
            allowed = len(launched) + len(finalized) < depth
            assert slots.can_launch == allowed
            if allowed:
                assert slots.launch() == turn
                launched.append(turn)
                turn = (turn + 1) % depth
            else:
                with pytest.raises(RuntimeError):
                    slots.launch()
        elif act == "abort":
            if launched and launched[-1] == slot:
                slots.abort(slot)
                turn = launched.pop()
            else:
                with pytest.raises(RuntimeError):
                    slots.abort(slot)
        else:
            queue = launched if act == "finalize" else finalized
            if queue and queue[0] == slot:
                getattr(slots, act)(slot)
                queue.popleft()
                if act == "finalize":
                    finalized.append(slot)
            else:
                with pytest.raises(RuntimeError):
                    getattr(slots, act)(slot)
        assert slots.in_flight == len(launched) + len(finalized)
        for one in range(depth):
            wanted = SlotState.LAUNCHED if one in launched else SlotState.FINALIZED if one in finalized else None
            assert slots.state(one) is (wanted or SlotState.FREE)


@pytest.mark.parametrize("depth", [0, 3])
def test_there_are_one_or_two_slots(depth: int) -> None:
    with pytest.raises(ValueError, match="depth"):
        StepSlots(depth)
