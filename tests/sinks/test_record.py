"""The record of a frame: its fields, its precision and the latency drawn on a frame."""

from __future__ import annotations

from dataclasses import replace

import pytest

from saccade.engine.results import Box, Detections, Grounding, Points, Reasoning, Result, Text
from saccade.sinks import (
    make_record,
)
from saccade.sinks.record import drawn_latency
from tests.support.sinks.results import FRAME, LATENCY, RECORD, RESULT


def test_the_record_has_exactly_these_fields() -> None:
    assert make_record(FRAME, RESULT, LATENCY) == RECORD
    assert list(make_record(FRAME, RESULT, LATENCY)) == list(RECORD)


def test_every_bin_of_a_coordinate_stays_distinct() -> None:
    boxes = tuple(Box("x", 0.5, n / 1024, 0.0, 1.0, 1.0) for n in range(1024))
    record = make_record(FRAME, Result(Detections(boxes, 1, 1), Points((), 1, 1)), LATENCY)
    assert [round(o["box_norm"][0] * 1024) for o in record["objects"]] == list(range(1024))


def test_drawn_latency_is_age_if_live_and_work_if_a_file() -> None:
    assert drawn_latency(FRAME, LATENCY) == LATENCY.total
    assert drawn_latency(replace(FRAME, capture_clock="file"), LATENCY) == pytest.approx(24.0)


def test_an_answer_has_its_probabilities_and_its_reasoning() -> None:
    reasoning = Reasoning("it is <5>", (Grounding(3, 9, ((1 / 3, 0.25),)),))
    text = Text("open?", "yes", reasoning=reasoning, probabilities={"yes": 2 / 3, "no": 1 / 3})
    record = make_record(FRAME, Result(Detections((), 1, 1), Points((), 1, 1), (text,)), LATENCY)
    assert record["answers"] == [
        {
            "prompt": "open?",
            "text": "yes",
            "probabilities": {"yes": 0.6667, "no": 0.3333},
            "reasoning": {"text": "it is <5>", "grounding": [{"start": 3, "end": 9, "points": [[0.33333, 0.25]]}]},
        }
    ]
