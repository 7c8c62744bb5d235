"""The two small products beside a block's large ones: of what attention's temperature depends on, and of the router.

Both have some 64 outputs and a few hundred kilobytes of weights, and are read at once by what comes next. In one launch
they take as long as the shorter of them. Rows may be few or many. Of few rows the router's last program to arrive also
chooses the experts, and says which rows are whose (`Routes`): as many programs as read experts would each do it again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.activation import exact_gelu
from saccade.engine.kernels.pdl import L2_LINE_BYTES, pdl_join, pdl_launch, pdl_options, pdl_wait, prefetch_l2

_CHUNK = 256  # inputs of the temperature's product that a program takes
_BLOCK_M = 16  # rows that a program takes: more of them cost registers, for the error function
_BLOCK_K = 256  # inputs of the router at a time
_ROUTED = 16  # experts that a program takes; it is the least that a matrix product has
_ROUTES = (2, 16, 32, 64)  # rows for which choosing is compiled
_COUNTED = 2  # rows up to which an expert's rank is counted from all pairs of logits, not found one after the other


@triton.jit
def _ranks(logit, there, EXPERTS: tl.constexpr, TOP: tl.constexpr, ROWS: tl.constexpr, COUNTED: tl.constexpr):
    """Each expert's rank among the TOP of a row, -1 for the others; its weight, unscaled, and the sum of a row's."""
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
    PDL: tl.constexpr,
):
    """`Routes` of all rows, from their logits."""
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
    # Experts in use come first, in their order, then the others, with nothing to do.
    before = tl.cumsum(used, 0) - used
    slot = table + tl.where(used > 0, before, tl.sum(used, 0) + e - before) * 3
    place = begin[None, :] + tl.cumsum(has, 0) - has
    if PDL:
        pdl_join()
    tl.store(slot, e)
    tl.store(slot + 1, begin)
    tl.store(slot + 2, count)
    tl.store(order + place, r[:, None] * TOP + rank, mask=has > 0)
    tl.store(shares + place, weight / total[:, None], mask=has > 0)


@triton.jit(do_not_specialize=["rows"])
def _side_kernel(
    heads,
    heads_stride,
    tau,
    partial,
    normed,
    normed_stride,
    router,
    router_bias,
    logits,
    table,
    order,
    shares,
    arrived,
    rows,
    TAU: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    DIM: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROUTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    COUNTED: tl.constexpr,
    PDL: tl.constexpr,
    LINES: tl.constexpr,
    PER_LINE: tl.constexpr,
):
    """For BLOCK_M rows the part of one of CHUNKS in TAU outputs, or the logits of ROUTED experts, whole.

    With TOP the last program with logits to arrive chooses as many experts for each of at most ROWS rows.
    """
    pid = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < rows
    at = m.to(tl.int64)
    if pid < CHUNKS:
        out = tl.arange(0, TAU)
        i = pid * CHUNK + tl.arange(0, CHUNK)
        of_tau = tl.load(tau + out[:, None] * (CHUNKS * CHUNK) + i[None, :])
        if PDL:
            pdl_wait()
        seen = tl.load(heads + at[None, :] * heads_stride + i[:, None], mask=real[None, :], other=0.0)
        part = tl.dot(of_tau, exact_gelu(seen.to(tl.float32)).to(of_tau.dtype))
        tl.store(partial + (pid * rows + at[None, :]) * TAU + out[:, None], part, mask=real[None, :])
    else:
        n = (pid - CHUNKS) * ROUTED + tl.arange(0, ROUTED)
        there = n < EXPERTS
        if PDL:
            if CHUNKS > 0:
                # The normed states are of the kernel before the previous one: this is done in the latter's shadow.
                pdl_launch()
            else:
                lines = tl.arange(0, LINES) * PER_LINE
                prefetch_l2(router + tl.minimum(n, EXPERTS - 1)[:, None] * DIM + lines[None, :])
                pdl_wait()
        acc = tl.zeros((ROUTED, BLOCK_M), tl.float32)
        for start in tl.range(0, DIM, BLOCK_K, num_stages=4):
            k = start + tl.arange(0, BLOCK_K)
            w = tl.load(router + n[:, None] * DIM + k[None, :], mask=there[:, None], other=0.0)
            x = tl.load(
                normed + at[None, :] * normed_stride + k[:, None],
                mask=real[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            acc = tl.dot(w, x, acc)
        acc += tl.load(router_bias + n, mask=there, other=0.0).to(tl.float32)[:, None]
        if PDL and CHUNKS > 0 and TOP == 0:
            pdl_join()
        # With TOP nothing of this step has read them before, so that they need not wait.
        tl.store(logits + at[None, :] * EXPERTS + n[:, None], acc, mask=real[None, :] & there[:, None])
        if TOP > 0:
            tl.debug_barrier()  # all of this program's stores come before it signals them
            programs = (tl.num_programs(0) - CHUNKS) * tl.num_programs(1)
            if tl.atomic_add(arrived, 1, sem="acq_rel") == programs - 1:
                tl.debug_barrier()
                _choose(logits, table, order, shares, rows, EXPERTS, TOP, ROWS, COUNTED, PDL and CHUNKS > 0)
                tl.store(arrived, 0)
            elif PDL and CHUNKS > 0:
                pdl_join()


def temperature_parts(inner: int) -> int:
    """How many parts the temperature's product comes in, whose inputs are `inner` queries, keys and values."""
    return inner // _CHUNK


def supports(inner: int, outputs: int, dim: int) -> bool:
    """Whether the kernel takes a temperature of so many inputs and outputs, and a router of `dim` inputs."""
    return inner % _CHUNK == 0 and dim % _BLOCK_K == 0 and outputs >= 16 and outputs & (outputs - 1) == 0


class Routes:
    """Which rows go through which experts, as `few_experts` reads it.

    Args:
        experts: of a layer.
        choices: most rows times the experts of each.
        device: where it is.

    Attributes:
        table: (experts, 3) int32: an expert, where its choices begin in `order`, how many; those in use first.
        order: (choices,) int32, row · top + rank, in the order of experts.
        shares: (choices,) float32 weights of these.
        arrived: programs that have written logits; 0 between launches.
    """

    __slots__ = ("arrived", "order", "shares", "table")

    def __init__(self, experts: int, choices: int, device: torch.device) -> None:
        self.table = torch.zeros(experts, 3, dtype=torch.int32, device=device)
        self.order = torch.zeros(choices, dtype=torch.int32, device=device)
        self.shares = torch.zeros(choices, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=device)


def temperature_products(heads: torch.Tensor, tau: torch.Tensor, partial: torch.Tensor, *, pdl: bool = False) -> None:
    """Write the temperature's products of heads, in parts.

    Args:
        heads: (rows, at least inner) queries, keys and values, not rotated; goes through exact GELU.
        tau: (outputs, inner).
        partial: float32 (parts, rows, outputs), to be summed by the reader; parts as `temperature_parts` gives.
        pdl: begin before the previous kernel has ended, see `kernels.pdl`.
    """
    _launch((heads, tau, partial), None, None, 0, pdl)


def router_products(
    normed: torch.Tensor,
    router: torch.nn.Linear,
    logits: torch.Tensor,
    routes: Routes | None = None,
    top: int = 0,
    *,
    pdl: bool = False,
) -> None:
    """Write the router's logits of normed states and, of at most 64 rows, the routes to the `top` best experts of each.

    Args:
        normed: (rows, dim).
        router: from dim to experts.
        logits: float32 (rows, experts).
        routes: to be written.
        top: experts a row.
        pdl: begin before the previous kernel has ended, see `kernels.pdl`.
    """
    _launch(None, (normed, router, logits), routes, top, pdl)


def side_products(
    heads: torch.Tensor,
    tau: torch.Tensor,
    partial: torch.Tensor,
    normed: torch.Tensor,
    router: torch.nn.Linear,
    logits: torch.Tensor,
    routes: Routes | None = None,
    top: int = 0,
    *,
    pdl: bool = False,
) -> None:
    """Both in one launch.

    Args:
        heads: as for `temperature_products`, with `tau` and `partial`.
        tau: likewise.
        partial: likewise.
        normed: as for `router_products`, with `router`, `logits`, `routes` and `top`.
        router: likewise.
        logits: likewise.
        routes: likewise.
        top: likewise.
        pdl: begin before the previous kernel has ended, see `kernels.pdl`; the one before that wrote `normed`.
    """
    _launch((heads, tau, partial), (normed, router, logits), routes, top, pdl)


def _launch(
    of_tau: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    of_router: tuple[torch.Tensor, torch.nn.Linear, torch.Tensor] | None,
    routes: Routes | None,
    top: int,
    pdl: bool,
) -> None:
    chunks, experts, dim, outputs = 0, 0, _BLOCK_K, 16
    if of_tau is not None:
        heads, tau, partial = of_tau
        rows, (outputs, inner) = len(heads), tau.shape
        chunks = inner // _CHUNK
    if of_router is not None:
        normed, router, logits = of_router
        rows, dim, experts = len(normed), normed.shape[1], router.out_features
        weight, bias = router.weight.detach(), router.bias.detach()
    # What a role that is missing would read and write: anything of the right type.
    if of_tau is None:
        heads, tau, partial = normed, weight, logits
    if of_router is None:
        normed, weight, bias, logits = heads, tau, tau, partial
    table, order, shares, arrived = (
        (logits,) * 4 if routes is None else (routes.table, routes.order, routes.shares, routes.arrived)
    )
    per_line = L2_LINE_BYTES // weight.element_size()
    most = next((size for size in _ROUTES if size >= rows), 0)
    assert routes is None or most > 0
    _side_kernel[(chunks + triton.cdiv(experts, _ROUTED), triton.cdiv(rows, _BLOCK_M))](
        heads,
        heads.stride(0),
        tau,
        partial,
        normed,
        normed.stride(0),
        weight,
        bias,
        logits,
        table,
        order,
        shares,
        arrived,
        rows,
        TAU=outputs,
        CHUNKS=chunks,
        CHUNK=_CHUNK,
        DIM=dim,
        EXPERTS=max(experts, 1),
        ROUTED=_ROUTED,
        BLOCK_M=_BLOCK_M,
        BLOCK_K=_BLOCK_K,
        TOP=0 if routes is None else top,
        ROWS=1 if routes is None else most,
        COUNTED=most <= _COUNTED,
        PDL=pdl,
        LINES=triton.next_power_of_2(dim // per_line),
        PER_LINE=per_line,
        num_warps=4 if rows <= _BLOCK_M else 8,
        **pdl_options(pdl),
    )
