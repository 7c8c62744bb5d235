from __future__ import annotations

import json
import math
from typing import Any

import pytest

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.bench.scale.measured import Row, ScaleTimes, frames_counted, quantile_ms, time_scale
from saccade.pipeline.config import RunConfig


def test_workers_are_measured_and_one_is_killed() -> None:
    settings = RunConfig.model_validate(
        {"source": str(DEMO_CLIP), "detect": "person", "device": "cpu", "vid_stride": 10}
    )
    times = time_scale(settings, [2], cameras=2, seconds=2)
    (row,) = times.rows
    assert times.fps == 1
    assert row.offered_per_s >= row.frames_per_s > 0
    assert row.p50_ms is not None
    assert row.p99_ms is not None
    assert row.p99_ms >= row.p50_ms > 0
    assert 0 <= row.in_time <= 1
    assert row.silent == 0
    assert row.back_s is not None
    assert row.ready_s is not None
    assert 0 < row.ready_s <= row.back_s
    assert ScaleTimes(**json.loads(times.as_json())).cameras == 2
    assert len(times.as_text().splitlines()) == 3


def test_streams_without_results_have_no_latencies() -> None:
    row = Row(2, 50.0, 0.0, 1.0, 0.0, 64, None, None, 0.0, 2.0, {"?": 64}, None, 0.5, None, 800.0)
    line = ScaleTimes(64, 25.0, [row]).as_text().splitlines()[-1]
    assert line.split()[:9] == ["2", "50.0", "0.0", "100.0", "%", "0.0", "%", "64", "-"]


def status(read: int, results: int, **dropped: int) -> dict[str, Any]:
    return {"frames_in": read, "frames_out": results, "dropped": dropped}


@pytest.mark.parametrize(
    ("after", "max_fps", "counted"),
    [
        (status(249, 249, full=2), None, (149, 149, 0)),  # a source that is slower than it says drops nothing
        (status(250, 200, full=52, lost=7), None, (150, 100, 50)),
        (status(250, 200, full=42, deadline=6, gate=2), None, (150, 100, 46)),
        (status(350, 250, full=102), 15.0, (150, 150, 0)),  # frames beyond the rate are not wanted
        (status(350, 230, full=122), 15.0, (150, 130, 20)),
        (status(350, 252, full=100), 15.0, (152, 152, 0)),
        (status(60, 55, full=1), 15.0, (60, 55, 1)),  # moved: it counts anew
    ],
)
def test_drops_are_counted_against_what_was_offered(
    after: dict[str, Any], max_fps: float | None, counted: tuple[float, float, float]
) -> None:
    assert frames_counted(status(100, 100, full=2), after, 10.0, max_fps) == counted


def test_quantiles_are_those_of_the_buckets() -> None:
    counts = {0.01: 0.0, 0.02: 50.0, 0.1: 90.0, math.inf: 100.0}
    assert [quantile_ms(counts, share) for share in (0.25, 0.5, 0.7, 0.99)] == pytest.approx([15, 20, 60, 100])
    assert quantile_ms({}, 0.5) is None
    assert quantile_ms({0.1: 0.0, math.inf: 0.0}, 0.5) is None
