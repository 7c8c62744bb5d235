"""Image types that the engine accepts: RGB arrays and decoded video frames."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_UINT8 = np.dtype(np.uint8)  # comparing two dtypes is five times as fast as comparing a dtype and a type

Factors = tuple[int, int, int, int, int, int]
"""Conversion factors: luma; v in red; u and v in green; u in blue; and the black level."""


def bytes_of(rows: int, columns: int, yuv: bool) -> int:
    """Return the number of bytes of an RGB image, or of an 8-bit YUV 4:2:0 image if `yuv` is True."""
    return rows * columns * 3 // (2 if yuv else 1)


@dataclass(slots=True, frozen=True)
class YuvImage:
    """A decoded video frame in 8-bit YUV 4:2:0 with even sides, in main memory or on a CUDA device.

    Pixels on a CUDA device must be complete, or be written on the legacy default stream.

    Attributes:
        y: (height, width) uint8 luma.
        u: (height / 2, width / 2) uint8 chroma.
        v: (height / 2, width / 2) uint8 chroma, with the same strides as `u`.
        matrix: conversion factors times 65536: v to red, u to blue, u to green and v to green (the last two are
            subtracted). For example, BT.601 is (104597, 132201, 25675, 53279), and BT.709 is (117489, 138438, 13975,
            34925). The factors are for limited-range chroma.
        full_range: whether all values use 0 to 255. Otherwise luma uses 16 to 235, and chroma 16 to 240.
    """

    y: torch.Tensor
    u: torch.Tensor
    v: torch.Tensor
    matrix: tuple[int, int, int, int]
    full_range: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (height, width, 3) of the image in RGB."""
        return self.y.shape[0], self.y.shape[1], 3

    @property
    def factors(self) -> Factors:
        """Integer factors of the conversion from YUV to RGB; see `rgb`."""
        return _factors(self.matrix, self.full_range)

    def to(self, device: torch.device) -> YuvImage:
        """Copy the frame to a device through pinned memory, on the current CUDA stream."""
        height, width, _ = self.shape
        half = height // 2, width // 2
        pinned = torch.empty(height * 3 // 2, width, dtype=torch.uint8, pin_memory=True)

        def parts(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            u, v = whole[height:].view(2, *half)
            return whole[:height], u, v

        for plane, place in zip((self.y, self.u, self.v), parts(pinned), strict=True):
            np.copyto(place.numpy(), plane.numpy())  # uses one thread and releases the GIL
        return YuvImage(*parts(pinned.to(device, non_blocking=True)), self.matrix, self.full_range)

    def part(self, x: int, y: int, width: int, height: int) -> YuvImage:
        """Return a view of a rectangle of the frame. Odd pixel positions and sizes are rounded down."""
        x, y, width, height = x & ~1, y & ~1, max(2, width & ~1), max(2, height & ~1)
        across, down = slice(x // 2, (x + width) // 2), slice(y // 2, (y + height) // 2)
        luma = self.y[y : y + height, x : x + width]
        return YuvImage(luma, self.u[down, across], self.v[down, across], self.matrix, self.full_range)

    def rgb(self) -> torch.Tensor:
        """Convert the frame to (height, width, 3) uint8 RGB on the same device.

        The result is byte-identical to that of FFmpeg's swscale on x86. Chroma is not interpolated.
        """
        of_luma, of_red, of_green_u, of_green_v, of_blue, black = self.factors
        y = ((self.y.int() - black) * 8 * of_luma) >> 16
        u, v = ((plane.int() - 128) * 8 for plane in (self.u, self.v))
        chroma = (v * of_red) >> 16, ((u * of_green_u) >> 16) + ((v * of_green_v) >> 16), (u * of_blue) >> 16
        channels = [y + part.repeat_interleave(2, 0).repeat_interleave(2, 1) for part in chroma]
        return torch.stack(channels, dim=-1).clamp_(0, 255).to(torch.uint8)


@functools.cache
def _factors(matrix: tuple[int, int, int, int], full_range: bool) -> Factors:
    if full_range:
        luma, (red_v, blue_u, green_u, green_v) = 1 << 16, (part * 224 // 255 for part in matrix)
    else:
        luma, (red_v, blue_u, green_u, green_v) = (255 << 16) // 219, matrix
    of_luma, of_red, of_green_u, of_green_v, of_blue = (
        ((part << 13) + (1 << 15)) >> 16 for part in (luma, red_v, -green_u, -green_v, blue_u)
    )
    return of_luma, of_red, of_green_u, of_green_v, of_blue, 0 if full_range else 16


Image = NDArray[np.uint8] | torch.Tensor | YuvImage
"""An image: (height, width, 3) uint8 RGB array or tensor, or a decoded video frame."""
Pixels = NDArray[np.uint8] | YuvImage
"""An image for the executor: (height, width, 3) uint8 RGB array, or a decoded video frame."""
LazyImage = Callable[[], Image]
"""Function that returns an image; called once, in any thread."""


def as_pixels(image: Image) -> Pixels:
    """Return an image as an array, or unchanged if it is a `YuvImage`.

    Raises:
        ValueError: if an array is not (height, width, 3) uint8.
    """
    return image if isinstance(image, YuvImage) else as_array(image)


def as_array(image: Image) -> NDArray[np.uint8]:
    """Return an image as an array (height, width, 3) uint8 RGB. The array shares the memory of the image if possible.

    Raises:
        ValueError: if the image has another shape or dtype.
    """
    if isinstance(image, np.ndarray):  # test this first, because testing for a tensor takes ten times as long
        array = image
    elif isinstance(image, YuvImage):
        array = image.rgb().numpy(force=True)
    elif isinstance(image, torch.Tensor):
        if image.dtype != torch.uint8:
            raise ValueError(f"an image must be (height, width, 3) uint8 RGB; got {tuple(image.shape)} {image.dtype}")
        array = image.numpy(force=True)
    else:
        array = np.asarray(image)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != _UINT8 or 0 in array.shape:
        raise ValueError(f"an image must be (height, width, 3) uint8 RGB; got {array.shape} {array.dtype}")
    return array
