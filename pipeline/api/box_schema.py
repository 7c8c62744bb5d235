"""Supports chat completions that return boxes or points in the format of a JSON schema.

The schema must contain an array of objects: either the whole document, or one property. Each object must have one of
these positions:
    `box`, `bbox`, `bbox_2d` or `box_2d`, as [x1, y1, x2, y2]
    `x_min`, `y_min`, `x_max`, `y_max`, or `x1`, `y1`, `x2`, `y2`
    `x` and `y`, or `point` as [x, y], for points

Coordinates of type integer are pixels. Coordinates of type number are normalized to 0 to 1.

An object can also have a label (`label`, `name`, `class`, `object`) and a score (`score`, `confidence`). The `enum` of
the label lists the labels to detect. Without an `enum`, the prompt is the label to detect.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from saccade.engine.results import Box, Result, Spot

_LABELS = ("label", "name", "class", "object", "class_name", "category")
_SCORES = ("score", "confidence")
_BOXES = ("box", "bbox", "bbox_2d", "box_2d", "bounding_box")
_CORNERS = (("x_min", "y_min", "x_max", "y_max"), ("x1", "y1", "x2", "y2"), ("xmin", "ymin", "xmax", "ymax"))
_MAX_LABELS = 64

Write = Callable[[Box | Spot, int, int], Any]


@dataclass(slots=True, frozen=True)
class BoxSchema:
    """A parsed JSON schema for an answer with boxes or points.

    Attributes:
        labels: labels to detect; empty if the prompt is the label to detect.
        points: whether to detect points instead of boxes.
        key: property that contains the array of objects; None if the array is the whole answer.
        fields: for each property of an object, by name, the function that formats the value.
    """

    labels: list[str]
    points: bool
    key: str | None
    fields: Mapping[str, Write]

    @classmethod
    def of(cls, schema: Mapping[str, Any]) -> BoxSchema:
        """Parse a JSON schema for an answer with boxes or points.

        Raises:
            ValueError: if the schema does not describe boxes or points.
        """
        key, items = _array_in(schema)
        properties = items.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            raise ValueError("the items of the JSON schema's array should be objects with a box, such as bbox or x_min")
        fields: dict[str, Write] = {}
        labels: list[str] = []
        for name in properties:
            described = properties[name] if isinstance(properties[name], Mapping) else {}
            if name in _LABELS:
                fields[name] = lambda found, width, height: found.label
                labels = _labels_in(described)
            elif name in _SCORES:
                fields[name] = lambda found, width, height: round(found.score, 3)
            elif (write := _place(name, properties, described)) is not None:
                fields[name] = write
            elif name in items.get("required", ()):
                raise ValueError(
                    f"the JSON schema's property '{name[:80]}' is not supported: use a label, a score and a box"
                )
        places = properties.keys() - {*_LABELS, *_SCORES}
        points = bool(places & {"x", "y", "point", "point_2d"})
        if not places & fields.keys():
            raise ValueError(
                "the JSON schema needs the position of an object: add bbox, or x_min, y_min, x_max and y_max, or point"
            )
        return cls(labels, points, key, fields)

    def answer(self, result: Result) -> Any:
        """Convert the detected boxes or points to a JSON value that matches the schema."""
        width, height = result.detections.width, result.detections.height
        found: list[Box | Spot] = [*(result.points.points if self.points else result.detections.boxes)]
        values = [{name: write(one, width, height) for name, write in self.fields.items()} for one in found]
        return values if self.key is None else {self.key: values}


def _array_in(schema: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """Find the array of objects in a JSON schema. Return its property name, and the schema of an object.

    `$defs` references are resolved.
    """
    definitions = schema.get("$defs") or schema.get("definitions") or {}

    def resolved(part: Any) -> Mapping[str, Any]:
        name = part.get("$ref", "").rpartition("/")[2] if isinstance(part, Mapping) else ""
        found = definitions.get(name, part) if isinstance(definitions, Mapping) else part
        return found if isinstance(found, Mapping) else {}

    if schema.get("type") == "array":
        return None, resolved(schema.get("items"))
    properties = schema.get("properties")
    for name, part in properties.items() if isinstance(properties, Mapping) else ():
        if resolved(part).get("type") == "array":
            return str(name), resolved(resolved(part).get("items"))
    raise ValueError("unsupported JSON schema: it should contain an array of boxes")


def _labels_in(described: Mapping[str, Any]) -> list[str]:
    values = [described["const"]] if "const" in described else described.get("enum", [])
    if not isinstance(values, list) or not all(isinstance(one, str) and one for one in values):
        raise ValueError("the label enum of the JSON schema should be a list of strings")
    if len(values) > _MAX_LABELS:
        raise ValueError(f"the label enum of the JSON schema can have at most {_MAX_LABELS} values")
    return values


def _place(name: str, properties: Mapping[str, Any], described: Mapping[str, Any]) -> Write | None:
    """Return the function that formats a position property, such as `bbox`. Return None for other properties."""
    items = described.get("items")
    kind = items if isinstance(items, Mapping) else described
    pixels = kind.get("type") == "integer"
    if name in _BOXES:
        return lambda found, width, height: _corners(found, width, height, pixels)
    if name in ("point", "point_2d"):
        return lambda found, width, height: _corners(found, width, height, pixels)[:2]
    for corners in (*_CORNERS, ("x", "y")):
        if name in corners and all(corner in properties for corner in corners):
            at = corners.index(name)
            return lambda found, width, height: _corners(found, width, height, pixels)[at]
    return None


def _corners(found: Box | Spot, width: int, height: int, pixels: bool) -> list[float]:
    ends = [found.x1, found.y1, found.x2, found.y2] if isinstance(found, Box) else [found.x, found.y]
    sizes = (width, height) * 2
    return [round(end * size) if pixels else round(end, 5) for end, size in zip(ends, sizes, strict=False)]
