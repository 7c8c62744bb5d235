"""A mixture of experts for one row, without tensor cores: there are no sixteen rows to fill.

Which experts these are, the kernel with the router's logits has written (`row_into`). Programs of fc2 have the row's
result of attention as well, add everything up, and leave the block's residual.
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


class Chosen:
    """A layer's best experts for a row, and how much of each.

    Each layer has its own, on lines of their own: hundreds of programs read the same bytes, which takes 100 µs unless
    L1 caches hold them, and a kernel that begins before the previous one has ended may find older bytes there, unless
    what it reads was last read in another step.

    Args:
        logits: float32 (1, experts), of the layer's own.
        top: how many are best.
        dim: of the row.
        dtype: of the row.

    Attributes:
        logits: the router's.
        ready: (1,) int64, the same as `packed` from when all is there until fc2 has run; else 0.
        packed: (1,) int64, the experts' numbers in `bits` each, the best in the lowest.
        normed: (1, dim), what they read.
        arrived: programs that have written logits; 0 between launches.
        top: as given.
        bits: of an expert's number.
    """

    __slots__ = ("arrived", "bits", "logits", "normed", "packed", "ready", "top")

    def __init__(self, logits: torch.Tensor, top: int, dim: int, dtype: torch.dtype) -> None:
        # Each tensor is an allocation of its own, which begins on a line of its own.
        self.logits, self.top, self.bits = logits, top, (logits.shape[1] - 1).bit_length()
        self.packed = torch.zeros(1, dtype=torch.int64, device=logits.device)
        self.ready = torch.zeros_like(self.packed)
        self.normed = torch.zeros(1, dim, dtype=dtype, device=logits.device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=logits.device)


@triton.jit
def _fc1_kernel(
    ready,
    x,
    weight,
    scale,
    inner,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N values of gelu(h) · (g + 1) of the expert of a rank."""
    slot = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, DIM)
    # Not for the previous kernel, but for the router's programs of the one before, all of which are there by now.
    packed = tl.atomic_add(ready, 0, sem="acquire")
    while packed == 0:
        packed = tl.atomic_add(ready, 0, sem="acquire")
    if PDL:
        pdl_launch()
    expert = (packed >> (slot * BITS)) & ((1 << BITS) - 1)
    at = weight + (expert * (2 * INNER) + n[:, None]) * DIM + k[None, :]
    h_w = tl.load(at)
    g_w = tl.load(at + INNER * DIM)
    if SCALED:
        h_scale = tl.load(scale + expert * (2 * INNER) + n)
        g_scale = tl.load(scale + expert * (2 * INNER) + INNER + n)
    a = tl.load(x + k).to(tl.float32)[None, :]
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
    ready,
    packed,
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
    expert = ((tl.load(packed) >> (slot * BITS).to(tl.int64)) & ((1 << BITS) - 1)).to(tl.int32)
    line = expert[:, None] * DIM + n[None, :]
    j = tl.arange(0, INNER)
    w = tl.load(weight + line[:, :, None].to(tl.int64) * INNER + j[None, None, :])
    logit = tl.load(logits + expert)
    share = tl.exp(logit - tl.max(logit, 0))
    factor = (share / tl.sum(share, 0))[:, None]
    if SCALED:
        factor *= tl.load(scale + line)
        out_factor = tl.load(out_scale + n)
    if PDL:
        pdl_join()
    if tl.program_id(0) == 0:
        tl.store(ready, 0)
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
    return powers and min(dim, inner) >= 128 and top * (experts - 1).bit_length() < 64


def expert_inner(
    chosen: Chosen,
    fc1: torch.Tensor,
    scale: torch.Tensor | None,
    inner: torch.Tensor,
    shape: Shape,
    *,
    pdl: bool,
) -> None:
    """Write gelu(h) · (g + 1) of a row's best experts.

    Args:
        chosen: which these are.
        fc1: (experts, 2 · width, dim), of the row's dtype or float8_e4m3fn; h's half first.
        scale: float32 (experts, 2 · width), of FP8 weights.
        inner: (top, width) of the row's dtype, by rank.
        shape: how the product is cut up.
        pdl: run beside the previous kernel, see `kernels.pdl`, and begin as soon as `chosen` is there: its kernel must
            have been launched whole before. The end is the end of both.
    """
    (top, width), dim = inner.shape, fc1.shape[2]
    _fc1_kernel[(width // shape.fc1_n, top)](
        chosen.ready,
        chosen.normed,
        fc1,
        fc1 if scale is None else scale,
        inner,
        DIM=dim,
        INNER=width,
        BITS=chosen.bits,
        BLOCK_N=shape.fc1_n,
        SCALED=scale is not None,
        PDL=pdl,
        num_warps=shape.fc1_warps,
        **pdl_options(pdl),
    )


def add_experts(
    chosen: Chosen,
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
        chosen: which the experts are.
        inner: (top, width), as `expert_inner` writes it.
        fc2: (experts, dim, width), of inner's dtype or float8_e4m3fn.
        scale: float32 (experts, dim), of FP8 weights.
        seen: (1, at least dim), what attention saw.
        out: (dim, dim), weights of attention's product, likewise.
        out_scale: float32 (dim,), of FP8 weights.
        bias: (dim,), of that product.
        into: (1, dim).
        shape: how the product is cut up.
        pdl: begin before the previous kernel has ended, see `kernels.pdl`; it may have written anything but `chosen`.
    """
    (top, width), dim = inner.shape, fc2.shape[1]
    _fc2_kernel[(dim // shape.fc2_n,)](
        chosen.logits,
        chosen.ready,
        chosen.packed,
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
        TOP=top,
        BITS=chosen.bits,
        BLOCK_N=shape.fc2_n,
        SCALED=scale is not None,
        PDL=pdl,
        num_warps=shape.fc2_warps,
        **pdl_options(pdl),
    )
