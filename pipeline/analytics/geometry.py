"""Geometry of points, polygons and lines in a plane."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]
Rect = tuple[float, float, float, float]
"""A rectangle as x1, y1, x2, y2."""


def contains(polygon: Sequence[Point], at: Point) -> bool:
    """Return whether a point is in a polygon, by the even-odd rule.

    A point on the common side of two adjacent polygons is in only one of them.
    """
    x, y = at
    inside = False
    x1, y1 = polygon[-1]
    for x2, y2 in polygon:
        if (y1 > y) != (y2 > y) and x < x1 + (y - y1) * (x2 - x1) / (y2 - y1):
            inside = not inside
        x1, y1 = x2, y2
    return inside


def area(polygon: Sequence[Point]) -> float:
    """Return the area of a simple polygon (its sides do not intersect)."""
    pairs = zip(polygon, [*polygon[1:], polygon[0]], strict=True)
    return abs(sum(x1 * y2 - x2 * y1 for (x1, y1), (x2, y2) in pairs)) / 2


def rect_area(rect: Rect) -> float:
    """Return the area of a rectangle."""
    return max(0.0, rect[2] - rect[0]) * max(0.0, rect[3] - rect[1])


def shared_area(a: Rect, b: Rect) -> float:
    """Return the area of the intersection of two rectangles."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def distance(start: Point, end: Point, at: Point) -> float:
    """Return the signed distance of a point from the straight line through `start` and `end`.

    In image coordinates, the distance is positive on the right side of the line, as seen from `start` towards `end`.
    """
    dx, dy = end[0] - start[0], end[1] - start[1]
    return (dx * (at[1] - start[1]) - dy * (at[0] - start[0])) / math.hypot(dx, dy)


def cross(a: Point, b: Point, c: Point, d: Point) -> bool:
    """Return whether the segment from `a` to `b` intersects the segment from `c` to `d`.

    The points `a` and `b` must lie on different sides of the line through `c` and `d`.
    """
    from_a, from_b = distance(c, d, a), distance(c, d, b)
    if from_a == from_b:
        return False
    k = from_a / (from_a - from_b)
    at = a[0] + k * (b[0] - a[0]), a[1] + k * (b[1] - a[1])
    dx, dy = d[0] - c[0], d[1] - c[1]
    along = (at[0] - c[0]) * dx + (at[1] - c[1]) * dy
    return 0 <= along <= dx * dx + dy * dy
