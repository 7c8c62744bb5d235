"""Frames that come in bursts are spread over their time, whatever the sender's clock and the network do."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sources.live.pacer import Pacer

RATE = 25
SEGMENT = 50  # frames: 2 s


def play(
    segments: int,
    clock: Callable[[int], float] = lambda number: number / RATE,
    arrivals: dict[int, float] | None = None,
) -> list[float]:
    """When each frame is handed on. Segments arrive every 2 s, or `arrivals` seconds later."""
    pacer, now, shown = Pacer(), 0.0, []
    for number in range(segments * SEGMENT):
        segment = number // SEGMENT
        now = max(now, (arrivals or {}).get(segment, 0.0) + segment * SEGMENT / RATE)
        now += pacer.delay(clock(number), now)
        shown.append(now)
    return shown


def steps(shown: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(shown)]


def test_bursts_are_spread_evenly() -> None:
    assert steps(play(5)) == pytest.approx([1 / RATE] * (5 * SEGMENT - 1))


CUT = 7 * SEGMENT  # the frame at which the clock is another
CLOCKS: dict[str, Callable[[int], float]] = {
    "falls": lambda n: n / RATE + (30 if n < CUT else 0),
    "falls by less than a frame": lambda n: n / RATE - (0 if n < CUT else 0.05),
    "falls by half a second": lambda n: n / RATE - (0 if n < CUT else 0.5),
    "jumps": lambda n: n / RATE + (0 if n < CUT else 40),
    "jumps by five seconds": lambda n: n / RATE + (0 if n < CUT else 5),
    "jumps by hours": lambda n: n / RATE + (0 if n < CUT else 95443),
    "is another in every segment": lambda n: n / RATE + 977 * (n // SEGMENT % 3),
    "repeats one time": lambda n: (n if n != CUT else n - 1) / RATE,
}


@pytest.mark.parametrize("name", CLOCKS)
def test_a_clock_that_falls_or_jumps_is_anchored_to_the_frame_before(name: str) -> None:
    shown = play(30, CLOCKS[name])
    assert max(steps(shown)) <= 2.01 / RATE
    assert min(steps(shown)) >= 0.89 / RATE
    assert shown[-1] == pytest.approx((30 * SEGMENT - 1) / RATE, abs=0.1)


def test_a_stall_of_the_network_ends_in_an_even_stream_that_catches_up() -> None:
    shown = play(30, arrivals={5: 2.5})
    after = steps(shown[5 * SEGMENT :])
    assert min(after) >= 0.89 / RATE
    assert max(after) <= 1.01 / RATE
    late = [at - number / RATE for number, at in enumerate(shown)]
    assert max(late[5 * SEGMENT : 6 * SEGMENT]) > 2
    assert max(late[20 * SEGMENT :]) < 1e-6


@pytest.mark.parametrize("lost_s", [0.4, 1.5, 3.0, 9.0])
def test_a_sender_that_lost_time_is_followed_for_good(lost_s: float) -> None:
    shown = play(60, arrivals=dict.fromkeys(range(10, 60), lost_s))
    after = steps(shown[10 * SEGMENT :])
    assert min(after) >= 0.89 / RATE
    assert sum(step > 1.01 / RATE for step in after) <= 1  # the one attempt to catch up
    assert steps(shown[20 * SEGMENT :]) == pytest.approx([1 / RATE] * (40 * SEGMENT - 1))


@given(st.lists(st.floats(0, 1.5), min_size=20, max_size=20))
def test_segments_that_come_at_odd_times_are_even_in_the_end(late: list[float]) -> None:
    every = [*late, *(late[n % 20] for n in range(20, 80))]
    shown = play(80, arrivals=dict(enumerate(every)))
    assert min(steps(shown)) >= 0.89 / RATE
    assert shown[-1] - (80 * SEGMENT - 1) / RATE < 3.5


def test_frames_that_come_seldom_keep_their_intervals() -> None:
    pacer, now, shown = Pacer(), 0.0, []
    for number in range(30):
        now = max(now, number // 3 * 18.0)  # three frames at once
        now += pacer.delay(6.0 * number, now)
        shown.append(now)
    assert steps(shown[10:]) == pytest.approx([6.0] * 19)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 100)), max_size=60))
def test_the_wait_is_never_negative_and_no_longer_than_a_step(pairs: list[tuple[float, float]]) -> None:
    pacer, now, longest, before = Pacer(), 0.0, 0.0, None
    for taken, passed in pairs:
        now += passed
        delay = pacer.delay(taken, now)
        longest = longest if before is None else max(longest, taken - before)
        before = taken
        assert 0 <= delay <= longest + 1e-6
        now += delay
