"""YUV to RGB conversion and Lanczos resize on the GPU, byte-identical with Pillow.

The resize follows the published algorithm of Pillow: two integer passes with 22-bit coefficients and 8-bit intermediate
results. Images of equal size are resized together, because the two kernel launches hold the GIL for 60 µs regardless of
the number of images.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
import triton
import triton.language as tl
from PIL import Image

ABOUT = 13
"""Number of int64 fields of an image descriptor.

The fields are: address of RGB or luma, output index; for YUV also addresses of u and v, row strides of luma and chroma,
pixel stride of chroma, and the six `YuvImage.factors`.
"""
_BITS = 22  # 32 bits minus 8 bits of a pixel minus 2 bits for overshoot
_LOBES = 3.0


def coefficients(before: int, after: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights for a resize from `before` to `after` pixels.

    Returns:
        The first source pixel (after,) of each output pixel, and its weights (after, taps), both int32.
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


@triton.jit(do_not_specialize_on_alignment=["about"])  # else it is compiled again for what begins at an odd image
def _pass_kernel(
    about,
    source,
    first,
    weights,
    out,
    given,
    total,
    before,
    LINE: tl.constexpr,
    AFTER: tl.constexpr,
    TAPS: tl.constexpr,
    ADDRESSED: tl.constexpr,
    PLACED: tl.constexpr,
    ABOUT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Resize the middle axis of each image (outer, before, LINE) of `given` bytes to AFTER.

    There are `total` output bytes.

    Source and output images are contiguous, unless the descriptors in `about` give other addresses.
    """
    image = tl.program_id(1).to(tl.int64)
    if ADDRESSED:
        source = tl.load(about + image * ABOUT).to(tl.pointer_type(tl.uint8))
    else:
        source += image * given
    if PLACED:
        out += tl.load(about + image * ABOUT + 1) * total
    else:
        out += image * total
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


@triton.jit(do_not_specialize_on_alignment=["about"])  # else it is compiled again for what begins at an odd image
def _yuv_pass_kernel(
    about,
    first,
    weights,
    out,
    total,
    before,
    DOWN: tl.constexpr,
    LINE: tl.constexpr,
    AFTER: tl.constexpr,
    TAPS: tl.constexpr,
    ABOUT: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run the first pass of `_pass_kernel` on YUV images, which are converted to RGB when they are loaded.

    `total` and LINE are numbers of pixels. The input is (outer, before, LINE). Its rows are image columns with DOWN,
    otherwise single pixels.
    """
    image = tl.program_id(1).to(tl.int64)
    about += image * ABOUT
    y = tl.load(about).to(tl.pointer_type(tl.uint8))
    u = tl.load(about + 2).to(tl.pointer_type(tl.uint8))
    v = tl.load(about + 3).to(tl.pointer_type(tl.uint8))
    y_row = tl.load(about + 4).to(tl.int32)
    uv_row = tl.load(about + 5).to(tl.int32)
    uv_step = tl.load(about + 6).to(tl.int32)
    of_luma = tl.load(about + 7).to(tl.int32)
    of_red = tl.load(about + 8).to(tl.int32)
    of_green_u = tl.load(about + 9).to(tl.int32)
    of_green_v = tl.load(about + 10).to(tl.int32)
    of_blue = tl.load(about + 11).to(tl.int32)
    black = tl.load(about + 12).to(tl.int32)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < total
    line = i % LINE
    at = i // LINE % AFTER
    outer = i // (LINE * AFTER)
    start = tl.load(first + at, mask=inside, other=0)
    red_acc = tl.full((BLOCK,), 1 << (BITS - 1), tl.int32)
    green_acc = red_acc
    blue_acc = red_acc
    for tap in range(TAPS):
        w = tl.load(weights + at * TAPS + tap, mask=inside, other=0)
        there = tl.minimum(start + tap, before - 1)  # past the end the weight is 0
        if DOWN:
            row = there
            column = line
        else:
            row = outer
            column = there
        red, green, blue = _rgb(
            tl.load(y + row * y_row + column, mask=inside, other=0).to(tl.int32),
            tl.load(u + (row // 2) * uv_row + (column // 2) * uv_step, mask=inside, other=0).to(tl.int32),
            tl.load(v + (row // 2) * uv_row + (column // 2) * uv_step, mask=inside, other=0).to(tl.int32),
            of_luma,
            of_red,
            of_green_u,
            of_green_v,
            of_blue,
            black,
        )
        red_acc += w * red
        green_acc += w * green
        blue_acc += w * blue
    out += (image * total + i) * 3
    tl.store(out, _byte(red_acc >> BITS).to(tl.uint8), mask=inside)
    tl.store(out + 1, _byte(green_acc >> BITS).to(tl.uint8), mask=inside)
    tl.store(out + 2, _byte(blue_acc >> BITS).to(tl.uint8), mask=inside)


@triton.jit
def _byte(x):
    return tl.minimum(tl.maximum(x, 0), 255)


@triton.jit
def _rgb(y, u, v, of_luma, of_red, of_green_u, of_green_v, of_blue, black):
    """Return red, green and blue of int32 luma and chroma. The values equal those of `YuvImage.rgb`."""
    luma = ((y - black) * 8 * of_luma) >> 16
    du = (u - 128) * 8
    dv = (v - 128) * 8
    red = luma + ((dv * of_red) >> 16)
    green = luma + ((du * of_green_u) >> 16) + ((dv * of_green_v) >> 16)
    return _byte(red), _byte(green), _byte(luma + ((du * of_blue) >> 16))


def resize(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Resize a CUDA image (rows, columns, 3) uint8 to (height, width, 3), byte-identical with Pillow's Lanczos filter.

    The first call for a pair of sizes runs Pillow and waits for the device.
    """
    rows, columns, _ = image.shape
    return _two_passes(image, height, width, across_first(rows, columns, height, width, image.device))


def resize_all(about: torch.Tensor, rows: int, columns: int, out: torch.Tensor, *, yuv: bool = False) -> None:
    """Resize images of equal size and format with two kernel launches.

    The first call for a pair of sizes takes about a second and waits for the device, unless `compile_for` was called
    before.

    Args:
        about: (n, ABOUT) int64 image descriptors on the device, with device addresses. RGB is (rows, columns, 3) uint8.
            YUV luma is (rows, columns) with contiguous columns. The chroma planes have half of both sizes.
        rows: height of each image.
        columns: width of each image.
        out: (images, height, width, 3) uint8, overwritten.
        yuv: whether the images are 8-bit YUV 4:2:0 instead of RGB.
    """
    _, height, width, _ = out.shape
    across = across_first(rows, columns, height, width, out.device)
    (outer, before, after, line), second = _passes(rows, columns, height, width, across)
    between = torch.empty(len(about), outer * after * line, dtype=torch.uint8, device=out.device)
    # Both passes run even if a side keeps its size, because the descriptors place input and output.
    if yuv:
        _yuv_pass(about, between, outer, before, after, line // 3, down=not across)
    else:
        _one_pass(about, None, between, outer, before, after, line)
    _one_pass(about, between, out, *second)


def weights_of(rows: int, columns: int, height: int, width: int, device: torch.device) -> list[torch.Tensor]:
    """Return the weight tensors for a pair of sizes. A CUDA graph of `resize_all` must keep them alive."""
    return [*_on_device(columns, width, device), *_on_device(rows, height, device)]


def compile_for(rows: int, columns: int, height: int, width: int, device: torch.device, *, yuv: bool = False) -> None:
    """Compile the kernels of `resize_all` for a pair of sizes on the current device. This may take a second."""
    image = torch.zeros(rows, columns, 3, dtype=torch.uint8, device=device)
    out = torch.empty(1, height, width, 3, dtype=torch.uint8, device=device)
    at = image.data_ptr()
    about = torch.tensor([[at, 0, at, at, columns, columns // 2, 1, *[0] * (ABOUT - 7)]], device=device)
    resize_all(about, rows, columns, out, yuv=yuv)
    out.cpu()


@functools.lru_cache(maxsize=256)
def across_first(rows: int, columns: int, height: int, width: int, device: torch.device) -> bool:
    """Return whether Pillow resizes horizontally before vertically for a pair of sizes.

    The order affects rounding, and Pillow's rule differs between versions. Therefore Pillow and both orders resize a
    test image here, and the results are compared.
    """
    noise = np.random.default_rng(0).integers(0, 256, (rows, columns, 3), np.uint8)
    wanted = np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.LANCZOS))
    got = _two_passes(torch.from_numpy(noise).to(device), height, width, True)
    return bool((got.cpu().numpy() == wanted).all())


def _two_passes(image: torch.Tensor, height: int, width: int, across: bool) -> torch.Tensor:
    rows, columns, _ = image.shape
    for outer, before, after, line in _passes(rows, columns, height, width, across):
        if before != after:
            out = torch.empty(1, outer * after * line, dtype=torch.uint8, device=image.device)
            _one_pass(None, image, out, outer, before, after, line)
            image = out
    return image.view(height, width, 3)


def _passes(rows: int, columns: int, height: int, width: int, across: bool) -> list[tuple[int, int, int, int]]:
    """Return both passes in order, each as (outer, before, after, line); see `_pass_kernel`."""
    if across:
        return [(rows, columns, width, 3), (1, rows, height, width * 3)]
    return [(1, rows, height, columns * 3), (height, columns, width, 3)]


def _one_pass(
    about: torch.Tensor | None,
    source: torch.Tensor | None,
    out: torch.Tensor,
    outer: int,
    before: int,
    after: int,
    line: int,
) -> None:
    """Run one pass on one image, or on all images of `about`. Without `source`, the descriptors give the addresses."""
    first, weights = _on_device(before, after, out.device)
    total = outer * after * line
    _pass_kernel[(triton.cdiv(total, 512), 1 if about is None else len(about))](
        out if about is None else about,
        out if source is None else source,
        first,
        weights,
        out,
        outer * before * line,
        total,
        before,
        LINE=line,
        AFTER=after,
        TAPS=weights.shape[1],
        ADDRESSED=source is None,
        PLACED=about is not None and source is not None,
        ABOUT=ABOUT,
        BITS=_BITS,
        BLOCK=512,
        num_warps=4,
    )


def _yuv_pass(
    about: torch.Tensor, out: torch.Tensor, outer: int, before: int, after: int, line: int, *, down: bool
) -> None:
    first, weights = _on_device(before, after, out.device)
    total = outer * after * line
    _yuv_pass_kernel[(triton.cdiv(total, 256), len(about))](
        about,
        first,
        weights,
        out,
        total,
        before,
        DOWN=down,
        LINE=line,
        AFTER=after,
        TAPS=weights.shape[1],
        ABOUT=ABOUT,
        BITS=_BITS,
        BLOCK=256,
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
    """Convert 8-bit YUV 4:2:0 to (height, width, 3) uint8 RGB, byte-identical with `engine.image.YuvImage.rgb`.

    Args:
        y: (height, width) uint8 on a CUDA device.
        u: (height / 2, width / 2) uint8 on the same device.
        v: tensor with the shape, dtype and strides of `u`.
        factors: `YuvImage.factors`.
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
