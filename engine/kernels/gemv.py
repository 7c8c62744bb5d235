"""GEMV kernels for a single row. They are fused with a layer norm before the product, or a residual addition after it.

Each program loads its weights before it waits for the previous kernel, so that loading overlaps with the previous
kernel. The kernels do not use tensor cores, which would need the row padded to 16 rows.

Weights are marked for early eviction from the L2 cache, because they are read only once per step. This saves 2 % of a
step with FP8 weights on an H200. Prefetching the weights of a later kernel into L2 would make a step 3 to 12 % slower.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.common import gelu, pdl_join, pdl_launch, pdl_options, pdl_wait


class Shape(NamedTuple):
    """Tile sizes of a GEMV kernel.

    Attributes:
        block_n: number of outputs per program.
        warps: number of warps per program.
        early: whether to allow the launch of the next kernel before waiting for the previous kernel.
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
    """A GEMV that additional programs (thread blocks) of another kernel compute.

    Attributes:
        x: (1, inputs).
        weight: (outputs, inputs), in the dtype of x or float8_e4m3fn. Rows may have any stride.
        out: (outputs,) float32 products without scale and bias.
        block_n: number of outputs per program.
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
    """Compute BLOCK_N outputs of a `Beside` GEMV in a program of another kernel."""
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
    """Kernel of `norm_gemv`: compute BLOCK_N outputs."""
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
        through = gelu(
            acc.to(plain.dtype.element_ty).to(tl.float32)
        )  # GELU reads the product after rounding, so that results equal those of the unfused kernels
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
    """Kernel of `add_gemv`: compute BLOCK_N outputs and add them to `into`."""
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
    """Return whether the GEMV kernels support this number of outputs and these numbers of inputs."""
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
    """Multiply a layer-normalized row by a weight matrix (GEMV).

    The first n outputs are written to `plain`. The others are written to `gelu_out` after GELU.

    Args:
        x: (1, inputs).
        norm: layer norm, or None to multiply x itself.
        weight: (outputs, inputs), contiguous, in the dtype of x or float8_e4m3fn.
        scale: (outputs,) float32 scales of FP8 weights, else None.
        bias: (outputs,).
        plain: (1, n) output. n is a multiple of `shape.block_n`.
        gelu_out: (1, outputs - n) output, or None if n equals `outputs`.
        shape: tile sizes.
        pdl: whether to use programmatic dependent launch, see `kernels.common`. The previous kernel may write x and
            read the outputs.
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
    """Add the product of a row and a weight matrix (GEMV) to `into`, in place.

    The input vector is split into two blocks. Their sizes should be powers of two, or slightly less.

    Args:
        x: (1, inputs).
        into: (1, outputs).
        weight: (outputs, inputs), contiguous, in the dtype of x or float8_e4m3fn.
        scale: (outputs,) float32 scales of FP8 weights, else None.
        bias: (outputs,).
        first: number of inputs in the first block.
        shape: tile sizes.
        delta: (outputs,) float32 products of the second block if another kernel computed them, else None.
        pdl: whether to use programmatic dependent launch, see `norm_gemv`.
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
