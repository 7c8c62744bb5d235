"""What goes on in a zone and over a line: who is in it, came and went, and for how long; who crossed it, which way.

Times are those of the frames, in seconds, so that lost frames change nothing. Knows sightings and settings only: no
frames, no results.
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
"""The largest x and y of an anchor: `contains` leaves out right and lower sides, so that zones side by side share no
point, but a box that the image's lower edge cuts off ends at 1, and stands in a zone that reaches down to there."""


@dataclass(slots=True, frozen=True)
class Sighting:
    """An object with a track on one frame: its number, label, score, and box as fractions of the image."""

    track_id: int
    label: str
    score: float
    box: tuple[float, float, float, float]


class Anchors:
    """The objects of one frame, for zones and lines to take those that concern them.

    What several of them ask alike is worked out once.

    Args:
        sightings: the objects.
    """

    def __init__(self, sightings: Iterable[Sighting]) -> None:
        self._sightings = list(sightings)
        self._known: dict[tuple[object, ...], list[tuple[Sighting, Point]]] = {}

    def of(self, region: RegionSettings) -> list[tuple[Sighting, Point]]:
        """Each object that concerns a zone or line, with the point of it that counts as where it is."""
        key = region.anchor, region.min_score, region.min_size, *region.classes
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
    return seen.score >= region.min_score and (x2 - x1) * (y2 - y1) >= region.min_size


def _anchor_of(region: RegionSettings, seen: Sighting) -> Point:
    x1, y1, x2, y2 = seen.box
    y = y2 if region.anchor == "bottom" else y1 if region.anchor == "top" else (y1 + y2) / 2
    return min(_LAST, (x1 + x2) / 2), min(_LAST, y)


@dataclass(slots=True)
class Visit:
    """A track and a zone: where it was seen last, and since when it has been inside.

    Attributes:
        label: of the object.
        since: the first time of those without a break inside.
        last: the last time that it was inside.
        counted: whether it has been inside for as long as the zone's inertia.
    """

    label: str
    since: float
    last: float
    counted: bool = False

    @property
    def dwell_s(self) -> float:
        """For how long it has been, or was, inside, in seconds."""
        return self.last - self.since


class ZoneCounter:
    """The objects in one zone.

    An object is in it once it has been inside for `inertia` seconds, and is not any more once it has been outside for
    as long, or its track has ended; the times are those of its first and last frame inside. One that is hidden for a
    while inside is still there.

    Args:
        settings: of the zone.

    Attributes:
        entered, left: how many objects have come and gone, by label.
        dwells: seconds that each of the last 1000 that left was there.
    """

    def __init__(self, settings: ZoneSettings) -> None:
        self.settings = settings
        self.entered: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.dwells: list[float] = []
        self._visits: dict[int, Visit] = {}
        self._counts: dict[str, dict[str, int]] | None = {}  # None when something has changed since
        xs, ys = zip(*settings.polygon, strict=True)
        self._around = min(xs), min(ys), max(xs), max(ys)

    def update(self, anchors: Anchors, alive: Collection[int], seconds: float) -> set[int]:
        """Take the objects of one frame; return the numbers of those that are in the zone.

        Args:
            anchors: the objects that were found.
            alive: the numbers of all tracks that go on or may be found again.
            seconds: time of the frame.
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
        """Those that are in the zone, by the number of the track."""
        return {number: visit for number, visit in self._visits.items() if visit.counted}

    def counts(self) -> dict[str, dict[str, int]]:
        """`inside`, `entered` and `left` by label."""
        if self._counts is None:  # a new mapping: others hold the old one
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
    """A track and a line: on which side it was last seen clearly, and where; which crossings of it have counted."""

    right: bool
    at: Point
    forward: bool = False
    backward: bool = False


class LineCounter:
    """The crossings of one line: forward from its left to its right, as seen from its start towards its end.

    A track counts once in each direction, when it is clearly on the other side, `margin` away from the line, and its
    way there led between the ends of the line.

    Args:
        settings: of the line.

    Attributes:
        forward, backward: how many objects have crossed, by label.
    """

    def __init__(self, settings: LineSettings) -> None:
        self.settings = settings
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self._sides: dict[int, _Side] = {}
        self._counts: dict[str, dict[str, int]] | None = {}  # as of a zone

    def counts(self) -> dict[str, dict[str, int]]:
        """`forward` and `backward` by label."""
        if self._counts is None:
            self._counts = {
                label: {"forward": self.forward[label], "backward": self.backward[label]}
                for label in sorted(self.forward | self.backward)
            }
        return self._counts

    def update(self, anchors: Anchors, alive: Collection[int]) -> dict[int, str]:
        """Take the objects of one frame; `alive` as in `ZoneCounter.update`. Return who was counted, and which way."""
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
