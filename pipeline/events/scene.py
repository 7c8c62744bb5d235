"""Builds scenes, on which rules are evaluated. A scene contains the tracks, zones and lines of one frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, time
from typing import TYPE_CHECKING

import cv2
import numpy as np
from numpy.typing import NDArray

from saccade.engine.results import Box, Result, Spot
from saccade.pipeline.analytics.track import bottom_of, time_of
from saccade.pipeline.analytics.tracker import TrackerSettings
from saccade.pipeline.events.places import Places, Rest, overlap
from saccade.pipeline.events.record import TrackPath
from saccade.pipeline.events.verdicts import SAME_PLACE, HeldBack
from saccade.sinks.overlay.scene import Line, Zone

if TYPE_CHECKING:
    from saccade.sources import Frame

KEEP_S = TrackerSettings().lost_s
"""Seconds for which a lost track stays in the scene. Within this time, the tracker can continue the track."""

_LOOKS = (1 << 64) - 1
_PATH_STEP_S = 0.5
_PATH_PLACES = 256
_CROP = 96  # longer side of the crop on which sharpness is measured, in pixels
_POINT = 0.05  # half the side of the box around a point, as a fraction of the image


@dataclass(slots=True, frozen=True)
class Track:
    """A tracked object at its last detection.

    Attributes:
        number: track ID.
        label: label of the object.
        score: detection score, from 0 to 1.
        box: x1, y1, x2, y2 in normalized coordinates.
        zones: zones that contain the object.
        speed: speed in image sizes per second.
        first_s: stream time in seconds from which the object counts as present.
        seen_s: stream time of the last detection, in seconds.
        looks: bit mask of the last 64 frames, with the newest frame in the lowest bit. 1: the track was detected.
        rest: motion state of the object; None if unknown.
    """

    number: int
    label: str
    score: float
    box: tuple[float, float, float, float]
    zones: tuple[str, ...]
    speed: float
    first_s: float
    seen_s: float
    looks: int = 1
    rest: Rest | None = None

    @property
    def area(self) -> float:
        """The area of the box, as a fraction of the image area."""
        return (self.box[2] - self.box[0]) * (self.box[3] - self.box[1])


@dataclass(slots=True, frozen=True)
class Scene:
    """The tracks, zones and lines of one frame.

    Attributes:
        seconds: stream time, in seconds.
        captured_at, capture_clock, width, height: see `Frame`.
        clock: local time of day.
        steady_at: capture time on a monotonic clock, in seconds.
        tracks: tracks by track ID: tracks that were detected on this frame, and lost tracks that can still return.
        zones: for each zone name, the dwell time in seconds of each track inside.
        crossed: for each line name, the direction of each track that crossed the line on this frame, `forward` or
            `backward`.
        sharpness: function that measures the sharpness of a track's image, from 0 to 1.
        empty: for each ID of a place whose object is missing: the object at its last detection, and how long the place
            has been visible without the object, in seconds.
        signals: signals that the camera reports, such as motion, see `OnvifSource.signals`.
    """

    seconds: float
    captured_at: float
    capture_clock: str
    width: int
    height: int
    clock: time
    steady_at: float
    tracks: Mapping[int, Track]
    zones: Mapping[str, Mapping[int, float]]
    crossed: Mapping[str, Mapping[int, str]]
    sharpness: Callable[[Track], float] = field(default=lambda track: 0.0, compare=False)
    empty: Mapping[int, tuple[Track, float]] = field(default_factory=dict)
    signals: frozenset[str] = frozenset()

    def seen(self, track: Track) -> bool:
        """Return whether a track was detected on this frame."""
        return track.seen_s == self.seconds


class SceneReader:
    """Builds a scene from each frame of one stream and its result. Frames must be passed in stream order.

    Args:
        file_began: Unix time of the first frame of a video file, to compute the time of day. Ignored for live streams,
            whose frames contain their capture time.
    """

    def __init__(self, file_began: float) -> None:
        self._file_began = file_began
        self._tracks: dict[int, Track] = {}
        self._places = Places()
        self._stood: dict[int, Track] = {}  # the object of each place, as it was seen last
        self._paths: dict[int, _Path] = {}
        self._ended: list[TrackPath] = []
        self._last_s = 0.0

    def read(self, frame: Frame, result: Result) -> Scene:
        """Update the tracks from a frame and its result. Return the scene of the frame."""
        seconds = time_of(frame)
        if seconds < self._last_s:  # the clock restarted, for example because a file loops
            for track in list(self._tracks.values()):
                self._drop(track, frame.stream)
            self._places.clear()
            self._stood = {}
        self._last_s = seconds
        zones = {zone.name: zone.dwell_s for zone in result.extras.get(Zone.key, ()) if isinstance(zone, Zone)}
        lines = {line.name: line.crossed for line in result.extras.get(Line.key, ()) if isinstance(line, Line)}
        found: list[Box | Spot] = [*result.detections.boxes, *result.points.points]
        for one in found:
            if one.track_id is not None and not one.predicted:
                old = self._tracks.get(one.track_id)
                first_s, looks, rest = (seconds, 0, None) if old is None else (old.first_s, old.looks, old.rest)
                self._tracks[one.track_id] = Track(
                    *(one.track_id, one.label, one.score, _box_of(one), one.zones, one.speed or 0.0, first_s, seconds),
                    (looks << 1 | 1) & _LOOKS,
                    rest,
                )
                path = self._paths.setdefault(one.track_id, _Path(frame.captured_at))
                path.add(seconds, frame.captured_at, bottom_of(one), one.score)
        there = {number for dwell_s in zones.values() for number in dwell_s}
        # A predicted track stays, however long ago it was seen: a gate drops frames without motion.
        there |= {one.track_id for one in found if one.predicted and one.track_id is not None}
        for number, track in list(self._tracks.items()):
            if number not in there and seconds - track.seen_s > KEEP_S:
                self._drop(track, frame.stream)
            elif seconds != track.seen_s:
                held = tuple(name for name in zones if number in zones[name])
                self._tracks[number] = replace(track, zones=held, looks=track.looks << 1 & _LOOKS)
        suppressed = self._suppressed(seconds, result)
        self._rest(seconds)
        places = self._places.places
        began = frame.captured_at + (self._file_began if frame.capture_clock == "file" else 0.0)
        return Scene(
            seconds,
            frame.captured_at,
            frame.capture_clock,
            frame.width,
            frame.height,
            datetime.fromtimestamp(began).time(),
            frame.steady_at,
            {number: track for number, track in self._tracks.items() if number not in suppressed},
            zones,
            lines,
            lambda track: sharpness_of(frame.image, track.box),
            {number: (self._stood[number], one.empty_s) for number, one in places.items() if one.empty_s},
        )

    def _suppressed(self, seconds: float, result: Result) -> set[int]:
        """Return the IDs of lost tracks whose object was detected on this frame, but suppressed as a false alarm."""
        # Such an object must not count as present: its track would fulfil the `for` time of a rule.
        held = [one.box for one in result.extras.get(HeldBack.key, ()) if isinstance(one, HeldBack)]
        found = set()
        for number, track in self._tracks.items() if held else ():
            if track.seen_s != seconds and any(
                box.label == track.label and overlap(track.box, (box.x1, box.y1, box.x2, box.y2)) > SAME_PLACE
                for box in held
            ):
                found.add(number)
        for number in found:
            self._tracks[number] = replace(self._tracks[number], first_s=seconds)
        return found

    def take_ended(self) -> list[TrackPath]:
        """Return the paths of the tracks that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def end(self, stream: str) -> None:
        """End all tracks, because the stream has ended."""
        for track in list(self._tracks.values()):
            self._drop(track, stream)

    def _rest(self, seconds: float) -> None:
        seen = {track.number: (track.label, track.box) for track in self._tracks.values() if track.seen_s == seconds}
        self._places.update(seconds, seen, self._tracks)
        places = self._places.places
        for number, track in self._tracks.items():
            rest = self._places.of(number)
            if rest is not track.rest:
                track = self._tracks[number] = replace(track, rest=rest)
            if rest is not None and rest.place in places:
                self._stood[rest.place] = track
        if len(self._stood) > len(places):
            self._stood = {number: track for number, track in self._stood.items() if number in places}

    def _drop(self, track: Track, stream: str) -> None:
        del self._tracks[track.number]
        path = self._paths.pop(track.number)
        times = path.first_time, path.last_time, path.top_score
        self._ended.append(TrackPath(stream, track.number, track.label, *times, tuple(path.places)))


def sharpness_of(image: NDArray[np.uint8], box: tuple[float, float, float, float]) -> float:
    """Return the sharpness of an image region, from 0 (blurred) to 1 (sharp).

    The measure is the variance of the Laplacian relative to the variance of the brightness.
    """
    height, width = image.shape[:2]
    x1, y1 = int(box[0] * width), int(box[1] * height)
    crop = image[y1 : max(y1 + 2, round(box[3] * height)), x1 : max(x1 + 2, round(box[2] * width))]
    if min(crop.shape[:2]) < 2:
        return 0.0
    scale = _CROP / max(crop.shape[:2])
    if scale < 1:
        size = max(2, round(crop.shape[1] * scale)), max(2, round(crop.shape[0] * scale))
        small = cv2.resize(crop, size, interpolation=cv2.INTER_AREA)
    else:
        small = crop
    grey = cv2.cvtColor(small, cv2.COLOR_RGB2GRAY)
    edges = float(cv2.Laplacian(grey, cv2.CV_32F).var())
    return edges / (edges + float(grey.var()) + 25.0)


class _Path:
    """The path of a track, with one point every 0.5 s.

    With more than 256 points, every second point is removed, and the interval between new points is doubled.
    """

    def __init__(self, first_time: float) -> None:
        self.first_time = self.last_time = first_time
        self.top_score = 0.0
        self.places: list[tuple[float, float, float]] = []
        self._step_s = _PATH_STEP_S
        self._added_s = float("-inf")  # stream time, in seconds

    def add(self, seconds: float, time: float, place: tuple[float, float], score: float) -> None:
        self.last_time, self.top_score = time, max(self.top_score, score)
        if seconds - self._added_s >= self._step_s:
            self._added_s = seconds
            self.places.append((round(time, 3), round(place[0], 4), round(place[1], 4)))
            if len(self.places) > _PATH_PLACES:
                self.places, self._step_s = self.places[::2], 2 * self._step_s


def _box_of(one: Box | Spot) -> tuple[float, float, float, float]:
    if isinstance(one, Box):
        return one.x1, one.y1, one.x2, one.y2
    x, y = one.x, one.y
    return max(0.0, x - _POINT), max(0.0, y - _POINT), min(1.0, x + _POINT), min(1.0, y + _POINT)
