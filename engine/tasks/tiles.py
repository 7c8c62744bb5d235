"""Sliced inference: the windows of an image that are prefilled one by one. `objects` makes one list of their objects.

A model that sees a 1920-pixel street as 256 pixels sees a pedestrian as four of them. Overlapping windows show them
larger (Akyon et al. 2022, arXiv:2202.06934); each costs as much as an image. Pure arithmetic, no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_OVERLAP = 0.24  # of a window's side: an object up to that size is whole in some window


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
