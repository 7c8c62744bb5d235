"""Residual addition and layer norm in one pass, for what lies between two products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_norm_kernel(
    x,
    delta,
    gain,
    shift,
    normed,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    EPS: tl.constexpr,
):
    """One row: x += delta, rounded as it is kept; normed = norm(x)."""
    at = tl.program_id(0).to(tl.int64) * DIM
    d = tl.arange(0, BLOCK)
    real = d < DIM
    value = tl.load(x + at + d, mask=real, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + at + d, mask=real, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty)
        tl.store(x + at + d, value, mask=real)
        value = value.to(tl.float32)
    if NORM:
        centred = tl.where(real, value - tl.sum(value, 0) / DIM, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, 0) / DIM + EPS)
        g = tl.load(gain + d, mask=real, other=0.0).to(tl.float32)
        s = tl.load(shift + d, mask=real, other=0.0).to(tl.float32)
        tl.store(normed + at + d, (centred * rstd * g + s).to(normed.dtype.element_ty), mask=real)


def add_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    norm: torch.nn.LayerNorm | None,
    normed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add `delta` to x in place, and return the layer norm of the sum; x itself without a norm.

    Args:
        x: (rows, dim), contiguous.
        delta: the same; None to add nothing.
        norm: over dim.
        normed: where the norm goes; a new tensor if None.
    """
    rows, dim = x.shape
    out = x if norm is None else torch.empty_like(x) if normed is None else normed
    _add_norm_kernel[(rows,)](
        x,
        x if delta is None else delta,
        x if norm is None else norm.weight,
        x if norm is None else norm.bias,
        out,
        DIM=dim,
        BLOCK=triton.next_power_of_2(dim),
        ADD=delta is not None,
        NORM=norm is not None,
        EPS=1e-5 if norm is None else norm.eps,
        num_warps=4,
    )
    return out
