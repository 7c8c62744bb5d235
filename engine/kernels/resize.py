"""YUV to RGB conversion and Lanczos resize on the GPU. The resize is byte-identical to that of Pillow.

The resize follows Pillow's published algorithm: two integer passes with 22-bit coefficients and 8-bit intermediate
results. Each kernel launch blocks the GIL for 30 µs. `resize_all` therefore resizes images of any sizes and formats
together. A table on the device describes the images, so a new size needs no new kernel.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from PIL import Image

FIELDS = 23
"""Number of int64 fields of an image in the table of `resize_all`.

The fields are:

    0 to 2     addresses of luma, u and v; for RGB of the first red, green and blue value
    3          index of the output
    4          first pixel in the intermediate buffer
    5 to 8     bytes per row and per pixel of luma, then of chroma
    9          1 if u and v have half the rows and columns (YUV), else 0 (RGB)
    10 to 15   `YuvImage.factors`
    16 to 22   `Scaling.fields`; all 0 for no image
"""
ROWS = 16
"""Index of the field that contains the number of rows."""
_BITS = 22  # 32 bits minus 8 bits of a pixel minus 2 bits for overshoot
_LOBES = 3.0
_COMPARED = 8  # output rows to compare, which show the order of the two passes
_PROGRAMS = 128  # programs per image of `resize_all`; each resizes several blocks of pixels


def coefficients(before: int, after: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the parameters for resizing an image axis from `before` to `after` pixels with a Lanczos filter.

    Returns:
        Index of the first source pixel of each output pixel, (after,) int32; and the filter weights of each output
        pixel in fixed point, (after, taps) int32.
    """
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
    """Resize the second axis of an array (outer, before, LINE) to AFTER. `total` is the size of the output in bytes."""
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
    tl.store(out + i, _byte(acc >> BITS).to(tl.uint8), mask=inside)


@triton.jit
def _first_pass_kernel(
    table, between, SIDE: tl.constexpr, FIELDS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Convert the images in the resize table to RGB, and run the first of two resize passes."""
    table += tl.program_id(1) * FIELDS
    y = tl.load(table).to(tl.pointer_type(tl.uint8))
    u = tl.load(table + 1).to(tl.pointer_type(tl.uint8))
    v = tl.load(table + 2).to(tl.pointer_type(tl.uint8))
    between += 3 * tl.load(table + 4)
    y_row = tl.load(table + 5).to(tl.int32)
    y_step = tl.load(table + 6).to(tl.int32)
    uv_row = tl.load(table + 7).to(tl.int32)
    uv_step = tl.load(table + 8).to(tl.int32)
    half = tl.load(table + 9).to(tl.int32)
    of_luma = tl.load(table + 10).to(tl.int32)
    of_red = tl.load(table + 11).to(tl.int32)
    of_green_u = tl.load(table + 12).to(tl.int32)
    of_green_v = tl.load(table + 13).to(tl.int32)
    of_blue = tl.load(table + 14).to(tl.int32)
    black = tl.load(table + 15).to(tl.int32)
    rows = tl.load(table + 16).to(tl.int32)
    columns = tl.load(table + 17).to(tl.int32)
    across = tl.load(table + 18) != 0
    which = tl.where(across, 19, 21)
    first = tl.load(table + which).to(tl.pointer_type(tl.int32))
    taps = tl.load(table + which + 1).to(tl.int32)
    weights = first + SIDE
    before = tl.where(across, columns, rows)
    width = tl.where(across, SIDE, columns)
    total = tl.where(across, rows, tl.minimum(rows, 1) * SIDE) * width
    step = tl.num_programs(0) * BLOCK
    for begin in range(tl.program_id(0) * BLOCK, total, step):
        i = begin + tl.arange(0, BLOCK)
        inside = i < total
        row = i // width
        column = i - row * width
        at = tl.where(across, column, row)
        start = tl.load(first + at, mask=inside, other=0)
        red_acc = tl.full((BLOCK,), 1 << (BITS - 1), tl.int32)
        green_acc = red_acc
        blue_acc = red_acc
        for tap in range(taps):
            w = tl.load(weights + tap * SIDE + at, mask=inside, other=0)
            there = tl.minimum(start + tap, before - 1)  # past the end the weight is 0
            r = tl.where(across, row, there)
            c = tl.where(across, there, column)
            chroma = (r >> half) * uv_row + (c >> half) * uv_step
            luma = tl.load(y + r * y_row + c * y_step, mask=inside, other=0).to(tl.int32)
            in_u = tl.load(u + chroma, mask=inside, other=0).to(tl.int32)
            in_v = tl.load(v + chroma, mask=inside, other=0).to(tl.int32)
            red, green, blue = _rgb(luma, in_u, in_v, of_luma, of_red, of_green_u, of_green_v, of_blue, black)
            red_acc += w * tl.where(half == 1, red, luma)
            green_acc += w * tl.where(half == 1, green, in_u)
            blue_acc += w * tl.where(half == 1, blue, in_v)
        out = between + i * 3
        tl.store(out, _byte(red_acc >> BITS).to(tl.uint8), mask=inside)
        tl.store(out + 1, _byte(green_acc >> BITS).to(tl.uint8), mask=inside)
        tl.store(out + 2, _byte(blue_acc >> BITS).to(tl.uint8), mask=inside)


@triton.jit
def _second_pass_kernel(
    table, between, out, SIDE: tl.constexpr, FIELDS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Run the second of two resize passes: from the intermediate buffer to the output."""
    table += tl.program_id(1) * FIELDS
    out += tl.load(table + 3) * (SIDE * SIDE * 3)
    between += 3 * tl.load(table + 4)
    rows = tl.load(table + 16).to(tl.int32)
    columns = tl.load(table + 17).to(tl.int32)
    across = tl.load(table + 18) != 0
    which = tl.where(across, 21, 19)
    first = tl.load(table + which).to(tl.pointer_type(tl.int32))
    taps = tl.load(table + which + 1).to(tl.int32)
    weights = first + SIDE
    before = tl.where(across, rows, columns)
    step = tl.where(across, SIDE * 3, 3)
    total = tl.minimum(rows, 1) * (SIDE * SIDE * 3)
    for begin in range(tl.program_id(0) * BLOCK, total, tl.num_programs(0) * BLOCK):
        i = begin + tl.arange(0, BLOCK)
        inside = i < total
        row = i // (SIDE * 3)
        line = i % (SIDE * 3)
        at = tl.where(across, row, line // 3)
        base = tl.where(across, line, row * columns * 3 + line % 3)
        start = tl.load(first + at, mask=inside, other=0)
        acc = tl.full((BLOCK,), 1 << (BITS - 1), tl.int32)
        for tap in range(taps):
            w = tl.load(weights + tap * SIDE + at, mask=inside, other=0)
            there = tl.minimum(start + tap, before - 1)
            acc += w * tl.load(between + base + there * step, mask=inside, other=0).to(tl.int32)
        tl.store(out + i, _byte(acc >> BITS).to(tl.uint8), mask=inside)


@triton.jit
def _byte(x):
    return tl.minimum(tl.maximum(x, 0), 255)


@triton.jit
def _rgb(y, u, v, of_luma, of_red, of_green_u, of_green_v, of_blue, black):
    """Return red, green and blue of int32 luma and chroma values, with the same results as `YuvImage.rgb`."""
    luma = ((y - black) * 8 * of_luma) >> 16
    du = (u - 128) * 8
    dv = (v - 128) * 8
    red = luma + ((dv * of_red) >> 16)
    green = luma + ((du * of_green_u) >> 16) + ((dv * of_green_v) >> 16)
    return _byte(red), _byte(green), _byte(luma + ((du * of_blue) >> 16))


def resize(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize a (rows, columns, 3) uint8 CUDA image to (height, width, 3), byte-identical to Pillow's Lanczos.

    The first call for a pair of sizes is slow, because it compiles kernels.
    """
    rows, columns, _ = image.shape
    return _two_passes(image, height, width, across_first(rows, columns, height, width))


@dataclass(slots=True, frozen=True, eq=False)
class Scaling:
    """Parameters for resizing images of one size to a square. The table of `resize_all` points to its coefficients.

    Attributes:
        fields: rows, columns, whether the columns are resized first, address of the column coefficients, column
            coefficients per output pixel, address of the row coefficients, row coefficients per output pixel.
        between: number of pixels of an image after the first pass.
        coefficients: int32 on the device.
    """

    fields: tuple[int, ...]
    between: int
    coefficients: torch.Tensor


def scaling_of(rows: int, columns: int, side: int, device: torch.device) -> Scaling:
    """Return the parameters for resizing images of `rows` × `columns` pixels to `side` × `side` pixels.

    The call takes a few milliseconds, and waits for the current CUDA stream.
    """
    across = across_first(rows, columns, side, side)
    parts = [coefficients(before, side) for before in (columns, rows)]
    whole = np.concatenate([np.concatenate([first, weights.T.ravel()]) for first, weights in parts])
    there = torch.from_numpy(whole).to(device)
    taps = [weights.shape[1] for _, weights in parts]
    low = there.data_ptr()
    high = low + 4 * side * (1 + taps[0])
    return Scaling(
        (rows, columns, int(across), low, taps[0], high, taps[1]), side * (rows if across else columns), there
    )


def resize_all(table: torch.Tensor, between: torch.Tensor, out: torch.Tensor) -> None:
    """Resize images of any sizes and formats with two kernel launches.

    Args:
        table: (n, FIELDS) int64 on the device, one image per row. Rows of zeros are skipped.
        between: uint8 buffer on the device for the first pass, with 3 · `Scaling.between` bytes for each image.
        out: (images, side, side, 3) uint8, written.
    """
    grid, side = (_PROGRAMS, len(table)), out.shape[1]
    _first_pass_kernel[grid](table, between, SIDE=side, FIELDS=FIELDS, BITS=_BITS, BLOCK=256, num_warps=4)
    _second_pass_kernel[grid](table, between, out, SIDE=side, FIELDS=FIELDS, BITS=_BITS, BLOCK=512, num_warps=4)


def weights_of(rows: int, columns: int, height: int, width: int, device: torch.device) -> list[torch.Tensor]:
    """Return the coefficient tensors of a resize. Keep them alive as long as a CUDA graph uses the resize."""
    return [*_on_device(columns, width, device), *_on_device(rows, height, device)]


@functools.lru_cache(maxsize=256)
def across_first(rows: int, columns: int, height: int, width: int) -> bool:
    """Return whether Pillow resizes horizontally before vertically, from (rows, columns) to (height, width).

    The order of the passes affects rounding, and Pillow's rule differs between versions. The function therefore resizes
    a test image in Pillow and compares its first rows.
    """
    noise = np.random.default_rng(0).integers(0, 256, (rows, columns), np.uint8)
    wanted = np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.LANCZOS))[:_COMPARED]
    first, weights = (part[:_COMPARED] for part in coefficients(rows, height))
    needed = noise[: first[-1] + weights.shape[1]]
    got = _resized_rows(_resized_rows(needed.T, *coefficients(columns, width)).T, first, weights)
    return bool((got == wanted).all())


def _resized_rows(pixels: np.ndarray, first: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Resize the rows of a (rows, columns) uint8 array with the given coefficients."""
    taken = np.minimum(first[:, None] + np.arange(weights.shape[1]), len(pixels) - 1)
    sums = np.einsum("ot,otc->oc", weights.astype(np.int64), pixels[taken], dtype=np.int64, casting="unsafe")
    rounded: np.ndarray = np.clip((sums + (1 << (_BITS - 1))) >> _BITS, 0, 255).astype(np.uint8)
    return rounded


def _two_passes(image: torch.Tensor, height: int, width: int, across: bool) -> torch.Tensor:
    rows, columns, _ = image.shape
    for outer, before, after, line in _passes(rows, columns, height, width, across):
        if before != after:
            out = torch.empty(outer * after * line, dtype=torch.uint8, device=image.device)
            _one_pass(image, out, outer, before, after, line)
            image = out
    return image.view(height, width, 3)


def _passes(rows: int, columns: int, height: int, width: int, across: bool) -> list[tuple[int, int, int, int]]:
    """Return the two passes of a resize in execution order, each as (outer, before, after, line).

    A pass resizes the middle axis of an array (outer, before, line) from `before` to `after`.
    """
    if across:
        return [(rows, columns, width, 3), (1, rows, height, width * 3)]
    return [(1, rows, height, columns * 3), (height, columns, width, 3)]


def _one_pass(source: torch.Tensor, out: torch.Tensor, outer: int, before: int, after: int, line: int) -> None:
    first, weights = _on_device(before, after, out.device)
    total = outer * after * line
    _pass_kernel[(triton.cdiv(total, 512),)](
        source,
        first,
        weights,
        out,
        total,
        before,
        LINE=line,
        AFTER=after,
        TAPS=weights.shape[1],
        BITS=_BITS,
        BLOCK=512,
        num_warps=4,
    )


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
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    row, column = i // width, i % width
    chroma = (row // 2) * uv_row + (column // 2) * uv_step
    red, green, blue = _rgb(
        tl.load(y + row * y_row + column, mask=inside, other=0).to(tl.int32),
        tl.load(u + chroma, mask=inside, other=0).to(tl.int32),
        tl.load(v + chroma, mask=inside, other=0).to(tl.int32),
        of_luma,
        of_red,
        of_green_u,
        of_green_v,
        of_blue,
        black,
    )
    tl.store(out + 3 * i, red.to(tl.uint8), mask=inside)
    tl.store(out + 3 * i + 1, green.to(tl.uint8), mask=inside)
    tl.store(out + 3 * i + 2, blue.to(tl.uint8), mask=inside)


def rgb_of_yuv(
    y: torch.Tensor, u: torch.Tensor, v: torch.Tensor, factors: tuple[int, int, int, int, int, int]
) -> torch.Tensor:
    """Convert 8-bit YUV 4:2:0 to (height, width, 3) uint8 RGB, byte-identical to `engine.image.YuvImage.rgb`.

    Args:
        y: (height, width) uint8 luma on a CUDA device.
        u: (height / 2, width / 2) uint8 chroma on the same device.
        v: chroma with the same shape, dtype and strides as `u`.
        factors: conversion factors, `YuvImage.factors`.
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
