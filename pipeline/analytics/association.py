"""Which detection belongs to which track: overlaps of boxes, and the best one-to-one assignment. Knows numbers only."""

from __future__ import annotations

import lap
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def corners_of(boxes: Floats) -> Floats:
    """Boxes (n, 2, 2) given by centre and size as (n, 4), x1, y1, x2, y2."""
    half = boxes[:, 1] / 2
    return np.concatenate((boxes[:, 0] - half, boxes[:, 0] + half), axis=1)


def iou(first: Floats, second: Floats) -> Floats:
    """Intersection over union of each of n boxes with each of m, (n, m), 0 to 1.

    Args:
        first: (n, 4), x1, y1, x2, y2.
        second: (m, 4), likewise.
    """
    a, b = first.T[:, :, None], second.T[:, None]
    sides = np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2])
    np.maximum(sides, 0, out=sides)
    shared = sides[0] * sides[1]
    areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    result: Floats = shared / np.maximum(areas - shared, 1e-12)
    return result


def assign(likeness: Floats, least: float) -> tuple[Ints, Ints]:
    """Pair rows with columns, each at most once, so that the likeness of all pairs together is greatest.

    Leaving a row and a column alone counts as much as pairing them at `least`.

    Args:
        likeness: (n, m), 0 to 1.
        least: below which no two are paired; above 0.

    Returns:
        Rows and columns of the pairs.
    """
    possible = likeness >= least
    rows, columns = np.nonzero(possible)
    # Mostly nothing competes for anything, and then there is nothing to solve: 3 µs instead of 20.
    if len(rows) < 2 or (possible.sum(axis=0).max() < 2 and possible.sum(axis=1).max() < 2):
        return rows, columns
    _, column_of, _ = lap.lapjv(1 - likeness, extend_cost=True, cost_limit=1 - least)
    rows = np.nonzero(column_of >= 0)[0]
    return rows, column_of[rows].astype(np.int64)
