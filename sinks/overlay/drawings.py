"""Registry of the functions that draw zones and other values of `Result.extras`: one function per key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade.engine.results import Result

Drawing = Callable[[NDArray[np.uint8], Sequence[Any], float], None]
"""Draws the values of one key of `Result.extras` into an image, (height, width, 3) uint8 RGB. The last argument is the
scale factor of line widths and font sizes."""

_DRAWINGS: dict[str, Drawing] = {}


def register_drawing(key: str, drawing: Drawing) -> None:
    """Register a function that draws the values of `Result.extras[key]`, on top of the boxes and below their labels.

    Raises:
        ValueError: if the key already has a function.
    """
    if _DRAWINGS.setdefault(key, drawing) is not drawing:
        raise ValueError(f"a drawing function is already registered for '{key}'")


def draw_extras(canvas: NDArray[np.uint8], result: Result, scale: float) -> None:
    """Draw the values of `result.extras` into the image. Keys without a drawing function are skipped."""
    for key, parts in result.extras.items():
        drawing = _DRAWINGS.get(key)
        if drawing is not None:
            drawing(canvas, parts, scale)
