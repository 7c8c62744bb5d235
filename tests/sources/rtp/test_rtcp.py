"""Capture times by a sender's reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sources.rtp.rtcp import PLAUSIBLE_S, SenderClock, SenderReport

NOW = 1_795_000_000.0


@pytest.mark.parametrize("off_s", [0.0, 9.0, -9.0, 3600.0, -NOW])
def test_a_clock_that_was_never_set_is_corrected(off_s: float) -> None:
    clock, report = SenderClock(), SenderReport(NOW + off_s, 0)
    delays = [0.3, 0.1, 0.2, 0.1]
    got = [
        clock.captured_at(report, 9000 * n, NOW + 0.1 * n + delay) - (NOW + 0.1 * n) for n, delay in enumerate(delays)
    ]
    if abs(off_s) < PLAUSIBLE_S:
        assert got == pytest.approx([off_s] * 4, abs=1e-4)
    else:  # late by the shortest delay until then
        assert got == pytest.approx([0.3, 0.1, 0.1, 0.1], abs=1e-4)
    assert clock.offset_s == pytest.approx(off_s - 0.1 if abs(off_s) >= PLAUSIBLE_S else 0.0, abs=1e-4)


def test_a_clock_that_is_set_is_followed() -> None:
    clock = SenderClock()
    steps = [0.0, -4000.0, -4000.0, 0.0]  # seconds that the camera is ahead
    got = [
        clock.captured_at(SenderReport(NOW + n + off, 90_000 * n), 90_000 * n, NOW + n) for n, off in enumerate(steps)
    ]
    assert got == pytest.approx([NOW, NOW + 1, NOW + 2, NOW + 3], abs=1e-4)


@given(st.lists(st.tuples(st.floats(-1e5, 1e5), st.floats(0, 5)), min_size=1, max_size=20))
def test_no_capture_time_is_further_off_than_plausible(frames: list[tuple[float, float]]) -> None:
    clock = SenderClock()
    for n, (off, delay) in enumerate(frames):
        arrived = NOW + n + delay
        captured = clock.captured_at(SenderReport(NOW + n + off, 0), 0, arrived)
        assert abs(captured - arrived) <= PLAUSIBLE_S + 1e-3
