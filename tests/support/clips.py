"""Images that carry their number through any coding, and the type of the fixture that encodes clips of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MakeClip = Callable[..., Path]


def numbered_image(number: int, width: int, height: int) -> NDArray[np.uint8]:
    """An image that shows which way is up, by a red corner top left, and its number, in eight binary stripes below."""
    image = np.full((height, width, 3), 120, np.uint8)
    image[: height // 4, : width // 4] = (220, 30, 30)
    for bit in range(8):
        image[height // 2 :, bit * width // 8 : (bit + 1) * width // 8] = 235 if number >> bit & 1 else 20
    return image


def number_of(image: NDArray[np.uint8]) -> int:
    """Read the number of a `numbered_image` back after any amount of coding."""
    height, width = image.shape[:2]
    row = image[height * 3 // 4, [(2 * bit + 1) * width // 16 for bit in range(8)]].mean(axis=1)
    return sum(1 << bit for bit in range(8) if row[bit] > 128)
