"""Kernels between two GEMMs: residual addition fused with layer norm, and quantization of activations to FP8.

FP8 activations are e4m3 with one scale per row, for GEMMs with FP8 weights. For few rows, `skinny_gemm` uses
activations in half precision, because FP8 activations would save no time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.engine.kernels import E4M3, LARGEST
from saccade.engine.kernels.common import gelu, pdl_options, pdl_wait

_LARGEST = tl.constexpr(LARGEST)
# Warps per row: with few rows, all split-K partial sums are loaded at once; with many rows; and with many rows of one
# partial sum no wider than `_NARROW`. With 8 warps instead of 2, the encoder's rows of 8 images (1,152 wide) take an
# H200 17.3 µs instead of 16.7 in FP8.
_FEW_WARPS, _WARPS, _NARROW_WARPS = 16, 8, 2
_NARROW = 2048
_FEW = 64


@triton.jit
def _add_layernorm_kernel(
    x,
    delta,
    bias,
    gain,
    shift,
    normed,
    scales,
    plain,
    stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    PLAIN: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add `delta` to one row of x. Store the layer norm of the sum in `normed`, in FP8 if SCALED is True."""
    at = tl.program_id(0).to(tl.int64) * DIM
    d = tl.arange(0, BLOCK)
    real = d < DIM
    if NORM:  # loaded early, so that the latency overlaps with the sums
        g = tl.load(gain + d, mask=real, other=0.0).to(tl.float32)
        s = tl.load(shift + d, mask=real, other=0.0).to(tl.float32)
    if PDL:
        pdl_wait()
    value = tl.load(x + at + d, mask=real, other=0.0).to(tl.float32)
    if SPLIT_K > 0:
        if BIAS:
            value += tl.load(bias + d, mask=real, other=0.0).to(tl.float32)
        for split in tl.static_range(SPLIT_K):
            value += tl.load(delta + split * stride + at + d, mask=real, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty)
        tl.store(x + at + d, value, mask=real)
        value = value.to(tl.float32)
    if NORM:
        centred = tl.where(real, value - tl.sum(value, 0) / DIM, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, 0) / DIM + EPS)
        y = centred * rstd * g + s
        if PLAIN:
            y = y.to(plain.dtype.element_ty)
            tl.store(plain + at + d, y, mask=real)
            y = y.to(tl.float32)
        if SCALED:
            # Padded columns are 0, because their gain and shift are 0.
            scale = tl.maximum(tl.max(tl.abs(y), 0), 1e-12) / _LARGEST
            tl.store(scales + tl.program_id(0), scale)
            y *= 1.0 / scale  # one division per value would double the kernel's time
        tl.store(normed + at + d, y.to(normed.dtype.element_ty), mask=real)


def add_layernorm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    norm: torch.nn.LayerNorm | None,
    normed: torch.Tensor | None = None,
    *,
    scales: torch.Tensor | None = None,
    plain: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    pdl: bool = False,
    early: bool = True,
) -> torch.Tensor:
    """Add `delta` to x in place. Return the layer norm of the sum, or x if `norm` is None.

    Args:
        x: (rows, dim), contiguous.
        delta: (rows, dim), or split-K partial sums (split_k, rows, dim). None adds nothing.
        norm: layer norm over dim, or None.
        normed: output buffer of the norm, or None to allocate it.
        scales: (rows,) float32 output for the FP8 scales if the norm is quantized to e4m3, else None.
        plain: second output of the norm in the dtype of x, if the first output is e4m3.
        bias: (dim,), which is added together with `delta`.
        pdl: whether this and the next kernel use programmatic dependent launch, see `kernels.common`.
        early: whether the next kernel may launch early. It must be False if more than one previous kernel is running.
    """
    rows, dim = x.shape
    out = x if norm is None else torch.empty_like(x) if normed is None else normed
    split_k = 0 if delta is None else 1 if delta.ndim == 2 else len(delta)
    warps = _FEW_WARPS if rows <= _FEW else _NARROW_WARPS if split_k < 2 and dim <= _NARROW else _WARPS
    # With more threads than values, two warps would load the same value of x, and one of them might load the sum that
    # the other has already stored.
    block = triton.next_power_of_2(dim)
    warps = max(1, min(warps, block // 32))
    _add_layernorm_kernel[(rows,)](
        x,
        x if delta is None else delta,
        x if bias is None else bias,
        x if norm is None else norm.weight,
        x if norm is None else norm.bias,
        out,
        x if scales is None else scales,
        x if plain is None else plain,
        rows * dim if split_k < 2 or delta is None else delta.stride(0),
        DIM=dim,
        BLOCK=block,
        SPLIT_K=split_k,
        BIAS=bias is not None,
        NORM=norm is not None,
        SCALED=scales is not None,
        PLAIN=plain is not None,
        EPS=1e-5 if norm is None else norm.eps,
        PDL=pdl,
        num_warps=warps,
        **pdl_options(pdl and early),
    )
    return out


# Warps per row, for rows of fewer and of at least _WIDE values. On the widest rows, 4 warps take 52.8 µs and 8 take
# 50.4.
_QUANTIZE_WARPS, _WIDE_QUANTIZE_WARPS, _WIDE = 4, 8, 8192


@triton.jit(do_not_specialize=["first_rows"])  # avoids a second compilation for multiples of 16
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
    """Kernel of `quantize_rows`: quantize one row."""
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
    factor = 1.0 / scale  # a division per value would take as long as the GELU
    if PLAIN > 0:
        tl.store(at + p, (a * factor).to(out.dtype.element_ty), mask=p < PLAIN)
    if PRE_GELU > 0:
        tl.store(at + PLAIN + b, (g * factor).to(out.dtype.element_ty))
    if BLOCK_REST > 0:
        tl.store(at + PLAIN + c, (r * factor).to(out.dtype.element_ty), mask=c < PRE_GELU)


def quantize_rows(
    plain: torch.Tensor | None, pre_gelu: torch.Tensor | None, first: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Concatenate the rows of `plain` and of GELU(`pre_gelu`), and quantize each row to FP8 (e4m3).

    Args:
        plain: (rows, n) values without GELU, or None. Rows may have any stride.
        pre_gelu: (rows, m) or None. Rows may have any stride. At least one of the two tensors must be given.
        first: (k, n) rows that replace the first k rows of `plain`, or None.

    Returns:
        (rows, n + m) e4m3 values, and one float32 scale per row (rows,).
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
        # Two blocks, a power of two and the remainder: one block of 8,192 for 4,304 values would waste half.
        BLOCK_PRE_GELU=whole,
        BLOCK_REST=triton.next_power_of_2(widths[1] - whole) if widths[1] > whole else 0,
        num_warps=_QUANTIZE_WARPS if sum(widths) < _WIDE else _WIDE_QUANTIZE_WARPS,
    )
    return out, scales
