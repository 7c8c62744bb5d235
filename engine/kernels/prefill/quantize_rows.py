"""Rows of activations in FP8: e4m3 with a scale a row, as a product with FP8 on both sides reads them.

Where rows are few the weights' bytes are what counts, and `skinny_gemm` leaves activations as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.activation import gelu
from saccade.engine.kernels.fp8_format import E4M3, LARGEST

_LARGEST = tl.constexpr(LARGEST)
_WARPS, _WIDE_WARPS, _WIDE = 4, 8, 8192  # of a row, and of one of so many values: of the widest 4 take 52.8 µs, 8 50.4


@triton.jit(do_not_specialize=["first_rows"])  # else it is compiled for multiples of 16 and for others
def _quantize_rows_kernel(
    first,
    first_stride,
    first_rows,
    plain,
    plain_stride,
    pre_gelu,
    pre_gelu_stride,
    out,
    scales,
    PLAIN: tl.constexpr,
    PRE_GELU: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr,
    BLOCK_PRE_GELU: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """One row: PLAIN values as they are and PRE_GELU values through GELU behind them."""
    row = tl.program_id(0).to(tl.int64)
    at = out + row * (PLAIN + PRE_GELU)
    widest = 0.0
    if PLAIN > 0:
        p = tl.arange(0, BLOCK_PLAIN)
        plain_at = first + row * first_stride if row < first_rows else plain + row * plain_stride
        a = tl.load(plain_at + p, mask=p < PLAIN, other=0.0).to(tl.float32)
        widest = tl.max(tl.abs(a), 0)
    if PRE_GELU > 0:
        b = tl.arange(0, BLOCK_PRE_GELU)
        g = gelu(tl.load(pre_gelu + row * pre_gelu_stride + b).to(tl.float32))
        widest = tl.maximum(widest, tl.max(tl.abs(g), 0))
    if BLOCK_REST > 0:
        c = BLOCK_PRE_GELU + tl.arange(0, BLOCK_REST)
        r = gelu(tl.load(pre_gelu + row * pre_gelu_stride + c, mask=c < PRE_GELU, other=0.0).to(tl.float32))
        widest = tl.maximum(widest, tl.max(tl.abs(r), 0))
    scale = tl.maximum(widest, 1e-12) / _LARGEST
    tl.store(scales + row, scale)
    factor = 1.0 / scale  # a division for each value would take as long as its GELU
    if PLAIN > 0:
        tl.store(at + p, (a * factor).to(out.dtype.element_ty), mask=p < PLAIN)
    if PRE_GELU > 0:
        tl.store(at + PLAIN + b, (g * factor).to(out.dtype.element_ty))
    if BLOCK_REST > 0:
        tl.store(at + PLAIN + c, (r * factor).to(out.dtype.element_ty), mask=c < PRE_GELU)


def quantize_rows(
    plain: torch.Tensor | None, pre_gelu: torch.Tensor | None, first: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows side by side as e4m3, those of `pre_gelu` through GELU first, and the float32 scale (rows,) of each.

    Args:
        plain: (rows, any); the stride of a row is free.
        pre_gelu: (rows, any), likewise. One of the two may be None.
        first: read instead of the first rows of `plain`.
    """
    given = plain if pre_gelu is None else pre_gelu
    assert given is not None
    rows, widths = len(given), [0 if part is None else part.shape[1] for part in (plain, pre_gelu)]
    out = torch.empty(rows, sum(widths), dtype=E4M3, device=given.device)
    scales = torch.empty(rows, dtype=torch.float32, device=given.device)
    whole = 1 << max(0, widths[1].bit_length() - 1)
    one, two = (given if part is None else part for part in (plain, pre_gelu))
    _quantize_rows_kernel[(rows,)](
        one if first is None else first,
        0 if first is None else first.stride(0),
        0 if first is None else len(first),
        one,
        one.stride(0),
        two,
        two.stride(0),
        out,
        scales,
        PLAIN=widths[0],
        PRE_GELU=widths[1],
        BLOCK_PLAIN=triton.next_power_of_2(max(1, widths[0])),
        # A power of two and the rest: of 4,304 values in one block of 8,192 half would be for nothing.
        BLOCK_PRE_GELU=whole,
        BLOCK_REST=triton.next_power_of_2(widths[1] - whole) if widths[1] > whole else 0,
        num_warps=_WARPS if sum(widths) < _WIDE else _WIDE_WARPS,
    )
    return out, scales
