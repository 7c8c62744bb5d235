from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from saccade.pipeline.bench.scale.simulation import RATES, ScaleForecast, Scenario, simulate
from saccade.pipeline.errors import ConfigError
from tests.support.command import run_saccade

SMALL = Scenario(cameras=200, gpus=8, gpus_each=2, workers_each=2, hours=0.5, worker_failures=40, machine_failures=20)
TIMES = {"place_p50_ms", "place_p99_ms"}


@pytest.fixture(scope="module")
def forecast() -> ScaleForecast:
    return simulate(SMALL)


def test_streams_that_lost_their_worker_come_back(forecast: ScaleForecast) -> None:
    assert forecast.failures > 4
    assert forecast.losses > forecast.failures
    slowest = SMALL.silent_s + 2.0 + SMALL.connect_s * 10 + SMALL.keyframe_s
    assert 0 < forecast.back_p50_s <= forecast.back_p99_s <= forecast.back_max_s <= slowest
    assert forecast.homeless == 0


def test_every_frame_is_processed_or_lost_to_a_cause(forecast: ScaleForecast) -> None:
    assert forecast.processed + forecast.lost_to_failures + forecast.lost_to_load == pytest.approx(1.0)
    assert 0 < forecast.lost_to_failures < 0.05
    assert forecast.offered_fps == 200 * SMALL.fps


def test_the_same_scenario_gives_the_same_forecast(forecast: ScaleForecast) -> None:
    again, first = asdict(simulate(SMALL)), asdict(forecast)
    assert {name: value for name, value in again.items() if name not in TIMES} == {
        name: value for name, value in first.items() if name not in TIMES
    }


def test_nothing_is_lost_where_nothing_fails_and_room_is() -> None:
    quiet = simulate(replace(SMALL, worker_failures=0, machine_failures=0))
    assert (quiet.failures, quiet.losses, quiet.moves, quiet.processed) == (0, 0, 0, 1.0)
    assert quiet.load_mean == pytest.approx(200 * SMALL.fps / (8 * RATES["nano"][2]), rel=0.1)


def test_more_than_the_gpus_can_do_is_lost_to_load() -> None:
    over = simulate(replace(SMALL, fps=120, worker_failures=0, machine_failures=0))
    assert over.processed == pytest.approx(8 * RATES["nano"][2] / (200 * 120), rel=0.1)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"model": "other"}, "no speed of 'other' is known"),
        ({"workers_each": 3}, "no speed of 3 workers"),
        ({"cameras": 0}, "1 or more"),
        ({"fps": float("nan")}, "more than 0"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(values: dict[str, float], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Scenario(**values)  # type: ignore[arg-type]


def test_the_command_names_what_was_measured() -> None:
    done = run_saccade("bench", "scale", "--simulate", "--cameras", 40, "--gpus", 2, "--hours", 0.1)
    assert (done.returncode, done.stderr) == (0, "")
    assert "measured   nano: 1513 frames/s a GPU (one H200)" in done.stdout
    done = run_saccade("bench", "scale", "--simulate", "--cameras", 40, "--gpus", 2, "--hours", 0.1, "--json")
    assert json.loads(done.stdout)["scenario"]["cameras"] == 40
