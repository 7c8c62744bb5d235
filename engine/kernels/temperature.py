"""Matrix products for the attention temperature. Each row of queries, keys and values gives about 64 outputs.

The inputs are split into parts (split-K), so that enough programs run. The attention kernel adds the partial sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.common import exact_gelu, pdl_options, pdl_wait

_CHUNK = 256  # inputs per tile
_GROUP = 4  # chunks per program with many rows; fewer partial sums to read
_FEW_ROWS = 128
_BLOCK_M = 16  # rows per program; more would spill registers in the error function


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
    """Kernel of `temperature_products`: compute one of the partial sums for BLOCK_M rows."""
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
    """Return the number of split-K parts that `temperature_products` needs for `rows` rows with `inner` inputs."""
    chunks = inner // _CHUNK
    return chunks // _GROUP if rows > _FEW_ROWS and chunks % _GROUP == 0 else chunks


def supports(inner: int, outputs: int) -> bool:
    """Return whether the temperature kernel supports `inner` inputs and `outputs` outputs."""
    return inner % _CHUNK == 0 and outputs >= 16 and outputs & (outputs - 1) == 0


def temperature_products(heads: torch.Tensor, tau: torch.Tensor, partial: torch.Tensor, *, pdl: bool = False) -> None:
    """Write the matrix products for the attention temperature as partial sums (split-K).

    Args:
        heads: (rows, inner or more) queries, keys and values before RoPE. The kernel applies the exact GELU to them.
        tau: (outputs, inner) weights.
        partial: float32 (parts, rows, outputs), overwritten. `temperature_parts` returns the number of parts.
        pdl: whether to use programmatic dependent launch, see `kernels.common`.
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
