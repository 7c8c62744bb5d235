"""The soak: its slope, and a short one of two cameras with all faults."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.soak.run import Soak, run_soak
from benchmarks.soak.slope import slope_of
from saccade.pipeline.asset_files import DEMO_CLIP


def test_a_slope_is_found_within_its_interval() -> None:
    chance = np.random.default_rng(1)
    x = np.arange(60.0)
    inside = 0
    for _ in range(200):
        found = slope_of(x, 0.05 * x + chance.normal(size=60))
        assert found is not None
        inside += abs(found.per_minute - 0.05) <= found.half_width
    assert inside >= 180


def test_a_walk_at_random_has_a_wide_interval() -> None:
    chance = np.random.default_rng(2)
    x = np.arange(60.0)
    walks = [slope_of(x, chance.normal(size=60).cumsum()) for _ in range(100)]
    assert sum(abs(one.per_minute) <= one.half_width for one in walks if one is not None) >= 65  # a plain one: 20


@pytest.mark.parametrize(("values", "slope"), [([1.0, 2.0], None), ([3.0, 3.0, 3.0], 0.0), ([1.0, 2.0, 3.0], 1.0)])
def test_few_and_even_values(values: list[float], slope: float | None) -> None:
    found = slope_of(range(len(values)), values)
    assert (found is None) == (slope is None)
    if found is not None and slope is not None:
        assert math.isclose(found.per_minute, slope, abs_tol=1e-12)
        assert found.half_width < 1e-6


def test_a_soak_prints_what_is_held_each_minute(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_soak(Soak(str(DEMO_CLIP), streams=2, fps=1, minutes=1, segment_s=10))
    (minute,) = result.minutes
    assert minute.frames > 0
    assert minute.rss_mb > minute.anonymous_mb > 100
    assert 10 < minute.threads < 300
    assert minute.descriptors > 10
    assert minute.disk_mb > 0
    assert 0 < minute.recorded <= 1
    assert sum(minute.objects.values()) > 1000
    assert sum(result.visits.values()) > 0
    assert "recorded" in capsys.readouterr().out
