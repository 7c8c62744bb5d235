"""`python -m benchmarks track`: measures the CPU time per frame of tracking and rules, without a model.

Simulated objects walk randomly and pass each other. In each frame, one in thirty objects is not detected, and one in
thirty has a low score.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from saccade.engine.results import Box, Detections, Points, Result
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.pipeline.analytics.track import TrackStage
from saccade.pipeline.analytics.tracker import Tracker, TrackerSettings
from saccade.pipeline.bench.common import Measurement
from saccade.pipeline.events.settings import EventSettings
from saccade.pipeline.events.stage import EventStage
from saccade.sources import Frame

_FPS = 30
_WARM_UP = 60  # frames
_SIZE = 0.06, 0.16  # of a box, as fractions of the image
_MISSED = _LOW = 1 / 30  # of the boxes
_ZONES = [
    "left=0,0,0.4,0,0.4,1,0,1",
    "right=0.6,0,1,0,1,1,0.6,1",
    "door=0.4,0.4,0.6,0.4,0.6,1,0.4,1",
]
_LINES = ["across=0,0.5,1,0.5", "down=0.5,0,0.5,1"]
_RULES = [
    "visitor=person in door for 2s",
    "waits=person in left for 10s",
    "crosses=person crosses across forward",
    "crowd=count of person in right > 5 for 3s",
    "nobody=person absent from door for 5s",
]
_STEPS = ("tracker", "tracks", "zones and lines", "rules")


@dataclass(slots=True, frozen=True)
class StepCost:
    """CPU time per frame of the tracking stages up to and including `step`, in milliseconds.

    Attributes:
        objects: approximate number of objects per frame.
        step: `tracker` (association and Kalman filter), `tracks` (trails), `zones and lines` (three zones, two lines,
            smoothing) or `rules` (five rules).
        p50_ms, p99_ms: median and 99th percentile of the CPU time over all frames.
    """

    objects: int
    step: str
    p50_ms: float
    p99_ms: float


@dataclass(slots=True, frozen=True)
class TrackBench(Measurement):
    """CPU times of tracking, one row per tracking stage and number of objects."""

    frames: int
    costs: tuple[StepCost, ...]

    def as_text(self) -> str:
        """Return the CPU times of tracking as a text table."""
        lines = [f"CPU time a frame of {self.frames} frames, in ms", f"{'objects':>7}  {'':<16} {'p50':>7} {'p99':>7}"]
        for cost in self.costs:
            number = str(cost.objects) if cost.step == _STEPS[0] else ""
            lines.append(f"{number:>7}  {cost.step:<16} {cost.p50_ms:>7.3f} {cost.p99_ms:>7.3f}")
        return "\n".join(lines)


def time_tracks(counts: Sequence[int], frames: int = 2000) -> TrackBench:
    """Measure the CPU time of tracking and rules on `frames` frames, for each number of objects in `counts`."""
    costs = []
    for count in counts:
        times = _time(count, frames)
        costs += [
            StepCost(count, step, float(np.percentile(row, 50)), float(np.percentile(row, 99)))
            for step, row in zip(_STEPS, times, strict=True)
        ]
    return TrackBench(frames, tuple(costs))


def _time(count: int, frames: int) -> NDArray[np.float64]:
    """Return the CPU time of each frame after each stage in `_STEPS`: (4, frames), cumulative, in milliseconds."""
    tracker = Tracker(TrackerSettings(high=0.5, new=0.5, low=0.0))
    tracks = TrackStage()
    zones = AnalyzeStage(AnalyticsSettings.model_validate({"zones": _ZONES, "lines": _LINES}))
    rules = EventStage(EventSettings.model_validate({"rules": _RULES}).rules, lambda change: None, file_began=0.0)
    image = np.zeros((360, 640, 3), np.uint8)
    times = np.zeros((len(_STEPS), frames))
    for number, (boxes, scores) in enumerate(walk(count, _WARM_UP + frames)):
        pts = number * 1000 // _FPS
        frame = Frame(image, "bench", number, pts, Fraction(1, 1000), pts / 1000, "file", 0.0, 0.0)
        found = tuple(
            Box("person", score, *corners) for score, corners in zip(scores.tolist(), boxes.tolist(), strict=True)
        )
        result = Result(Detections(found, 640, 360), Points((), 640, 360), ())
        kinds = np.zeros(len(boxes), np.int64)
        at = [time.thread_time_ns()]
        tracker.update(boxes, scores, kinds, pts / 1000)
        at.append(time.thread_time_ns())
        tracks.process(frame, result)
        at.append(time.thread_time_ns())
        counted = zones.process(frame, result)
        at.append(time.thread_time_ns())
        rules.process(frame, counted)
        at.append(time.thread_time_ns())
        if number >= _WARM_UP:
            spent = np.diff(at) / 1e6
            times[:, number - _WARM_UP] = spent[0], spent[1], spent[2], spent[2] + spent[3]
    rules.close()
    return times


def walk(count: int, frames: int) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    """Simulate `count` moving objects. Return boxes (n, 4) and scores (n,) for each frame."""
    dice = np.random.default_rng(0)
    half = np.array(_SIZE) / 2
    places = dice.uniform(half, 1 - half, (count, 2))
    speeds = dice.uniform(-0.2, 0.2, (count, 2)) / _FPS
    walked = []
    for _ in range(frames):
        places = places + speeds
        speeds = np.where((places < half) | (places > 1 - half), -speeds, speeds)
        places = np.clip(places, half, 1 - half)
        seen = places + dice.normal(0, 0.01, places.shape) * _SIZE
        chance = dice.random(count)
        scores = np.where(chance < _MISSED + _LOW, 0.3, dice.uniform(0.7, 0.95, count))
        kept = chance >= _MISSED
        walked.append((np.clip(np.concatenate((seen - half, seen + half), axis=1), 0, 1)[kept], scores[kept]))
    return walked
