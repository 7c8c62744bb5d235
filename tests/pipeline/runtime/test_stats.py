from __future__ import annotations

import time
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest

from saccade.engine.results import Box, Detections, Points, Result, Spot, Timings
from saccade.pipeline.runtime.stats import BUCKETS_MS, Stats, latency_of
from saccade.sinks import Latency
from saccade.sources import CaptureClock, Frame

IMAGE = np.zeros((4, 4, 3), np.uint8)


def frame(clock: CaptureClock = "arrival", age_s: float = 0.0) -> Frame:
    now = time.monotonic()
    return Frame(IMAGE, "door", 0, 0, Fraction(1, 90_000), 0.0, clock, now - age_s, 5.0)


def result(boxes: int, points: int = 0) -> Result:
    return Result(
        Detections((Box("cat", 0.9, 0, 0, 1, 1),) * boxes, 4, 4), Points((Spot("cat", 0.9, 0.5, 0.5),) * points, 4, 4)
    )


def test_nothing_yet() -> None:
    report = Stats().report({}, 0, {})
    assert (report.frames, report.read, report.fps, report.recent.p50_ms, report.recent.age_ms) == (
        0,
        0,
        0.0,
        None,
        None,
    )


def test_each_time_falls_into_its_bucket() -> None:
    stats = Stats()
    for ms in (0.0, 1.0, 1.1, 33.0, 34.0, 5000.0, 5001.0):
        stats.note_result(frame(), result(0), Latency(total=ms))
    histogram = stats.report({}, 0, {}).histograms["total"]
    expected = dict.fromkeys((*BUCKETS_MS, None), 0) | {1.0: 2, 2.5: 1, 33.0: 1, 50.0: 1, 5000.0: 1, None: 1}
    assert dict(zip((*BUCKETS_MS, None), histogram.counts, strict=True)) == expected
    assert histogram.sum_ms == pytest.approx(10_070.1)


def test_everything_is_counted() -> None:
    stats = Stats()
    stats.note_read(0)
    stats.note_read(3)
    stats.note_submit(time.monotonic())
    stats.note_result(frame(), result(2, 1), Latency(total=10.0))
    stats.note_result(frame(age_s=0.5), result(1), Latency(total=30.0))
    report = stats.report({"full": 2}, 7, {"engine": 1})
    assert (report.read, report.frames, report.objects, report.corrupt_packets) == (2, 2, 4, 7)
    assert report.drops == {"full": 2, "lost": 3}
    assert report.waiting == {"engine": 1}
    assert report.latency.total == 20.0
    now = report.recent
    assert (now.objects, now.p50_ms, now.p99_ms) == (1, 30.0, 30.0)
    assert now.age_ms is not None
    assert 505 <= now.age_ms < 30_000


def test_a_file_is_not_old_for_having_been_read_ahead() -> None:
    stats = Stats()
    stats.note_result(frame("file", age_s=9), result(0), Latency(queue=8900.0, prefill=40.0, total=9000.0))
    now = stats.report({}, 0, {}).recent
    assert (now.age_ms, now.p50_ms) == (None, 100.0)


def test_what_was_long_ago_is_not_now(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = Stats()
    clock = [1000.0]
    monkeypatch.setattr("saccade.pipeline.runtime.stats.time.monotonic", lambda: clock[0])
    for _ in range(21):
        stats.note_result(frame(), result(0), Latency())
        clock[0] += 0.1
    assert stats.report({}, 0, {}).recent.fps == pytest.approx(10)
    clock[0] += 2
    assert stats.report({}, 0, {}).recent.fps == pytest.approx(5)
    clock[0] += 4
    assert stats.report({}, 0, {}).recent.fps == 0


def test_each_part_of_a_latency_is_where_it_was_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = Frame(
        np.zeros((2, 2, 3), np.uint8), "door", 0, 0, Fraction(1, 10), 0.0, "file", decoded_at=10.0, decode_ms=5.0
    )
    timings = Timings(queue_ms=3.0, prefill_ms=20.0, decode_ms=7.0)
    result = Result(Detections((), 2, 2), Points((), 2, 2), timings=timings)
    monkeypatch.setattr(time, "monotonic", lambda: 10.1)
    found = latency_of(frame, 10.02, result, track_ms=4.0)
    expected = Latency(decode=5.0, queue=23.0, prefill=20.0, decode_tokens=7.0, track=4.0, total=105.0)
    assert asdict(found) == pytest.approx(asdict(expected))
