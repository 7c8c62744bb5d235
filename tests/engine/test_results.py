from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from saccade.engine import Box, Detections, Outline, Points, Result, Spot, Timings

BOXES = (
    Box("dog", 0.75, 0.1, 0.2, 0.5, 0.6),
    Box("cat", 0.5, 0.0, 0.0, 1.0, 1.0),
    Box("dog", 0.25, 0.5, 0.5, 0.75, 1.0),
)


def test_pixels_are_fractions_of_width_and_height() -> None:
    assert BOXES[0].pixels(640, 360) == pytest.approx((64, 72, 320, 216))
    assert Spot("dog", 0.5, 0.25, 0.5).pixels(640, 360) == (160, 180)


def test_results_are_values() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        BOXES[0].score = 1.0  # type: ignore[misc]
    assert Box("dog", 0.75, 0.1, 0.2, 0.5, 0.6) == BOXES[0]
    assert len(Detections(BOXES, 10, 10)) == 3
    assert len(Points((), 10, 10)) == 0
    assert Result(Detections((), 1, 1), Points((), 1, 1)).timings == Timings()


def test_supervision_gets_pixels_scores_and_names() -> None:
    pytest.importorskip("supervision", reason="the extra `supervision` is not installed")
    out = Detections(BOXES, 640, 360).to_supervision()
    assert out.xyxy == pytest.approx(np.array([[64, 72, 320, 216], [0, 0, 640, 360], [320, 180, 480, 360]]))
    assert out.confidence == pytest.approx(np.array([0.75, 0.5, 0.25]))
    assert out.class_id is not None
    assert out.class_id.tolist() == [1, 0, 1]
    assert out.data["class_name"].tolist() == ["dog", "cat", "dog"]
    assert out[out.class_id == 1].data["class_name"].tolist() == ["dog", "dog"]


def test_supervision_gets_the_masks_of_outlines() -> None:
    pytest.importorskip("supervision", reason="the extra `supervision` is not installed")
    square = "M 0 0 L 1 0 L 1 1 L 0 1 Z"
    parts = [Outline("dog", square, (0.25, 0.5, 0.75, 1.0), True), Outline("cat", "", (0.0, 0.0, 0.0, 0.0), False)]
    out = Result.of(parts, 8, 4, Timings()).segments_to_supervision()
    assert out.xyxy[0].tolist() == [2, 2, 6, 4]
    assert out.mask is not None
    assert [int(mask.sum()) for mask in out.mask] == [8, 0]
    assert (out.class_id.tolist(), out.data["class_name"].tolist()) == ([1, 0], ["dog", "cat"])
    assert len(Result.of([], 8, 4, Timings()).segments_to_supervision()) == 0


def test_supervision_takes_an_empty_image() -> None:
    supervision = pytest.importorskip("supervision", reason="the extra `supervision` is not installed")
    nothing = Detections((), 640, 360).to_supervision()
    assert len(nothing) == 0
    assert nothing.xyxy.shape == (0, 4)
    merged = supervision.Detections.merge([nothing, Detections(BOXES, 640, 360).to_supervision()])
    assert len(merged) == 3
