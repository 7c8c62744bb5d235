"""Points, polygons and lines in a plane. Knows numbers only."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]


def contains(polygon: Sequence[Point], at: Point) -> bool:
    """Whether a point is in a polygon, by the even-odd rule; its corners may go round either way.

    Of points on a side those on left and upper ones are in it, so that of two polygons side by side one has each.
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
    """The area of a polygon whose sides do not cross."""
    pairs = zip(polygon, [*polygon[1:], polygon[0]], strict=True)
    return abs(sum(x1 * y2 - x2 * y1 for (x1, y1), (x2, y2) in pairs)) / 2


def distance(start: Point, end: Point, at: Point) -> float:
    """How far a point is from the straight line through two others.

    Where y grows downwards, as in images, it is positive on the right of one who looks from `start` towards `end`.
    """
    dx, dy = end[0] - start[0], end[1] - start[1]
    return (dx * (at[1] - start[1]) - dy * (at[0] - start[0])) / math.hypot(dx, dy)


def cross(a: Point, b: Point, c: Point, d: Point) -> bool:
    """Whether the way from `a` to `b`, on different sides of the line through `c` and `d`, crosses between these."""
    from_a, from_b = distance(c, d, a), distance(c, d, b)
    if from_a == from_b:
        return False
    k = from_a / (from_a - from_b)
    at = a[0] + k * (b[0] - a[0]), a[1] + k * (b[1] - a[1])
    dx, dy = d[0] - c[0], d[1] - c[1]
    along = (at[0] - c[0]) * dx + (at[1] - c[1]) * dy
    return 0 <= along <= dx * dx + dy * dy
