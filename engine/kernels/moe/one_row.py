"""Mixture of experts for one row, with GEMVs instead of tensor cores, so that no rows are padded to 16.

The router's kernel (`row_into`) writes the chosen experts. Extra programs of fc1 compute the attention output
projection. fc2 adds all results to the block's residual.
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
    """Tile sizes: outputs per program of fc1 (of each half), warps of fc1, and outputs per program of fc2."""

    fc1_n: int
    fc1_warps: int
    fc2_n: int
    fc2_warps: int


class Chosen:
    """The experts chosen for one row in one layer, and their logits.

    Each layer has its own buffers on separate cache lines. Hundreds of programs read the same bytes, which takes 100 µs
    without L1 caching. With programmatic dependent launch, L1 may return stale data if the same addresses were read
    earlier in the step.

    Args:
        logits: float32 (1, experts), owned by this layer.
        top: number of experts to choose.
        dim: width of the row.
        dtype: dtype of the row.

    Attributes:
        logits: the router's logits.
        ready: (1,) int64, equal to `packed` from the time all buffers are written until fc2 has run, else 0.
        packed: (1,) int64 expert indices of `bits` bits each; the best expert has the lowest bits.
        normed: (1, dim), input of the experts.
        arrived: number of programs that have written logits; 0 between launches.
        top: number of experts chosen.
        bits: bits per expert index.
    """

    __slots__ = ("arrived", "bits", "logits", "normed", "packed", "ready", "top")

    def __init__(self, logits: torch.Tensor, top: int, dim: int, dtype: torch.dtype) -> None:
        # Separate allocations begin on separate cache lines.
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
    """Compute BLOCK_N values of gelu(h) · (g + 1) of one expert, or in the last programs the attention projection."""
    program = tl.program_id(0)
    slot = program // (INNER // BLOCK_N)
    n = program % (INNER // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, DIM // PARTS)
    if slot < TOP:
        # Waits for the router's programs instead of the previous kernel. All of them are resident by now.
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
        # Only these programs wait for attention; the expert programs do not, and exit early.
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
    """Add BLOCK_N outputs to `into`: the weighted results of all experts, and the attention projection."""
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
    """Return whether the kernels support experts of these widths and this number of experts per row."""
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
    """Add the outputs of a row's experts and of attention to its residual in place.

    Args:
        chosen: the chosen experts.
        fc1: (experts, 2 · width, dim), of the row's dtype or float8_e4m3fn; the half for h comes first.
        fc2: (experts, dim, width), of the dtype of `fc1`.
        scales: float32 (experts, 2 · width) and (experts, dim) for FP8 weights, else None.
        inner: (top, width), scratch buffer of the dtype of `chosen.normed`.
        seen: (1, at least dim), attention output; float16 if weights are FP8.
        out: (dim, dim), weights of the attention projection, of the dtype of `fc1`.
        out_scale: float32 (dim,) for FP8 weights, else None.
        bias: (dim,) bias of the attention projection.
        delta: float32 (dim,), scratch buffer.
        into: (1, dim), residual.
        shape: tile sizes.
        pdl: run fc1 concurrently with the previous kernel as soon as `chosen` is written, see `kernels.pdl`. The
            router's kernel must be fully resident before.
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
