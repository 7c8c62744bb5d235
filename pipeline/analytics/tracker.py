"""Tracks objects with the data association of BoT-SORT, without camera motion compensation or appearance features.

In each frame, three steps associate boxes with tracks:
    1. high-score boxes with confirmed tracks, including lost tracks
    2. low-score boxes with the remaining tracks that are not lost, as in ByteTrack
    3. the remaining high-score boxes with unconfirmed tracks, which have only one box
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.pipeline.analytics.association import Floats, Ints, assign, corners_of, iou
from saccade.pipeline.analytics.kalman import STEP_S, correct, predict, start

_LEAST_FIRST = 0.2  # overlap × score of a track and a high-score box
_LEAST_SECOND = 0.5  # overlap of a track and a low-score box
_LEAST_NEW = 0.3  # overlap × score of a new track and its second box
# A missed track keeps growing or shrinking for this time; a longer time would let it match anything. With 0, objects
# half hidden for some frames were lost (TUD-Campus: IDF1 70.4, against 74.7); 0.25 to 0.4 gave the same.
_GROWTH_S = 0.3
_NONE: Ints = np.zeros(0, np.int64)


@dataclass(slots=True, frozen=True)
class TrackerSettings:
    """The thresholds of a tracker. The defaults are those of BoT-SORT.

    Attributes:
        high: minimum score of high-score boxes, which are associated first.
        new: minimum score of a box that starts a track.
        low: boxes with this score or a lower score are ignored.
        lost_s: time without a detection after which a track ends, in seconds.

    Raises:
        ValueError: if a value is out of range.
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
            raise ValueError(f"lost_s (seconds until a lost track ends) should be at least 0, got {self.lost_s}")


@dataclass(slots=True, frozen=True)
class Unseen:
    """The predicted positions of lost tracks. A lost track was not detected on the last frame.

    Attributes:
        ids: (n,) int64 track IDs.
        kinds: (n,) int64 class indices.
        boxes: (n, 4) float64 predicted boxes as x1, y1, x2, y2.
        for_s: (n,) float64 time since the last detection of each track, in seconds.
    """

    ids: Ints
    kinds: Ints
    boxes: Floats
    for_s: Floats


class Tracker:
    """Tracks the objects of one stream. All boxes of a track have the same class.

    A track gets its ID with its second box. On the first frame of the stream, every track gets its ID at once. IDs
    start at 1 and are never reused.

    Args:
        settings: thresholds of the tracker.
    """

    def __init__(self, settings: TrackerSettings | None = None) -> None:
        self._settings = settings or TrackerSettings()
        self._clock = 0.0  # elapsed seconds, which also advance when timestamps jump back
        self._last: float | None = None  # time of the last frame
        self._next_id = 1
        self._state: Floats = np.zeros((5, 4, 0))
        self._ids: Ints = np.zeros(0, np.int64)  # 0 while a track is new
        self._kinds: Ints = np.zeros(0, np.int64)
        self._seen_at: Floats = np.zeros(0)
        # Cached to save array operations of some microseconds each: the number of new tracks, the number of tracks
        # missed on the last frame, and a lower bound of the times at which tracks were last seen.
        self._new = self._hidden = 0
        self._seen_since = 0.0

    def __len__(self) -> int:
        return len(self._ids)

    def update(self, boxes: Floats, scores: Floats, kinds: Ints, seconds: float) -> tuple[Ints, Floats]:
        """Update the tracks with the boxes of one frame.

        Args:
            boxes: (n, 4) as x1, y1, x2, y2. The unit must be the same on every frame.
            scores: (n,), from 0 to 1.
            kinds: (n,) class index of each box.
            seconds: time of the frame, in seconds.

        Returns:
            Two arrays: the track ID of each box (n,), or 0 if the box has no ID; the velocity of each box (n, 2) in x
            and y, per second.
        """
        passed = 0.0 if self._last is None else seconds - self._last
        first, self._last = self._last is None, seconds
        seen_before = self._clock
        self._clock += passed if passed >= 0 else STEP_S
        self._forget()
        if len(self._ids):
            self._stop_growth(seen_before - _GROWTH_S)
            self._state = predict(self._state, self._clock - seen_before)
        corners = boxes.T
        measured = np.empty(corners.shape)
        np.subtract(corners[2:], corners[:2], out=measured[2:])
        np.multiply(measured[2:], 0.5, out=measured[:2])
        measured[:2] += corners[:2]
        track_of = np.empty(len(boxes), np.int64)
        track_of.fill(-1)
        if len(boxes) and len(self._ids):
            likeness = iou(corners_of(self._state[0]).T, boxes)
            likeness *= self._kinds[:, None] == kinds
            self._pair(likeness, scores, seen_before, track_of)
        paired = self._take(measured, track_of)
        paired += self._begin(measured, scores, kinds, track_of, first)
        self._hidden = len(self._ids) - paired
        if not len(self._ids):
            return np.zeros(len(boxes), np.int64), np.zeros((len(boxes), 2))
        ids, velocities = self._ids[track_of], self._state[1, :2].T[track_of] / STEP_S
        if paired < len(boxes):
            alone = track_of < 0
            ids[alone] = 0
            velocities[alone] = 0
        return ids, velocities

    def hold(self, seconds: float) -> None:
        """Extend the timeout of lost tracks by a period without motion.

        Args:
            seconds: duration of the period, in seconds.
        """
        if self._last is not None:
            self._last += seconds

    def unseen(self) -> Unseen:
        """Return the predicted positions of all lost tracks that have a track ID."""
        rows = np.nonzero((self._ids > 0) & (self._seen_at < self._clock))[0] if self._hidden else _NONE
        boxes = corners_of(self._state[0][:, rows]).T
        return Unseen(self._ids[rows], self._kinds[rows], boxes, self._clock - self._seen_at[rows])

    @property
    def ids(self) -> NDArray[np.int64]:
        """The IDs of all tracks, including lost tracks."""
        return self._ids[self._ids > 0]

    def _pair(self, likeness: Floats, scores: Floats, seen_before: float, track_of: Ints) -> None:
        """Associate boxes with tracks, and write the result into `track_of`.

        Args:
            likeness: (n, m) IoU of each track and each box; 0 if their classes differ.
            scores: (m,) score of each box.
            seen_before: time of the previous frame, in seconds.
            track_of: (m,) output: track index of each box; -1 for a box without a track.
        """
        settings = self._settings
        fused = likeness * scores
        low = min(scores.tolist()) < settings.high
        if not (low or self._new):  # the case of most frames
            rows, columns = assign(fused, _LEAST_FIRST)
            track_of[columns] = rows
            return
        high, known = scores >= settings.high, self._ids > 0
        rows, columns = assign(fused * high * known[:, None], _LEAST_FIRST)
        track_of[columns] = rows
        if low:
            left = known & (self._seen_at >= seen_before)
            left[rows] = False
            chosen = np.nonzero(~high & (scores > settings.low))[0]
            rows, columns = assign(likeness[:, chosen] * left[:, None], _LEAST_SECOND)
            track_of[chosen[columns]] = rows
        if self._new:
            new = np.nonzero(~known)[0]
            rows, columns = assign(fused[new] * (high & (track_of < 0)), _LEAST_NEW)
            track_of[columns] = new[rows]

    def _take(self, measured: Floats, track_of: Ints) -> int:
        """Correct the tracks with their associated boxes. Return the number of corrected tracks.

        A new track with a second box gets an ID. A new track without a second box is deleted.
        """
        columns = np.nonzero(track_of >= 0)[0]
        rows = track_of[columns]
        if len(rows):
            taken = correct(self._state.take(rows, axis=2), measured.take(columns, axis=1))
            # The order of tracks does not matter, and writing back in place takes 4 µs.
            if len(rows) == len(self._ids) and not self._new:
                self._state, self._ids, self._kinds = taken, self._ids[rows], self._kinds[rows]
                self._seen_at = np.empty(len(rows))
                self._seen_at.fill(self._clock)
                rows = np.arange(len(rows))
                track_of[columns] = rows
            else:
                self._state[:, :, rows] = taken
                self._seen_at[rows] = self._clock
        if self._new:
            self._number(np.nonzero((self._ids == 0) & (self._seen_at == self._clock))[0])
            self._new = 0
            keep = self._ids > 0
            track_of[columns] = (np.cumsum(keep) - 1)[rows]
            self._keep(keep)
        return len(rows)

    def _begin(self, measured: Floats, scores: Floats, kinds: Ints, track_of: Ints, first: bool) -> int:
        """Start a track for each box that continues no track. Return the number of new tracks."""
        if not len(track_of) or min(track_of.tolist()) >= 0:
            return 0
        begun = np.nonzero((track_of < 0) & (scores >= self._settings.new))[0]
        if not len(begun):
            return 0
        begun = begun[np.lexsort((*measured[:, begun], kinds[begun]))]  # independent of the order of the boxes
        count = len(self._ids)
        track_of[begun] = np.arange(count, count + len(begun))
        self._state = np.concatenate((self._state, start(measured[:, begun])), axis=2)
        self._ids = np.concatenate((self._ids, np.zeros(len(begun), np.int64)))
        self._kinds = np.concatenate((self._kinds, kinds[begun]))
        self._seen_at = np.concatenate((self._seen_at, np.full(len(begun), self._clock)))
        if first:
            self._number(np.arange(count, len(self._ids)))
        else:
            self._new = len(begun)
        return len(begun)

    def _number(self, rows: Ints) -> None:
        self._ids[rows] = np.arange(self._next_id, self._next_id + len(rows))
        self._next_id += len(rows)

    def _forget(self) -> None:
        if self._clock - self._oldest(self._clock - self._settings.lost_s) > self._settings.lost_s:
            self._keep(self._clock - self._seen_at <= self._settings.lost_s)

    def _stop_growth(self, before: float) -> None:
        """Stop the predicted change in size of tracks that were last detected before the time `before`."""
        if self._oldest(before) < before:
            self._state[1, 2:, self._seen_at < before] = 0

    def _oldest(self, before: float) -> float:
        """Return the earliest time at which a track was last detected. A result after `before` is approximate."""
        if self._seen_since <= before:
            self._seen_since = min(self._seen_at.tolist(), default=self._clock)
        return self._seen_since

    def _keep(self, keep: NDArray[np.bool_]) -> None:
        self._state = self._state[:, :, keep]
        self._ids, self._kinds, self._seen_at = self._ids[keep], self._kinds[keep], self._seen_at[keep]
