"""Mixture of experts for many rows (prefill): rows are sorted by expert, then multiplied with grouped GEMMs.

All work runs on the device, in launches of fixed size, so CUDA graphs can capture it. The result of each expert is
stored separately. The kernel of the next layer norm adds the results in a fixed order.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from saccade.engine.kernels.common import exact_gelu
from saccade.engine.kernels.skinny_gemm import shared_memory

_COUNTED = 64  # row blocks counted per iteration; one image and its prompt have fewer

_ROUTED = 16  # rows per router program, the minimum of `tl.dot`
_ROUTED_K = 128  # inputs per tile


class Shape(NamedTuple):
    """Tile sizes of the grouped GEMM of a mixture of experts.

    Attributes:
        block_m: number of rows of an expert per tile.
        block_n: number of outputs per program. An fc1 program computes `block_n` values in each half of the output.
        block_k: number of inputs per tile.
        stages: number of pipeline stages.
        warps: number of warps per program.
        tma: whether the Tensor Memory Accelerator (TMA) loads the weights.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    warps: int
    tma: bool = False


# Tile sizes keyed by (fc1, FP8), tuned on an H200. The 740 tokens of one image take 152, 89, 89 and 55 µs in Moondream
# 3's experts; reading the weights takes 128, 64, 64 and 32 µs. Above _MANY rows per expert (several images) larger
# tiles are faster; one image takes 152, 100, 91 and 57 µs with them.
_MANY = 256
_SHAPES = {
    (True, False): Shape(128, 128, 64, 4, 8, tma=True),
    (True, True): Shape(128, 64, 128, 3, 8, tma=True),
    (False, False): Shape(128, 128, 64, 3, 4, tma=True),
    (False, True): Shape(128, 128, 128, 3, 4, tma=True),
}
_SHAPES_OF_MANY = {
    (True, False): Shape(128, 128, 64, 4, 8, tma=True),
    (True, True): Shape(128, 128, 128, 4, 8, tma=True),
    (False, False): Shape(128, 256, 64, 3, 8, tma=True),
    (False, True): Shape(128, 256, 128, 3, 8, tma=True),
}
_LARGE = 200 << 10  # bytes of shared memory on Hopper and data-centre Blackwell, which have TMA
_SMALL = {  # sizes that fit the shared memory of all other GPUs
    (True, False): Shape(128, 64, 64, 3, 8),
    (True, True): Shape(128, 64, 128, 3, 8),
    (False, False): Shape(128, 64, 64, 4, 8),
    (False, True): Shape(128, 64, 128, 4, 4),
}


@triton.jit(do_not_specialize=["rows"])
def _route_kernel(
    x,
    x_stride,
    weight,
    bias,
    chosen,
    weights,
    counts,
    rows,
    DIM: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the router logits of BLOCK_M rows, and choose TOP experts per row, best first.

    The kernel also writes the softmax weights of these experts, and the number of rows per expert.
    """
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, EXPERTS)
    real, at = r < rows, r[:, None].to(tl.int64)
    left = tl.zeros((BLOCK_M, EXPERTS), tl.float32)
    for start in tl.range(0, DIM, BLOCK_K, num_stages=4):
        k = start + tl.arange(0, BLOCK_K)
        a = tl.load(x + at * x_stride + k[None, :], mask=real[:, None], other=0.0)
        left = tl.dot(a, tl.load(weight + e[None, :] * DIM + k[:, None]), left)
    left += tl.load(bias + e).to(tl.float32)[None, :]
    rank = tl.arange(0, TOP)[None, :]
    best = tl.zeros((BLOCK_M, TOP), tl.float32)
    expert = tl.zeros((BLOCK_M, TOP), tl.int32)
    count = tl.zeros((BLOCK_M, EXPERTS), tl.int32)
    for i in tl.static_range(TOP):
        value, which = tl.max(left, 1, return_indices=True)
        best = tl.where(rank == i, value[:, None], best)
        expert = tl.where(rank == i, which[:, None], expert)
        count += (e[None, :] == which[:, None]).to(tl.int32)
        left = tl.where(e[None, :] == which[:, None], -float("inf"), left)
    tl.store(counts + tl.program_id(0) * EXPERTS + e, tl.sum(tl.where(real[:, None], count, 0), 0))
    share = tl.exp(best - tl.max(best, 1)[:, None])
    tl.store(chosen + at * TOP + rank, expert, mask=real[:, None])
    tl.store(weights + at * TOP + rank, share / tl.sum(share, 1)[:, None], mask=real[:, None])


@triton.jit(do_not_specialize=["rows", "blocks"])
def _sort_kernel(
    chosen,
    counts,
    order,
    begins,
    rows,
    blocks,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """Sort (row, expert) pairs by expert: compute the positions of the pairs of BLOCK_M rows.

    The first program also writes the offset of each expert in the sorted list.
    """
    block = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    before = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, blocks, BLOCK_B):
        b = start + tl.arange(0, BLOCK_B)[:, None]
        count = tl.load(counts + b * EXPERTS + e[None, :], mask=b < blocks, other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(b < block, count, 0), 0)
    begin = tl.cumsum(total, 0) - total
    if block == 0:
        tl.store(begins + e, begin)
        tl.store(begins + EXPERTS, tl.sum(total, 0))
    i = tl.arange(0, BLOCK_M * TOP)
    first = block * BLOCK_M * TOP
    real = first + i < rows * TOP
    one = tl.load(chosen + first + i[:, None], mask=real[:, None], other=EXPERTS)
    other = tl.load(chosen + first + i[None, :], mask=real[None, :], other=EXPERTS)
    at = tl.sum(((one == other) & (i[None, :] < i[:, None])).to(tl.int32), 1)
    at += tl.sum(tl.where(one == e[None, :], (begin + before)[None, :], 0), 1)
    tl.store(order + at, first + i, mask=real)


@triton.jit
def _weights(weight, line, k, BLOCK_N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr):
    """Load a transposed weight tile: BLOCK_K inputs from index `k`, and BLOCK_N outputs from index `line`."""
    if TMA:
        w = weight.load([line, k]).T
    else:
        n = line + tl.arange(0, BLOCK_N)
        w = tl.load(weight + n[None, :].to(tl.int64) * K + (k + tl.arange(0, BLOCK_K))[:, None])
    return w


@triton.jit
def _grouped_kernel(
    x,
    x_stride,
    x_scales,
    order,
    begins,
    weight,
    scale,
    shares,
    out,
    out_stride,
    part_stride,
    K: tl.constexpr,
    N: tl.constexpr,
    TOP: tl.constexpr,
    EXPERTS: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ROW_SCALED: tl.constexpr,
    SCALED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute BLOCK_N outputs of one expert for BLOCK_M of its rows (grouped GEMM).

    With FIRST (fc1), the kernel reads x (rows, K), and writes N hidden values gelu(h) · (g + 1) per (row, expert) pair,
    sorted by expert. Without FIRST (fc2), it reads these hidden values, and writes weighted results (TOP, rows, N).
    """
    e = tl.arange(0, EXPERTS)
    begin_of = tl.load(begins + e)
    end_of = tl.load(begins + e + 1)
    blocks = tl.cdiv(end_of - begin_of, BLOCK_M)
    behind = tl.cumsum(blocks, 0)  # block index after each expert, where the next expert begins
    number = tl.program_id(1)
    own = (e == tl.sum((behind <= number).to(tl.int32), 0)).to(tl.int32)
    if tl.sum(own, 0) == 0:
        return  # surplus program: the grid has the maximum number of blocks
    expert = tl.sum(own * e, 0)
    end = tl.sum(own * end_of, 0)
    first = tl.sum(own * begin_of, 0) + (number - tl.sum(own * (behind - blocks), 0)) * BLOCK_M
    halves: tl.constexpr = 2 if FIRST else 1
    line = expert * (halves * N) + tl.program_id(0) * BLOCK_N
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = first + tl.arange(0, BLOCK_M)
    real = m < end
    pair = tl.load(order + m, mask=real, other=0)
    source = pair // TOP if FIRST else m
    x_at = x + source[:, None].to(tl.int64) * x_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if FIRST:
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        a = tl.load(x_at + (start + tl.arange(0, BLOCK_K))[None, :], mask=real[:, None], other=0.0)
        acc = tl.dot(a, _weights(weight, line, start, BLOCK_N, K, BLOCK_K, TMA).to(a.dtype), acc)
        if FIRST:
            gate = tl.dot(a, _weights(weight, line + N, start, BLOCK_N, K, BLOCK_K, TMA).to(a.dtype), gate)
    if ROW_SCALED:
        of_row = tl.load(x_scales + source, mask=real, other=0.0)[:, None]
        acc *= of_row
        if FIRST:
            gate *= of_row
    if SCALED:
        acc *= tl.load(scale + expert * (halves * N) + n)[None, :]
        if FIRST:
            gate *= tl.load(scale + expert * (halves * N) + N + n)[None, :]
    if FIRST:
        value = exact_gelu(acc) * (gate + 1.0)
        at = out + m[:, None].to(tl.int64) * out_stride
    else:
        value = acc * tl.load(shares + pair, mask=real, other=0.0)[:, None]
        at = out + (pair % TOP)[:, None].to(tl.int64) * part_stride + (pair // TOP)[:, None] * out_stride
    tl.store(at + n[None, :], value.to(out.dtype.element_ty), mask=real[:, None])


class SortedRows:
    """Assignment of rows to experts on the device, sorted by expert.

    A *choice* is a pair of a row and one of its experts. Its index is row · top + rank.

    Args:
        x: (rows, dim) in half precision. Rows may have any stride.
        router: linear layer from dim to experts.
        top: number of experts per row.

    Attributes:
        order: (rows · top,) int32 indices of the choices, sorted by expert.
        begins: (experts + 1,) int32 offset of each expert in `order`.
        weights: (rows · top,) float32 router weights of the choices.
    """

    __slots__ = ("begins", "order", "top", "weights")

    def __init__(self, x: torch.Tensor, router: torch.nn.Linear, top: int) -> None:
        (rows, dim), experts = x.shape, router.out_features
        blocks = triton.cdiv(rows, _ROUTED)

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=x.device)

        chosen, counts = numbers(rows * top), numbers(blocks, experts)
        self.top, self.order, self.begins = top, numbers(rows * top), numbers(experts + 1)
        self.weights = numbers(rows * top, dtype=torch.float32)
        shared = {"EXPERTS": experts, "TOP": top, "BLOCK_M": _ROUTED}
        _route_kernel[(blocks,)](
            x,
            x.stride(0),
            router.weight.detach(),
            router.bias.detach(),
            chosen,
            self.weights,
            counts,
            rows,
            DIM=dim,
            BLOCK_K=_ROUTED_K,
            num_warps=4,
            **shared,
        )
        _sort_kernel[(blocks,)](
            chosen, counts, self.order, self.begins, rows, blocks, BLOCK_B=_COUNTED, num_warps=8, **shared
        )


def grouped_product(
    x: torch.Tensor,
    rows: SortedRows,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    x_scales: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shape: Shape | None = None,
) -> torch.Tensor:
    """Multiply the rows of each expert by the expert's weights (grouped GEMM), and return `out`.

    Args:
        x: (rows, inputs), or (rows · top, inputs) ordered by expert; in half precision or float8_e4m3fn.
        rows: assignment of rows to experts.
        weight: (experts, outputs, inputs) in half precision or float8_e4m3fn. Must be FP8 if x is FP8.
        out: output. If x is (rows, inputs), `out` is (rows · top, outputs / 2) and receives gelu(h) · (g + 1), sorted
            by expert, where h and g are the two halves of the products. If x is ordered by expert, `out` is (top, rows,
            outputs) and receives weighted results, best expert first.
        x_scales: float32 scale of each row if x is FP8, else None.
        scale: float32 (experts, outputs) for FP8 weights, else None.
        shape: tile sizes. None uses the tuned sizes.
    """
    n_experts, outputs, inputs = weight.shape
    first = out.ndim == 2
    n = outputs // 2 if first else outputs
    shape = shape or _shape_for(x.device, len(rows.order) // n_experts, first, x.element_size() == 1)
    lines = weight.view(-1, inputs)
    # The last block of each expert may be partly filled.
    most_blocks = min(len(rows.order), n_experts + len(rows.order) // shape.block_m)
    _grouped_kernel[(n // shape.block_n, most_blocks)](
        x,
        x.stride(0),
        rows.weights if x_scales is None else x_scales,
        rows.order,
        rows.begins,
        TensorDescriptor.from_tensor(lines, [shape.block_n, shape.block_k]) if shape.tma else lines,
        rows.weights if scale is None else scale,
        rows.weights,
        out,
        out.stride(-2),
        out.stride(0),
        K=inputs,
        N=n,
        TOP=rows.top,
        EXPERTS=n_experts,
        FIRST=first,
        BLOCK_M=shape.block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        STAGES=shape.stages,
        ROW_SCALED=x_scales is not None,
        SCALED=scale is not None,
        TMA=shape.tma,
        num_warps=shape.warps,
    )
    return out


@cache
def _shape_for(device: torch.device, each: int, first: bool, fp8: bool) -> Shape:
    """Return the tuned tile sizes of the grouped GEMM. `each` is the mean number of rows per expert."""
    if each > 64:
        small = device.type != "cuda" or shared_memory(device) < _LARGE
        shapes = _SMALL if small else _SHAPES if each <= _MANY else _SHAPES_OF_MANY
        return shapes[first, fp8]
    # With few rows per expert, the tile is no taller than these rows.
    shape = _SMALL[first, fp8]
    return shape._replace(block_m=64 if each > 16 else 16, warps=4)
