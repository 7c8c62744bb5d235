"""What is counted in memory has a bound, however long a stream runs and whatever it is asked."""

from __future__ import annotations

from collections import Counter

import numpy as np

from saccade.engine.results import Box, Detections, Points, Result
from saccade.pipeline.analytics.counts import MOST_LABELS, CountLog, Totals, add_label
from saccade.pipeline.analytics.track import TrackStage
from tests.support.sinks.results import live_frame


def test_minutes_are_kept_for_a_day() -> None:
    log = CountLog()
    for minute in range(3000):
        assert log.due(60.0 * minute)
        log.turn(60.0 * minute, Totals({"person": minute}))
    assert len(log) == 24 * 60
    kept = log.since(0.0, Totals({"person": 3000}))
    assert kept[0].start == 60 * (3000 - 24 * 60 - 1)


def test_labels_without_end_are_not_counted() -> None:
    counter: Counter[str] = Counter()
    for number in range(MOST_LABELS + 100):
        add_label(counter, f"thing {number}")
    add_label(counter, "thing 0")
    assert len(counter) == MOST_LABELS
    assert counter["thing 0"] == 2


def test_labels_without_end_are_tracked() -> None:
    stage = TrackStage()
    numbers = []
    for frame in range(2 * MOST_LABELS + 10):
        box = Box(f"thing {frame // 2}", 0.9, 0.4, 0.4, 0.6, 0.6)
        result = Result(Detections((box,), 64, 48), Points((), 64, 48))
        numbers.append(stage.process(live_frame(frame / 10), result).detections.boxes[0].track_id)
    assert len(stage._kinds) <= MOST_LABELS
    assert len(stage._trails) < 100
    seen = np.array([number for number in numbers if number])
    assert len(set(seen.tolist())) >= MOST_LABELS
