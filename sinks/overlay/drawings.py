"""How parts of other tasks are drawn: one function for each key of `Result.extras`. Knows results only."""

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
    """Draw the parts that a result lists under a key of its extras, above boxes and below their labels.

    Raises:
        ValueError: if another function draws that key.
    """
    if _DRAWINGS.setdefault(key, drawing) is not drawing:
        raise ValueError(f"there is a drawing of '{key}' already")


def draw_extras(canvas: NDArray[np.uint8], result: Result, scale: float) -> None:
    """Draw what a function is registered for, in place."""
    for key, parts in result.extras.items():
        drawing = _DRAWINGS.get(key)
        if drawing is not None:
            drawing(canvas, parts, scale)
