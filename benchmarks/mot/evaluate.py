"""Runs Saccade's tracker on the given boxes of a MOT Challenge sequence, and scores the tracks."""

from __future__ import annotations

import numpy as np

from benchmarks.mot.files import Rows, Sequence
from benchmarks.mot.metrics import Counts, count
from saccade.pipeline.analytics.tracker import Tracker, TrackerSettings


def track(rows: Rows, fps: float, settings: TrackerSettings, every: int = 1) -> Rows:
    """Run the tracker on detected boxes. Return the boxes that belong to a track, with their track IDs.

    Args:
        rows: detected boxes of a sequence, without track IDs.
        fps: frame rate of the sequence, in frames per second.
        settings: thresholds of the tracker.
        every: use only every Nth frame, starting with the first.
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
    """Compare tracks with the ground truth, and return the counts for tracking scores. Only every Nth frame is used."""
    chosen = [rows[(rows[:, 0] - 1) % every == 0] for rows in (sequence.truth, tracks, sequence.distractors)]
    return count(*chosen)
