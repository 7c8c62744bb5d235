"""FP8 on both sides of a product, for many rows: activations squeezed to e4m3 with a scale a row, then cuBLAS's.

Where rows are few the weights' bytes are what counts, and `product` leaves activations as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.engine.backends.quantization import E4M3, LARGEST
from saccade.engine.kernels.activation import gelu

_LARGEST = tl.constexpr(LARGEST)


@triton.jit
def _squeeze_kernel(
    plain,
    plain_stride,
    bent,
    bent_stride,
    out,
    scales,
    PLAIN: tl.constexpr,
    BENT: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr,
    BLOCK_BENT: tl.constexpr,
):
    """One row: PLAIN values as they are and BENT values through GELU behind them."""
    row = tl.program_id(0).to(tl.int64)
    at = out + row * (PLAIN + BENT)
    widest = 0.0
    if PLAIN > 0:
        p = tl.arange(0, BLOCK_PLAIN)
        a = tl.load(plain + row * plain_stride + p, mask=p < PLAIN, other=0.0).to(tl.float32)
        widest = tl.max(tl.abs(a), 0)
    if BENT > 0:
        b = tl.arange(0, BLOCK_BENT)
        g = gelu(tl.load(bent + row * bent_stride + b, mask=b < BENT, other=0.0).to(tl.float32))
        widest = tl.maximum(widest, tl.max(tl.abs(g), 0))
    scale = tl.maximum(widest, 1e-12) / _LARGEST
    tl.store(scales + row, scale)
    if PLAIN > 0:
        tl.store(at + p, (a / scale).to(out.dtype.element_ty), mask=p < PLAIN)
    if BENT > 0:
        tl.store(at + PLAIN + b, (g / scale).to(out.dtype.element_ty), mask=b < BENT)


def squeeze(plain: torch.Tensor | None, bent: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows side by side as e4m3, those of `bent` through GELU first, and the float32 scale (rows,) of each.

    Args:
        plain: (rows, any); the stride of a row is free.
        bent: (rows, any), likewise. One of the two may be None.
    """
    given = plain if bent is None else bent
    assert given is not None
    rows, widths = len(given), [0 if part is None else part.shape[1] for part in (plain, bent)]
    out = torch.empty(rows, sum(widths), dtype=E4M3, device=given.device)
    scales = torch.empty(rows, dtype=torch.float32, device=given.device)
    first, second = (given if part is None else part for part in (plain, bent))
    _squeeze_kernel[(rows,)](
        first,
        first.stride(0),
        second,
        second.stride(0),
        out,
        scales,
        PLAIN=widths[0],
        BENT=widths[1],
        BLOCK_PLAIN=triton.next_power_of_2(max(1, widths[0])),
        BLOCK_BENT=triton.next_power_of_2(max(1, widths[1])),
        num_warps=8,
    )
    return out, scales


def fits(rows: int, *widths: int) -> bool:
    """Whether `linear` takes so many rows, and weights of these widths."""
    return rows >= 16 and all(width % 16 == 0 for width in widths)


def linear(
    x: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """A linear layer with FP8 on both sides, in bfloat16.

    Args:
        x: (rows, inputs) e4m3, as `fits` allows.
        scales: (rows,) float32.
        weight: (outputs, inputs) e4m3.
        scale: (outputs,) float32.
        bias: (outputs,) bfloat16.
    """
    # torch has no public name for it yet.
    return torch._scaled_mm(
        x, weight.t(), scales.unsqueeze(1), scale.unsqueeze(0), bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )
