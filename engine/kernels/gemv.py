"""Products of one row with many weights, layer norm before or residual addition behind them included.

A program's weights are all loaded before it waits for the previous kernel, so that they come from memory while that one
still runs; without tensor cores there are no sixteen rows to fill, and no parts of a split product to add up.

FP8 weights are multiplied in float16, two at a time, and added up so over a few parts of the inputs only, the rest in
float32: 824 instructions of a thread for 1,392, which took 3 µs behind a wait. Inputs are made smaller for that.

In the L2 cache they make room for others first, as nobody reads them before the next step: 2 % of a step of FP8 weights
on an H200. To fetch a later kernel's weights there, line by line, costs more than it saves: 6 to 12 % of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.activation import gelu
from saccade.engine.kernels.pdl import pdl_join, pdl_launch, pdl_options, pdl_wait


class Shape(NamedTuple):
    """How a product is cut up.

    Attributes:
        block_n: a program's outputs.
        warps: of a program.
        parts: of the inputs, whose products a thread adds up before those of its own inputs; a divisor of them.
        early: launch the next kernel's programs before waiting for the previous one, not behind that.
    """

    block_n: int
    warps: int
    early: bool
    parts: int = 1


INNER_SCALE = 2.0**-10
"""What is between an MLP's products is in float16 with FP8 weights, and so much smaller: 448 times it is a float16."""
_SHRUNK = tl.constexpr(2.0**-6)  # likewise what a norm gives
_INNER_SCALE = tl.constexpr(INNER_SCALE)


@triton.jit
def _wait(EARLY: tl.constexpr):
    if EARLY:
        pdl_launch()
        pdl_join()
    else:
        pdl_wait()


class Beside(NamedTuple):
    """A product of a row in programs of another kernel, which needs nothing of what that one does for itself.

    Attributes:
        x: (1, inputs), of FP8 weights float16 and times `INNER_SCALE`.
        weight: (outputs, inputs) of x's dtype or float8_e4m3fn; the stride of an output is free.
        out: (outputs,) float32: the products as they are, without scale or bias.
        block_n: a program's outputs.
        parts: as in `Shape`.
    """

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    block_n: int
    parts: int


@triton.jit
def _tiles(line, STEP: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """A tuple of PARTS tiles of weights, of STEP inputs each."""
    c = tl.arange(0, BLOCK)[None, :]
    tiles = ()
    for part in tl.static_range(PARTS):
        tile = tl.load(line + part * STEP + c, mask=c < STEP, other=0.0, eviction_policy="evict_first")
        tiles += (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit
def product_beside(
    program,
    x,
    weight,
    stride,
    out,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """BLOCK_N outputs of a `Beside`, all that such a program does."""
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK)
    w = _tiles(weight + n[:, None].to(tl.int64) * stride, STEP, BLOCK, PARTS)
    if PDL:
        pdl_wait()
    fp8: tl.constexpr = weight.dtype.element_ty.is_fp8()
    kind: tl.constexpr = tl.float16 if fp8 else tl.float32
    acc = tl.zeros((BLOCK_N, BLOCK), kind)
    for part in tl.static_range(PARTS):
        acc += w[part].to(kind) * tl.load(x + part * STEP + c, mask=c < STEP, other=0.0).to(kind)[None, :]
    total = tl.sum(acc.to(tl.float32), 1)
    tl.store(out + n, total / _INNER_SCALE if fp8 else total)


@triton.jit
def _norm_gemv_kernel(
    x,
    gain,
    shift,
    weight,
    scale,
    bias,
    plain,
    gelu_out,
    PLAIN: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_N outputs: the first PLAIN as they are, those behind them through GELU."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    c = tl.arange(0, BLOCK)
    real = c < STEP
    w = _tiles(weight + n[:, None].to(tl.int64) * (PARTS * STEP), STEP, BLOCK, PARTS)
    b = tl.load(bias + n).to(tl.float32)
    if SCALED:
        factor = tl.load(scale + n)
    if PDL:
        _wait(EARLY)
    inputs = ()
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        value = tl.load(x + part * STEP + c, mask=real, other=0.0).to(tl.float32)
        inputs += (value,)  # type: ignore[assignment]
        total += value
    if NORM:
        mean = tl.sum(total, 0) / (PARTS * STEP)
        squares = tl.zeros((BLOCK,), tl.float32)
        for part in tl.static_range(PARTS):
            centred = tl.where(real, inputs[part] - mean, 0.0)
            squares += centred * centred
        rstd = tl.rsqrt(tl.sum(squares, 0) / (PARTS * STEP) + EPS)
    kind: tl.constexpr = tl.float16 if SCALED else tl.float32
    products = tl.zeros((BLOCK_N, BLOCK), kind)
    for part in tl.static_range(PARTS):
        y = inputs[part]  # type: ignore[var-annotated]
        if NORM:
            g = tl.load(gain + part * STEP + c, mask=real, other=0.0).to(tl.float32)
            s = tl.load(shift + part * STEP + c, mask=real, other=0.0).to(tl.float32)
            y = (y - mean) * rstd * g + s
        y = y * _SHRUNK if SCALED else y.to(x.dtype.element_ty)
        products += w[part].to(kind) * y.to(kind)[None, :]
    acc = tl.sum(products.to(tl.float32), 1)
    if SCALED:
        acc *= factor / _SHRUNK
    acc += b
    if tl.program_id(0) * BLOCK_N < PLAIN:
        tl.store(plain + n, acc.to(plain.dtype.element_ty))
    else:
        through = gelu(acc.to(plain.dtype.element_ty).to(tl.float32))  # of what the product alone would have left
        through *= _INNER_SCALE if SCALED else 1.0
        tl.store(gelu_out + n - PLAIN, through.to(gelu_out.dtype.element_ty))


@triton.jit
def _add_gemv_kernel(
    x,
    into,
    weight,
    scale,
    bias,
    delta,
    INPUTS: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    BLOCK_SECOND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DELTA: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Add BLOCK_N outputs to `into`, of FIRST and SECOND inputs behind each other; with DELTA others are added up."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = weight + n[:, None].to(tl.int64) * INPUTS
    i = tl.arange(0, BLOCK_FIRST)
    w = tl.load(line + i[None, :], mask=(i < FIRST)[None, :], other=0.0, eviction_policy="evict_first")
    j = tl.arange(0, BLOCK_SECOND)
    if SECOND > 0:
        second = line + FIRST + j[None, :]
        w_second = tl.load(second, mask=(j < SECOND)[None, :], other=0.0, eviction_policy="evict_first")
    b = tl.load(bias + n).to(tl.float32)
    if SCALED:
        factor = tl.load(scale + n)
    if PDL:
        _wait(EARLY)
    a = tl.load(x + i, mask=i < FIRST, other=0.0)
    if SECOND > 0:
        a_second = tl.load(x + FIRST + j, mask=j < SECOND, other=0.0)
    before = tl.load(into + n).to(tl.float32)
    acc = tl.sum(w.to(tl.float32) * a.to(tl.float32)[None, :], 1)
    if SECOND > 0:
        acc += tl.sum(w_second.to(tl.float32) * a_second.to(tl.float32)[None, :], 1)
    if DELTA:
        acc += tl.load(delta + n)
    if SCALED:
        acc *= factor
    tl.store(into + n, (before + b + acc).to(into.dtype.element_ty))


def supports(outputs: int, *inputs: int) -> bool:
    """Whether the kernels take weights of so many outputs, and inputs behind each other."""
    return outputs % 32 == 0 and all(width % 16 == 0 for width in inputs)


def norm_gemv(
    x: torch.Tensor,
    norm: torch.nn.LayerNorm | None,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor,
    plain: torch.Tensor,
    gelu_out: torch.Tensor | None,
    shape: Shape,
    *,
    pdl: bool,
) -> None:
    """Write the products of a row's layer norm: the first to `plain`, those behind them through GELU to `gelu_out`.

    Args:
        x: (1, inputs).
        norm: over inputs; None to multiply x as it is.
        weight: (outputs, inputs), contiguous: of x's dtype, or float8_e4m3fn.
        scale: (outputs,) float32, of FP8 weights.
        bias: (outputs,).
        plain: (1, any multiple of `shape.block_n`).
        gelu_out: (1, the other outputs); with FP8 weights float16, and times `INNER_SCALE`.
        shape: how the product is cut up.
        pdl: begin before the previous kernel has ended, see `kernels.pdl`; it may have written x and read the outputs.
    """
    outputs, inputs = weight.shape
    assert plain.shape[1] % shape.block_n == 0
    assert inputs % shape.parts == 0
    _norm_gemv_kernel[(outputs // shape.block_n,)](
        x,
        x if norm is None else norm.weight,
        x if norm is None else norm.bias,
        weight,
        weight if scale is None else scale,
        bias,
        plain,
        plain if gelu_out is None else gelu_out,
        PLAIN=plain.shape[1],
        STEP=inputs // shape.parts,
        BLOCK=triton.next_power_of_2(inputs // shape.parts),
        PARTS=shape.parts,
        BLOCK_N=shape.block_n,
        NORM=norm is not None,
        EPS=0.0 if norm is None else norm.eps,
        SCALED=scale is not None,
        PDL=pdl,
        EARLY=shape.early,
        num_warps=shape.warps,
        **pdl_options(pdl),
    )


def add_gemv(
    x: torch.Tensor,
    into: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor,
    first: int,
    shape: Shape,
    *,
    delta: torch.Tensor | None = None,
    pdl: bool,
) -> None:
    """Add a row's products to `into`.

    Args:
        x: (1, inputs).
        into: (1, outputs).
        weight: as for `norm_gemv`.
        scale: as for `norm_gemv`.
        bias: as for `norm_gemv`.
        first: so many inputs are read for themselves, and then the others: the nearer to powers of two, the better.
        shape: how the product is cut up.
        delta: (outputs,) float32, the products with the inputs behind the first, where these are made elsewhere.
        pdl: as for `norm_gemv`.
    """
    outputs, inputs = weight.shape
    second = inputs - first if delta is None else 0
    _add_gemv_kernel[(outputs // shape.block_n,)](
        x,
        into,
        weight,
        weight if scale is None else scale,
        bias,
        x if delta is None else delta,
        INPUTS=inputs,
        FIRST=first,
        BLOCK_FIRST=triton.next_power_of_2(first),
        SECOND=second,
        BLOCK_SECOND=triton.next_power_of_2(max(1, second)),
        BLOCK_N=shape.block_n,
        DELTA=delta is not None,
        SCALED=scale is not None,
        PDL=pdl,
        EARLY=shape.early,
        num_warps=shape.warps,
        **pdl_options(pdl),
    )
