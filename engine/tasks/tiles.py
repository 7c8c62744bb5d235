"""The windows of an image that are looked at besides the whole. `objects` makes one list of their objects.

A model that sees a 1920-pixel street as 256 pixels sees a pedestrian as four of them. Overlapping windows show them
larger (Akyon et al. 2022, arXiv:2202.06934); each costs as much as an image. Windows are tiles that cover the image, or
rectangles that the caller chooses. Pure arithmetic, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_OVERLAP = 0.24  # of a window's side: an object up to that size is whole in some window


@dataclass(slots=True, frozen=True)
class Window:
    """A part of an image, in pixels.

    Raises:
        ValueError: if it has no pixels, or begins outside of every image.
    """

    x: int
    y: int
    width: int
    height: int

    def __post_init__(self) -> None:
        if min(self.x, self.y) < 0 or min(self.width, self.height) < 1:
            raise ValueError(f"a window begins at 0 or more and has 1 pixel or more; got {self}")

    @property
    def pixels(self) -> int:
        """How many there are."""
        return self.width * self.height


def windows(width: int, height: int, tiles: int, chosen: Sequence[Window] = ()) -> list[Window]:
    """The whole image; with `tiles` > 1, as many overlapping windows a side that cover it, row by row; the chosen ones.

    Of a chosen window only what lies in the image counts; one outside of it becomes its nearest pixel.
    """
    found = [Window(0, 0, width, height)]
    if tiles > 1:
        side_x = min(width, math.ceil(width * (1 + _OVERLAP) / tiles))
        side_y = min(height, math.ceil(height * (1 + _OVERLAP) / tiles))
        for row in range(tiles):
            for column in range(tiles):
                x = round((width - side_x) * column / (tiles - 1))
                y = round((height - side_y) * row / (tiles - 1))
                found.append(Window(x, y, side_x, side_y))
    return found + [clip(window, width, height) for window in chosen]


def clip(window: Window, width: int, height: int) -> Window:
    """The part of a window that lies in a `width` × `height` image, at least one pixel."""
    x, y = min(window.x, width - 1), min(window.y, height - 1)
    return Window(x, y, min(window.width, width - x), min(window.height, height - y))
