"""A mixture of experts for one row, without tensor cores: there are no sixteen rows to fill.

Which experts these are, the kernel with the router's logits has written (`row_into`). Programs behind fc1's multiply
what attention saw; those of fc2 add everything up, and leave the block's residual.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.activation import exact_gelu
from saccade.engine.kernels.pdl import pdl_join, pdl_launch, pdl_options
from saccade.engine.kernels.row_products import GROW, PARTS, shrunk, sum_products, tiles


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
    seen,
    out_weight,
    out_scale,
    bias,
    delta,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    TOP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N values of gelu(h) · (g + 1) of the expert of a rank; or, behind all ranks', what attention adds."""
    program = tl.program_id(0)
    slot = program // (INNER // BLOCK_N)
    n = program % (INNER // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, DIM // PARTS)
    if slot < TOP:
        # Not for the previous kernel, but for the router's programs of the one before, all of which are there by now.
        packed = tl.atomic_add(ready, 0, sem="acquire")
        while packed == 0:
            packed = tl.atomic_add(ready, 0, sem="acquire")
        if PDL:
            pdl_launch()
        expert = (packed >> (slot * BITS)) & ((1 << BITS) - 1)
        at = weight + (expert * (2 * INNER) + n[:, None]) * DIM + k[None, :]
        h_w = tiles(at, DIM // PARTS)
        g_w = tiles(at + INNER * DIM, DIM // PARTS)
        if SCALED:
            h_scale = tl.load(scale + expert * (2 * INNER) + n)
            g_scale = tl.load(scale + expert * (2 * INNER) + INNER + n)
        a = tiles(x + k, DIM // PARTS)
        h = tl.sum(sum_products(h_w, a, SCALED), 1)
        g = tl.sum(sum_products(g_w, a, SCALED), 1)
        if SCALED:
            h *= h_scale * GROW
            g *= g_scale * GROW
        value = exact_gelu(h) * (g + 1.0)
        tl.store(inner + slot * INNER + n, shrunk(value) if SCALED else value.to(inner.dtype.element_ty))
    else:
        if PDL:
            pdl_launch()
        o = (program - TOP * (INNER // BLOCK_N)) * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
        w = tiles(out_weight + o[:, None] * DIM + k[None, :], DIM // PARTS)
        b = tl.load(bias + o).to(tl.float32)
        if SCALED:
            factor = tl.load(out_scale + o) * GROW
        # These programs have this kernel end behind attention's; the others, which do not wait, make room for them.
        if PDL:
            pdl_join()
        v = ()
        for part in tl.static_range(PARTS):
            seen_part = tl.load(seen + part * (DIM // PARTS) + k)
            v += (shrunk(seen_part) if SCALED else seen_part,)  # type: ignore[assignment]
        acc = tl.sum(sum_products(w, v, SCALED), 1)
        if SCALED:
            acc *= factor
        tl.store(delta + o, acc + b)


@triton.jit
def _fc2_kernel(
    logits,
    ready,
    packed,
    inner,
    weight,
    scale,
    delta,
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
    slot = tl.arange(0, TOP)
    j = tl.arange(0, INNER // PARTS)
    expert = ((tl.load(packed) >> (slot * BITS).to(tl.int64)) & ((1 << BITS) - 1)).to(tl.int32)
    line = expert[None, :] * DIM + n[:, None]
    w = tiles(weight + line[:, :, None].to(tl.int64) * INNER + j[None, None, :], INNER // PARTS)
    logit = tl.load(logits + expert)
    share = tl.exp(logit - tl.max(logit, 0))
    factor = (share / tl.sum(share, 0))[None, :]
    if SCALED:
        factor *= tl.load(scale + line) * GROW
    if PDL:
        pdl_join()
    if tl.program_id(0) == 0:
        tl.store(ready, 0)
    a = tiles(inner + slot[:, None] * INNER + j[None, :], INNER // PARTS)
    before = tl.load(into + n).to(tl.float32) + tl.load(delta + n)
    acc = tl.sum(tl.sum(sum_products(w, a, SCALED), 2) * factor, 1)
    tl.store(into + n, (before + acc).to(into.dtype.element_ty))


def supports(dim: int, inner: int, experts: int, top: int) -> bool:
    """Whether the kernels take experts of these widths, so many of them."""
    powers = all(size & (size - 1) == 0 and size > 1 for size in (dim, inner, experts, top))
    return powers and min(dim, inner) >= 128 and top * (experts - 1).bit_length() < 64


def add_experts(
    chosen: Chosen,
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    inner: torch.Tensor,
    seen: torch.Tensor,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    bias: torch.Tensor,
    delta: torch.Tensor,
    into: torch.Tensor,
    shape: Shape,
    *,
    pdl: bool,
) -> None:
    """Add to a row's residual what its experts give, and what attention does.

    Args:
        chosen: which the experts are.
        fc1: (experts, 2 · width, dim), of the row's dtype or float8_e4m3fn; h's half first.
        fc2: (experts, dim, width), likewise.
        scales: float32 (experts, 2 · width) and (experts, dim), of FP8 weights.
        inner: (top, width), scratch: of `chosen.normed`'s dtype.
        seen: (1, at least dim), what attention saw; float16 if weights are in FP8.
        out: (dim, dim), weights of attention's product, as the experts'.
        out_scale: float32 (dim,), of FP8 weights.
        bias: (dim,), of that product.
        delta: float32 (dim,), scratch.
        into: (1, dim).
        shape: how the products are cut up.
        pdl: run fc1 beside the previous kernel, see `kernels.pdl`, from when `chosen` is there: its kernel must have
            been launched whole before.
    """
    (top, width), dim = inner.shape, fc1.shape[2]
    shared = {
        "DIM": dim,
        "INNER": width,
        "TOP": top,
        "BITS": chosen.bits,
        "SCALED": scales is not None,
        "PDL": pdl,
    }
    _fc1_kernel[(top * width // shape.fc1_n + dim // (2 * shape.fc1_n),)](
        chosen.ready,
        chosen.normed,
        fc1,
        fc1 if scales is None else scales[0],
        inner,
        seen,
        out,
        out if out_scale is None else out_scale,
        bias,
        delta,
        BLOCK_N=shape.fc1_n,
        num_warps=shape.fc1_warps,
        **shared,
        **pdl_options(pdl),
    )
    _fc2_kernel[(dim // shape.fc2_n,)](
        chosen.logits,
        chosen.ready,
        chosen.packed,
        inner,
        fc2,
        fc2 if scales is None else scales[1],
        delta,
        into,
        BLOCK_N=shape.fc2_n,
        num_warps=shape.fc2_warps,
        **shared,
        **pdl_options(pdl),
    )
