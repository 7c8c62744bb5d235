"""A mixture of experts for one row, without tensor cores: there are no sixteen rows to fill.

A program's weights are all on their way at once, those of the second product while the first still runs; and that one
adds the experts' results up, as each of its programs has all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.activation import exact_gelu
from saccade.engine.kernels.experts.router import Routes
from saccade.engine.kernels.pdl import pdl_launch, pdl_options, pdl_wait


class Shape(NamedTuple):
    """Outputs of a program of fc1 (of each half) and its warps, and of fc2."""

    fc1_n: int
    fc1_warps: int
    fc2_n: int
    fc2_warps: int


@triton.jit
def _fc1_kernel(
    table,
    x,
    weight,
    scale,
    inner,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N values of gelu(h) · (g + 1) of one expert."""
    if PDL:
        pdl_launch()
    slot = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, DIM)
    expert = tl.load(table + slot * 3)
    at = weight + (expert.to(tl.int64) * (2 * INNER) + n[:, None]) * DIM + k[None, :]
    h_w = tl.load(at)
    g_w = tl.load(at + INNER * DIM)
    a = tl.load(x + k).to(tl.float32)[None, :]
    h = tl.sum(h_w.to(tl.float32) * a, 1)
    g = tl.sum(g_w.to(tl.float32) * a, 1)
    if SCALED:
        h *= tl.load(scale + expert * (2 * INNER) + n)
        g *= tl.load(scale + expert * (2 * INNER) + INNER + n)
    value = exact_gelu(h) * (g + 1.0)
    tl.store(inner + slot * INNER + n, value.to(inner.dtype.element_ty))


@triton.jit
def _fc2_kernel(
    table,
    shares,
    inner,
    weight,
    scale,
    out,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N outputs of all experts, times their weights."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.arange(0, TOP)
    j = tl.arange(0, INNER)
    # Not through L1: the kernel may have begun before the previous one has ended, see `kernels.pdl`.
    expert = tl.load(table + slot * 3, cache_modifier=".cg")
    share = tl.load(shares + slot, cache_modifier=".cg")
    line = expert[:, None] * DIM + n[None, :]
    w = tl.load(weight + line[:, :, None].to(tl.int64) * INNER + j[None, None, :])
    share = share[:, None] * tl.load(scale + line) if SCALED else share[:, None]
    if PDL:
        pdl_wait()
    a = tl.load(inner + slot[:, None] * INNER + j[None, :]).to(tl.float32)
    each = tl.sum(w.to(tl.float32) * a[:, None, :], 2)
    tl.store(out + n, tl.sum(each * share, 0))


def supports(dim: int, inner: int, top: int) -> bool:
    """Whether the kernels take experts of these widths, so many of them."""
    return all(size & (size - 1) == 0 and size > 1 for size in (dim, inner, top)) and min(dim, inner) >= 128


def one_row(
    routes: Routes,
    top: int,
    x: torch.Tensor,
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    inner: torch.Tensor,
    out: torch.Tensor,
    shape: Shape,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    pdl: bool = False,
) -> None:
    """Put a row through the experts that a router has chosen.

    Args:
        routes: which these are.
        top: how many.
        x: (1, dim).
        fc1: (experts, 2 · width, dim), of x's dtype or float8_e4m3fn; h's half first.
        fc2: (experts, dim, width), likewise.
        inner: (at least top, width), scratch of x's dtype.
        out: float32 (1, dim), the sum of the experts' results, times their weights.
        shape: how the products are cut up.
        scales: float32 (experts, 2 · width) and (experts, dim), of FP8 weights.
        pdl: let fc2 begin before fc1 has ended, see `kernels.pdl`. fc1 itself is the first of a stream.
    """
    _, dim, width = fc2.shape
    _fc1_kernel[(width // shape.fc1_n, top)](
        routes.table,
        x,
        fc1,
        fc1 if scales is None else scales[0],
        inner,
        DIM=dim,
        INNER=width,
        BLOCK_N=shape.fc1_n,
        SCALED=scales is not None,
        PDL=pdl,
        num_warps=shape.fc1_warps,
    )
    _fc2_kernel[(dim // shape.fc2_n,)](
        routes.table,
        routes.shares,
        inner,
        fc2,
        fc2 if scales is None else scales[1],
        out,
        DIM=dim,
        INNER=width,
        TOP=top,
        BLOCK_N=shape.fc2_n,
        SCALED=scales is not None,
        PDL=pdl,
        num_warps=shape.fc2_warps,
        **pdl_options(pdl),
    )
