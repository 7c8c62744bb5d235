"""A mixture of experts for few rows: reads the experts that the rows use, each once, and none of the others.

Which rows an expert has is worked out by each program from the router's logits, in registers: nothing is sorted in
memory and the host is never asked, so that a graph can hold it. The results of a row's experts are left side by side
for the next norm to add, always in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.activation import exact_gelu
from saccade.engine.kernels.pdl import L2_LINE_BYTES, pdl_join, pdl_launch, pdl_options, pdl_wait, prefetch_l2

MAX_ROWS = 64
_BLOCK_M = 16  # rows at a time, the least of a matrix product; more of an expert's are rare, and find its weights in L2
_ROWS = (1, 4, 16, 32, MAX_ROWS)  # for which kernels are compiled
_LARGEST_HALF = 65280.0  # that is a bfloat16 and a float16


class _Shape(NamedTuple):
    """Outputs of a program (of each half of fc1), inputs at a time, how many of those are under way, its warps."""

    block_n: int
    block_k: int
    stages: int
    warps: int


# By trial on an H200.
_FC1, _FC2 = _Shape(64, 128, 3, 4), _Shape(128, 64, 4, 4)
_FC1_FP8, _FC2_FP8 = _Shape(32, 128, 4, 2), _Shape(128, 128, 3, 4)
_FC1_FP8_FEW, _FC2_FP8_FEW = _Shape(32, 256, 3, 2), _Shape(64, 256, 3, 4)
_FEW = 2  # rows up to which experts have one row each, as a rule


@triton.jit
def _routed(logits, rows, slot, EXPERTS: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr):
    """The slot-th of the experts in use, -1 if there are fewer; each row's rank of it, -1 for none, and its weight."""
    r = tl.arange(0, ROWS)
    e = tl.arange(0, EXPERTS)
    at = logits + r[:, None] * EXPERTS + e[None, :]
    # Not through L1: the kernel may have begun before the previous one has ended, see `kernels.pdl`.
    logit = tl.load(at, mask=(r < rows)[:, None], other=0.0, cache_modifier=".cg")
    best = tl.max(logit, 1)
    rank = tl.full((ROWS, EXPERTS), -1, tl.int32)
    left = logit
    total = tl.zeros((ROWS,), tl.float32)
    for i in tl.static_range(TOP):
        total += tl.exp(tl.max(left, 1) - best)
        first = e[None, :] == tl.argmax(left, 1)[:, None]
        rank = tl.where(first, i, rank)
        left = tl.where(first, -float("inf"), left)
    rank = tl.where((r < rows)[:, None], rank, -1)
    used = (tl.max(rank, 0) >= 0).to(tl.int32)
    mine = (used > 0) & (tl.cumsum(used, 0) == slot + 1)
    expert = tl.sum(tl.where(mine, e + 1, 0), 0) - 1
    own = tl.sum(tl.where(mine[None, :], rank + 1, 0), 1) - 1
    weight = tl.sum(tl.where(mine[None, :], tl.exp(logit - best[:, None]), 0.0), 1) / total
    return expert, own, weight


@triton.jit
def _packed(rank, weight, first, TOP: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of the rows that have a rank, BLOCK_M from `first` on: row · TOP + rank, weight, and whether it is there."""
    has = (rank >= 0).to(tl.int32)
    place = tl.cumsum(has, 0) - has - first
    m = tl.arange(0, BLOCK_M)
    same = (place[None, :] == m[:, None]) & (has > 0)[None, :]
    pair = tl.sum(tl.where(same, (tl.arange(0, ROWS) * TOP + rank)[None, :], 0), 1)
    share = tl.sum(tl.where(same, weight[None, :], 0.0), 1)
    return pair, share, m < tl.sum(has, 0) - first


@triton.jit(do_not_specialize=["rows"])
def _fc1_kernel(
    logits,
    x,
    x_stride,
    weight,
    scale,
    inner,
    rows,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_N values of gelu(h) · (g + 1) of one expert, for all its rows.

    Reads only what kernels before the previous one wrote, and so is done in the shadow of that one.
    """
    if PDL:
        pdl_launch()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert, rank, share = _routed(logits, rows, tl.program_id(1), EXPERTS, TOP, ROWS)
    if expert >= 0:
        kind: tl.constexpr = tl.float16 if SCALED else x.dtype.element_ty
        h_at = weight + (expert.to(tl.int64) * (2 * INNER) + n[:, None]) * DIM
        g_at = h_at + INNER * DIM
        count = tl.sum((rank >= 0).to(tl.int32), 0)
        first = 0
        while first < count:
            pair, _, real = _packed(rank, share, first, TOP, ROWS, BLOCK_M)
            x_at = x + (pair // TOP)[None, :].to(tl.int64) * x_stride
            h = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            g = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for start in tl.range(0, DIM, BLOCK_K, num_stages=STAGES):
                k = start + tl.arange(0, BLOCK_K)
                h_w = tl.load(h_at + k[None, :])
                g_w = tl.load(g_at + k[None, :])
                a = tl.load(x_at + k[:, None], mask=real[None, :], other=0.0, cache_modifier=".cg").to(kind)
                h = tl.dot(h_w.to(kind), a, h)
                g = tl.dot(g_w.to(kind), a, g)
            if SCALED:
                h *= tl.load(scale + expert * (2 * INNER) + n)[:, None]
                g *= tl.load(scale + expert * (2 * INNER) + INNER + n)[:, None]
            value = exact_gelu(h) * (g + 1.0)
            if SCALED:
                value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
            out = inner + pair[None, :].to(tl.int64) * INNER + n[:, None]
            tl.store(out, value.to(inner.dtype.element_ty), mask=real[None, :])
            first += BLOCK_M
    if PDL:
        pdl_join()


@triton.jit(do_not_specialize=["rows"])
def _fc2_kernel(
    logits,
    inner,
    weight,
    scale,
    parts,
    parts_stride,
    rows,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
    LINES: tl.constexpr,
    PER_LINE: tl.constexpr,
):
    """BLOCK_N outputs of one expert for all its rows, times its weight."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert, rank, share = _routed(logits, rows, tl.program_id(1), EXPERTS, TOP, ROWS)
    w_at = weight + (tl.maximum(expert, 0).to(tl.int64) * DIM + n[:, None]) * INNER
    if PDL:
        if expert >= 0:
            prefetch_l2(w_at + tl.arange(0, LINES)[None, :] * PER_LINE)
        pdl_wait()
    if expert >= 0:
        kind: tl.constexpr = tl.float16 if SCALED else inner.dtype.element_ty
        count = tl.sum((rank >= 0).to(tl.int32), 0)
        first = 0
        while first < count:
            pair, share_m, real = _packed(rank, share, first, TOP, ROWS, BLOCK_M)
            x_at = inner + pair[None, :].to(tl.int64) * INNER
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for start in tl.range(0, INNER, BLOCK_K, num_stages=STAGES):
                k = start + tl.arange(0, BLOCK_K)
                w = tl.load(w_at + k[None, :])
                a = tl.load(x_at + k[:, None], mask=real[None, :], other=0.0)
                acc = tl.dot(w.to(kind), a.to(kind), acc)
            if SCALED:
                acc *= tl.load(scale + expert * DIM + n)[:, None]
            out = parts + (pair % TOP)[None, :].to(tl.int64) * parts_stride
            out += (pair // TOP)[None, :].to(tl.int64) * DIM + n[:, None]
            tl.store(out, (acc * share_m[None, :]).to(parts.dtype.element_ty), mask=real[None, :])
            first += BLOCK_M


def supports(dim: int, inner: int, experts: int) -> bool:
    """Whether the kernels take experts of these widths."""
    return dim % 256 == 0 and inner % 256 == 0 and experts >= 16 and experts & (experts - 1) == 0


def few_experts(
    logits: torch.Tensor,
    x: torch.Tensor,
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    inner: torch.Tensor,
    parts: torch.Tensor,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    pdl: bool = False,
) -> None:
    """Put rows through the experts that a router likes best for each.

    Args:
        logits: float32 (rows, experts), at most MAX_ROWS rows.
        x: (rows, dim); the stride of a row is free.
        fc1: (experts, 2 · width, dim), of x's dtype or float8_e4m3fn; h's half first.
        fc2: (experts, dim, width), likewise.
        inner: (at least rows · top, width), scratch of x's dtype.
        parts: (top, rows, dim): each row's results by rank, times their weights, to be summed by the reader.
        scales: float32 (experts, 2 · width) and (experts, dim), of FP8 weights.
        pdl: begin before the previous kernel has ended, see `kernels.pdl`; that one writes neither x nor logits.
    """
    rows, top = len(x), len(parts)
    n_experts, dim, width = fc2.shape
    assert rows <= MAX_ROWS
    slots, fp8 = min(n_experts, rows * top), scales is not None
    shared = {
        "DIM": dim,
        "INNER": width,
        "EXPERTS": n_experts,
        "TOP": top,
        "ROWS": next(size for size in _ROWS if size >= rows),
        "BLOCK_M": _BLOCK_M,
        "SCALED": fp8,
        "PDL": pdl,
        **pdl_options(pdl),
    }
    few = (_FC1_FP8_FEW, _FC2_FP8_FEW) if rows <= _FEW else (_FC1_FP8, _FC2_FP8)
    into, out = few if fp8 else (_FC1, _FC2)
    _fc1_kernel[(width // into.block_n, slots)](
        logits,
        x,
        x.stride(0),
        fc1,
        logits if scales is None else scales[0],
        inner,
        rows,
        BLOCK_N=into.block_n,
        BLOCK_K=into.block_k,
        STAGES=into.stages,
        LIMIT=_LARGEST_HALF,
        num_warps=into.warps,
        **shared,
    )
    _fc2_kernel[(dim // out.block_n, slots)](
        logits,
        inner,
        fc2,
        logits if scales is None else scales[1],
        parts,
        parts.stride(0),
        rows,
        BLOCK_N=out.block_n,
        BLOCK_K=out.block_k,
        STAGES=out.stages,
        LINES=2,
        PER_LINE=L2_LINE_BYTES // fc2.element_size(),
        num_warps=out.warps,
        **shared,
    )
