"""Zones and counting lines with their counts, and trails of tracks: data classes and drawing functions.

Pipeline stages store these objects in `Result.extras`. Coordinates are normalized: 0 to 1 in width and height.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import ClassVar, TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from saccade.engine.results import Result
from saccade.sinks.overlay.style import CASING_PX, INK, LINE_PX, PAPER, SHIFT, Rect, Rgb, color_of, font_px
from saccade.sinks.overlay.text import note, paste_best

Point = tuple[float, float]
P = TypeVar("P", "Zone", "Line", "Trail")

_DASH_PX, _GAP_PX = 9.0, 8.0  # of a zone's outline, at 360 lines as all sizes here
_ARROW_PX = 9.0
_TRAIL_POINTS = 40  # the newest of a trail that are drawn


@dataclass(slots=True, frozen=True)
class Zone:
    """A polygonal zone with its object counts. Raises ValueError if the corners are not a polygon.

    Attributes:
        name: name of the zone.
        corners: at least three corners (x, y) of the polygon, in order along its edge.
        inside: number of objects inside now.
        entered, left: number of objects that have entered and left so far; None if entries and exits are not counted.
        counts: `inside`, `entered` and `left` for each label.
        dwell_s: for each track inside the zone, by track ID: how long it has been inside, in seconds.
        loitering: IDs of tracks that have been inside longer than allowed.
    """

    key: ClassVar[str] = "zones"
    name: str
    corners: tuple[Point, ...]
    inside: int = 0
    entered: int | None = None
    left: int | None = None
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    dwell_s: Mapping[int, float] = field(default_factory=dict)
    loitering: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.corners) < 3:
            raise ValueError(f"a zone needs at least 3 corners, not {len(self.corners)}")
        _check_finite(self.corners)

    def to_record(self, width: int, height: int) -> dict[str, object]:
        """Return the zone's name, counts and tracks inside, as JSON values."""
        totals = {"inside": self.inside, "entered": self.entered, "left": self.left}
        record: dict[str, object] = {name: count for name, count in totals.items() if count is not None}
        if self.counts:
            record["counts"] = {label: dict(counts) for label, counts in self.counts.items()}
        if self.dwell_s:
            record["tracks"] = [
                {"track_id": number, "dwell_s": round(seconds, 2), "loitering": number in self.loitering}
                for number, seconds in self.dwell_s.items()
            ]
        return {"name": self.name, **record}


@dataclass(slots=True, frozen=True)
class Line:
    """A counting line with the number of objects that have crossed it.

    Attributes:
        name: name of the line.
        start, end: end points of the line.
        forward: number of crossings from left to right, seen from `start` towards `end`. The image shows it as `in`.
        backward: number of crossings in the opposite direction. The image shows it as `out`.
        counts: `forward` and `backward` per label.
        crossed: tracks that crossed the line on this frame, with their direction.
    """

    key: ClassVar[str] = "lines"
    name: str
    start: Point
    end: Point
    forward: int = 0
    backward: int = 0
    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    crossed: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_finite((self.start, self.end))

    def to_record(self, width: int, height: int) -> dict[str, object]:
        """Return the line's name and crossing counts, as JSON values."""
        record: dict[str, object] = {"name": self.name, "forward": self.forward, "backward": self.backward}
        if self.counts:
            record["counts"] = {label: dict(counts) for label, counts in self.counts.items()}
        if self.crossed:
            record["crossed"] = [{"track_id": number, "direction": way} for number, way in self.crossed.items()]
        return record


@dataclass(slots=True, frozen=True)
class Trail:
    """The past positions of one tracked object.

    Attributes:
        track_id: track ID.
        label: class of the object, which selects the colour.
        points: positions from oldest to newest.
    """

    key: ClassVar[str] = "trails"
    track_id: int
    label: str
    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        _check_finite(self.points)

    def to_record(self, width: int, height: int) -> dict[str, object]:
        """Return an empty object, because JSON records do not contain trails."""
        return {}


def draw_scene(canvas: NDArray[np.uint8], result: Result, scale: float) -> None:
    """Draw the zones, counting lines and trails of a result into an image, before the boxes are drawn."""
    height, width = canvas.shape[:2]
    for zone in _of(result, Zone):
        _draw_zone(canvas, _pixels(zone.corners, width, height), color_of(zone.name), scale, full=zone.inside > 0)
    for line in _of(result, Line):
        start, end = _pixels((line.start, line.end), width, height)
        _draw_line(canvas, start, end, color_of(line.name), scale)
    for trail in _of(result, Trail):
        _draw_trail(canvas, _pixels(trail.points[-_TRAIL_POINTS:], width, height), color_of(trail.label), scale)


def label_scene(canvas: NDArray[np.uint8], result: Result, scale: float, taken: list[Rect]) -> None:
    """Draw the names and counts of zones and lines, if possible without overlap with the rectangles in `taken`."""
    height, width = canvas.shape[:2]
    gap = round(4 * scale)
    for zone in _of(result, Zone):
        counts = [("in", zone.entered), ("out", zone.left)]
        wording = " · ".join([f"{zone.name}  {zone.inside}", *(f"{name} {n}" for name, n in counts if n is not None)])
        bitmap = note(wording, font_px(scale))
        points = _pixels(zone.corners, width, height)
        top, bottom = min(points, key=lambda at: (at[1], at[0])), max(points, key=lambda at: (at[1], -at[0]))
        places = [
            (round(top[0]) + gap, round(top[1]) + gap),
            (round(top[0]) - gap - bitmap.width, round(top[1]) + gap),
            (round(top[0]) + gap, round(top[1]) - gap - bitmap.height),
            (round(bottom[0]) + gap, round(bottom[1]) - gap - bitmap.height),
            (round(bottom[0]) - gap - bitmap.width, round(bottom[1]) - gap - bitmap.height),
        ]
        taken.append(paste_best(canvas, bitmap, places, taken))
    for line in _of(result, Line):
        bitmap = note(f"{line.name}  in {line.forward} · out {line.backward}", font_px(scale))
        (x1, y1), (x2, y2) = _pixels((line.start, line.end), width, height)
        # Beside the line, at a half, a third and two thirds of it.
        away = (_ARROW_PX + 6) * scale
        nx, ny = _normal(x1, y1, x2, y2)
        half_w, half_h = bitmap.width / 2, bitmap.height / 2
        reach = away + abs(nx) * half_w + abs(ny) * half_h
        places = [
            (
                round(x1 + (x2 - x1) * along + side * nx * reach - half_w),
                round(y1 + (y2 - y1) * along + side * ny * reach - half_h),
            )
            for along in (1 / 2, 1 / 3, 2 / 3)
            for side in (-1, 1)
        ]
        taken.append(paste_best(canvas, bitmap, places, taken))


def _check_finite(points: Sequence[Point]) -> None:
    if not math.isfinite(sum(chain.from_iterable(points))):  # four times as fast as one by one
        raise ValueError("normalized coordinates must be finite, not NaN or infinity")


def _of(result: Result, kind: type[P]) -> list[P]:
    return [part for part in result.extras.get(kind.key, ()) if isinstance(part, kind)]


def _pixels(points: Sequence[Point], width: int, height: int) -> tuple[Point, ...]:
    """Convert points from normalized coordinates to pixels. Points far outside the image are clamped."""
    return tuple((min(max(x, -10.0), 10.0) * width, min(max(y, -10.0), 10.0) * height) for x, y in points)


def _normal(x1: float, y1: float, x2: float, y2: float) -> Point:
    """Return the unit normal of the line from (x1, y1) to (x2, y2). It points to the right of this direction."""
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    return -(y2 - y1) / length, (x2 - x1) / length


def _draw_zone(canvas: NDArray[np.uint8], corners: tuple[Point, ...], color: Rgb, scale: float, *, full: bool) -> None:
    """Draw the boundary of a zone, solid if `full` is True, else dashed."""
    line = max(1, round(LINE_PX * scale))
    casing = line + 2 * max(1, round(CASING_PX * scale))
    pieces = [_fixed(corners)] if full else list(_dashes(corners, _DASH_PX * scale, _GAP_PX * scale))
    cv2.polylines(canvas, pieces, full, INK, casing, cv2.LINE_AA, SHIFT)
    cv2.polylines(canvas, pieces, full, color, line, cv2.LINE_AA, SHIFT)


@lru_cache(maxsize=256)
def _dashes(corners: tuple[Point, ...], dash: float, gap: float) -> tuple[NDArray[np.int32], ...]:
    """Split the sides of a polygon into dashes, for a dashed line. `dash` and `gap` are lengths in pixels."""
    pieces = []
    for (x1, y1), (x2, y2) in zip(corners, (*corners[1:], corners[0]), strict=True):
        length = math.hypot(x2 - x1, y2 - y1)
        count = max(1, min(200, round((length + gap) / (dash + gap))))
        step = 1.0 / (count - gap / (dash + gap)) if length else 1.0
        for number in range(count):
            begin = number * step
            end = min(1.0, begin + step * dash / (dash + gap))
            piece = ((x1 + (x2 - x1) * begin, y1 + (y2 - y1) * begin), (x1 + (x2 - x1) * end, y1 + (y2 - y1) * end))
            pieces.append(_fixed(piece))
    return tuple(pieces)


def _draw_line(canvas: NDArray[np.uint8], start: Point, end: Point, color: Rgb, scale: float) -> None:
    """Draw a counting line with an arrow in its middle that shows the forward direction."""
    line = max(1, round(1.4 * LINE_PX * scale))
    casing = line + 2 * max(1, round(CASING_PX * scale))
    nx, ny = _normal(*start, *end)
    middle = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    size = _ARROW_PX * scale
    tip = middle[0] + nx * size, middle[1] + ny * size
    wings = [(middle[0] + side * ny * size * 0.6, middle[1] - side * nx * size * 0.6) for side in (-1, 1)]
    arrow = _fixed((wings[0], tip, wings[1]))
    whole = _fixed((start, end))
    cv2.polylines(canvas, [whole, arrow], False, INK, casing, cv2.LINE_AA, SHIFT)
    cv2.polylines(canvas, [whole], False, color, line, cv2.LINE_AA, SHIFT)
    cv2.fillPoly(canvas, [arrow], color, cv2.LINE_AA, SHIFT)
    for at in (start, end):
        centre = (round(at[0] * 2**SHIFT), round(at[1] * 2**SHIFT))
        for radius, fill in ((2.6, INK), (1.8, PAPER)):
            cv2.circle(canvas, centre, round(radius * line * 2**SHIFT / 2), fill, cv2.FILLED, cv2.LINE_AA, SHIFT)


def _draw_trail(canvas: NDArray[np.uint8], points: tuple[Point, ...], color: Rgb, scale: float) -> None:
    """Draw the trail of a tracked object: its past positions as a line that is thinner for older positions."""
    if len(points) < 2:
        return
    line = max(1.0, LINE_PX * scale)
    casing = 2 * max(1, round(CASING_PX * scale))
    whole = _fixed(points)
    third = max(1, len(points) // 3)
    parts = [(whole[: third + 1], 0.5), (whole[third : 2 * third + 1], 0.8), (whole[2 * third :], 1.2)]
    for part, share in parts:
        cv2.polylines(canvas, [part], False, INK, max(1, round(line * share)) + casing, cv2.LINE_AA, SHIFT)
    for part, share in parts:
        cv2.polylines(canvas, [part], False, color, max(1, round(line * share)), cv2.LINE_AA, SHIFT)


def _fixed(points: Sequence[Point]) -> NDArray[np.int32]:
    """Convert points in pixels to OpenCV's fixed-point format: (points, 1, 2) int32, in pixels times 2 ** `SHIFT`."""
    fixed: NDArray[np.int32] = np.round(np.asarray(points, dtype=np.float64) * 2**SHIFT).astype(np.int32)
    return fixed.reshape(-1, 1, 2)
