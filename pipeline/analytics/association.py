"""Which detection belongs to which track: overlaps of boxes, and the best one-to-one assignment. Knows numbers only."""

from __future__ import annotations

import lap
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def corners_of(boxes: Floats) -> Floats:
    """Boxes (4, n), centre x and y, width and height, as (4, n), x1, y1, x2, y2."""
    corners = np.empty_like(boxes)
    half = boxes[2:] / 2
    np.subtract(boxes[:2], half, out=corners[:2])
    np.add(boxes[:2], half, out=corners[2:])
    return corners


def iou(first: Floats, second: Floats) -> Floats:
    """Intersection over union of each of n boxes with each of m, (n, m), 0 to 1.

    Args:
        first: (n, 4), x1, y1, x2, y2.
        second: (m, 4), likewise.
    """
    a, b = first.T[:, :, None], second.T[:, None]
    a1, a2, b1, b2 = a[:2], a[2:], b[:2], b[2:]
    sides = np.minimum(a2, b2)
    sides -= np.maximum(a1, b1)
    np.maximum(sides, 0, out=sides)
    shared: Floats = sides[0] * sides[1]
    a_size, b_size = a2 - a1, b2 - b1
    union = a_size[0] * a_size[1] + b_size[0] * b_size[1]
    union -= shared
    np.maximum(union, 1e-12, out=union)
    shared /= union
    return shared


def assign(likeness: Floats, least: float) -> tuple[Ints, Ints]:
    """Pair rows with columns, each at most once, so that the likeness of all pairs together is greatest.

    Leaving a row and a column alone counts as much as pairing them at `least`.

    Args:
        likeness: (n, m), 0 to 1.
        least: below which no two are paired; above 0.

    Returns:
        Rows and columns of the pairs.
    """
    rows, columns = np.nonzero(likeness >= least)
    # Mostly nothing competes for anything, and then there is nothing to solve.
    if len(set(columns.tolist())) == len(columns) == len(set(rows.tolist())):
        return rows, columns
    n, m = likeness.shape
    # A square of its own: `lapjv` takes 4 µs for ten by ten then, and 30 where it is to extend and cut off itself.
    cost = np.ones((max(n, m), max(n, m)))
    cost[:n, :m] = np.minimum(1, 1 + least - likeness)
    column_of = lap.lapjv(cost, return_cost=False)[0][:n]
    rows = np.nonzero(cost[np.arange(n), column_of] < 1)[0]
    return rows, column_of[rows].astype(np.int64)
