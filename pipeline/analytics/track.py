"""The tracking stage, which adds track IDs, speeds and trajectories to the boxes and points of a stream.

The tracking algorithm is in `tracker`.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from saccade.engine.results import Box, Detections, Points, Result, Spot
from saccade.pipeline.analytics.association import Floats, Ints
from saccade.pipeline.analytics.counts import MOST_LABELS
from saccade.pipeline.analytics.tracker import Tracker, TrackerSettings
from saccade.sinks.overlay.scene import Trail

if TYPE_CHECKING:
    from saccade.sources import Frame

BRIDGE_S = 0.3  # how long a missed box is predicted from its track
_POINT_SIZE = 0.1  # side of the square that represents a point, as a fraction of the frame's shorter side
_TRAIL_S = 1.2
_TRAIL_STEP_S = 0.09  # between two points of a trail; with every point, drawing took longer than tracking

Place = tuple[float, float]


def time_of(frame: Frame) -> float:
    """Return the presentation timestamp (PTS) of a frame, in seconds."""
    return frame.pts * frame.time_base.numerator / frame.time_base.denominator


class TrackStage:
    """Adds track IDs and speeds to the boxes and points of each frame, and adds the trajectories of the objects.

    Args:
        start_score: minimum score of a box that starts a track. A box with a lower score can only continue a track.
    """

    def __init__(self, start_score: float = 0.5) -> None:
        self._tracker = Tracker(TrackerSettings(high=start_score, new=start_score, low=0.0))
        self._kinds: dict[tuple[type, str], int] = {}
        self._kind_numbers = itertools.count()
        self._last: dict[int, Box] = {}  # the last detection of each track
        self._trails: dict[int, tuple[deque[float], deque[Place]]] = {}  # times and positions, without the current one

    @property
    def tracker(self) -> Tracker:
        """The object tracker of this stage."""
        return self._tracker

    def predicted(self) -> tuple[Box, ...]:
        """Return the predicted boxes of objects that were not detected on the last frame.

        An object is included if it was detected within the last `BRIDGE_S` seconds. Its predicted box has the score of
        its last detection.
        """
        unseen = self._tracker.unseen()
        boxes = []
        for number, corners, for_s in zip(unseen.ids.tolist(), unseen.boxes, unseen.for_s, strict=True):
            last = self._last.get(number)
            x1, y1, x2, y2 = np.clip(corners, 0, 1).tolist()
            if last is not None and for_s <= BRIDGE_S and x1 < x2 and y1 < y2:
                boxes.append(Box(last.label, last.score, x1, y1, x2, y2, number, last.speed, last.zones, True))
        return tuple(boxes)

    def trails_of(self, boxes: Iterable[Box]) -> tuple[Trail, ...]:
        """Return the trajectory (past positions) of each object in `boxes`."""
        known = [(box, self._trails[box.track_id][1]) for box in boxes if box.track_id in self._trails]
        return tuple(Trail(box.track_id or 0, box.label, (*places, bottom_of(box))) for box, places in known)

    def process(self, frame: Frame, result: Result) -> Result:
        """Add track IDs, speeds and trajectories to a result."""
        found: list[Box | Spot] = [*result.detections.boxes, *result.points.points]
        seconds = time_of(frame)
        ids, velocities = self._tracker.update(*self._arrays(found, frame), seconds)
        speeds = np.hypot(velocities[:, 0], velocities[:, 1]).tolist()
        numbers = ids.tolist()
        tracked = [
            _numbered(one, number, speed) if number else one
            for one, number, speed in zip(found, numbers, speeds, strict=True)
        ]
        boxes = tuple(one for one in tracked if isinstance(one, Box))
        self._last.update((one.track_id, one) for one in boxes if one.track_id is not None)
        spots = tuple(one for one in tracked if isinstance(one, Spot))
        return Result(
            Detections(boxes, result.detections.width, result.detections.height),
            Points(spots, result.points.width, result.points.height),
            result.texts,
            result.timings,
            {**result.extras, Trail.key: tuple(self._follow(tracked, seconds))},
        )

    def _arrays(self, found: list[Box | Spot], frame: Frame) -> tuple[Floats, Floats, Ints]:
        """Return the boxes (n, 4), scores (n,) and class indices (n,) of detections. A point becomes a small box."""
        side = _POINT_SIZE / 2 * min(frame.width, frame.height)
        x, y = side / frame.width, side / frame.height
        corners = [
            (one.x1, one.y1, one.x2, one.y2) if isinstance(one, Box) else (one.x - x, one.y - y, one.x + x, one.y + y)
            for one in found
        ]
        scores = [one.score for one in found]
        kinds = [self._kind(type(one), one.label) for one in found]
        return np.array(corners, np.float64).reshape(-1, 4), np.array(scores), np.array(kinds, np.int64)

    def _kind(self, of: type, label: str) -> int:
        known = self._kinds.get((of, label))
        if known is None:
            if len(self._kinds) >= MOST_LABELS:  # prompts can change without end; tracks then restart
                self._kinds.clear()
            known = self._kinds[of, label] = next(self._kind_numbers)
        return known

    def _follow(self, tracked: list[Box | Spot], seconds: float) -> Iterator[Trail]:
        """Append the position of each tracked object to its trajectory, and yield the trajectories."""
        for one in tracked:
            if one.track_id is None:
                continue
            times, places = self._trails.setdefault(one.track_id, (deque(), deque()))
            place = bottom_of(one)
            while times and not 0 <= seconds - times[0] <= _TRAIL_S:
                times.popleft()
                places.popleft()
            yield Trail(one.track_id, one.label, (*places, place))
            if not times or seconds - times[-1] >= _TRAIL_STEP_S:
                times.append(seconds)
                places.append(place)
        if len(self._trails) > 2 * len(tracked) + 16:
            alive = set(self._tracker.ids.tolist())
            self._trails = {number: trail for number, trail in self._trails.items() if number in alive}
            self._last = {number: box for number, box in self._last.items() if number in alive}


def bottom_of(one: Box | Spot) -> Place:
    """Return the point at which an object touches the ground: the midpoint of the lower edge of its box.

    For a point detection, return the point.
    """
    return ((one.x1 + one.x2) / 2, one.y2) if isinstance(one, Box) else (one.x, one.y)


def _numbered(one: Box | Spot, number: int, speed: float) -> Box | Spot:
    """Return a copy of a detection with a track ID and a speed."""
    if isinstance(one, Box):  # a constructor call is faster than dataclasses.replace
        return Box(one.label, one.score, one.x1, one.y1, one.x2, one.y2, number, speed, one.zones, one.predicted)
    return Spot(one.label, one.score, one.x, one.y, number, speed, one.zones, one.predicted)
