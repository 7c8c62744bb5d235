"""What an image may be given as. Knows no models."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

Image = NDArray[np.uint8] | torch.Tensor
"""An image: (height, width, 3) uint8 RGB, array or tensor."""
LazyImage = Callable[[], Image]
"""Gives an image when it is needed, once; called in any thread."""


def as_array(image: Image) -> NDArray[np.uint8]:
    """The image as an array, which shares its memory where it can.

    Raises:
        ValueError: if it is not (height, width, 3) uint8.
    """
    if isinstance(image, np.ndarray):  # asked first: whether it is a tensor takes ten times as long
        array = image
    elif isinstance(image, torch.Tensor):
        if image.dtype != torch.uint8:
            raise ValueError(f"an image is (height, width, 3) uint8 RGB; got {tuple(image.shape)} {image.dtype}")
        array = image.numpy(force=True)
    else:
        array = np.asarray(image)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or 0 in array.shape:
        raise ValueError(f"an image is (height, width, 3) uint8 RGB; got {array.shape} {array.dtype}")
    return array
