"""The bit rate of a viewer by its reports."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from saccade.pipeline.api.loss_control import FALL_S, MOST_HALVINGS, RAISE_MOST_S, RAISE_S, LossControl


def run(control: LossControl, lost: float, begin: int, seconds: int) -> list[int]:
    return [control.report(lost, float(now)) for now in range(begin, begin + seconds)]


def test_loss_lowers_the_bit_rate_step_by_step() -> None:
    control = LossControl()
    assert run(control, 0.3, 0, 8) == [1, 1, 2, 2, 3, 3, 3, 3]
    assert FALL_S == 2
    assert run(control, 0.05, 8, 100) == [3] * 100  # neither high nor low


def test_a_clean_connection_raises_it_again() -> None:
    control = LossControl()
    run(control, 0.3, 0, 3)
    rises = run(control, 0.0, 3, 30)
    assert (rises[0], rises[9], rises[10], rises[19], rises[20], rises[-1]) == (2, 2, 1, 1, 0, 0)
    assert RAISE_S == 10


def test_a_rise_that_brings_the_loss_back_is_tried_less_often() -> None:
    control, now, pauses = LossControl(), 0, []
    control.report(0.3, 0.0)
    for _ in range(8):
        begun = now
        while control.halvings == 1:
            now += 1
            control.report(0.0, float(now))
        pauses.append(now - begun)
        while control.halvings == 0:
            now += 1
            control.report(0.3, float(now))
    assert pauses[:3] == sorted(pauses[:3])
    assert pauses[-1] == RAISE_MOST_S + 1
    assert pauses[0] < pauses[2] < pauses[4]


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 20)), max_size=60))
def test_it_stays_within_its_bounds_and_moves_by_one(reports: list[tuple[float, float]]) -> None:
    control, now, before = LossControl(), 0.0, 0
    for lost, passed in reports:
        now += passed
        after = control.report(lost, now)
        assert 0 <= after <= MOST_HALVINGS
        assert abs(after - before) <= 1
        before = after
