"""Sliced inference: the windows of an image that are prefilled one by one, and how their objects become one list.

A model that sees a 1920-pixel street as 256 pixels sees a pedestrian as four of them. Overlapping windows show them
larger (Akyon et al. 2022, arXiv:2202.06934); each costs as much as an image. Pure arithmetic, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from saccade.engine.tasks.output_state import DecodedObject

_OVERLAP = 0.24  # of a window's side: an object up to that size is whole in some window
_EDGE = 0.02  # an object this close to a window's inner edge was cut by it, and is whole in another window
_MERGE_IOU = 0.5  # above it two objects of different windows are one
_INSIDE = 0.8  # so are two of which the smaller lies in the larger by this part: the halves of a cut object


@dataclass(slots=True, frozen=True)
class Window:
    """A part of an image, in pixels."""

    x: int
    y: int
    width: int
    height: int

    @property
    def pixels(self) -> int:
        """How many there are."""
        return self.width * self.height


def windows(width: int, height: int, tiles: int) -> list[Window]:
    """The whole image, and if `tiles` > 1, `tiles` × `tiles` overlapping windows that cover it, row by row."""
    found = [Window(0, 0, width, height)]
    if tiles > 1:
        side_x = min(width, math.ceil(width * (1 + _OVERLAP) / tiles))
        side_y = min(height, math.ceil(height * (1 + _OVERLAP) / tiles))
        for row in range(tiles):
            for column in range(tiles):
                x = round((width - side_x) * column / (tiles - 1))
                y = round((height - side_y) * row / (tiles - 1))
                found.append(Window(x, y, side_x, side_y))
    return found


def place(found: DecodedObject, window: Window, width: int, height: int) -> DecodedObject | None:
    """A window's object in the whole `width` × `height` image; None if an inner edge has cut it."""
    left, right = found.x - found.width / 2, found.x + found.width / 2
    top, bottom = found.y - found.height / 2, found.y + found.height / 2
    if (
        (left < _EDGE and window.x > 0)
        or (right > 1 - _EDGE and window.x + window.width < width)
        or (top < _EDGE and window.y > 0)
        or (bottom > 1 - _EDGE and window.y + window.height < height)
    ):
        return None
    return DecodedObject(
        found.score,
        (window.x + found.x * window.width) / width,
        (window.y + found.y * window.height) / height,
        found.width * window.width / width,
        found.height * window.height / height,
    )


def merge(objects: Iterable[DecodedObject]) -> list[DecodedObject]:
    """Each object once, best score first: of two that overlap much, the better one stays."""
    return _first_of(sorted(objects, key=lambda one: -one.score), _same)


def distinct(objects: Iterable[DecodedObject], limit: float) -> list[DecodedObject]:
    """The objects of one answer without those that overlap an earlier box by an IoU of more than the limit."""
    return _first_of(objects, lambda a, b: _iou(a, b) > limit)


def _first_of(
    objects: Iterable[DecodedObject], same: Callable[[DecodedObject, DecodedObject], bool]
) -> list[DecodedObject]:
    """The objects that are not the same as one kept before them."""
    kept: list[DecodedObject] = []
    for found in objects:
        if not any(same(found, other) for other in kept):
            kept.append(found)
    return kept


def _iou(a: DecodedObject, b: DecodedObject) -> float:
    """Intersection over union of two boxes; 0 for points."""
    # Asked first, as few boxes of an answer touch: of 50 boxes there are 1225 pairs.
    if 2 * abs(a.x - b.x) >= a.width + b.width or 2 * abs(a.y - b.y) >= a.height + b.height:
        return 0.0
    shared = _intersection(a, b)
    return shared / (a.width * a.height + b.width * b.height - shared) if shared > 0 else 0.0


def _same(a: DecodedObject, b: DecodedObject) -> bool:
    shared = _intersection(a, b)
    smaller = min(a.width * a.height, b.width * b.height)
    return shared > 0 and (_iou(a, b) > _MERGE_IOU or shared > _INSIDE * smaller)


def _intersection(a: DecodedObject, b: DecodedObject) -> float:
    across = min(a.x + a.width / 2, b.x + b.width / 2) - max(a.x - a.width / 2, b.x - b.width / 2)
    down = min(a.y + a.height / 2, b.y + b.height / 2) - max(a.y - a.height / 2, b.y - b.height / 2)
    return max(0.0, across) * max(0.0, down)
