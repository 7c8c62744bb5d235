"""The summary of a run."""

from __future__ import annotations

import pytest

from saccade.pipeline.cli.formatting import summary
from saccade.pipeline.runtime.stats import Report
from saccade.sinks.record import Latency

LATENCY = Latency(decode=1, queue=1, prefill=2, decode_tokens=3, track=0, total=7)


@pytest.mark.parametrize(
    ("report", "lines"),
    [
        (
            Report(1, 1, 2.0, LATENCY, {"full": 1}, 1, events=1),
            [
                "1 frame in 2.0 s: 0.5 fps, 5.0 ms a frame (prefill 2.0, decode 3.0), 1 object, 1 event",
                "1 frame dropped because the model was busy, 1 damaged packet skipped",
            ],
        ),
        (
            Report(4, 0, 2.0, LATENCY, {"lost": 2}, 0, events=0),
            [
                "4 frames in 2.0 s: 2.0 fps, 5.0 ms a frame (prefill 2.0, decode 3.0), 0 objects, 0 events",
                "2 frames lost or damaged in transit",
            ],
        ),
        (
            Report(2, 3, 2.0, LATENCY, {}, 0),
            ["2 frames in 2.0 s: 1.0 fps, 5.0 ms a frame (prefill 2.0, decode 3.0), 3 objects"],
        ),
        (Report(0, 0, 0.0, LATENCY, {}, 0), ["no frames"]),
    ],
)
def test_a_summary_counts_with_the_right_number_and_names_events_if_there_are_rules(
    report: Report, lines: list[str]
) -> None:
    assert summary(report).splitlines() == lines
