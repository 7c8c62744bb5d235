"""Frames that come in bursts are spread over their time, and catch up after a stall."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from saccade.sources.live.pacer import Pacer

RATE = 25
SEGMENT = 50  # frames: 2 s


def play(pacer: Pacer, segments: int, arrivals: dict[int, float] | None = None) -> list[float]:
    """How late each frame is handed on, against a schedule from the first: segments arrive when they are complete."""
    now, lateness = 0.0, []
    for number in range(segments * SEGMENT):
        segment = number // SEGMENT
        now = max(now, (arrivals or {}).get(segment, 0.0) + segment * SEGMENT / RATE)
        now += pacer.delay(number / RATE, now)
        lateness.append(now - number / RATE)
    return lateness


def test_bursts_are_spread_evenly() -> None:
    lateness = play(Pacer(), 5)
    assert max(lateness) < 1e-6


def test_after_a_stall_of_the_network_frames_catch_up() -> None:
    lateness = play(Pacer(), 30, arrivals={5: 2.5})
    assert max(lateness[5 * SEGMENT : 7 * SEGMENT]) > 2
    assert max(lateness[8 * SEGMENT :]) < 1e-6  # for good 2.5 s late when the schedule moved with every stall


def test_a_schedule_that_is_never_met_moves() -> None:
    late = dict.fromkeys(range(10, 60), 3.0)
    lateness = play(Pacer(), 60, arrivals=late)
    segment = lateness[-SEGMENT:]
    assert max(lateness) < 3.0 + 1e-6
    assert min(segment) > 1.0  # the last frame of each segment is the first that is on time again


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 100)), max_size=60))
def test_no_frame_is_held_back_for_longer_than_a_minute(steps: list[tuple[float, float]]) -> None:
    pacer, now = Pacer(), 0.0
    for taken, passed in steps:
        now += passed
        assert 0 <= pacer.delay(taken, now) <= 60.001
