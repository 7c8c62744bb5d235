"""Registry of functions that draw the parts in `Result.extras`, one per key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from saccade.engine.results import Result

Drawing = Callable[[NDArray[np.uint8], Sequence[Any], float], None]
"""Draws the parts of one key onto an image (height, width, 3) uint8 RGB in place; lines and texts of the usual size are
multiplied by the scale."""

_DRAWINGS: dict[str, Drawing] = {}


def register_drawing(key: str, drawing: Drawing) -> None:
    """Register a function that draws the parts under a key of `Result.extras`, above boxes and below their labels.

    Raises:
        ValueError: if the key already has a function.
    """
    if _DRAWINGS.setdefault(key, drawing) is not drawing:
        raise ValueError(f"'{key}' already has a drawing function")


def draw_extras(canvas: NDArray[np.uint8], result: Result, scale: float) -> None:
    """Draw all parts whose key has a registered function, in place."""
    for key, parts in result.extras.items():
        drawing = _DRAWINGS.get(key)
        if drawing is not None:
            drawing(canvas, parts, scale)
