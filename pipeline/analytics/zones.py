"""Counts the objects that enter zones, leave zones and cross lines, and measures dwell times.

All times are frame times in seconds, so that dropped frames do not change the durations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from saccade.pipeline.analytics.counts import add_label
from saccade.pipeline.analytics.geometry import Point, contains, cross, distance
from saccade.pipeline.analytics.settings import LineSettings, RegionSettings, ZoneSettings

_LAST = math.nextafter(1.0, 0.0)
"""The largest x and y of an anchor point. `contains` excludes the right and lower sides of a zone, so that no point is
in two adjacent zones. A box at the lower edge of the image has y = 1. This limit keeps such a box inside a zone that
ends at 1."""


@dataclass(slots=True, frozen=True)
class Sighting:
    """A tracked object on one frame: track ID, label, score, and box in normalized coordinates (0 to 1)."""

    track_id: int
    label: str
    score: float
    box: tuple[float, float, float, float]


class Anchors:
    """Selects the objects that a zone or line counts, by label, score and size.

    Args:
        sightings: the tracked objects of the frame.
    """

    def __init__(self, sightings: Iterable[Sighting]) -> None:
        self._sightings = list(sightings)
        self._known: dict[tuple[object, ...], list[tuple[Sighting, Point]]] = {}

    def of(self, region: RegionSettings) -> list[tuple[Sighting, Point]]:
        """Return the objects that a zone or line counts, each with the anchor point that represents its position."""
        sizes = None if region.sizes is None else region.sizes.model_dump_json()
        key = region.anchor, region.min_score, region.min_size, sizes, *region.classes
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = [
                (seen, _anchor_of(region, seen)) for seen in self._sightings if _concerns(region, seen)
            ]
        return found


def _concerns(region: RegionSettings, seen: Sighting) -> bool:
    if region.classes and seen.label not in region.classes:
        return False
    x1, y1, x2, y2 = seen.box
    if region.sizes is not None and x2 > x1 and not region.sizes.fits(seen.box):  # a point has no size
        return False
    return seen.score >= region.min_score and (x2 - x1) * (y2 - y1) >= region.min_size


def excludes(zone: ZoneSettings, seen: Sighting) -> bool:
    """Return whether an object is dropped, because it is inside a zone with `exclude: true`."""
    return _concerns(zone, seen) and contains(zone.polygon, _anchor_of(zone, seen))


def _anchor_of(region: RegionSettings, seen: Sighting) -> Point:
    x1, y1, x2, y2 = seen.box
    y = y2 if region.anchor == "bottom" else y1 if region.anchor == "top" else (y1 + y2) / 2
    return min(_LAST, (x1 + x2) / 2), min(_LAST, y)


@dataclass(slots=True)
class Visit:
    """The stay of a tracked object in a zone.

    Attributes:
        label: label of the object.
        since: time of the first frame on which the object was in the zone, in seconds.
        last: time of the last frame on which the object was in the zone, in seconds.
        counted: whether the object counts as entered, because it has been in the zone for `inertia` seconds.
    """

    label: str
    since: float
    last: float
    counted: bool = False

    @property
    def dwell_s(self) -> float:
        """The dwell time of the object in the zone, in seconds."""
        return self.last - self.since


class ZoneCounter:
    """Counts the objects in one zone, and measures their dwell times.

    An object counts as entered after `inertia` seconds in the zone. It counts as left after `inertia` seconds outside
    the zone, or when its track ends.

    Args:
        settings: settings of the zone.

    Attributes:
        entered, left: number of objects that entered and left, by label.
        dwells: dwell times of the last 1000 objects that left, in seconds.
    """

    def __init__(self, settings: ZoneSettings) -> None:
        self.settings = settings
        self.entered: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.dwells: list[float] = []
        self._visits: dict[int, Visit] = {}
        self._counts: dict[str, dict[str, int]] | None = {}  # None after a change
        xs, ys = zip(*settings.polygon, strict=True)
        self._around = min(xs), min(ys), max(xs), max(ys)

    def update(self, anchors: Anchors, alive: Collection[int], seconds: float) -> set[int]:
        """Update the counts of the zone with the objects of one frame.

        Return the track IDs of the objects inside the zone.

        Args:
            anchors: the tracked objects of the frame.
            alive: track IDs of all visible and lost tracks.
            seconds: time of the frame, in seconds.
        """
        zone = self.settings
        left, top, right, bottom = self._around
        for seen, at in anchors.of(zone):
            visit = self._visits.get(seen.track_id)
            if left <= at[0] <= right and top <= at[1] <= bottom and contains(zone.polygon, at):
                if visit is None:
                    visit = self._visits[seen.track_id] = Visit(seen.label, seconds, seconds)
                visit.last = seconds
                if not visit.counted and seconds - visit.since >= zone.inertia:
                    visit.counted = True
                    add_label(self.entered, visit.label)
                    self._counts = None
            elif visit is not None and (not visit.counted or seconds - visit.last >= zone.inertia):
                self._end(seen.track_id)
        for number in [number for number in self._visits if number not in alive]:
            self._end(number)
        return {number for number, visit in self._visits.items() if visit.counted}

    @property
    def inside(self) -> dict[int, Visit]:
        """The objects that are inside the zone, by track ID."""
        return {number: visit for number, visit in self._visits.items() if visit.counted}

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of objects `inside`, `entered` and `left`, by label."""
        if self._counts is None:  # a new mapping, because callers hold the old one
            now = Counter(visit.label for visit in self.inside.values())
            self._counts = {
                label: {"inside": now[label], "entered": self.entered[label], "left": self.left[label]}
                for label in sorted(self.entered)
            }
        return self._counts

    def _end(self, number: int) -> None:
        visit = self._visits.pop(number)
        if visit.counted:
            add_label(self.left, visit.label)
            self._counts = None
            self.dwells = [*self.dwells[-999:], visit.dwell_s]


@dataclass(slots=True)
class _Side:
    """The side of a line on which an object was last detected, and whether it was already counted per direction."""

    right: bool
    at: Point
    forward: bool = False
    backward: bool = False


class LineCounter:
    """Counts the objects that cross one line. An object counts at most once per direction.

    The forward direction is from left to right for an observer who looks along the line from its first to its second
    point.

    Args:
        settings: settings of the line.

    Attributes:
        forward, backward: number of objects that crossed, by label.
    """

    def __init__(self, settings: LineSettings) -> None:
        self.settings = settings
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self._sides: dict[int, _Side] = {}
        self._counts: dict[str, dict[str, int]] | None = {}  # None after a change

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of `forward` and `backward` crossings, by label."""
        if self._counts is None:
            self._counts = {
                label: {"forward": self.forward[label], "backward": self.backward[label]}
                for label in sorted(self.forward | self.backward)
            }
        return self._counts

    def update(self, anchors: Anchors, alive: Collection[int]) -> dict[int, str]:
        """Update the counts of the line with the objects of one frame.

        Args:
            anchors: the tracked objects of the frame.
            alive: IDs of all tracks, including lost tracks.

        Returns:
            The direction ('forward' or 'backward') of each object that crossed the line on this frame, by track ID.
        """
        line, crossed = self.settings, dict[int, str]()
        start, end = line.points
        margin = line.margin
        for seen, at in anchors.of(line):
            away = distance(start, end, at)
            if -margin < away < margin:
                continue
            side = self._sides.get(seen.track_id)
            if side is None:
                self._sides[seen.track_id] = _Side(away > 0, at)
                continue
            if (away > 0) != side.right and cross(side.at, at, start, end):
                if away > 0 and not side.forward:
                    side.forward = True
                    add_label(self.forward, seen.label)
                    crossed[seen.track_id] = "forward"
                elif away < 0 and not side.backward:
                    side.backward = True
                    add_label(self.backward, seen.label)
                    crossed[seen.track_id] = "backward"
            side.right, side.at = away > 0, at
        if crossed:
            self._counts = None
        if len(self._sides) > 2 * len(alive) + 16:
            self._sides = {number: side for number, side in self._sides.items() if number in alive}
        return crossed
