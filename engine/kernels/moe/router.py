"""The expert router for few rows: it computes logits and assigns rows to experts (`Routes`).

The last program to finish chooses the experts for all rows. Otherwise each of the hundreds of expert programs would
repeat that work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.pdl import L2_LINE_BYTES, pdl_options, pdl_wait, prefetch_l2

_BLOCK_M = 16  # rows per program
_BLOCK_N = 16  # experts per program, the minimum of `tl.dot`
_BLOCK_K = 256  # inputs per tile
_ROWS = (2, 16, 32, 64)  # row counts that the choosing code is compiled for
_COUNTED = 2  # up to this many rows, ranks come from comparing all pairs of logits


@triton.jit
def _ranks(logit, there, EXPERTS: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr, COUNTED: tl.constexpr):
    """Return each expert's rank among a row's TOP experts (else -1), its unscaled weight, and the sum of weights."""
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
    """Write `Routes` of all rows from their logits."""
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
    """Compute logits of BLOCK_M rows for BLOCK_N experts; the last program to finish chooses TOP experts per row."""
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
    """Assignment of rows to experts, read by `few_experts`.

    Args:
        experts: number of experts in a layer.
        choices: maximum number of rows times experts per row.
        device: device of the buffers.

    Attributes:
        table: (experts, 3) int32: expert index, offset in `order`, and count; used experts first.
        order: (choices,) int32 choice indices (row · top + rank) in expert order.
        shares: (choices,) float32 weights of the choices in `order`.
        arrived: number of programs that have written logits; 0 between launches.
    """

    __slots__ = ("arrived", "order", "shares", "table")

    def __init__(self, experts: int, choices: int, device: torch.device) -> None:
        self.table = torch.zeros(experts, 3, dtype=torch.int32, device=device)
        self.order = torch.zeros(choices, dtype=torch.int32, device=device)
        self.shares = torch.zeros(choices, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)


def supports(dim: int) -> bool:
    """Return whether the kernel supports rows of this width."""
    return dim % _BLOCK_K == 0


def router_products(
    x: torch.Tensor,
    router: torch.nn.Linear,
    logits: torch.Tensor,
    routes: Routes,
    top: int,
    *,
    pdl: bool = False,
) -> None:
    """Write the router's logits for at most 64 rows, and the routes to each row's `top` experts.

    Args:
        x: (rows, dim); rows may have any stride.
        router: linear layer from dim to experts.
        logits: float32 (rows, experts), written.
        routes: written.
        top: number of experts per row.
        pdl: enable programmatic dependent launch, see `kernels.pdl`.
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
