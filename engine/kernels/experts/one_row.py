"""A mixture of experts for one row, without tensor cores: there are no sixteen rows to fill.

Each program finds its experts from the router's logits, which takes it less than a kernel that did it for all. fc2's
have the row's result of attention as well, add everything up, and leave the block's residual.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.activation import exact_gelu
from saccade.engine.kernels.pdl import pdl_join, pdl_launch, pdl_options


class Shape(NamedTuple):
    """Outputs of a program of fc1 (of each half) and its warps, and of fc2."""

    fc1_n: int
    fc1_warps: int
    fc2_n: int
    fc2_warps: int


@triton.jit
def _best(logits, EXPERTS: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr):
    """The TOP best experts of a row in BITS each, the best in the lowest; of as good ones the first."""
    e = tl.arange(0, EXPERTS)
    # Not through L1: the kernel begins before the previous one has ended, see `kernels.pdl`.
    own = tl.load(logits + e[:, None], cache_modifier=".cg")
    other = tl.load(logits + e[None, :], cache_modifier=".cg")
    above = (other > own) | ((other == own) & (e[None, :] < e[:, None]))
    rank = tl.sum(above.to(tl.int32), 1)
    # One sum for all, whose result any thread can take apart.
    return tl.sum(tl.where(rank < TOP, e.to(tl.int64) << (rank * BITS).to(tl.int64), 0), 0)


@triton.jit
def _fc1_kernel(
    logits,
    x,
    weight,
    scale,
    inner,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N values of gelu(h) · (g + 1) of the expert of a rank."""
    if PDL:
        pdl_launch()
    slot = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, DIM)
    expert = (_best(logits, EXPERTS, TOP, BITS) >> (slot * BITS)) & (EXPERTS - 1)
    at = weight + (expert * (2 * INNER) + n[:, None]) * DIM + k[None, :]
    h_w = tl.load(at)
    g_w = tl.load(at + INNER * DIM)
    if SCALED:
        h_scale = tl.load(scale + expert * (2 * INNER) + n)
        g_scale = tl.load(scale + expert * (2 * INNER) + INNER + n)
    a = tl.load(x + k, cache_modifier=".cg").to(tl.float32)[None, :]
    h = tl.sum(h_w.to(tl.float32) * a, 1)
    g = tl.sum(g_w.to(tl.float32) * a, 1)
    if SCALED:
        h *= h_scale
        g *= g_scale
    value = exact_gelu(h) * (g + 1.0)
    tl.store(inner + slot * INNER + n, value.to(inner.dtype.element_ty))
    # One program is enough to have this kernel end behind the previous one; others make room for the next.
    if PDL and tl.program_id(0) + slot == 0:
        pdl_join()


@triton.jit
def _fc2_kernel(
    logits,
    inner,
    weight,
    scale,
    seen,
    out_weight,
    out_scale,
    bias,
    into,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add BLOCK_N outputs to `into`: of all experts, times their weights, and of attention."""
    if PDL:
        pdl_launch()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, DIM)
    out_w = tl.load(out_weight + n[:, None].to(tl.int64) * DIM + k[None, :])
    b = tl.load(bias + n).to(tl.float32)
    slot = tl.arange(0, TOP)
    expert = ((_best(logits, EXPERTS, TOP, BITS) >> (slot * BITS).to(tl.int64)) & (EXPERTS - 1)).to(tl.int32)
    line = expert[:, None] * DIM + n[None, :]
    j = tl.arange(0, INNER)
    w = tl.load(weight + line[:, :, None].to(tl.int64) * INNER + j[None, None, :])
    logit = tl.load(logits + expert, cache_modifier=".cg")
    share = tl.exp(logit - tl.max(logit, 0))
    factor = (share / tl.sum(share, 0))[:, None]
    if SCALED:
        factor *= tl.load(scale + line)
        out_factor = tl.load(out_scale + n)
    if PDL:
        pdl_join()
    v = tl.load(seen + k).to(tl.float32)
    before = tl.load(into + n).to(tl.float32)
    a = tl.load(inner + slot[:, None] * INNER + j[None, :]).to(tl.float32)
    acc = tl.sum(out_w.to(tl.float32) * v[None, :], 1)
    if SCALED:
        acc *= out_factor
    each = tl.sum(w.to(tl.float32) * a[:, None, :], 2)
    acc += tl.sum(each * factor, 0)
    tl.store(into + n, (before + b + acc).to(into.dtype.element_ty))


def supports(dim: int, inner: int, experts: int, top: int) -> bool:
    """Whether the kernels take experts of these widths, so many of them."""
    powers = all(size & (size - 1) == 0 and size > 1 for size in (dim, inner, experts, top))
    return powers and min(dim, inner) >= 128 and top * _bits(experts) < 64


def _bits(experts: int) -> int:
    return (experts - 1).bit_length()


def expert_inner(
    logits: torch.Tensor,
    x: torch.Tensor,
    fc1: torch.Tensor,
    scale: torch.Tensor | None,
    inner: torch.Tensor,
    shape: Shape,
    *,
    pdl: bool,
) -> None:
    """Write gelu(h) · (g + 1) of a row's best experts.

    Args:
        logits: float32 (1, experts).
        x: (1, dim).
        fc1: (experts, 2 · width, dim), of x's dtype or float8_e4m3fn; h's half first.
        scale: float32 (experts, 2 · width), of FP8 weights.
        inner: (top, width) of x's dtype, by rank.
        shape: how the product is cut up.
        pdl: run beside the previous kernel, see `kernels.pdl`; that one must wait for those which wrote logits and x
            before it lets this one be launched, and must not touch `inner`. The end is the end of both.
    """
    (top, width), (experts, _, dim) = inner.shape, fc1.shape
    _fc1_kernel[(width // shape.fc1_n, top)](
        logits,
        x,
        fc1,
        fc1 if scale is None else scale,
        inner,
        DIM=dim,
        INNER=width,
        EXPERTS=experts,
        TOP=top,
        BITS=_bits(experts),
        BLOCK_N=shape.fc1_n,
        SCALED=scale is not None,
        PDL=pdl,
        num_warps=shape.fc1_warps,
        **pdl_options(pdl),
    )


def add_experts(
    logits: torch.Tensor,
    inner: torch.Tensor,
    fc2: torch.Tensor,
    scale: torch.Tensor | None,
    seen: torch.Tensor,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    bias: torch.Tensor,
    into: torch.Tensor,
    shape: Shape,
    *,
    pdl: bool,
) -> None:
    """Add to a row's residual what its experts give, and what attention does.

    Args:
        logits: float32 (1, experts).
        inner: (top, width), as `expert_inner` writes it.
        fc2: (experts, dim, width), of inner's dtype or float8_e4m3fn.
        scale: float32 (experts, dim), of FP8 weights.
        seen: (1, at least dim), what attention saw.
        out: (dim, dim), weights of attention's product, likewise.
        out_scale: float32 (dim,), of FP8 weights.
        bias: (dim,), of that product.
        into: (1, dim).
        shape: how the product is cut up.
        pdl: begin before the previous kernel has ended, see `kernels.pdl`; it may have written anything but logits.
    """
    (top, width), (experts, dim, _) = inner.shape, fc2.shape
    _fc2_kernel[(dim // shape.fc2_n,)](
        logits,
        inner,
        fc2,
        fc2 if scale is None else scale,
        seen,
        out,
        out if out_scale is None else out_scale,
        bias,
        into,
        DIM=dim,
        INNER=width,
        EXPERTS=experts,
        TOP=top,
        BITS=_bits(experts),
        BLOCK_N=shape.fc2_n,
        SCALED=scale is not None,
        PDL=pdl,
        num_warps=shape.fc2_warps,
        **pdl_options(pdl),
    )
