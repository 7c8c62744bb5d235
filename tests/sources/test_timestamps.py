"""Timestamps are kept where they are right and mended where they are not."""

import itertools
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from saccade.sources.timestamps import Timeline


def placed(pts: list[int | None], step: Fraction = Fraction(40), jump: int = 1000, first: int = 0) -> list[int]:
    timeline = Timeline(step, jump, first)
    return [timeline.place(p) for p in pts]


def test_right_timestamps_are_left_alone() -> None:
    stamps: list[int | None] = [-80, -40, 0, 41, 90, 5000]
    assert placed(stamps) == stamps


def test_missing_timestamps_follow_the_rate_without_drift() -> None:
    assert placed([None] * 7, step=Fraction(100, 3)) == [0, 33, 67, 100, 133, 167, 200]


def test_missing_timestamps_count_from_the_last_known() -> None:
    assert placed([100, None, None, 225, None]) == [100, 140, 180, 225, 265]


def test_the_first_missing_timestamp_is_the_given_one() -> None:
    assert placed([None, None], first=500) == [500, 540]


def test_a_repeated_timestamp_moves_on_by_one_unit_only() -> None:
    assert placed([0, 40, 40, 80, 79, 120]) == [0, 40, 41, 80, 81, 120]


def test_a_restarted_clock_keeps_its_own_intervals() -> None:
    assert placed([9000, 9040, 0, 50, 90]) == [9000, 9040, 9080, 9130, 9170]


@given(st.lists(st.none() | st.integers(-(10**6), 10**6), max_size=40), st.fractions(Fraction(1, 8), 5000))
def test_it_always_grows_strictly(stamps: list[int | None], step: Fraction) -> None:
    result = placed(stamps, step)
    assert all(a < b for a, b in itertools.pairwise(result))


@given(st.lists(st.integers(-(10**6), 10**6), unique=True, max_size=40))
def test_growing_timestamps_never_change(stamps: list[int]) -> None:
    assert placed(sorted(stamps)) == sorted(stamps)
