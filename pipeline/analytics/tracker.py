"""Numbers objects over time: BoT-SORT's association without camera compensation and appearance, in real seconds.

Boxes that score high are paired with the tracks by their overlap times their score; then, as in ByteTrack, boxes that
score low with those tracks that are left and were seen last time; then what is left of the high ones with tracks
that are new. All tracks move on together, as arrays. Knows numbers only: no frames, no results, no clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.pipeline.analytics.association import Floats, Ints, assign, corners_of, iou
from saccade.pipeline.analytics.kalman import STEP_S, correct, predict, start

_LEAST_FIRST = 0.2  # overlap × score, of a track and a box that scores high
_LEAST_SECOND = 0.5  # overlap, of a track and a box that scores low
_LEAST_NEW = 0.3  # overlap × score, of a track seen once and its second box
# For which a track that is not seen goes on growing or shrinking; later it would match anything. With 0, those that are
# half hidden for some frames were lost (TUD-Campus: IDF1 70.4, with this 74.7); 0.25 to 0.4 gave the same.
_GROWTH_S = 0.3


@dataclass(slots=True, frozen=True)
class TrackerSettings:
    """How a tracker decides. The defaults are BoT-SORT's.

    Attributes:
        high: least score of the boxes that are paired first; lower ones can only carry a track on.
        new: least score of a box that may begin a track.
        low: least score of a box that is used at all.
        lost_s: for how many seconds a track that is not seen may be found again.
    """

    high: float = 0.6
    new: float = 0.7
    low: float = 0.1
    lost_s: float = 1.0

    def __post_init__(self) -> None:
        for name in ("high", "new", "low"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} should be from 0 to 1, got {getattr(self, name)}")
        if not 0 <= self.lost_s < float("inf"):
            raise ValueError(f"lost_s should be a number of seconds of at least 0, got {self.lost_s}")


@dataclass(slots=True, frozen=True)
class Unseen:
    """Tracks that were not seen on the last frame, where they are expected.

    Attributes:
        ids: (n,) int64, their numbers.
        kinds: (n,) int64, their classes.
        boxes: (n, 4) float64, x1, y1, x2, y2.
        for_s: (n,) float64, seconds since they were seen.
    """

    ids: Ints
    kinds: Ints
    boxes: Floats
    for_s: Floats


class Tracker:
    """The tracks of one stream. A track has one class and only takes boxes of it.

    A track has its number from its second box on, or from its first if that is on the first frame. Numbers begin at 1
    and are given once. The order of the boxes does not matter.

    Args:
        settings: how it decides.
    """

    def __init__(self, settings: TrackerSettings | None = None) -> None:
        self._settings = settings or TrackerSettings()
        self._clock = 0.0  # seconds that have passed, which go on where timestamps jump back
        self._last: float | None = None  # time of the last frame
        self._next_id = 1
        self._state: Floats = np.zeros((5, 0, 2, 2))
        self._ids: Ints = np.zeros(0, np.int64)  # 0 while a track is new
        self._kinds: Ints = np.zeros(0, np.int64)
        self._seen_at: Floats = np.zeros(0)

    def __len__(self) -> int:
        return len(self._ids)

    def update(self, boxes: Floats, scores: Floats, kinds: Ints, seconds: float) -> tuple[Ints, Floats]:
        """Take the boxes of one frame.

        Args:
            boxes: (n, 4), x1, y1, x2, y2, in any unit, the same on all frames.
            scores: (n,), 0 to 1.
            kinds: (n,), the class of each.
            seconds: time of the frame. Where it jumps back, a thirtieth of a second is taken to have passed.

        Returns:
            (n,) the number of each box's track, 0 for none; (n, 2) its velocity in units of the boxes a second.
        """
        passed = 0.0 if self._last is None else seconds - self._last
        first, self._last = self._last is None, seconds
        seen_before = self._clock
        self._clock += passed if passed >= 0 else STEP_S
        self._forget()
        track_of = np.full(len(boxes), -1)
        if len(self._ids):
            lost = self._seen_at < seen_before
            self._state[1, self._seen_at < seen_before - _GROWTH_S, 1] = 0
            predict(self._state, self._clock - seen_before)
        measured = np.empty((len(boxes), 2, 2))
        measured[:, 1] = boxes[:, 2:] - boxes[:, :2]
        measured[:, 0] = boxes[:, :2] + measured[:, 1] / 2
        if len(boxes) and len(self._ids):
            likeness = iou(corners_of(self._state[0]), boxes) * (self._kinds[:, None] == kinds)
            self._pair(likeness, scores, lost, track_of)
        self._take(measured, track_of)
        self._begin(measured, scores, kinds, track_of, first)
        paired = track_of >= 0
        ids, velocities = np.zeros(len(boxes), np.int64), np.zeros((len(boxes), 2))
        ids[paired] = self._ids[track_of[paired]]
        velocities[paired] = self._state[1, track_of[paired], 0] / STEP_S
        return ids, velocities

    def hold(self, seconds: float) -> None:
        """Let a time pass in which nothing moved, so that no track ages."""
        if self._last is not None:
            self._last += seconds

    def unseen(self) -> Unseen:
        """The tracks with a number that were not seen on the last frame."""
        rows = np.nonzero((self._ids > 0) & (self._seen_at < self._clock))[0]
        boxes = corners_of(self._state[0, rows])
        return Unseen(self._ids[rows], self._kinds[rows], boxes, self._clock - self._seen_at[rows])

    @property
    def ids(self) -> NDArray[np.int64]:
        """The numbers of all tracks that go on or may be found again."""
        return self._ids[self._ids > 0]

    def _pair(self, likeness: Floats, scores: Floats, lost: NDArray[np.bool_], track_of: Ints) -> None:
        """Write the row of the track of each box into `track_of`."""
        high, known = scores >= self._settings.high, self._ids > 0
        fused = likeness * scores
        if known.all() and high.all():  # as on most frames
            rows, columns = assign(fused, _LEAST_FIRST)
            track_of[columns] = rows
            return
        taken = np.zeros(len(self._ids), bool)

        def stage(table: Floats, tracks: NDArray[np.bool_], boxes: NDArray[np.bool_], least: float) -> None:
            rows, columns = np.nonzero(tracks)[0], np.nonzero(boxes)[0]
            if len(rows) and len(columns):
                i, j = assign(table[rows[:, None], columns], least)
                track_of[columns[j]] = rows[i]
                taken[rows[i]] = True

        stage(fused, known, high, _LEAST_FIRST)
        if not high.all():
            low = ~high & (scores > self._settings.low)
            stage(likeness, known & ~lost & ~taken, low, _LEAST_SECOND)
        if not known.all():
            stage(fused, ~known, high & (track_of < 0), _LEAST_NEW)

    def _take(self, measured: Floats, track_of: Ints) -> None:
        """Correct the tracks by their boxes; number the new ones among them, and drop those that were not seen."""
        columns = np.nonzero(track_of >= 0)[0]
        rows = track_of[columns]
        if len(rows):
            self._state[:, rows] = correct(self._state[:, rows], measured[columns])
            self._seen_at[rows] = self._clock
        new = self._ids == 0
        if not new.any():
            return
        self._number(np.nonzero(new & (self._seen_at == self._clock))[0])
        keep = self._ids > 0
        track_of[columns] = (np.cumsum(keep) - 1)[rows]
        self._keep(keep)

    def _begin(self, measured: Floats, scores: Floats, kinds: Ints, track_of: Ints, first: bool) -> None:
        begun = np.nonzero((track_of < 0) & (scores >= self._settings.new))[0]
        if not len(begun):
            return
        box = measured[begun]
        begun = begun[np.lexsort((*box.reshape(-1, 4).T, kinds[begun]))]  # whatever their order
        count = len(self._ids)
        track_of[begun] = np.arange(count, count + len(begun))
        self._state = np.concatenate((self._state, start(measured[begun])), axis=1)
        self._ids = np.concatenate((self._ids, np.zeros(len(begun), np.int64)))
        self._kinds = np.concatenate((self._kinds, kinds[begun]))
        self._seen_at = np.concatenate((self._seen_at, np.full(len(begun), self._clock)))
        if first:
            self._number(np.arange(count, len(self._ids)))

    def _number(self, rows: Ints) -> None:
        self._ids[rows] = np.arange(self._next_id, self._next_id + len(rows))
        self._next_id += len(rows)

    def _forget(self) -> None:
        """Drop the tracks that have not been seen for too long."""
        keep = self._clock - self._seen_at <= self._settings.lost_s
        if not keep.all():
            self._keep(keep)

    def _keep(self, keep: NDArray[np.bool_]) -> None:
        self._state = self._state[:, keep]
        self._ids, self._kinds, self._seen_at = self._ids[keep], self._kinds[keep], self._seen_at[keep]
