"""The products that attention's temperature depends on: some 64 outputs of all queries, keys and values of a row.

Attention reads them at once. They come in parts of the inputs, or a few programs would have all the work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.activation import exact_gelu
from saccade.engine.kernels.pdl import pdl_options, pdl_wait

_CHUNK = 256  # inputs at a time
_GROUP = 4  # of these for a program, where rows are many: who reads the parts, reads as many fewer
_FEW_ROWS = 128
_BLOCK_M = 16  # rows that it takes: more of them cost registers, for the error function


@triton.jit(do_not_specialize=["rows"])
def _temperature_kernel(
    heads,
    heads_stride,
    tau,
    partial,
    rows,
    TAU: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """For BLOCK_M rows the part of GROUP times CHUNK of INNER inputs in TAU outputs."""
    part = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real, at = m < rows, m.to(tl.int64)
    out = tl.arange(0, TAU)
    i = part * GROUP * CHUNK + tl.arange(0, CHUNK)
    weight_at = tau + out[:, None] * INNER + i[None, :]
    weight = tl.load(weight_at)
    if PDL:
        pdl_wait()
    product = tl.zeros((TAU, BLOCK_M), tl.float32)
    for step in tl.static_range(GROUP):
        seen_at = heads + at[None, :] * heads_stride + step * CHUNK + i[:, None]
        seen = tl.load(seen_at, mask=real[None, :], other=0.0)
        product = tl.dot(weight, exact_gelu(seen.to(tl.float32)).to(weight.dtype), product)
        if step + 1 < GROUP:
            weight = tl.load(weight_at + (step + 1) * CHUNK)
    tl.store(partial + (part * rows + at[None, :]) * TAU + out[:, None], product, mask=real[None, :])


def temperature_parts(inner: int, rows: int = 1) -> int:
    """How many parts the products of so many rows come in, whose inputs are `inner` queries, keys and values."""
    chunks = inner // _CHUNK
    return chunks // _GROUP if rows > _FEW_ROWS and chunks % _GROUP == 0 else chunks


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
    _temperature_kernel[(len(partial), triton.cdiv(rows, _BLOCK_M))](
        heads,
        heads.stride(0),
        tau,
        partial,
        rows,
        TAU=outputs,
        INNER=inner,
        GROUP=inner // _CHUNK // len(partial),
        CHUNK=_CHUNK,
        BLOCK_M=_BLOCK_M,
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )
