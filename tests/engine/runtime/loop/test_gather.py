"""Prefills of callers who hand in an image for each answer, on the real step cycle in simulated time."""

from __future__ import annotations

import statistics

import pytest

from tests.support.engine.callers import Callers


@pytest.mark.parametrize(("callers", "images"), [(1, 1), (4, 2), (8, 4), (24, 12), (32, 16), (64, 16)])
def test_a_prefill_is_of_half_the_callers(callers: int, images: int) -> None:
    simulated = Callers(callers)
    simulated.run(1.0)
    assert statistics.mean(simulated.prefills) == pytest.approx(images, rel=0.02)


def test_a_single_caller_is_not_kept_waiting() -> None:
    simulated = Callers(1)
    simulated.run(0.5)
    assert max(simulated.waits) < 1.4e-3  # of which the launch is 0.7, and the prefill 0.55


def test_callers_who_do_not_return_are_not_waited_for() -> None:
    simulated = Callers(8)
    simulated.run(0.1)
    simulated.leave(7)
    settled = len(simulated.waits)
    simulated.run(0.6)
    assert max(simulated.waits[settled + 20 :]) < 1.4e-3
