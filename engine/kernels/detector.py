"""Triton kernels for the pointwise and depthwise convolutions of small detectors, with bias and activation.

A feature map is a tensor (N · H · W, channels) in channels-last format. Its rows may have any stride. Both kernels are
limited by memory bandwidth. The number of kernel variants is small, because Triton takes half a second to compile each
variant.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _hardswish(x):
    return x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)


@triton.jit(do_not_specialize=["rows", "act"])
def _pointwise_kernel(
    x,
    x_stride,
    weight,
    bias,
    out,
    out_stride,
    rows,
    inner,
    outer,
    act,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    here = m[:, None].to(tl.int64)
    for start in range(0, inner, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + here * x_stride + k[None, :], mask=(m < rows)[:, None] & (k < inner)[None, :], other=0.0)
        b = tl.load(
            weight + n[None, :] * inner + k[:, None], mask=(n < outer)[None, :] & (k < inner)[:, None], other=0.0
        )
        acc = tl.dot(a, b, acc, input_precision="ieee")
    acc += tl.load(bias + n, mask=n < outer, other=0.0).to(tl.float32)[None, :]
    acc = tl.where(act > 0, _hardswish(acc), acc)
    at = out + here * out_stride + n[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=(m < rows)[:, None] & (n < outer)[None, :])


@triton.jit(do_not_specialize=["total", "height", "width", "out_height", "out_width", "act"])
def _depthwise_kernel(
    x,
    x_stride,
    weight,
    bias,
    out,
    out_stride,
    total,
    height,
    width,
    out_height,
    out_width,
    channels,
    act,
    SIDE: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = c < channels
    column = p % out_width
    row = (p // out_width) % out_height
    image = p // (out_width * out_height)
    acc = tl.zeros((BLOCK_P, BLOCK_C), tl.float32) + tl.load(bias + c, mask=real, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(SIDE * SIDE):
        y = row * STRIDE + tap // SIDE - SIDE // 2
        z = column * STRIDE + tap % SIDE - SIDE // 2
        inside = (p < total) & (y >= 0) & (y < height) & (z >= 0) & (z < width)
        at = ((image * height + y) * width + z).to(tl.int64)[:, None] * x_stride + c[None, :]
        seen = tl.load(x + at, mask=inside[:, None] & real[None, :], other=0.0).to(tl.float32)
        acc += seen * tl.load(weight + tap * channels + c, mask=real, other=0.0).to(tl.float32)[None, :]
    acc = tl.where(act > 0, _hardswish(acc), acc)
    at = p[:, None].to(tl.int64) * out_stride + c[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(p < total)[:, None] & real[None, :])


def pointwise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, hardswish: bool, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the pointwise convolution (R, outer) of `x` (R, inner), with bias and optional hard swish.

    All tensors have the same dtype.

    Args:
        x: (R, inner) feature map.
        weight: (outer, inner).
        bias: (outer,).
        hardswish: whether to apply hard swish to the result.
        out: (R, outer) output buffer, or None.
    """
    rows, inner = x.shape
    outer = len(weight)
    out = x.new_empty(rows, outer) if out is None else out
    # float32 products do not use tensor cores here. Larger blocks would spill registers.
    wide = x.element_size() == 2
    block_m, block_n, block_k = 64, 128 if wide and outer > 64 else 64, 64 if wide else 32
    _pointwise_kernel[(triton.cdiv(rows, block_m), triton.cdiv(outer, block_n))](
        x,
        x.stride(0),
        weight,
        bias,
        out,
        out.stride(0),
        rows,
        inner,
        outer,
        int(hardswish),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
    )
    return out


def depthwise(
    x: torch.Tensor,
    size: tuple[int, int, int],
    weight: torch.Tensor,
    bias: torch.Tensor,
    stride: int,
    hardswish: bool,
) -> torch.Tensor:
    """Return a depthwise convolution with zero padding: (N · ceil(H / stride) · ceil(W / stride), channels).

    Args:
        x: (N · H · W, channels).
        size: N, H and W of the input.
        weight: (side · side, channels), kernel elements in row-major order.
        bias: (channels,).
        stride: 1 or 2.
        hardswish: whether to apply hard swish to the result.
    """
    n, height, width = size
    taps, channels = weight.shape
    after = (height + stride - 1) // stride, (width + stride - 1) // stride
    total = n * after[0] * after[1]
    out = x.new_empty(total, channels)
    block_p, block_c = 64, 32
    _depthwise_kernel[(triton.cdiv(total, block_p), triton.cdiv(channels, block_c))](
        x,
        x.stride(0),
        weight,
        bias,
        out,
        out.stride(0),
        total,
        height,
        width,
        *after,
        channels,
        int(hardswish),
        SIDE=round(taps**0.5),
        STRIDE=stride,
        BLOCK_P=block_p,
        BLOCK_C=block_c,
        num_warps=4,
    )
    return out
