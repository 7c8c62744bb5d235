"""One clock over all connections, whatever the senders' clocks do."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sources.live.clock import LiveClock


@given(st.lists(st.tuples(st.booleans(), st.none() | st.integers(-(2**40), 2**40), st.floats(0, 1000)), max_size=50))
def test_pts_grow_strictly_whatever_the_senders_do(steps: list[tuple[bool, int | None, float]]) -> None:
    clock, at, placed = LiveClock(), 0.0, []
    for restart, timestamp, passed in steps:
        at += passed
        if restart:
            clock.restart()
        placed.append(clock.place(timestamp, at))
    assert placed[:1] in ([], [0])
    assert all(type(pts) is int for pts in placed)
    assert all(before < after for before, after in itertools.pairwise(placed))


def test_intervals_hold_within_a_connection_and_time_between() -> None:
    clock = LiveClock()
    assert [clock.place(7_000_000 + step, 1.0 + step / 90_000) for step in (0, 3600, 7201)] == [0, 3600, 7201]
    clock.restart()
    assert clock.place(5, 11.08) == 7201 + 900_000 - 1  # 10 s later, rounded down
    assert clock.place(3605, 11.12) == 7201 + 900_000 - 1 + 3600


@pytest.mark.parametrize("jump", [-(2**40), -90_000 * 30, -45_000, -1, 90_000 * 12, 90_000 * 40, 2**40])
def test_where_a_clock_falls_or_jumps_the_time_that_passed_counts(jump: int) -> None:
    clock = LiveClock()
    placed = [clock.place(3600 * n + (jump if n >= 50 else 0), n / 25) for n in range(100)]
    assert all(abs(after - before - 3600) <= 1 for before, after in itertools.pairwise(placed))


def test_a_clock_at_the_wrong_rate_gives_way_to_arrival() -> None:
    clock = LiveClock()
    placed = [clock.place(90 * number, number / 25) for number in range(250)]  # 0.025 s for each of its seconds
    assert 90_000 * 5 < placed[-1] - placed[0] < 90_000 * 10.1
    late = [after - before for before, after in itertools.pairwise(placed[125:])]
    assert all(abs(step - 3600) <= 1 for step in late)


def test_a_burst_of_stored_frames_does_not_discredit_the_clock() -> None:
    clock = LiveClock()
    burst = [clock.place(3600 * number, number / 1000) for number in range(125)]
    live = [clock.place(3600 * (125 + number), 0.125 + number / 25) for number in range(250)]
    assert burst + live == [3600 * number for number in range(375)]
