"""Mixture of experts for few rows. Only weights of experts that at least one row uses are read, and only once.

The router computes logits and writes the assignment of rows to experts (`Routes`) on the device. The host never reads
this assignment, so CUDA graphs can capture these kernels. The result of each expert is stored separately. The kernel of
the next layer norm adds the results in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.common import L2_LINE_BYTES, exact_gelu, pdl_launch, pdl_options, pdl_wait, prefetch_l2

MAX_ROWS = 64
FEW = 2  # up to this many rows, most experts have one row each
_BLOCK_M = 16  # rows per tile, the minimum of `tl.dot`; more rows per expert are rare
_BLOCK_N = 16  # experts per program, the minimum of `tl.dot`
_BLOCK_K = 256  # inputs per tile
_ROWS = (2, 16, 32, 64)  # row counts for which the expert selection is compiled
_COUNTED = 2  # up to this many rows, ranks come from comparing all pairs of logits
_LARGEST_HALF = 65280.0  # largest value in both bfloat16 and float16


class Shape(NamedTuple):
    """Tile sizes of the GEMM of a mixture of experts.

    Attributes:
        block_n: number of outputs per program. An fc1 program computes `block_n` values in each half of the output.
        block_k: number of inputs per tile.
        stages: number of pipeline stages.
        warps: number of warps per program.
        prefetch_bytes: number of fc2 weight bytes per output to load into L2 while fc1 runs.
    """

    block_n: int
    block_k: int
    stages: int
    warps: int
    prefetch_bytes: int = 0


# Tile sizes of fc1 and fc2, keyed by (FP8 weights, few rows). Tuned on an H200.
_SHAPES = {
    (False, True): (Shape(64, 64, 5, 4), Shape(128, 64, 4, 4, 256)),
    (False, False): (Shape(64, 128, 3, 4), Shape(128, 64, 4, 4, 256)),
    (True, True): (Shape(32, 128, 4, 2), Shape(128, 128, 3, 4, 256)),
    (True, False): (Shape(32, 128, 4, 2), Shape(64, 128, 4, 4, 512)),
}


@triton.jit
def _fc1_kernel(
    table,
    order,
    x,
    x_stride,
    weight,
    scale,
    inner,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_N hidden values of one expert for all rows that use the expert.

    A hidden value is gelu(h) · (g + 1), where h and g are values of the two halves of the fc1 output.
    """
    if PDL:
        pdl_launch()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = table + tl.program_id(1) * 3
    count = tl.load(slot + 2)
    if count > 0:
        kind: tl.constexpr = tl.float16 if SCALED else x.dtype.element_ty
        expert = tl.load(slot)
        own = order + tl.load(slot + 1)
        h_at = weight + (expert.to(tl.int64) * (2 * INNER) + n[:, None]) * DIM
        g_at = h_at + INNER * DIM
        first = 0
        while first < count:
            m = first + tl.arange(0, BLOCK_M)
            real = m < count
            pair = tl.load(own + m, mask=real, other=0)
            x_at = x + (pair // TOP)[None, :].to(tl.int64) * x_stride
            h = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            g = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for start in tl.range(0, DIM, BLOCK_K, num_stages=STAGES):
                k = start + tl.arange(0, BLOCK_K)
                h_w = tl.load(h_at + k[None, :])
                g_w = tl.load(g_at + k[None, :])
                a = tl.load(x_at + k[:, None], mask=real[None, :], other=0.0).to(kind)
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


@triton.jit
def _fc2_kernel(
    table,
    order,
    shares,
    inner,
    weight,
    scale,
    parts,
    parts_stride,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
    LINES: tl.constexpr,
    PER_LINE: tl.constexpr,
):
    """Compute BLOCK_N outputs of one expert for all rows that use the expert.

    Each output is multiplied by the router's weight for the expert and the row.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = table + tl.program_id(1) * 3
    expert = tl.load(slot, cache_modifier=".cg")
    begin = tl.load(slot + 1, cache_modifier=".cg")
    count = tl.load(slot + 2, cache_modifier=".cg")
    w_at = weight + (expert.to(tl.int64) * DIM + n[:, None]) * INNER
    if PDL:
        if LINES > 0 and count > 0:
            prefetch_l2(w_at + tl.arange(0, LINES)[None, :] * PER_LINE)
        pdl_wait()
    if count > 0:
        kind: tl.constexpr = tl.float16 if SCALED else inner.dtype.element_ty
        first = 0
        while first < count:
            m = first + tl.arange(0, BLOCK_M)
            real = m < count
            pair = tl.load(order + begin + m, mask=real, other=0, cache_modifier=".cg")
            share = tl.load(shares + begin + m, mask=real, other=0.0, cache_modifier=".cg")
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
            tl.store(out, (acc * share[None, :]).to(parts.dtype.element_ty), mask=real[None, :])
            first += BLOCK_M


def supports(dim: int, inner: int, experts: int) -> bool:
    """Return whether the kernels support these dimensions of an expert, and this number of experts."""
    return dim % 256 == 0 and inner % 256 == 0 and experts >= 16 and experts & (experts - 1) == 0


def few_experts(
    routes: Routes,
    x: torch.Tensor,
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    inner: torch.Tensor,
    parts: torch.Tensor,
    *,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    pdl: bool = False,
    shapes: tuple[Shape, Shape] | None = None,
) -> None:
    """Compute the mixture of experts for few rows, after the router (`router_products`).

    Args:
        routes: assignment of rows to experts.
        x: (rows, dim), at most MAX_ROWS rows with any stride.
        fc1: (experts, 2 · width, dim), in the dtype of x or float8_e4m3fn. The half for h comes first, then the half
            for g; a hidden value is gelu(h) · (g + 1).
        fc2: (experts, dim, width), in the dtype of `fc1`.
        inner: (at least rows · top, width) scratch buffer in the dtype of x.
        parts: (top, rows, dim) output: weighted results of each row, best expert first. The caller adds them.
        scales: float32 (experts, 2 · width) and (experts, dim) for FP8 weights, else None.
        pdl: whether fc2 uses programmatic dependent launch, see `kernels.common`. fc1 waits for all previous kernels.
        shapes: tile sizes of fc1 and fc2. None uses the tuned sizes.
    """
    rows, top = len(x), len(parts)
    n_experts, dim, width = fc2.shape
    assert rows <= MAX_ROWS
    slots, fp8 = min(n_experts, rows * top), scales is not None
    shared = {
        "DIM": dim,
        "INNER": width,
        "TOP": top,
        "BLOCK_M": _BLOCK_M,
        "SCALED": fp8,
        "PDL": pdl,
    }
    into, out = shapes or _SHAPES[fp8, rows <= FEW]
    _fc1_kernel[(width // into.block_n, slots)](
        routes.table,
        routes.order,
        x,
        x.stride(0),
        fc1,
        fc1 if scales is None else scales[0],
        inner,
        BLOCK_N=into.block_n,
        BLOCK_K=into.block_k,
        STAGES=into.stages,
        LIMIT=_LARGEST_HALF,
        num_warps=into.warps,
        **shared,
    )
    _fc2_kernel[(dim // out.block_n, slots)](
        routes.table,
        routes.order,
        routes.shares,
        inner,
        fc2,
        fc2 if scales is None else scales[1],
        parts,
        parts.stride(0),
        BLOCK_N=out.block_n,
        BLOCK_K=out.block_k,
        STAGES=out.stages,
        LINES=out.prefetch_bytes // L2_LINE_BYTES,
        PER_LINE=L2_LINE_BYTES // fc2.element_size(),
        num_warps=out.warps,
        **pdl_options(pdl),
        **shared,
    )


# ---- the router


@triton.jit
def _ranks(logit, there, EXPERTS: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr, COUNTED: tl.constexpr):
    """Select the TOP experts of each row by router logits.

    Return the rank of each expert (0 for the highest logit, -1 if not selected), the unnormalized softmax weight of
    each expert, and the sum of these weights in each row.
    """
    e = tl.arange(0, EXPERTS)
    best = tl.max(logit, 1)
    if COUNTED:
        above = logit[:, None, :] > logit[:, :, None]
        above |= (logit[:, None, :] == logit[:, :, None]) & (e[None, None, :] < e[None, :, None])
        rank = tl.sum(above.to(tl.int32), 2)
        rank = tl.where(rank < TOP, rank, -1)
    else:
        rank = tl.full((ROWS, EXPERTS), -1, tl.int32)
        left = logit
        for i in tl.static_range(TOP):
            first = e[None, :] == tl.argmax(left, 1)[:, None]
            rank = tl.where(first, i, rank)
            left = tl.where(first, -float("inf"), left)
    weight = tl.where(rank >= 0, tl.exp(logit - best[:, None]), 0.0)
    return tl.where(there[:, None], rank, -1), weight, tl.sum(weight, 1)


@triton.jit
def _choose(
    logits,
    table,
    order,
    shares,
    rows,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Choose the experts of all rows by router logits, and write the assignment of rows to experts (`Routes`)."""
    r = tl.arange(0, ROWS)
    e = tl.arange(0, EXPERTS)
    there = r < rows
    at = logits + r[:, None] * EXPERTS + e[None, :]
    logit = tl.load(at, mask=there[:, None], other=0.0, cache_modifier=".cg")
    rank, weight, total = _ranks(logit, there, EXPERTS, TOP, ROWS, COUNTED)
    has = (rank >= 0).to(tl.int32)
    count = tl.sum(has, 0)
    begin = tl.cumsum(count, 0) - count
    used = (count > 0).to(tl.int32)
    # Used experts come first in index order, then the unused ones with a count of 0.
    before = tl.cumsum(used, 0) - used
    slot = table + tl.where(used > 0, before, tl.sum(used, 0) + e - before) * 3
    place = begin[None, :] + tl.cumsum(has, 0) - has
    tl.store(slot, e)
    tl.store(slot + 1, begin)
    tl.store(slot + 2, count)
    tl.store(order + place, r[:, None] * TOP + rank, mask=has > 0)
    tl.store(shares + place, weight / total[:, None], mask=has > 0)


@triton.jit(do_not_specialize=["rows"])
def _router_kernel(
    x,
    x_stride,
    weight,
    bias,
    logits,
    table,
    order,
    shares,
    arrived,
    rows,
    DIM: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
    LINES: tl.constexpr,
    PER_LINE: tl.constexpr,
):
    """Compute the router logits of BLOCK_M rows for BLOCK_N experts.

    The last program (thread block) to finish chooses the TOP experts of all rows.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real, there, at = m < rows, n < EXPERTS, m.to(tl.int64)
    if PDL:
        lines = tl.arange(0, LINES) * PER_LINE
        prefetch_l2(weight + tl.minimum(n, EXPERTS - 1)[:, None] * DIM + lines[None, :])
        pdl_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(0, DIM, BLOCK_K, num_stages=4):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(weight + n[:, None] * DIM + k[None, :], mask=there[:, None], other=0.0)
        a = tl.load(x + at[None, :] * x_stride + k[:, None], mask=real[None, :], other=0.0)
        acc = tl.dot(w, a, acc)
    acc += tl.load(bias + n, mask=there, other=0.0).to(tl.float32)[:, None]
    tl.store(logits + at[None, :] * EXPERTS + n[:, None], acc, mask=real[None, :] & there[:, None])
    tl.debug_barrier()  # all stores of this program precede its signal
    if tl.atomic_add(arrived, 1, sem="acq_rel") == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.debug_barrier()
        _choose(logits, table, order, shares, rows, EXPERTS, TOP, ROWS, COUNTED)
        tl.store(arrived, 0)


class Routes:
    """Assignment of rows to experts, written by the router and read by `few_experts`.

    A *choice* is a pair of a row and one of its experts. Its index is row · top + rank.

    Args:
        experts: number of experts in a layer.
        choices: maximum number of choices.
        device: device of the buffers.

    Attributes:
        table: (experts, 3) int32: expert index, offset in `order`, and number of choices. Used experts come first.
        order: (choices,) int32 indices of the choices, sorted by expert.
        shares: (choices,) float32 router weights of the choices, sorted by expert.
        arrived: number of programs that have written logits; 0 between launches.
    """

    __slots__ = ("arrived", "order", "shares", "table")

    def __init__(self, experts: int, choices: int, device: torch.device) -> None:
        self.table = torch.zeros(experts, 3, dtype=torch.int32, device=device)
        self.order = torch.zeros(choices, dtype=torch.int32, device=device)
        self.shares = torch.zeros(choices, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)


def router_products(
    x: torch.Tensor,
    router: torch.nn.Linear,
    logits: torch.Tensor,
    routes: Routes,
    top: int,
    *,
    pdl: bool = False,
) -> None:
    """Compute the router logits of at most 64 rows, and choose the `top` best experts for each row.

    Args:
        x: (rows, dim). Rows may have any stride.
        router: linear layer from dim to experts.
        logits: float32 (rows, experts), overwritten.
        routes: assignment of rows to experts, overwritten.
        top: number of experts per row.
        pdl: whether to use programmatic dependent launch, see `kernels.common`.
    """
    (rows, dim), experts = x.shape, router.out_features
    weight, bias = router.weight.detach(), router.bias.detach()
    most = next(size for size in _ROWS if size >= rows)
    per_line = L2_LINE_BYTES // weight.element_size()
    _router_kernel[(triton.cdiv(experts, _BLOCK_N), triton.cdiv(rows, _BLOCK_M))](
        x,
        x.stride(0),
        weight,
        bias,
        logits,
        routes.table,
        routes.order,
        routes.shares,
        routes.arrived,
        rows,
        DIM=dim,
        EXPERTS=experts,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        TOP=top,
        ROWS=most,
        COUNTED=most <= _COUNTED,
        PDL=pdl,
        LINES=triton.next_power_of_2(dim // per_line),
        PER_LINE=per_line,
        num_warps=4 if rows <= _BLOCK_M else 8,
        **pdl_options(pdl),
    )
