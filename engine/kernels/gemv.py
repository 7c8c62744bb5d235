"""Products of one row with many weights, layer norm before or residual addition behind them included.

A program's weights are all loaded before it waits for the previous kernel, so that they come from memory while that one
still runs; without tensor cores there are no sixteen rows to fill, and no parts of a split product to add up.

In the L2 cache they make room for others first, as nobody reads them before the next step: 2 % of a step of FP8 weights
on an H200. To fetch a later kernel's weights there, line by line, costs more than it saves: 3 to 12 % of a step.
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
        early: launch the next kernel's programs before waiting for the previous one, not behind that.
    """

    block_n: int
    warps: int
    early: bool


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
        x: (1, inputs).
        weight: (outputs, inputs) of x's dtype or float8_e4m3fn; the stride of an output is free.
        out: (outputs,) float32: the products as they are, without scale or bias.
        block_n: a program's outputs.
    """

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    block_n: int


@triton.jit
def product_beside(
    part,
    x,
    weight,
    stride,
    out,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """BLOCK_N outputs of a `Beside`, all that such a program does."""
    n = part * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    real = k < K
    line = weight + n[:, None].to(tl.int64) * stride
    w = tl.load(line + k[None, :], mask=real[None, :], other=0.0, eviction_policy="evict_first")
    if PDL:
        pdl_wait()
    a = tl.load(x + k, mask=real, other=0.0).to(tl.float32)
    tl.store(out + n, tl.sum(w.to(tl.float32) * a[None, :], 1))


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
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_N outputs: the first PLAIN as they are, those behind them through GELU."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    real = k < K
    line = weight + n[:, None].to(tl.int64) * K
    w = tl.load(line + k[None, :], mask=real[None, :], other=0.0, eviction_policy="evict_first")
    if NORM:
        g = tl.load(gain + k, mask=real, other=0.0).to(tl.float32)
        s = tl.load(shift + k, mask=real, other=0.0).to(tl.float32)
    b = tl.load(bias + n).to(tl.float32)
    if SCALED:
        factor = tl.load(scale + n)
    if PDL:
        _wait(EARLY)
    y = tl.load(x + k, mask=real, other=0.0).to(tl.float32)
    if NORM:
        centred = tl.where(real, y - tl.sum(y, 0) / K, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, 0) / K + EPS)
        y = (centred * rstd * g + s).to(x.dtype.element_ty).to(tl.float32)
    acc = tl.sum(w.to(tl.float32) * y[None, :], 1)
    if SCALED:
        acc *= factor
    acc += b
    if tl.program_id(0) * BLOCK_N < PLAIN:
        tl.store(plain + n, acc.to(plain.dtype.element_ty))
    else:
        through = gelu(acc.to(plain.dtype.element_ty).to(tl.float32))  # of what the product alone would have left
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
        gelu_out: (1, the other outputs).
        shape: how the product is cut up.
        pdl: begin before the previous kernel has ended, see `kernels.pdl`; it may have written x and read the outputs.
    """
    outputs, inputs = weight.shape
    assert plain.shape[1] % shape.block_n == 0
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
        K=inputs,
        BLOCK_K=triton.next_power_of_2(inputs),
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
