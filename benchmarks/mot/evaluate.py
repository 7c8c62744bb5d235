"""Tracks the boxes of a sequence, and scores the tracks. Knows sequences, the tracker and the metrics."""

from __future__ import annotations

import numpy as np

from benchmarks.mot.files import Rows, Sequence
from benchmarks.mot.metrics import Counts, count
from saccade.pipeline.analytics.tracker import Tracker, TrackerSettings


def track(rows: Rows, fps: float, settings: TrackerSettings, every: int = 1) -> Rows:
    """The boxes of a sequence that belong to tracks, with their numbers.

    Args:
        rows: the boxes, without ids.
        fps: frames a second.
        settings: how to decide.
        every: use only every so manieth frame, from the first on.
    """
    tracker = Tracker(settings)
    tracked = []
    for number in range(1, int(rows[:, 0].max(initial=0)) + 1, every):
        here = rows[rows[:, 0] == number].copy()
        ids, _ = tracker.update(here[:, 2:6], here[:, 6], np.zeros(len(here), np.int64), number / fps)
        here[:, 1] = ids
        tracked.append(here[ids > 0])
    return np.concatenate([np.zeros((0, 8)), *tracked])


def score(sequence: Sequence, tracks: Rows, every: int = 1) -> Counts:
    """Compare tracks with the truth of a sequence, on every so manieth frame."""
    chosen = [rows[(rows[:, 0] - 1) % every == 0] for rows in (sequence.truth, tracks, sequence.distractors)]
    return count(*chosen)
