"""Images on the GPU: YUV to RGB, and Lanczos resize byte for byte as Pillow does it, two passes of whole numbers.

After the published algorithm of Pillow's resampling: coefficients of 22 bits, bytes between the passes. Images of one
size are resized together: two launches take the interpreter 60 µs, whether of one image or of sixteen.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
import triton
import triton.language as tl
from PIL import Image

ABOUT = 2
"""Numbers that say of an image where its first byte is, and which of the results it becomes."""
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
    """Resize the middle axis of each image (outer, before, LINE), of `given` bytes, to AFTER, in `total` bytes.

    Images lie behind each other in source and out, but where `about` says so.
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
    tl.store(out + i, tl.minimum(tl.maximum(acc >> BITS, 0), 255).to(tl.uint8), mask=inside)


def resize(image: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """A (rows, columns, 3) uint8 CUDA image at another size, as Pillow's Lanczos gives it.

    The first call for a pair of sizes asks Pillow, and waits for the device.
    """
    rows, columns, _ = image.shape
    return _two_passes(image, height, width, across_first(rows, columns, height, width, image.device))


def resize_all(about: torch.Tensor, rows: int, columns: int, out: torch.Tensor) -> None:
    """Resize images of one size, in two launches; for `compile_for` sizes, else the first call waits for the device.

    Args:
        about: (n, ABOUT) int64 on the device: of each image, the address of its (rows, columns, 3) uint8 RGB on the
            device, and its place in `out`.
        rows: of each image.
        columns: of each image.
        out: (places, height, width, 3) uint8.
    """
    _, height, width, _ = out.shape
    _resize_all(about, rows, columns, out, across_first(rows, columns, height, width, out.device))


def compile_for(rows: int, columns: int, height: int, width: int, device: torch.device) -> None:
    """Have what `resize_all` runs for a pair of sizes compiled on the current device; may take a second."""
    image = torch.zeros(rows, columns, 3, dtype=torch.uint8, device=device)
    out = torch.empty(1, height, width, 3, dtype=torch.uint8, device=device)
    resize_all(torch.tensor([[image.data_ptr(), 0]], device=device), rows, columns, out)
    out.cpu()


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
    rows, columns, _ = image.shape
    for outer, before, after, line in _passes(rows, columns, height, width, across):
        if before != after:
            out = torch.empty(1, outer * after * line, dtype=torch.uint8, device=image.device)
            _one_pass(None, image, out, outer, before, after, line)
            image = out
    return image.view(height, width, 3)


def _resize_all(about: torch.Tensor, rows: int, columns: int, out: torch.Tensor, across: bool) -> None:
    _, height, width, _ = out.shape
    (outer, before, after, line), second = _passes(rows, columns, height, width, across)
    between = torch.empty(len(about), outer * after * line, dtype=torch.uint8, device=out.device)
    # Also where a side stays as it is: what is read lies somewhere, and what is written has its place.
    _one_pass(about, None, between, outer, before, after, line)
    _one_pass(about, between, out, *second)


def _passes(rows: int, columns: int, height: int, width: int, across: bool) -> list[tuple[int, int, int, int]]:
    """Both passes in order: (outer, before, after, line) of (outer, before → after, line)."""
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
    """Of one image; with `about`, of all its images, and then without a source from where it says, else to there."""
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
