"""Segmentation outlines: conversion between SVG path data, polygons, masks and COCO run-length encoding.

Path coordinates are fractions of the object's box. Polygon coordinates are fractions of the image.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Polygon = NDArray[np.float64]
"""(corners, 2) x and y; the last corner connects to the first."""
Mask = NDArray[np.bool_]
"""(height, width) boolean mask."""

TOLERANCE = 0.002
"""Maximum distance between a curve and its polygon, as a fraction of the path's box."""
_TOKENS = re.compile(r"([A-Za-z])|([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)|[\s,]+|(.)", re.DOTALL)
_NUMBERS = {"M": 2, "L": 2, "C": 6, "Z": 0}
_MOST_PIECES = 64  # maximum number of straight pieces per curve
_SIMPLE_PX, _SIMPLE_IOU = 0.75, 0.98  # maximum distance of a path from its mask, and minimum IoU of both masks


def parse_path(text: str, tolerance: float = TOLERANCE) -> tuple[list[Polygon], bool]:
    """Parse SVG path data into polygons. The supported commands are M, L, C and Z, absolute or relative.

    Args:
        text: path data, such as `M 0.500 0.300 L 0.100 0.900 Z` or `M.5,.3L.1.9z`.
        tolerance: maximum error of a curve as a fraction of the box size.

    Returns:
        The polygons with at least three corners, and whether the whole text was valid. After an error, the polygons are
        those of the valid start of the text.
    """
    found: list[list[tuple[float, float]]] = []
    at = start = (0.0, 0.0)
    command, numbers, used, drawing = "", list[float](), True, False

    def ended(good: bool) -> tuple[list[Polygon], bool]:
        good = good and not numbers and used
        return [np.array(corners) for corners in found if len(corners) > 2], good

    for letter, number, other in _TOKENS.findall(text):
        if letter:
            if letter.upper() not in _NUMBERS or numbers or not used:
                return ended(False)
            command, used = letter, letter.upper() == "Z"
            if used:
                at, drawing = start, False
            continue
        if other:
            return ended(False)
        if not number:
            continue
        value = float(number)
        needed = _NUMBERS.get(command.upper(), 0)
        if not needed or not math.isfinite(value):  # a command letter is expected here
            return ended(False)
        numbers.append(value)
        if len(numbers) < needed:
            continue
        offset = at if command.islower() else (0.0, 0.0)
        points = [(numbers[i] + offset[0], numbers[i + 1] + offset[1]) for i in range(0, needed, 2)]
        if command.upper() == "M":
            start, drawing = points[0], True
            found.append([start])
            command = "l" if command.islower() else "L"  # in SVG, numbers after a move are line commands
        else:
            if not found:
                return ended(False)
            if not drawing:  # after Z, the next subpath begins where the last one began
                found.append([at])
                drawing = True
            found[-1] += (
                points if command.upper() == "L" else _flattened(at, points[0], points[1], points[2], tolerance)
            )
        at, numbers, used = points[-1], [], True
    return ended(True)


def _flattened(
    a: tuple[float, float], b: tuple[float, float], c: tuple[float, float], d: tuple[float, float], tolerance: float
) -> list[tuple[float, float]]:
    """Approximate a cubic Bézier curve by a polyline. Return its points without the start point."""
    bend = max(math.hypot(p[0] - 2 * q[0] + r[0], p[1] - 2 * q[1] + r[1]) for p, q, r in ((a, b, c), (b, c, d)))
    pieces = math.ceil(math.sqrt(0.75 * bend / tolerance)) if math.isfinite(bend) else _MOST_PIECES
    count = min(_MOST_PIECES, max(1, pieces))
    points = []
    for number in range(1, count + 1):
        t = number / count
        shares = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
        points.append(
            (
                sum(s * p[0] for s, p in zip(shares, (a, b, c, d), strict=True)),
                sum(s * p[1] for s, p in zip(shares, (a, b, c, d), strict=True)),
            )
        )
    return points


def placed(polygons: Sequence[Polygon], box: tuple[float, float, float, float]) -> list[Polygon]:
    """Convert polygons from fractions of the box (x1, y1, x2, y2) to fractions of the image."""
    x1, y1, x2, y2 = box
    return [corners * (x2 - x1, y2 - y1) + (x1, y1) for corners in polygons]


def fill(polygons: Sequence[Polygon], width: int, height: int) -> Mask:
    """Fill polygons by the even-odd rule. Return the mask of pixels whose centre is inside."""
    flips = np.zeros((height, width + 1), np.uint8)
    for corners in polygons:
        x, y = corners[:, 0] * width - 0.5, corners[:, 1] * height - 0.5
        for x0, y0, x1, y1 in zip(x, y, np.roll(x, -1), np.roll(y, -1), strict=True):
            if not (math.isfinite(x0 + y0 + x1 + y1) and y0 != y1):
                continue
            low, high = min(y0, y1), max(y0, y1)
            first, last = max(0, math.ceil(low)), min(height, math.ceil(high))
            if first >= last:
                continue
            rows = np.arange(first, last)
            crossed = x0 + (rows - y0) * ((x1 - x0) / (y1 - y0))
            flips[rows, np.clip(np.ceil(crossed), 0, width).astype(np.int64)] ^= 1  # each side crosses a row once
    mask: Mask = (flips.cumsum(axis=1, dtype=np.uint8)[:, :width] & 1).view(bool)  # odd number of crossings
    return mask


def trace(mask: Mask) -> list[Polygon]:
    """Return polygons along the pixel edges of a mask: outer edges and edges of holes. `fill` restores the mask."""
    height, width = mask.shape
    padded = np.zeros((height + 2, width + 2), bool)
    padded[1:-1, 1:-1] = mask
    # Each edge goes from one corner (x, y) to the next, with the mask on its right.
    following: dict[tuple[int, int], list[tuple[int, int]]] = {}
    across, down = padded[1:, 1:-1].astype(np.int8) - padded[:-1, 1:-1], None
    for y, x in np.argwhere(across):
        a, b = (int(x), int(y)), (int(x) + 1, int(y))
        start, end = (a, b) if across[y, x] > 0 else (b, a)
        following.setdefault(start, []).append(end)
    down = padded[1:-1, 1:].astype(np.int8) - padded[1:-1, :-1]
    for y, x in np.argwhere(down):
        a, b = (int(x), int(y)), (int(x), int(y) + 1)
        start, end = (b, a) if down[y, x] > 0 else (a, b)
        following.setdefault(start, []).append(end)
    polygons = []
    while following:
        first = next(iter(following))
        corners, at, before = [first], first, None
        while True:
            options = following[at]
            chosen = options[0]
            # Two pixels touch only at this corner: turn right to stay at the same pixel.
            if before is not None and len(options) > 1:
                dx, dy = at[0] - before[0], at[1] - before[1]
                chosen = next((one for one in options if (one[0] - at[0], one[1] - at[1]) == (-dy, dx)), options[0])
            options.remove(chosen)
            if not options:
                del following[at]
            before, at = at, chosen
            if at == first:
                break
            corners.append(at)
        polygons.append(_straightened(np.array(corners, np.float64)) / (width, height))
    return polygons


def _straightened(corners: Polygon) -> Polygon:
    """Remove the corners of a polygon that lie on a straight line."""
    before, after = corners - np.roll(corners, 1, 0), np.roll(corners, -1, 0) - corners
    turns: Polygon = corners[before[:, 0] * after[:, 1] != before[:, 1] * after[:, 0]]
    return turns


def write_path(polygons: Sequence[Polygon], digits: int = 3) -> tuple[str, tuple[float, float, float, float]]:
    """Convert polygons in normalized image coordinates to SVG path data and a bounding box.

    Path coordinates are fractions of the bounding box (x1, y1, x2, y2).
    """
    if not polygons:
        return "", (0.0, 0.0, 0.0, 0.0)
    points = np.concatenate(polygons)
    (x1, y1), (x2, y2) = points.min(0), points.max(0)
    spread = np.maximum((x2 - x1, y2 - y1), 1e-12)
    pieces = []
    for corners in polygons:
        scaled = (corners - (x1, y1)) / spread
        words = [f"{x:.{digits}f} {y:.{digits}f}" for x, y in scaled]
        pieces.append(f"M {words[0]} " + " ".join(f"L {word}" for word in words[1:]) + " Z")
    return " ".join(pieces), (float(x1), float(y1), float(x2), float(y2))


def draw(mask: Mask, smallest: float = 0.0) -> tuple[str, tuple[float, float, float, float]]:
    """Trace the contours of a mask. Return simplified SVG path data and the normalized box (x1, y1, x2, y2).

    Args:
        mask: (height, width).
        smallest: minimum size of a separate part or a hole, in pixels. The largest part always remains.
    """
    height, width = mask.shape
    rings = trace(mask)
    areas = [_area(corners) * mask.size for corners in rings]
    most = max(map(abs, areas), default=0.0)
    kept = trace(
        _closed(fill([r for r, a in zip(rings, areas, strict=True) if abs(a) >= min(smallest, most)], width, height))
    )
    simple = write_path([_simplified(corners * (width, height)) / (width, height) for corners in kept])
    exact = fill(kept, width, height)
    drawn = fill(placed(parse_path(simple[0])[0], simple[1]), width, height)
    alike = (drawn & exact).sum() >= _SIMPLE_IOU * (drawn | exact).sum()
    return simple if alike else write_path(kept, digits=5)


def _area(corners: Polygon) -> float:
    """Return the signed area of a closed polygon. Outer contours and holes have opposite signs."""
    x, y = corners.T
    return float(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2


def _closed(mask: Mask) -> Mask:
    """Apply a morphological closing with a 3 × 3 square to a mask."""
    wide = np.pad(mask, 2)
    for both in (np.logical_or, np.logical_and):
        wide = both.reduce([wide[:-2], wide[1:-1], wide[2:]])
        wide = both.reduce([wide[:, :-2], wide[:, 1:-1], wide[:, 2:]])
    return wide


def _simplified(corners: Polygon) -> Polygon:
    """Simplify a closed polygon in pixels (Douglas and Peucker 1973). Two distant corners always remain."""
    far = int(np.argmax(((corners - corners[0]) ** 2).sum(1)))
    ring, keep = np.concatenate([corners, corners[:1]]), np.zeros(len(corners) + 1, bool)
    keep[[0, far]] = True
    spans = [(0, far), (far, len(corners))]
    while spans:
        first, last = spans.pop()
        if last - first < 2:
            continue
        (x, y), between = ring[last] - ring[first], ring[first + 1 : last] - ring[first]
        distance = np.abs(x * between[:, 1] - y * between[:, 0]) / max(math.hypot(x, y), 1e-12)
        if not (x or y):
            distance = np.hypot(*between.T)
        worst = int(distance.argmax())
        if distance[worst] > _SIMPLE_PX:
            middle = first + 1 + worst
            keep[middle] = True
            spans += [(first, middle), (middle, last)]
    chosen: Polygon = corners[keep[:-1]]
    return chosen if len(chosen) > 2 else corners


def coco_rle(mask: Mask) -> dict[str, object]:
    """Return the COCO run-length encoding of a mask, as pycocotools does: `size` [height, width] and `counts`."""
    flat = mask.ravel(order="F")
    changes = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    edges = np.concatenate([[0] if not flat.size or not flat[0] else [0, 0], changes, [flat.size]])
    runs = np.diff(edges).tolist()
    text = []
    for number, run in enumerate(runs):
        value = int(run) - (int(runs[number - 2]) if number > 2 else 0)
        while True:
            bits, value = value & 31, value >> 5
            more = value != (-1 if bits & 16 else 0)
            text.append(chr(48 + bits + (32 if more else 0)))
            if not more:
                break
    return {"size": [mask.shape[0], mask.shape[1]], "counts": "".join(text)}
