"""The stage that numbers boxes and points, alone and through a configuration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from saccade.engine.results import Box, Detections, Points, Result, Spot
from saccade.pipeline import load, opened_run
from saccade.pipeline.analytics import STAGES
from saccade.pipeline.analytics.track import TrackStage
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.sinks.overlay.scene import Trail
from tests.support.sinks.results import live_frame

LONG_S = 60


def result_of(*found: Box | Spot) -> Result:
    boxes = tuple(one for one in found if isinstance(one, Box))
    spots = tuple(one for one in found if isinstance(one, Spot))
    return Result(Detections(boxes, 200, 100), Points(spots, 200, 100))


def trails_of(result: Result) -> dict[int, tuple[tuple[float, float], ...]]:
    return {trail.track_id: trail.points for trail in result.extras[Trail.key] if isinstance(trail, Trail)}


def test_boxes_and_points_of_each_label_have_numbers() -> None:
    stage = TrackStage()
    for number in range(10):
        x = 0.01 * number
        found = (
            Box("person", 0.9, 0.1 + x, 0.1, 0.3 + x, 0.6),
            Box("dog", 0.9, 0.1 + x, 0.1, 0.3 + x, 0.6),
            Spot("person", 0.8, 0.5, 0.5 + x),
        )
        result = stage.process(live_frame(number / 10), result_of(*found))
    person, dog = result.detections.boxes
    (spot,) = result.points.points
    assert sorted([person.track_id, dog.track_id, spot.track_id]) == [1, 2, 3]  # type: ignore[type-var]
    assert (person.label, dog.label, person.x1) == ("person", "dog", pytest.approx(0.19))
    assert [one.speed for one in (person, dog, spot)] == [pytest.approx(0.1, abs=0.02)] * 3
    trails = trails_of(result)
    assert set(trails) == {1, 2, 3}
    assert trails[spot.track_id or 0][-1] == (0.5, pytest.approx(0.59))
    assert len(trails[spot.track_id or 0]) == 10


def test_a_trail_holds_the_last_seconds_and_ends_with_its_track() -> None:
    stage = TrackStage()
    still = Box("person", 0.9, 0.1, 0.1, 0.3, 0.6)
    for number in range(60):
        result = stage.process(live_frame(number / 10), result_of(still))
    assert 12 <= len(trails_of(result)[1]) <= 14
    assert trails_of(stage.process(live_frame(8.0), result_of())) == {}


def test_supervision_gets_the_numbers() -> None:
    pytest.importorskip("supervision")
    known = Box("person", 0.9, 0.1, 0.1, 0.3, 0.6, track_id=7)
    assert Detections((known, replace(known, track_id=None)), 10, 10).to_supervision().tracker_id.tolist() == [7, -1]
    assert Detections((replace(known, track_id=None),), 10, 10).to_supervision().tracker_id is None


def test_the_stage_has_a_name() -> None:
    assert isinstance(STAGES["track"](), TrackStage)


def test_a_configuration_that_tracks_writes_the_numbers(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    wanted = {"source": str(DEMO_CLIP), "detect": "person", "conf": 0.3, "track": True, "start": 8, "end": 10}
    with opened_run(load(None, {**wanted, "jsonl": str(out)})) as opened:
        assert all(run.join(LONG_S) for run in opened.controller.start())
    records = [json.loads(line) for line in out.read_text().splitlines()]
    numbers = {found.get("track") for record in records for found in record["objects"]} - {None}
    assert len(records) == 20
    assert numbers == {1}
