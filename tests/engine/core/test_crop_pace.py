"""How long cutting an image takes is learned, and one slow measurement is not trusted for ever."""

from __future__ import annotations

import pytest

from saccade.engine.core.crop_pace import CropPace


def test_the_pace_of_cutting_is_learned_from_large_images() -> None:
    pace = CropPace(1e-8)
    pace.measured(10_000, 1.0)
    assert pace.seconds(1_000_000) == pytest.approx(0.01)
    pace.measured(1_000_000, 0.08)
    assert pace.seconds(48_000_000) == pytest.approx(48 * 0.04)
    pace.measured(2_000_000, 0.04)
    assert pace.seconds(1_000_000) == pytest.approx(0.01)
    pace.measured(2_000_000, 4.0)  # the machine was busy
    assert pace.seconds(1_000_000) == pytest.approx(0.01)


def test_one_slow_measurement_does_not_refuse_for_ever() -> None:
    pace, refusals = CropPace(1e-8), 0
    pace.measured(1_000_000, 10.0)
    while pace.seconds(1_000_000) > 0.1:
        pace.refused()
        refusals += 1
    assert 1 < refusals < 60
    pace.measured(1_000_000, 0.06)
    assert pace.seconds(1_000_000) == pytest.approx(0.03)
