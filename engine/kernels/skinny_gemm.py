"""Products of few rows with many weights, in half precision or FP8: as fast as the weights come from memory.

FP8 weights (e4m3, a scale for each output) are widened to float16 on their way to the tensor cores, and activations in
bfloat16 go there as float16, too: they must be within ±65504. On one H200, 8 rows of Moondream 2 into and out of a
block take 16.4 and 11.6 µs in bf16 (cuBLAS 17.3 and 14.7), 10.5 and 7.5 in FP8; to read the weights once takes 13.7
and 9.8, or 6.8 and 4.9.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.activation import gelu
from saccade.engine.kernels.pdl import LINE, begin, early, fetch

MAX_ROWS = 64
_LEAST_ROWS = 16  # of a matrix product


class _Shape(NamedTuple):
    """How a product is cut up: a program's outputs, inputs at a time, how many of those are under way, and its warps.

    Attributes:
        ahead: bytes of each output's weights that are fetched while the kernel ahead still runs.
        early: whether to begin that early. Programs come to lie where the kernel ahead leaves room, which is not where
            they can read best: with few and slow programs that costs more than it gains.
    """

    block_n: int
    block_k: int
    stages: int
    warps: int
    ahead: int
    early: bool


# The best of some 200 each on an H200, in the chain of a whole step.
_HALF, _HALF_PARTS = _Shape(64, 128, 4, 4, 0, True), _Shape(64, 256, 3, 4, 128, True)
_FP8, _FP8_PARTS = _Shape(32, 256, 3, 2, 256, True), _Shape(32, 256, 4, 4, 256, True)
_FP8_MANY, _FP8_PARTS_MANY = _Shape(128, 128, 3, 8, 0, True), _Shape(64, 128, 4, 2, 0, False)


@triton.jit
def _product_kernel(
    x,
    x_stride,
    weight,
    scale,
    bias,
    out,
    out_stride,
    part_stride,
    rows,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    BEND: tl.constexpr,
    AHEAD: tl.constexpr,
    LINES: tl.constexpr,
    PER_LINE: tl.constexpr,
):
    """BLOCK_N outputs of all rows over one of PARTS parts of the inputs; transposed, as a tile is more weights high."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    part = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)[None, :]
    real = m < rows
    line = weight + n[:, None].to(tl.int64) * K
    kind: tl.constexpr = tl.float16 if SCALED else x.dtype.element_ty
    if AHEAD:
        if LINES > 0:
            fetch(line + part * (K // PARTS) + tl.arange(0, LINES)[None, :] * PER_LINE)
        begin()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(part * (K // PARTS), (part + 1) * (K // PARTS), BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(line + k[None, :])
        a = tl.load(x + m * x_stride + k[:, None], mask=real, other=0.0)
        acc = tl.dot(w.to(kind), a.to(kind), acc)
    if SCALED:
        acc *= tl.load(scale + n)[:, None]
    if BIAS:
        acc += tl.load(bias + n).to(tl.float32)[:, None]
    if BEND:
        acc = gelu(acc)
    at = out + part * part_stride + m * out_stride + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=real)


def parts_for(inputs: int, scaled: bool) -> int:
    """Parts to cut many inputs into where outputs are few, with FP8 weights or without."""
    return next((parts for parts in ((8, 4, 2) if scaled else (4, 2)) if fits(128, inputs, parts)), 1)


def fits(outputs: int, inputs: int, parts: int = 1) -> bool:
    """Whether the kernel takes weights (outputs, inputs), with the inputs in so many parts."""
    return outputs % 128 == 0 and inputs % (parts * 256) == 0


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    bend: bool = False,
    ahead: bool = False,
) -> torch.Tensor:
    """Write x times the transposed weights to `out`, and return it.

    Args:
        x: (rows, inputs), at most MAX_ROWS; the stride of a row is free.
        weight: (outputs, inputs), contiguous: of x's dtype, or float8_e4m3fn.
        out: (rows, outputs), or float32 (parts, rows, outputs): the products with as many parts of the inputs, which
            keeps a GPU busy where outputs are few, to be summed by who reads them.
        scale: (outputs,) float32, of FP8 weights.
        bias: (outputs,); not with parts.
        bend: put the outputs through tanh-approximated GELU; not with parts.
        ahead: whether kernels of the step begin early, see `ahead`.
    """
    rows, (outputs, inputs) = len(x), weight.shape
    assert rows <= MAX_ROWS
    parts, block_m = len(out) if out.ndim == 3 else 1, max(_LEAST_ROWS, triton.next_power_of_2(rows))
    if scale is None:
        shape = _HALF if parts == 1 else _HALF_PARTS
    elif parts == 1:
        shape = _FP8 if block_m < MAX_ROWS else _FP8_MANY
    else:
        shape = _FP8_PARTS if block_m == _LEAST_ROWS else _FP8_PARTS_MANY
    tile = (shape.block_n * weight.element_size() + block_m * x.element_size()) * shape.block_k
    per_line = LINE // weight.element_size()
    _product_kernel[(outputs // shape.block_n, parts)](
        x,
        x.stride(0),
        weight,
        weight if scale is None else scale,
        weight if bias is None else bias,
        out,
        out.stride(-2),
        out.stride(0),
        rows,
        K=inputs,
        PARTS=parts,
        BLOCK_M=block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        STAGES=max(1, min(shape.stages, _shared_memory(x.device) // tile)),
        SCALED=scale is not None,
        BIAS=bias is not None,
        BEND=bend,
        AHEAD=ahead,
        LINES=shape.ahead // LINE,
        PER_LINE=per_line,
        num_warps=shape.warps,
        **early(ahead and shape.early),
    )
    return out


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    if device.type != "cuda":  # Triton's interpreter
        return 1 << 20
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 96 << 10))
