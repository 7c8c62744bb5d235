"""Images on the GPU: YUV to RGB, and Lanczos resize byte for byte as Pillow does it, two passes of whole numbers.

After the published algorithm of Pillow's resampling: coefficients of 22 bits, bytes between the passes.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
import triton
import triton.language as tl
from PIL import Image

_BITS = 22  # 32 less those of a byte, less two for overshoot
_LOBES = 3.0


def coefficients(before: int, after: int) -> tuple[np.ndarray, np.ndarray]:
    """First source pixel (after,) of each resized one, and its weights (after, taps) of that and the next; int32."""
    step = before / after
    stretch = max(step, 1.0)
    support = _LOBES * stretch
    taps = math.ceil(support) * 2 + 1
    first = np.zeros(after, np.int32)
    weights = np.zeros((after, taps), np.float64)
    for i in range(after):
        centre = (i + 0.5) * step
        start = max(0, int(centre - support + 0.5))
        stop = min(before, int(centre + support + 0.5))
        x = (np.arange(start, stop) - centre + 0.5) / stretch
        w = np.where(np.abs(x) < _LOBES, np.sinc(x) * np.sinc(x / _LOBES), 0.0)
        first[i], weights[i, : stop - start] = start, w / w.sum()
    return first, np.trunc(weights * (1 << _BITS) + np.copysign(0.5, weights)).astype(np.int32)


@functools.lru_cache(maxsize=64)
def _on_device(before: int, after: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    first, weights = coefficients(before, after)
    return torch.from_numpy(first).to(device), torch.from_numpy(weights).to(device)


@triton.jit
def _pass_kernel(
    source,
    first,
    weights,
    out,
    total,
    before,
    LINE: tl.constexpr,
    AFTER: tl.constexpr,
    TAPS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Resize the middle axis of (outer, before, LINE) to AFTER."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    line = i % LINE
    at = i // LINE % AFTER
    outer = (i // (LINE * AFTER)).to(tl.int64)
    start = tl.load(first + at, mask=inside, other=0)
    acc = tl.full((BLOCK,), 1 << (BITS - 1), tl.int32)
    for tap in range(TAPS):
        w = tl.load(weights + at * TAPS + tap, mask=inside, other=0)
        there = tl.minimum(start + tap, before - 1)  # past the end the weight is 0
        acc += w * tl.load(source + (outer * before + there) * LINE + line, mask=inside, other=0).to(tl.int32)
    tl.store(out + i, tl.minimum(tl.maximum(acc >> BITS, 0), 255).to(tl.uint8), mask=inside)


def resize(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """A (rows, columns, 3) uint8 CUDA image at another size, as Pillow's Lanczos gives it.

    The first call for a pair of sizes asks Pillow, and waits for the device.
    """
    rows, columns, _ = image.shape
    return _two_passes(image, height, width, across_first(rows, columns, height, width, image.device))


@functools.lru_cache(maxsize=256)
def across_first(rows: int, columns: int, height: int, width: int, device: torch.device) -> bool:
    """Whether Pillow resizes across before it does down.

    Which pass comes first changes roundings, and Pillow's rule for it differs from version to version: it is asked.
    """
    noise = np.random.default_rng(0).integers(0, 256, (rows, columns, 3), np.uint8)
    wanted = np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.LANCZOS))
    got = _two_passes(torch.from_numpy(noise).to(device), height, width, True)
    return bool((got.cpu().numpy() == wanted).all())


def _two_passes(image: torch.Tensor, height: int, width: int, across: bool) -> torch.Tensor:
    rows, columns, channels = image.shape
    if across:
        narrow = _one_pass(image, rows, columns, width, channels)
        return _one_pass(narrow, 1, rows, height, width * channels).view(height, width, channels)
    low = _one_pass(image, 1, rows, height, columns * channels)
    return _one_pass(low, height, columns, width, channels).view(height, width, channels)


def _one_pass(source: torch.Tensor, outer: int, before: int, after: int, line: int) -> torch.Tensor:
    if before == after:
        return source
    first, weights = _on_device(before, after, source.device)
    out = torch.empty(outer, after, line, dtype=torch.uint8, device=source.device)
    _pass_kernel[(triton.cdiv(out.numel(), 512),)](
        source,
        first,
        weights,
        out,
        out.numel(),
        before,
        LINE=line,
        AFTER=after,
        TAPS=weights.shape[1],
        BITS=_BITS,
        BLOCK=512,
        num_warps=4,
    )
    return out


@triton.jit
def _rgb_kernel(
    y,
    u,
    v,
    out,
    total,
    width,
    y_row,
    uv_row,
    uv_step,
    of_luma,
    of_red,
    of_green_u,
    of_green_v,
    of_blue,
    black,
    BLOCK: tl.constexpr,
):
    """One pixel for each element of the block."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    row, column = i // width, i % width
    chroma = (row // 2) * uv_row + (column // 2) * uv_step
    luma = ((tl.load(y + row * y_row + column, mask=inside, other=0).to(tl.int32) - black) * 8 * of_luma) >> 16
    du = (tl.load(u + chroma, mask=inside, other=0).to(tl.int32) - 128) * 8
    dv = (tl.load(v + chroma, mask=inside, other=0).to(tl.int32) - 128) * 8
    red = luma + ((dv * of_red) >> 16)
    green = luma + ((du * of_green_u) >> 16) + ((dv * of_green_v) >> 16)
    blue = luma + ((du * of_blue) >> 16)
    tl.store(out + 3 * i, tl.minimum(tl.maximum(red, 0), 255).to(tl.uint8), mask=inside)
    tl.store(out + 3 * i + 1, tl.minimum(tl.maximum(green, 0), 255).to(tl.uint8), mask=inside)
    tl.store(out + 3 * i + 2, tl.minimum(tl.maximum(blue, 0), 255).to(tl.uint8), mask=inside)


def rgb_of_yuv(
    y: torch.Tensor, u: torch.Tensor, v: torch.Tensor, factors: tuple[int, int, int, int, int, int]
) -> torch.Tensor:
    """(height, width, 3) uint8 RGB of 8-bit YUV 4:2:0, byte for byte as `engine.image.YuvImage.rgb`.

    Args:
        y: (height, width) uint8 on a CUDA device.
        u: (height / 2, width / 2) uint8 there.
        v: the same, of equal strides.
        factors: as `YuvImage.factors`.
    """
    height, width = y.shape
    out = torch.empty(height, width, 3, dtype=torch.uint8, device=y.device)
    _rgb_kernel[(triton.cdiv(height * width, 512),)](
        y,
        u,
        v,
        out,
        height * width,
        width,
        y.stride(0),
        u.stride(0),
        u.stride(1),
        *factors,
        BLOCK=512,
        num_warps=4,
    )
    return out
