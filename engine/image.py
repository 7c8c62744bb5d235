"""What an image may be given as. Knows no models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_UINT8 = np.dtype(np.uint8)  # a dtype is compared to one in a fifth of the time that it is to a type

Factors = tuple[int, int, int, int, int, int]
"""Of luma; of v in red; of u and of v in green; of u in blue; and the value of black."""


def bytes_of(rows: int, columns: int, yuv: bool) -> int:
    """Of an image in RGB, or in 8-bit YUV 4:2:0."""
    return rows * columns * 3 // (2 if yuv else 1)


@dataclass(slots=True, frozen=True)
class YuvImage:
    """An image as video decoders give it: 8-bit YUV 4:2:0 of even sides, in main memory or on a CUDA device.

    On a device, what writes it may still be queued on that device's legacy default stream, and only there.

    Attributes:
        y: (height, width) uint8.
        u, v: (height / 2, width / 2) uint8, of equal strides.
        matrix: what red has of v and blue of u, and green has less by u and by v, times 65536 for a range of 16 to
            240: (104597, 132201, 25675, 53279) is BT.601, (117489, 138438, 13975, 34925) BT.709.
        full_range: whether values use all of 0 to 255, not 16 to 235 (chroma: 240).
    """

    y: torch.Tensor
    u: torch.Tensor
    v: torch.Tensor
    matrix: tuple[int, int, int, int]
    full_range: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """(height, width, 3) of the image."""
        return self.y.shape[0], self.y.shape[1], 3

    @property
    def factors(self) -> Factors:
        """What `rgb` multiplies by."""
        return _factors(self.matrix, self.full_range)

    def to(self, device: torch.device) -> YuvImage:
        """The same on a device, copied behind what is queued on the current stream; from pinned memory."""
        height, width, _ = self.shape
        half = height // 2, width // 2
        pinned = torch.empty(height * 3 // 2, width, dtype=torch.uint8, pin_memory=True)

        def parts(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            u, v = whole[height:].view(2, *half)
            return whole[:height], u, v

        for plane, place in zip((self.y, self.u, self.v), parts(pinned), strict=True):
            np.copyto(place.numpy(), plane.numpy())  # in this thread alone, and without the interpreter's lock
        return YuvImage(*parts(pinned.to(device, non_blocking=True)), self.matrix, self.full_range)

    def part(self, x: int, y: int, width: int, height: int) -> YuvImage:
        """A rectangle of it, which shares its memory; it begins at even pixels and has even sides."""
        x, y, width, height = x & ~1, y & ~1, max(2, width & ~1), max(2, height & ~1)
        across, down = slice(x // 2, (x + width) // 2), slice(y // 2, (y + height) // 2)
        luma = self.y[y : y + height, x : x + width]
        return YuvImage(luma, self.u[down, across], self.v[down, across], self.matrix, self.full_range)

    def rgb(self) -> torch.Tensor:
        """(height, width, 3) uint8 RGB on its device, byte for byte as swscale gives it on x86.

        Each product with a factor, eightfold, is cut to whole numbers; chroma is not interpolated.
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
"""An image: (height, width, 3) uint8 RGB, array or tensor; or one as a video decoder gives it."""
Pixels = NDArray[np.uint8] | YuvImage
"""An image as an executor takes it: (height, width, 3) uint8 RGB, or as a video decoder gives it."""
LazyImage = Callable[[], Image]
"""Gives an image when it is needed, once; called in any thread."""


def as_pixels(image: Image) -> Pixels:
    """The image as an executor takes it.

    Raises:
        ValueError: as `as_array`.
    """
    return image if isinstance(image, YuvImage) else as_array(image)


def as_array(image: Image) -> NDArray[np.uint8]:
    """The image as an array, which shares its memory where it can.

    Raises:
        ValueError: if it is not (height, width, 3) uint8.
    """
    if isinstance(image, np.ndarray):  # asked first: whether it is a tensor takes ten times as long
        array = image
    elif isinstance(image, YuvImage):
        array = image.rgb().numpy(force=True)
    elif isinstance(image, torch.Tensor):
        if image.dtype != torch.uint8:
            raise ValueError(f"an image is (height, width, 3) uint8 RGB; got {tuple(image.shape)} {image.dtype}")
        array = image.numpy(force=True)
    else:
        array = np.asarray(image)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != _UINT8 or 0 in array.shape:
        raise ValueError(f"an image is (height, width, 3) uint8 RGB; got {array.shape} {array.dtype}")
    return array
