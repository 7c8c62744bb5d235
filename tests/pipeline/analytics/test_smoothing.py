"""Boxes that bridge a gap are there to be seen, marked, and counted by nothing; and the heatmap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from saccade.engine.results import Box, Detections, Points, Result
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.heatmap import Heat, HeatmapStage
from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.pipeline.runtime.stats import Stats
from saccade.sinks import Latency, SinkError
from saccade.sinks.messaging.events import observations_of
from saccade.sinks.overlay import draw
from saccade.sinks.record import make_record
from tests.support.sinks.results import live_frame


def results_of(seconds: int = 3, missing: tuple[int, ...] = (), **values: object) -> list[Result]:
    """At 10 fps, of one who walks to the right and is not found on the frames `missing`."""
    stage = AnalyzeStage(AnalyticsSettings.model_validate({"track": True, **values}))
    results = []
    for number in range(seconds * 10):
        x = 0.1 + 0.02 * number
        boxes = () if number in missing else (Box("person", 0.9, x, 0.3, x + 0.1, 0.8),)
        results.append(
            stage.process(live_frame(number / 10), Result(Detections(boxes, 200, 100), Points((), 200, 100)))
        )
    return results


def test_a_box_that_flickers_is_bridged_where_it_would_be() -> None:
    results = results_of(missing=(12, 20, 21))
    assert all(len(result.detections.boxes) == 1 for result in results)
    assert [n for n, result in enumerate(results) if result.detections.boxes[0].predicted] == [12, 20, 21]
    assert [len(result.extras["trails"]) for result in results] == [1] * len(results)
    (bridged,) = results[12].detections.boxes
    assert (bridged.track_id, bridged.score, bridged.label) == (1, 0.9, "person")
    assert (bridged.x1, bridged.y2) == (pytest.approx(0.34, abs=0.01), pytest.approx(0.8, abs=0.01))


def test_a_bridged_box_stays_in_its_zone() -> None:
    results = results_of(missing=(12, 24), zones="left=0,0,.5,0,.5,1,0,1")
    assert [result.detections.boxes[0].zones for result in results[11:14]] == [("left",)] * 3
    assert results[24].detections.boxes[0].zones == ()


def test_a_bridge_ends_after_less_than_half_a_second() -> None:
    results = results_of(missing=tuple(range(12, 30)))
    assert [len(result.detections.boxes) for result in results[11:17]] == [1, 1, 1, 1, 0, 0]


def test_without_smoothing_a_gap_is_a_gap() -> None:
    assert results_of(missing=(12,), smooth=False)[12].detections.boxes == ()


def test_a_predicted_box_is_counted_by_nothing() -> None:
    result = results_of(missing=(12,), zones="all=0,0,1,0,1,1,0,1")[12]
    assert make_record(live_frame(1.2), result, Latency())["objects"][0]["predicted"] is True
    assert observations_of(result, 200, 100) == []
    stats = Stats()
    stats.note_result(live_frame(1.2), result, Latency())
    assert stats.report({}, 0, {}).objects == 0
    pytest.importorskip("supervision")
    assert len(result.detections.to_supervision()) == 0


def test_a_predicted_box_is_drawn_thinner_and_without_a_score() -> None:
    found = results_of()[12]
    predicted = replace(found.detections, boxes=tuple(replace(box, predicted=True) for box in found.detections.boxes))
    black = np.zeros((360, 640, 3), np.uint8)
    seen, bridged = draw(black, found), draw(black, replace(found, detections=predicted))
    assert 0 < np.count_nonzero(bridged) < np.count_nonzero(seen)


def test_a_heatmap_is_hottest_where_one_stood_longest(tmp_path: Path) -> None:
    path = tmp_path / "{stream}-heat.png"
    stage = HeatmapStage(str(path))
    for number in range(100):
        x = 0.2 if number < 80 else 0.2 + 0.03 * (number - 80)
        box = Box("person", 0.9, x - 0.05, 0.3, x + 0.05, 0.7)
        stage.process(live_frame(number / 10), Result(Detections((box,), 200, 100), Points((), 200, 100)))
    stage.close()
    image = cv2.imread(str(tmp_path / "door-heat.png"))
    assert image.shape == (100, 200, 3)
    red = image[..., 2].astype(int) - image[..., 0]
    row, column = np.unravel_index(red.argmax(), red.shape)
    assert (row, column) == (pytest.approx(70, abs=3), pytest.approx(40, abs=3))
    assert image[10, 150].max() < 10


def test_a_heatmap_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    stage = HeatmapStage(str(tmp_path / "gone" / "heat.png"))
    stage.process(live_frame(0.0), Result(Detections((), 200, 100), Points((), 200, 100)))
    with pytest.raises(SinkError, match=r"cannot write .*heat\.png: the folder .*gone does not exist"):
        stage.close()


def test_a_heatmap_to_lay_over_is_transparent_elsewhere() -> None:
    heat = Heat()
    assert heat.overlay().shape == (1, 1, 4)
    for number in range(20):
        box = Box("person", 0.9, 0.15, 0.3, 0.25, 0.7)
        heat.add(live_frame(number / 10), Result(Detections((box,), 200, 100), Points((), 200, 100)))
    drawn = heat.overlay()
    assert (drawn.shape, drawn.dtype) == ((180, 360, 4), np.uint8)
    assert (drawn[126, 72, 3], drawn[20, 300, 3]) == (204, 0)
