"""The two small products beside a block's large ones: of what attention's temperature depends on, and of the router.

Both have some 64 outputs and a few hundred kilobytes of weights, and are read at once by what comes next. In one launch
they take as long as the shorter of them. Rows may be few or many.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.activation import exact_gelu
from saccade.engine.kernels.pdl import pdl_join, pdl_launch, pdl_options, pdl_wait

_CHUNK = 256  # inputs of the temperature's product that a program takes
_BLOCK_M = 16  # rows that a program takes: more of them cost registers, for the error function
_BLOCK_K = 256  # inputs of the router at a time
_ROUTED = 16  # experts that a program takes; it is the least that a matrix product has


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
    rows,
    TAU: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    DIM: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROUTED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """For BLOCK_M rows the part of one of CHUNKS in TAU outputs, or the logits of ROUTED experts, whole."""
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
        # The normed states are of the kernel before the previous one: this product is done in the latter's shadow.
        n = (pid - CHUNKS) * ROUTED + tl.arange(0, ROUTED)
        there = n < EXPERTS
        if PDL:
            pdl_launch()
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
        if PDL:
            pdl_join()
        tl.store(logits + at[None, :] * EXPERTS + n[:, None], acc, mask=real[None, :] & there[:, None])


def temperature_parts(inner: int) -> int:
    """How many parts the temperature's product comes in, whose inputs are `inner` queries, keys and values."""
    return inner // _CHUNK


def supports(inner: int, outputs: int, dim: int) -> bool:
    """Whether the kernel takes a temperature of so many inputs and outputs, and a router of `dim` inputs."""
    return inner % _CHUNK == 0 and dim % _BLOCK_K == 0 and outputs >= 16 and outputs & (outputs - 1) == 0


def side_products(
    heads: torch.Tensor,
    tau: torch.Tensor,
    partial: torch.Tensor,
    normed: torch.Tensor | None = None,
    router: torch.nn.Linear | None = None,
    logits: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> None:
    """Write the temperature's products of heads, in parts, and the router's of normed states if there is a router.

    Args:
        heads: (rows, at least inner) queries, keys and values, not rotated; goes through exact GELU.
        tau: (outputs, inner).
        partial: float32 (parts, rows, outputs), to be summed by the reader; parts as `temperature_parts` gives.
        normed: (rows, dim) that the router reads.
        router: from dim to experts.
        logits: float32 (rows, experts).
        pdl: begin before the previous kernel has ended, see `kernels.pdl`; the one before that wrote `normed`.
    """
    rows, (outputs, inner) = len(heads), tau.shape
    chunks = inner // _CHUNK
    experts = 0 if router is None else router.out_features
    x = heads if normed is None else normed
    _side_kernel[(chunks + triton.cdiv(experts, _ROUTED), triton.cdiv(rows, _BLOCK_M))](
        heads,
        heads.stride(0),
        tau,
        partial,
        x,
        x.stride(0),
        tau if router is None else router.weight,
        tau if router is None else router.bias,
        partial if logits is None else logits,
        rows,
        TAU=outputs,
        CHUNKS=chunks,
        CHUNK=_CHUNK,
        DIM=x.shape[1],
        EXPERTS=experts,
        ROUTED=_ROUTED,
        BLOCK_M=_BLOCK_M,
        BLOCK_K=_BLOCK_K,
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )
