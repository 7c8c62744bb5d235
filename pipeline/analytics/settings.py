"""The settings of analytics: zones, lines, tracking and motion detection."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WrapValidator, field_validator

from saccade.pipeline.analytics.geometry import Point, area
from saccade.pipeline.settings import Names, NullIsUnset, Seconds, Text, as_list, keep_bytes, setting

MAX_REGIONS = 64

ImageName = Annotated[Text, Field(pattern=r"(?i)\.(png|jpe?g)$"), WrapValidator(keep_bytes)]


def _points(value: object) -> object:
    """Convert coordinates, such as ".1,.2,.5,.2" or [.1, .2, .5, .2], to a list of points (x, y)."""
    if isinstance(value, str):
        try:
            value = [float(number) for number in value.split(",")]
        except ValueError:
            raise ValueError("coordinates should be numbers separated by commas, such as .1,.2,.5,.2,.5,.9") from None
    if isinstance(value, list | tuple) and value and all(isinstance(one, int | float) for one in value):
        if len(value) % 2:
            raise ValueError(f"coordinates should be pairs of x and y, got an odd number of values ({len(value)})")
        return list(zip(value[::2], value[1::2], strict=True))
    return value


def _inside_the_image(points: list[Point]) -> list[Point]:
    if not all(math.isfinite(one) and 0 <= one <= 1 for point in points for one in point):
        raise ValueError("coordinates should be normalized to the image size, from 0 to 1")
    return points


Points = Annotated[list[Point], BeforeValidator(_points), AfterValidator(_inside_the_image)]


_EDGE = 0.005  # of the image, within which a box is taken to be cut off


def _box(points: list[Point]) -> list[Point]:
    if len(points) != 2 or points[0][0] >= points[1][0] or points[0][1] >= points[1][1]:
        raise ValueError("a box should be x1,y1,x2,y2 with x1 < x2 and y1 < y2")
    return points


def _side(box: list[Point]) -> float:
    return math.sqrt((box[1][0] - box[0][0]) * (box[1][1] - box[0][1]))


def _polygon(points: list[Point]) -> list[Point]:
    if len(points) < 3 or area(points) <= 0:
        raise ValueError("a polygon should have at least three corners that are not on one line")
    return points


Polygon = Annotated[Points, AfterValidator(_polygon)]
Polygons = Annotated[list[Polygon], BeforeValidator(as_list), Field(max_length=MAX_REGIONS)]


def _line(points: list[Point]) -> list[Point]:
    if len(points) != 2 or points[0] == points[1]:
        raise ValueError("a line should have two different end points: x1,y1,x2,y2")
    return points


class SizeSettings(NullIsUnset):
    """The expected size of objects, given by a sample box near the camera and a sample box far from the camera.

    The expected size at other positions is interpolated between the two boxes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    near: Annotated[Points, AfterValidator(_box)] = Field(
        description="sample box of a near object: x1,y1,x2,y2 in normalized coordinates"
    )
    far: Annotated[Points, AfterValidator(_box)] = Field(
        description="sample box of a far object: x1,y1,x2,y2 in normalized coordinates, higher than `near`"
    )
    tolerance: float = Field(
        2.0, gt=1, le=10, description="maximum factor by which a box is smaller or larger than expected"
    )

    @field_validator("far")
    @classmethod
    def _higher(cls, value: list[Point], info: Any) -> list[Point]:
        if "near" in info.data and value[1][1] >= info.data["near"][1][1]:
            raise ValueError("the lower edge of the distant box `far` should be above that of the close box `near`")
        return value

    def fits(self, box: tuple[float, float, float, float]) -> bool:
        """Return whether the size of a box is close to the expected size at its position.

        A box at the image border can be smaller, because part of the object can be outside the image.
        """
        (x1, y1, x2, y2), (near, far) = box, (self.near, self.far)
        k = (y2 - far[1][1]) / (near[1][1] - far[1][1])
        expected = max(_side(far) + k * (_side(near) - _side(far)), 0.2 * min(_side(near), _side(far)))
        side = math.sqrt(max((x2 - x1) * (y2 - y1), 0.0))
        cut = x1 <= _EDGE or y1 <= _EDGE or x2 >= 1 - _EDGE or y2 >= 1 - _EDGE
        return side <= expected * self.tolerance and (cut or side >= expected / self.tolerance)


class RegionSettings(NullIsUnset):
    """The common settings of zones and lines, such as the labels to count and the anchor point of a box."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    classes: Names = Field([], description="labels to count; empty counts every label")
    anchor: Literal["bottom", "center", "top"] = Field(
        "bottom", description="point of the box that must be inside the zone or cross the line"
    )
    min_size: float = Field(0.0, ge=0, le=1, description="smallest area of a box, as a fraction of the image area")
    min_score: float = Field(0.0, ge=0, le=1, description="lowest score of an object to count")
    sizes: SizeSettings | None = Field(
        None, description="expected sizes of near and far objects; objects of other sizes are not counted"
    )


class ZoneSettings(RegionSettings):
    """The settings of a zone, which is a polygon in the image."""

    polygon: Polygon = Field(description="corners as x1,y1,x2,y2,… in normalized coordinates")
    inertia: Seconds = Field(
        0.2, description="seconds inside before an object counts as entered, and outside before it counts as left"
    )
    loitering: Seconds | None = Field(None, description="seconds inside after which an object counts as loitering")
    exclude: bool = Field(False, description="ignore all objects in this zone, and count nothing")


class LineSettings(RegionSettings):
    """The settings of a counting line between two points.

    The direction of the line is from its first to its second point.
    """

    points: Annotated[Points, AfterValidator(_line)] = Field(
        description="both ends as x1,y1,x2,y2 in normalized coordinates"
    )
    margin: float = Field(
        0.01,
        ge=0,
        le=0.5,
        description="distance from the line at which an object has clearly crossed, in normalized coordinates",
    )


def _regions(points_key: str) -> BeforeValidator:
    """Return a validator that also accepts the short form of a zone or line, such as `door=.1,.2,.5,.2`."""

    def read(value: object) -> object:
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list):
            named: dict[str, Any] = {}
            for one in value:
                name, equals, points = one.partition("=") if isinstance(one, str) else ("", "", "")
                if isinstance(one, Mapping):
                    raise ValueError(
                        "expected a mapping of names to coordinates, such as {door: [.1, .2, .5, .2, .5, .9]}"
                    )
                if not (equals and name.strip()):
                    raise ValueError("expected a zone or line as NAME=X,Y,X,Y,…, such as door=.1,.2,.5,.2,.5,.9")
                if name.strip() in named:
                    raise ValueError(f"the zone or line '{name.strip()}' is defined twice; use another name")
                named[name.strip()] = points
            value = named
        if isinstance(value, Mapping):
            return {
                name: {points_key: region} if isinstance(region, str | list | tuple) else region
                for name, region in value.items()
            }
        return value

    return BeforeValidator(read)


Zones = Annotated[dict[Text, ZoneSettings], _regions("polygon"), Field(max_length=MAX_REGIONS)]
Lines = Annotated[dict[Text, LineSettings], _regions("points"), Field(max_length=MAX_REGIONS)]


class Regions(NullIsUnset):
    """The zones and lines of a stream, in the format of the configuration file and the HTTP API."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    zones: Zones = setting(
        {},
        "Zone to count in, as NAME=X,Y,X,Y,…: corners in normalized coordinates; repeatable.",
        more="In a file: {door: '.1,.2,.5,.2,.5,.9'}, or {door: {polygon: …, classes: [person], anchor: "
        "bottom (center, top), min_size: 0.01 (of the image's area), min_score: 0.6, inertia: 0.2, "
        "loitering: 10}}. An object counts as inside after inertia seconds, and as loitering after "
        "loitering seconds. sizes: {near: '.1,.2,.4,1', far: '.5,.3,.55,.45', tolerance: 2} ignores objects more than "
        "twice as small or large as these two sample boxes suggest at their place. exclude: true ignores all "
        "objects in the zone, of classes if given. Turns tracking on.",
        metavar="NAME=POINTS",
        flags=("--zone",),
    )
    lines: Lines = setting(
        {},
        "Line whose crossings are counted, as NAME=X,Y,X,Y; forward means to the right of the line; repeatable.",
        more="In a file: {gate: '.1,.5,.9,.5'}, or {gate: {points: …, margin: 0.01, …}} with the keys classes, anchor, "
        "min_size and min_score of zones. An object has crossed the line when its distance on the other side "
        "is at least margin. Each track counts once per direction. Turns tracking on.",
        metavar="NAME=POINTS",
        flags=("--line",),
    )


class AnalyticsSettings(Regions):
    """The analytics settings of a stream: zones, lines, tracking and motion detection."""

    track: bool = setting(
        False,
        "Track objects over time; zones and lines turn it on.",
        more="Records then have `track_id` and `speed`. Drawn boxes have the track ID and a trail.",
    )
    track_conf: float = setting(
        0.5,
        "Lowest score that starts a track; lower scores, down to conf, only continue tracks.",
        more="With a lower conf, a track continues while its object is half hidden, as in ByteTrack.",
        metavar="SCORE",
        ge=0,
        le=1,
    )
    smooth: bool = setting(
        True,
        "Keep boxes of tracks for 0.3 s after a missed detection, marked as predicted and never counted.",
        more="This prevents flicker of drawn boxes. It requires tracking.",
    )
    heatmap: ImageName | None = setting(
        None,
        "Heatmap image of object positions, written at the end of the stream, such as heat.png.",
        more="{stream} stands for the stream's name. An existing file is replaced.",
        metavar="FILE",
    )
    motion_area: float = setting(
        0.002,
        "Fraction of the image that must change for the gate `motion` to admit a frame.",
        more="With gates: [motion], the model skips frames without motion, and tracks pause.",
        metavar="FRACTION",
        gt=0,
        le=1,
    )
    motion_mask: Polygons = setting(
        [],
        "Polygon in which motion is ignored, as X,Y,X,Y,…: corners in normalized coordinates; repeatable.",
        metavar="POINTS",
    )
    motion_heartbeat: Seconds = setting(
        5.0, "Seconds without motion after which the gate `motion` admits one frame.", metavar="SECONDS"
    )
