"""The analytics stage of a stream. It tracks objects, counts objects in zones, and counts objects that cross lines."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from saccade.engine.results import Box, Detections, Points, Result, Spot
from saccade.pipeline.analytics.counts import CountLog, Minute, Totals, add_label
from saccade.pipeline.analytics.heatmap import Heat
from saccade.pipeline.analytics.motion import StillBefore
from saccade.pipeline.analytics.settings import AnalyticsSettings, ZoneSettings
from saccade.pipeline.analytics.track import TrackStage, time_of
from saccade.pipeline.analytics.zones import Anchors, LineCounter, Sighting, ZoneCounter, excludes
from saccade.sinks.overlay.scene import Line, Trail, Zone

if TYPE_CHECKING:
    from saccade.sources import Frame


class AnalyzeStage:
    """Tracks objects, counts objects in zones, and counts objects that cross lines.

    If tracking is off and there are no zones and lines, the stage returns results unchanged.

    Attributes:
        heat: heatmap of object positions.

    Args:
        settings: analytics settings of the stream.
        still_before: function that takes a frame index, and returns how long there was no motion before the frame, in
            seconds. Lost tracks do not expire during this time.
        track: whether to track objects even if the settings do not require it.
    """

    def __init__(
        self,
        settings: AnalyticsSettings | None = None,
        still_before: StillBefore | None = None,
        *,
        track: bool = False,
    ) -> None:
        self._still_before = still_before
        self._track: TrackStage | None = None
        self._lock = threading.Lock()  # guards the counters, which other threads read and replace
        self._zones: dict[str, ZoneCounter] = {}
        self._lines: dict[str, LineCounter] = {}
        self._objects: Counter[str] = Counter()
        self._newest = 0  # the highest track ID counted so far
        self._log = CountLog()
        self.heat = Heat()
        self.configure(settings or AnalyticsSettings(), track=track)

    def configure(self, settings: AnalyticsSettings, *, track: bool = False) -> None:
        """Apply new settings from the next frame on. Unchanged zones and lines keep their counts. Thread-safe.

        Args:
            settings: the new settings. `track_conf` has no effect after tracking has started.
            track: whether to track objects even if the settings do not require it, because rules need tracks.
        """
        with self._lock:
            self._settings = settings
            self._tracking = settings.track or track
            old_zones, old_lines = self._zones, self._lines
            self._masks = [zone for zone in settings.zones.values() if zone.exclude]
            self._zones = {name: ZoneCounter(zone) for name, zone in settings.zones.items() if not zone.exclude}
            self._zones |= {name: old for name, old in old_zones.items() if settings.zones.get(name) == old.settings}
            self._lines = {name: LineCounter(line) for name, line in settings.lines.items()}
            self._lines |= {name: old for name, old in old_lines.items() if settings.lines.get(name) == old.settings}

    def process(self, frame: Frame, result: Result) -> Result:
        """Add to a result the track IDs, the zones of each object, and the object counts of all zones and lines."""
        if self._masks:
            result = _without(result, self._masks)
        self.heat.add(frame, result)
        if not (self._tracking or self._zones or self._lines):
            return result
        if self._track is None:
            self._track = TrackStage(self._settings.track_conf)
        if self._still_before and (still_s := self._still_before(frame.index)):
            self._track.tracker.hold(still_s)
        result = self._track.process(frame, result)
        with self._lock:
            if self._log.due(frame.captured_at):
                self._log.turn(frame.captured_at, self._totals())
            result, zones_of = self._count(result, time_of(frame), self._track)
        if self._settings.smooth and (predicted := self._track.predicted()):
            predicted = tuple(_in_zones(box, zones_of.get(box.track_id or 0, ())) for box in predicted)
            found = result.detections
            trails = (*result.extras[Trail.key], *self._track.trails_of(predicted))
            extras = {**result.extras, Trail.key: trails}
            return replace(result, detections=replace(found, boxes=found.boxes + predicted), extras=extras)
        return result

    def totals(self) -> Totals:
        """Return the object counts since the stream started."""
        with self._lock:
            return self._totals()

    @property
    def kept(self) -> dict[str, int]:
        """How many tracks, and how many minutes of object counts, are in memory."""
        return {"tracks": len(self._track.tracker) if self._track else 0, "minutes": len(self._log)}

    def minutes(self, since: float = 0.0) -> list[Minute]:
        """Return the object counts of each minute that ends after the capture time `since`, in seconds."""
        with self._lock:
            return self._log.since(since, self._totals())

    def take_minutes(self, last: bool) -> list[Minute]:
        """Return the object counts of the minutes that ended since the last call.

        Args:
            last: whether to add the current, incomplete minute.
        """
        with self._lock:
            return self._log.take(self._totals() if last else None)

    def _totals(self) -> Totals:
        zones = {name: zone.counts() for name, zone in self._zones.items()}
        return Totals(dict(self._objects), zones, {name: line.counts() for name, line in self._lines.items()})

    def _count(self, result: Result, seconds: float, track: TrackStage) -> tuple[Result, Mapping[int, tuple[str, ...]]]:
        """Add the counts of zones and lines to a result. Also return the names of each object's zones, by track ID."""
        found: list[Box | Spot] = [*result.detections.boxes, *result.points.points]
        sightings = [
            Sighting(one.track_id, one.label, one.score, _box_of(one)) for one in found if one.track_id is not None
        ]
        for seen in sightings:
            if seen.track_id > self._newest:
                add_label(self._objects, seen.label)
        self._newest = max(self._newest, max((seen.track_id for seen in sightings), default=0))
        if not (self._zones or self._lines):
            return result, {}
        alive, anchors = set(track.tracker.ids.tolist()), Anchors(sightings)
        zones_of: dict[int, tuple[str, ...]] = {}
        for name, zone in self._zones.items():
            for number in zone.update(anchors, alive, seconds):
                zones_of[number] = (*zones_of.get(number, ()), name)
        crossed = {name: line.update(anchors, alive) for name, line in self._lines.items()}
        extras = dict(result.extras)
        if self._zones:
            extras[Zone.key] = tuple(_zone_part(name, zone, seconds) for name, zone in self._zones.items())
        if self._lines:
            extras[Line.key] = tuple(_line_part(name, line, crossed[name]) for name, line in self._lines.items())
        boxes, spots = result.detections.boxes, result.points.points
        if zones_of:
            boxes = tuple(_in_zones(one, z) if (z := zones_of.get(one.track_id or 0)) else one for one in boxes)
            spots = tuple(replace(one, zones=z) if (z := zones_of.get(one.track_id or 0)) else one for one in spots)
        counted = Result(
            Detections(boxes, result.detections.width, result.detections.height),
            Points(spots, result.points.width, result.points.height),
            result.texts,
            result.timings,
            extras,
        )
        return counted, zones_of


def _box_of(one: Box | Spot) -> tuple[float, float, float, float]:
    return (one.x1, one.y1, one.x2, one.y2) if isinstance(one, Box) else (one.x, one.y, one.x, one.y)


def _without(result: Result, masks: list[ZoneSettings]) -> Result:

    def kept(one: Box | Spot) -> bool:
        seen = Sighting(0, one.label, one.score, _box_of(one))
        return not any(excludes(mask, seen) for mask in masks)

    boxes = tuple(filter(kept, result.detections.boxes))
    spots = tuple(filter(kept, result.points.points))
    if len(boxes) + len(spots) == len(result.detections.boxes) + len(result.points.points):
        return result
    detections, points = replace(result.detections, boxes=boxes), replace(result.points, points=spots)
    return replace(result, detections=detections, points=points)


def _in_zones(box: Box, zones: tuple[str, ...]) -> Box:
    """Return a copy of a box with other zone names."""
    place = box.x1, box.y1, box.x2, box.y2  # the constructor is faster than `dataclasses.replace`
    return Box(box.label, box.score, *place, box.track_id, box.speed, zones, box.predicted)


def _zone_part(name: str, zone: ZoneCounter, seconds: float) -> Zone:
    dwell_s = {number: max(0.0, seconds - visit.since) for number, visit in zone.inside.items()}
    limit = zone.settings.loitering
    loitering = () if limit is None else tuple(number for number, dwell in dwell_s.items() if dwell >= limit)
    corners, entered, left = tuple(zone.settings.polygon), zone.entered.total(), zone.left.total()
    return Zone(name, corners, len(dwell_s), entered, left, zone.counts(), dwell_s, loitering)


def _line_part(name: str, line: LineCounter, crossed: dict[int, str]) -> Line:
    start, end = line.settings.points
    return Line(name, start, end, line.forward.total(), line.backward.total(), line.counts(), crossed)
