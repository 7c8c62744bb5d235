"""Attention within images: every token of one sees every other, queries, keys and values side by side in rows.

Heads may be of any width that is a power of two and some sixteenths: 72 is read as 64 and 16, where kernels for powers
of two compute 96 or 128.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

_LOG2_E = 1.4426950408889634
_REST = 16  # of a head's width, behind a power of two


class Tile(NamedTuple):
    """How it is cut up: a program's queries, keys at a time, how many of those are under way, and its warps."""

    block_m: int
    block_t: int
    stages: int
    warps: int


_TILE = Tile(128, 64, 2, 8)


@triton.jit
def _more_keys(
    q, q_rest, wide, rest, row, k_at, v_at, start, scale, best, total, acc, acc_rest,
    LENGTH: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, BLOCK_T: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) with BLOCK_T more keys in it."""
    score = tl.dot(q, wide.load([row + start, k_at]).T)
    if REST > 0:
        score = tl.dot(q_rest, rest.load([row + start, k_at + WIDTH]).T, score)
    if LAST:
        t = start + tl.arange(0, BLOCK_T)
        score = tl.where((t < LENGTH)[None, :], score, -float("inf"))
    higher = tl.maximum(best, tl.max(score, 1))
    fade = tl.exp2((best - higher) * scale)
    p = tl.exp2(score * scale - (higher * scale)[:, None])  # in one multiply-add a score
    total = total * fade + tl.sum(p, 1)
    p = p.to(q.dtype)
    acc = tl.dot(p, wide.load([row + start, v_at]), acc * fade[:, None])
    if REST > 0:
        acc_rest = tl.dot(p, rest.load([row + start, v_at + WIDTH]), acc_rest * fade[:, None])
    return higher, total, acc, acc_rest


@triton.jit
def _prefix_attention_kernel(
    queries,
    queries_rest,
    wide,
    rest,
    out,
    out_stride,
    scale,
    N_HEADS: tl.constexpr,
    N_KV: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCK_M queries of one head of one image."""
    start_m = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1)
    row = tl.program_id(2) * LENGTH
    kv = head // (N_HEADS // N_KV)
    k_at, v_at = (N_HEADS + kv) * D, (N_HEADS + N_KV + kv) * D
    q = queries.load([row + start_m, head * D])
    q_rest = q
    acc_rest = tl.zeros((BLOCK_M, REST if REST > 0 else 16), tl.float32)
    if REST > 0:
        r = tl.arange(0, REST)
        q_rest = queries_rest.load([row + start_m, head * D + WIDTH])
        q_rest = tl.where((r < D - WIDTH)[None, :], q_rest, 0.0)  # what is behind is the next head's
    best = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    whole: tl.constexpr = LENGTH // BLOCK_T * BLOCK_T
    for start in tl.range(0, whole, BLOCK_T, num_stages=STAGES):
        best, total, acc, acc_rest = _more_keys(
            q, q_rest, wide, rest, row, k_at, v_at, start, scale, best, total, acc, acc_rest,
            LENGTH, WIDTH, REST, BLOCK_T, False,
        )  # fmt: skip
    if whole < LENGTH:
        best, total, acc, acc_rest = _more_keys(
            q, q_rest, wide, rest, row, k_at, v_at, whole, scale, best, total, acc, acc_rest,
            LENGTH, WIDTH, REST, BLOCK_T, True,
        )  # fmt: skip
    m = start_m + tl.arange(0, BLOCK_M)
    at = out + (row + m).to(tl.int64)[:, None] * out_stride + head * D
    real = (m < LENGTH)[:, None]
    d = tl.arange(0, WIDTH)
    tl.store(at + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
    if REST > 0:
        tl.store(
            at + WIDTH + r[None, :], (acc_rest / total[:, None]).to(out.dtype.element_ty),
            mask=real & (r < D - WIDTH)[None, :],
        )  # fmt: skip


def supports(heads: torch.Tensor, head_dim: int) -> bool:
    """Whether the kernel takes rows like these: where the copy engine for tiles is, which Hopper brought."""
    width = _width(head_dim)
    aligned = heads.stride(0) * heads.element_size() % 16 == 0 and heads.stride(1) == 1
    half = heads.dtype in (torch.bfloat16, torch.float16)
    tiles = not heads.is_cuda or torch.cuda.get_device_capability(heads.device) >= (9, 0)
    return half and aligned and tiles and 16 <= width <= 128 and head_dim - width <= _REST


def _width(head_dim: int) -> int:
    """The largest power of two that is no larger."""
    return 1 << (head_dim.bit_length() - 1)


def prefix_attention(
    heads: torch.Tensor,
    out: torch.Tensor,
    length: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    tile: Tile = _TILE,
) -> None:
    """Attention of images to themselves.

    Args:
        heads: (images · length, at least (n_heads + 2 n_kv_heads) · head_dim) queries, keys and values; the stride of
            a row is a multiple of 16 bytes.
        out: (images · length, n_heads · head_dim); the stride of a row is free.
        length: tokens of an image.
        n_heads: of queries.
        n_kv_heads: of keys and values.
        head_dim: 64, or up to 16 more than a power of two.
        tile: how it is cut up.
    """
    width = _width(head_dim)
    rest = 0 if head_dim == width else _REST

    def blocks(rows: int, columns: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(heads, [rows, columns or _REST])

    _prefix_attention_kernel[(triton.cdiv(length, tile.block_m), n_heads, len(heads) // length)](
        blocks(tile.block_m, width),
        blocks(tile.block_m, rest),
        blocks(tile.block_t, width),
        blocks(tile.block_t, rest),
        out,
        out.stride(0),
        head_dim**-0.5 * _LOG2_E,
        N_HEADS=n_heads,
        N_KV=n_kv_heads,
        D=head_dim,
        WIDTH=width,
        REST=rest,
        LENGTH=length,
        BLOCK_M=tile.block_m,
        BLOCK_T=tile.block_t,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
