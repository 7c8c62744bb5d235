"""How long cutting an image takes is learned, and one slow measurement is not trusted for ever."""

from __future__ import annotations

import pytest

from saccade.engine.config import EngineConfig
from saccade.engine.core.request import CropPace
from saccade.engine.errors import DeadlineError


def bound(pace: CropPace, pixels: int) -> float:
    """Seconds that are just enough for so many pixels."""
    return pace._rate * pixels


def test_the_pace_of_cutting_is_learned_from_large_images() -> None:
    pace = CropPace(EngineConfig(), 1e-8)
    pace.measured(10_000, 1.0)
    assert bound(pace, 1_000_000) == pytest.approx(0.01)
    pace.measured(1_000_000, 0.08)
    assert bound(pace, 48_000_000) == pytest.approx(48 * 0.04)
    pace.measured(2_000_000, 0.04)
    assert bound(pace, 1_000_000) == pytest.approx(0.01)
    pace.measured(2_000_000, 4.0)  # the machine was busy
    assert bound(pace, 1_000_000) == pytest.approx(0.01)
    pace.require_time(1_000_000, 0.011)
    with pytest.raises(DeadlineError, match="cropping this image takes"):
        pace.require_time(1_000_000, 0.009)


def test_one_slow_measurement_does_not_refuse_for_ever() -> None:
    pace, refusals = CropPace(EngineConfig(), 1e-8), 0
    pace.measured(1_000_000, 10.0)
    while bound(pace, 1_000_000) > 0.1:
        with pytest.raises(DeadlineError):
            pace.require_time(1_000_000, 0.1)
        refusals += 1
    assert 1 < refusals < 60
    pace.measured(1_000_000, 0.06)
    assert bound(pace, 1_000_000) == pytest.approx(0.03)
