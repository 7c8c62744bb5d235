"""Scores for multi-object tracking: MOTA and identity switches (CLEAR MOT), IDF1 and HOTA.

The counts of several sequences can be added and scored together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Self

import lap
import numpy as np
from numpy.typing import NDArray

from benchmarks.mot.files import Rows
from saccade.pipeline.analytics.association import Floats, Ints, iou

_LEAST = 0.5  # IoU of a box with its ground truth, for every metric except HOTA
_ALPHAS = np.arange(0.05, 0.99, 0.05)  # IoU thresholds of HOTA
_TINY = np.finfo(np.float64).eps


@dataclass(slots=True)
class Counts:
    """Counts from which the tracking scores are computed.

    Attributes:
        truth: number of ground-truth boxes.
        found: number of boxes in the tracks.
        matched: number of track boxes that match a ground-truth box.
        switches: number of times that the track ID of a ground-truth object changed.
        same_identity: number of matched boxes with the best one-to-one assignment of tracks to objects (for IDF1).
        at: (19,) number of matched boxes at each IoU threshold of HOTA.
        together: (19,) sum of the association scores of matched boxes at each IoU threshold of HOTA.
    """

    truth: int = 0
    found: int = 0
    matched: int = 0
    switches: int = 0
    same_identity: int = 0
    at: Floats = field(default_factory=lambda: np.zeros(len(_ALPHAS)))
    together: Floats = field(default_factory=lambda: np.zeros(len(_ALPHAS)))

    def __add__(self, other: Self) -> Counts:
        return Counts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    @property
    def mota(self) -> float:
        """MOTA score: 1 - (misses + false boxes + identity switches) / ground-truth boxes. It can be negative."""
        wrong = self.truth - self.matched + self.found - self.matched + self.switches
        return 1 - wrong / max(1, self.truth)

    @property
    def idf1(self) -> float:
        """IDF1 score: F1 score of the track boxes that have the identity of the matching object."""
        return 2 * self.same_identity / max(1, self.truth + self.found)

    @property
    def hota(self) -> float:
        """HOTA score: mean of sqrt(detection accuracy × association accuracy) over the IoU thresholds."""
        detection = self.at / np.maximum(1, self.truth + self.found - self.at)
        association = self.together / np.maximum(1, self.at)
        return float(np.sqrt(detection * association).mean())

    def to_dict(self) -> dict[str, float | int]:
        """Return the tracking scores, from 0 to 1, and the counts, by name."""
        scores = {"mota": self.mota, "idf1": self.idf1, "hota": self.hota}
        misses, false = self.truth - self.matched, self.found - self.matched
        return {
            **{name: round(score, 5) for name, score in scores.items()},
            "id_switches": self.switches,
            "misses": misses,
            "false_boxes": false,
            "true_boxes": self.truth,
        }


@dataclass(slots=True, frozen=True)
class _Frame:
    truth: Ints  # indexes of the objects, from 0
    found: Ints  # indexes of the tracks, from 0
    overlap: Floats


def count(truth: Rows, found: Rows, distractors: Rows | None = None) -> Counts:
    """Compare tracks with the ground truth, and return the counts for tracking scores.

    Args:
        truth: ground-truth boxes with IDs, as `mot.files` reads them.
        found: track boxes with IDs, in the same format.
        distractors: boxes of distractors. A track box that matches only a distractor is ignored.
    """
    if distractors is not None and len(distractors):
        found = _without(found, truth, distractors)
    frames = list(_frames(truth, found))
    counts = Counts(len(truth), len(found))
    _count_clear(frames, counts)
    _count_identity(frames, counts)
    _count_hota(frames, counts)
    return counts


def best_pairs(gain: Floats) -> tuple[Ints, Ints]:
    """Solve the linear assignment problem. Return the row and column indices that maximize the sum of `gain`."""
    if not gain.size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    _, column_of, _ = lap.lapjv(gain.max() - gain, extend_cost=True)
    rows = np.nonzero(column_of >= 0)[0]
    return rows, column_of[rows].astype(np.int64)


def _frames(truth: Rows, found: Rows) -> Iterator[_Frame]:
    _, true_ids = np.unique(truth[:, 1], return_inverse=True)
    _, found_ids = np.unique(found[:, 1], return_inverse=True)
    for number in np.union1d(truth[:, 0], found[:, 0]):
        true_rows, found_rows = truth[:, 0] == number, found[:, 0] == number
        overlap = iou(truth[true_rows, 2:6], found[found_rows, 2:6])
        yield _Frame(true_ids[true_rows], found_ids[found_rows], overlap)


def _without(found: Rows, truth: Rows, distractors: Rows) -> Rows:
    keep = np.ones(len(found), bool)
    for number in np.unique(distractors[:, 0]):
        rows = np.nonzero(found[:, 0] == number)[0]
        true, other = truth[truth[:, 0] == number], distractors[distractors[:, 0] == number]
        overlap = iou(np.concatenate((true, other))[:, 2:6], found[rows, 2:6])
        first, second = best_pairs(np.where(overlap >= _LEAST - _TINY, overlap, 0))
        on_distractor = (first >= len(true)) & (overlap[first, second] >= _LEAST - _TINY)
        keep[rows[second[on_distractor]]] = False
    return found[keep]


def _count_clear(frames: list[_Frame], counts: Counts) -> None:
    number_of: dict[int, int] = {}  # the last track ID of each object
    before: dict[int, int] = {}  # pairs of the previous frame: a pair that still overlaps is kept
    for frame in frames:
        stays = np.array([[before.get(int(t)) == int(f) for f in frame.found] for t in frame.truth], bool)
        possible = frame.overlap >= _LEAST - _TINY
        gain = np.where(possible, frame.overlap + 1000 * stays.reshape(frame.overlap.shape), 0)
        rows, columns = best_pairs(gain)
        real = possible[rows, columns]
        pairs = dict(zip(frame.truth[rows[real]].tolist(), frame.found[columns[real]].tolist(), strict=True))
        counts.matched += len(pairs)
        counts.switches += sum(number_of.get(true, number) != number for true, number in pairs.items())
        number_of |= pairs
        before = pairs


def _count_identity(frames: list[_Frame], counts: Counts) -> None:
    together = _together(frames, lambda frame: (frame.overlap >= _LEAST - _TINY).astype(np.float64))
    rows, columns = best_pairs(together)
    counts.same_identity = int(together[rows, columns].sum())


def _count_hota(frames: list[_Frame], counts: Counts) -> None:
    def share(frame: _Frame) -> Floats:
        either = frame.overlap.sum(axis=0)[None] + frame.overlap.sum(axis=1)[:, None] - frame.overlap
        return np.where(either > _TINY, frame.overlap / np.maximum(either, _TINY), 0)

    together = _together(frames, share)
    true_size = np.bincount(np.concatenate([f.truth for f in frames] or [np.zeros(0, int)]), minlength=len(together))
    width = together.shape[1]
    found_size = np.bincount(np.concatenate([f.found for f in frames] or [np.zeros(0, int)]), minlength=width)
    sizes = true_size[:, None] + found_size[None]
    alignment = together / np.maximum(sizes - together, _TINY)
    matches = np.zeros((len(_ALPHAS), *together.shape))
    for frame in frames:
        rows, columns = best_pairs(alignment[frame.truth[:, None], frame.found] * frame.overlap)
        overlap = frame.overlap[rows, columns]
        for number, alpha in enumerate(_ALPHAS):
            real = overlap >= alpha - _TINY
            matches[number, frame.truth[rows[real]], frame.found[columns[real]]] += 1
    counts.at = matches.sum(axis=(1, 2))
    counts.together = (matches * matches / np.maximum(1, sizes - matches)).sum(axis=(1, 2))


def _together(frames: list[_Frame], weight: Callable[[_Frame], Floats]) -> Floats:
    """Add up the results of `weight` over all frames, in a matrix (objects, tracks)."""
    true = 1 + max((int(frame.truth.max(initial=-1)) for frame in frames), default=-1)
    found = 1 + max((int(frame.found.max(initial=-1)) for frame in frames), default=-1)
    total: NDArray[np.float64] = np.zeros((true, found))
    for frame in frames:
        total[frame.truth[:, None], frame.found] += weight(frame)
    return total
