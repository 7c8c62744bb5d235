"""The products that attention's temperature depends on: some 64 outputs of all queries, keys and values of a row.

Attention reads them at once. They come in parts of the inputs, or a few programs would have all the work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.activation import exact_gelu
from saccade.engine.kernels.pdl import pdl_options, pdl_wait

_CHUNK = 256  # inputs that a program takes
_BLOCK_M = 16  # rows that it takes: more of them cost registers, for the error function


@triton.jit(do_not_specialize=["rows"])
def _temperature_kernel(
    heads,
    heads_stride,
    tau,
    partial,
    rows,
    TAU: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """For BLOCK_M rows the part of one of CHUNKS in TAU outputs."""
    part = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real, at = m < rows, m.to(tl.int64)
    out = tl.arange(0, TAU)
    i = part * CHUNK + tl.arange(0, CHUNK)
    weight = tl.load(tau + out[:, None] * (CHUNKS * CHUNK) + i[None, :])
    if PDL:
        pdl_wait()
    seen = tl.load(heads + at[None, :] * heads_stride + i[:, None], mask=real[None, :], other=0.0)
    product = tl.dot(weight, exact_gelu(seen.to(tl.float32)).to(weight.dtype))
    tl.store(partial + (part * rows + at[None, :]) * TAU + out[:, None], product, mask=real[None, :])


def temperature_parts(inner: int) -> int:
    """How many parts the products come in, whose inputs are `inner` queries, keys and values."""
    return inner // _CHUNK


def supports(inner: int, outputs: int) -> bool:
    """Whether the kernel takes a temperature of so many inputs and outputs."""
    return inner % _CHUNK == 0 and outputs >= 16 and outputs & (outputs - 1) == 0


def temperature_products(heads: torch.Tensor, tau: torch.Tensor, partial: torch.Tensor, *, pdl: bool = False) -> None:
    """Write the temperature's products of heads, in parts.

    Args:
        heads: (rows, at least inner) queries, keys and values, not rotated; goes through exact GELU.
        tau: (outputs, inner).
        partial: float32 (parts, rows, outputs), to be summed by the reader; parts as `temperature_parts` gives.
        pdl: begin before the previous kernel has ended, see `kernels.pdl`.
    """
    rows, (outputs, inner) = len(heads), tau.shape
    chunks = inner // _CHUNK
    _temperature_kernel[(chunks, triton.cdiv(rows, _BLOCK_M))](
        heads,
        heads.stride(0),
        tau,
        partial,
        rows,
        TAU=outputs,
        CHUNKS=chunks,
        CHUNK=_CHUNK,
        BLOCK_M=_BLOCK_M,
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )
