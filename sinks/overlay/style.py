"""Colours and sizes of the overlay. Sizes are for an image 360 pixels high and scale with the image.

All shapes and texts have a dark outline, so that they are readable on any background.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

Rgb = tuple[int, int, int]
Rect = tuple[int, int, int, int]  # x1, y1, x2, y2 in pixels

# Bright enough that dark text reads on each of them, and far enough apart to be distinguished.
PALETTE: tuple[Rgb, ...] = (
    (255, 107, 107),
    (255, 159, 69),
    (255, 210, 63),
    (195, 233, 75),
    (110, 220, 95),
    (46, 230, 166),
    (43, 217, 217),
    (77, 184, 255),
    (122, 155, 255),
    (165, 139, 255),
    (215, 123, 255),
    (255, 123, 213),
    (255, 92, 147),
    (224, 168, 120),
    (150, 200, 170),
    (201, 209, 224),
)
_SALT = b"243260"  # chosen so that the eleven commonest classes, from person to horse, differ in colour
INK: Rgb = (16, 19, 26)
PAPER: Rgb = (245, 247, 250)
DIM: Rgb = (196, 203, 214)

_FONT_PX = 13.0  # at 360 lines; the sizes below too
LINE_PX = 1.75
CASING_PX = 0.7
MARGIN_PX = 8.0
_GROWTH = 0.85  # sizes grow a little slower than the image: large images are viewed from closer
SHIFT = 4  # fractional bits of the coordinates given to OpenCV


@lru_cache(maxsize=1024)
def color_of(label: str) -> Rgb:
    """Return the colour of a class. The same class always gets the same colour."""
    digest = hashlib.blake2b(label.casefold().encode(), digest_size=2, salt=_SALT).digest()
    return PALETTE[int.from_bytes(digest) % len(PALETTE)]


def scale_of(width: int, height: int) -> float:
    """Return the scale factor of the overlay for an image size in pixels; 1 for a height of 360."""
    return float(max(0.6, (min(height, width) / 360) ** _GROWTH))


def font_px(scale: float) -> int:
    """Return the font size in pixels for a scale factor of the overlay."""
    return max(9, round(_FONT_PX * scale))
