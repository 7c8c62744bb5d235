"""Bidirectional attention between the tokens of each image on Hopper GPUs, written in Gluon.

The kernel reads queries, keys and values from the output of the QKV GEMM. The Tensor Memory Accelerator (TMA) loads
tiles and pads them with zeros at the end of an image or head. The head dimension is split into a power of two and a
remainder, which is padded to 16: 72 becomes 64 + 16. A program processes two tiles of queries in one warp group. The
softmax of one tile overlaps with the GEMMs of the other tile.

| time per layer of Moondream 2 on an H200 | 1 image | 2 images | 5 images | 8 images |
|---|---|---|---|---|
| decoder (32 heads of 64) | 19.2 µs | 29.6 µs | 66.6 µs | 97.8 µs |
| decoder, cuDNN | 22.9 µs | 31.7 µs | 74.2 µs | 107.3 µs |
| encoder (16 heads of 72) | 16.9 µs | 24.6 µs | 45.3 µs | 66.2 µs |
| encoder, cuDNN | 17.4 µs | 29.5 µs | 52.7 µs | 76.4 µs |

Gluon is experimental, and its names change between versions. This code is for Triton 3.6. `cuda.image_attention`
therefore tests the kernel before use.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MIN_TOKENS = 512
"""Minimum tokens per image. Results are correct from 65 tokens; speed was measured with 729 and 730."""
_HALF = 64  # queries per tile: the rows of one warp-group MMA
_BLOCK = 64  # keys per tile
_STAGES = 4  # pipeline stages of key and value tiles
_REST = 16  # padded remainder of a head width after a power of two
_LOG2_E = 1.4426950408889634


@gluon.jit
def _fetch(
    rows,
    rows_rest,
    arrived,
    tiles,
    tiles_rest,
    slot,
    wanted,
    image,
    token,
    head,
    BLOCK: gl.constexpr,
    WIDTH: gl.constexpr,
    REST: gl.constexpr,
):
    """Start to copy a tile of a head's queries, keys or values to shared memory, if `wanted` is true."""
    mbarrier.expect(arrived.index(slot), BLOCK * (WIDTH + REST) * 2, wanted)
    tma.async_copy_global_to_shared(rows, [image, token, head, 0], arrived.index(slot), tiles.index(slot), wanted)
    if REST > 0:
        at = [image, token, head, WIDTH]
        tma.async_copy_global_to_shared(rows_rest, at, arrived.index(slot), tiles_rest.index(slot), wanted)


@gluon.jit
def _scores(q, q_rest, k, k_rest, slot, none, BLOCK: gl.constexpr, WIDTH: gl.constexpr, REST: gl.constexpr):
    """Start the asynchronous GEMM of a query tile and a key tile (attention scores)."""
    tile = k.index(slot).reshape([BLOCK, WIDTH]).permute([1, 0])
    score = warpgroup_mma(q, tile, none, use_acc=False, is_async=True)
    if REST > 0:
        tile_rest = k_rest.index(slot).reshape([BLOCK, REST]).permute([1, 0])
        score = warpgroup_mma(q_rest, tile_rest, score, is_async=True)
    return score


@gluon.jit
def _softmax(score, best, total, scale, dtype: gl.constexpr):
    """Update the online softmax in base 2 with a block of scores (Milakov and Gimelshein 2018, arXiv:1805.02867)."""
    higher = gl.maximum(best, gl.max(score, 1) * scale)
    fade = gl.exp2(best - higher)
    p = gl.exp2(score * scale - higher[:, None])
    return p.to(dtype), higher, total * fade + gl.sum(p, 1), fade


@gluon.jit
def _faded(acc, fade):
    like: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.convert_layout(fade, like, assert_trivial=True)[:, None]


@gluon.jit
def _seen(p, v, v_rest, slot, acc, rest, BLOCK: gl.constexpr, WIDTH: gl.constexpr, REST: gl.constexpr):
    """Start the asynchronous GEMM that adds attention probabilities times a value tile to the accumulators."""
    like: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    tile = v.index(slot).reshape([BLOCK, WIDTH])
    more = warpgroup_mma(gl.convert_layout(p, like, assert_trivial=True), tile, acc, is_async=True)
    more_rest = more
    if REST > 0:
        like_rest: gl.constexpr = gl.DotOperandLayout(0, rest.type.layout, 2)
        tile_rest = v_rest.index(slot).reshape([BLOCK, REST])
        more_rest = warpgroup_mma(gl.convert_layout(p, like_rest, assert_trivial=True), tile_rest, rest, is_async=True)
    return more, more_rest


@gluon.jit
def _wait(pending: gl.constexpr, score, acc, rest, REST: gl.constexpr):
    """Wait until at most `pending` asynchronous GEMMs are in flight. Return the attention scores and accumulators."""
    if REST > 0:
        score, acc, rest = warpgroup_mma_wait(pending, deps=(score, acc, rest))
    else:
        score, acc = warpgroup_mma_wait(pending, deps=(score, acc))
        rest = acc
    return score, acc, rest


@gluon.jit
def _store(acc, total, out, tile, image, token, head, d, HALF: gl.constexpr, WIDTH: gl.constexpr):
    tile.reshape([HALF, WIDTH]).store(_faded(acc, 1.0 / total).to(out.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [image, token, head, d], tile)


@gluon.jit
def _image_attention_kernel(
    queries,
    queries_rest,
    rows,
    rows_rest,
    out,
    out_rest,
    scale,
    N_HEADS: gl.constexpr,
    N_KV: gl.constexpr,
    TOKENS: gl.constexpr,
    WIDTH: gl.constexpr,
    REST: gl.constexpr,
    HALF: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Compute the attention of 2 · HALF queries (two tiles) in one head of one image."""
    dtype: gl.constexpr = rows.dtype
    token = gl.program_id(0) * (2 * HALF)
    head = gl.program_id(1)
    image = gl.program_id(2)
    key = N_HEADS + head // (N_HEADS // N_KV)
    value = key + N_KV
    blocks: gl.constexpr = (TOKENS + BLOCK - 1) // BLOCK
    one: gl.constexpr = 2 if REST > 0 else 1  # GEMMs per query tile for scores; the same number for values
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    of_width: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    of_rest: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST if REST > 0 else 16, 16])
    of_row: gl.constexpr = gl.SliceLayout(1, scores)

    q = gl.allocate_shared_memory(dtype, [2, 1, HALF, 1, WIDTH], queries.layout)
    k = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK, 1, WIDTH], rows.layout)
    v = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK, 1, WIDTH], rows.layout)
    q_rest = q
    k_rest = k
    v_rest = v
    if REST > 0:
        q_rest = gl.allocate_shared_memory(dtype, [2, 1, HALF, 1, REST], queries_rest.layout)
        k_rest = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK, 1, REST], rows_rest.layout)
        v_rest = gl.allocate_shared_memory(dtype, [STAGES, 1, BLOCK, 1, REST], rows_rest.layout)
    q_arrived = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_arrived.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_arrived.index(i), count=1)
        mbarrier.init(v_arrived.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()

    mbarrier.expect(q_arrived.index(0), 2 * HALF * (WIDTH + REST) * 2)
    for half in gl.static_range(2):
        at = token + half * HALF
        tma.async_copy_global_to_shared(queries, [image, at, head, 0], q_arrived.index(0), q.index(half))
        if REST > 0:
            rest_at = [image, at, head, WIDTH]
            tma.async_copy_global_to_shared(queries_rest, rest_at, q_arrived.index(0), q_rest.index(half))
    for i in gl.static_range(STAGES):
        _fetch(rows, rows_rest, k_arrived, k, k_rest, i, i < blocks, image, i * BLOCK, key, BLOCK, WIDTH, REST)
        _fetch(rows, rows_rest, v_arrived, v, v_rest, i, i < blocks, image, i * BLOCK, value, BLOCK, WIDTH, REST)

    q_a = q.index(0).reshape([HALF, WIDTH])
    q_b = q.index(1).reshape([HALF, WIDTH])
    r_a = q_a
    r_b = q_b
    none = gl.zeros([HALF, BLOCK], gl.float32, scores)
    best_a = gl.full([HALF], -float("inf"), gl.float32, of_row)
    best_b = gl.full([HALF], -float("inf"), gl.float32, of_row)
    total_a = gl.zeros([HALF], gl.float32, of_row)
    total_b = gl.zeros([HALF], gl.float32, of_row)
    acc_a = gl.zeros([HALF, WIDTH], gl.float32, of_width)
    acc_b = gl.zeros([HALF, WIDTH], gl.float32, of_width)
    rest_a = acc_a
    rest_b = acc_b
    if REST > 0:
        r_a = q_rest.index(0).reshape([HALF, REST])
        r_b = q_rest.index(1).reshape([HALF, REST])
        rest_a = gl.zeros([HALF, REST], gl.float32, of_rest)
        rest_b = gl.zeros([HALF, REST], gl.float32, of_rest)

    mbarrier.wait(q_arrived.index(0), 0)
    mbarrier.wait(k_arrived.index(0), 0)
    s_a = _scores(q_a, r_a, k, k_rest, 0, none, BLOCK, WIDTH, REST)
    s_b = _scores(q_b, r_b, k, k_rest, 0, none, BLOCK, WIDTH, REST)
    score_a = warpgroup_mma_wait(one, deps=(s_a,))
    p, best_a, total_a, fade = _softmax(score_a, best_a, total_a, scale, dtype)
    mbarrier.wait(v_arrived.index(0), 0)
    t_a, tr_a = _seen(p, v, v_rest, 0, acc_a, rest_a, BLOCK, WIDTH, REST)
    mbarrier.wait(k_arrived.index(1), 0)
    s_a = _scores(q_a, r_a, k, k_rest, 1, none, BLOCK, WIDTH, REST)
    score_b = warpgroup_mma_wait(2 * one, deps=(s_b,))
    gl.thread_barrier()  # all threads have read the first keys
    more: gl.constexpr = blocks > STAGES
    _fetch(rows, rows_rest, k_arrived, k, k_rest, 0, more, image, STAGES * BLOCK, key, BLOCK, WIDTH, REST)
    p_b, best_b, total_b, fade = _softmax(score_b, best_b, total_b, scale, dtype)
    # Wait for the scores in the iteration that started their GEMM; otherwise ptxas serializes the GEMMs.
    score_a, acc_a, rest_a = _wait(0, s_a, t_a, tr_a, REST)
    for i in range(1, blocks - 1):
        before = (i - 1) % STAGES
        slot = i % STAGES
        after = (i + 1) % STAGES
        t_b, tr_b = _seen(p_b, v, v_rest, before, acc_b, rest_b, BLOCK, WIDTH, REST)
        s_b = _scores(q_b, r_b, k, k_rest, slot, none, BLOCK, WIDTH, REST)
        p, best_a, total_a, fade = _softmax(score_a, best_a, total_a, scale, dtype)
        mbarrier.wait(v_arrived.index(slot), (i // STAGES) & 1)
        acc_a = _faded(acc_a, fade)
        if REST > 0:
            rest_a = _faded(rest_a, fade)
        t_a, tr_a = _seen(p, v, v_rest, slot, acc_a, rest_a, BLOCK, WIDTH, REST)
        mbarrier.wait(k_arrived.index(after), ((i + 1) // STAGES) & 1)
        s_a = _scores(q_a, r_a, k, k_rest, after, none, BLOCK, WIDTH, REST)
        score_b, acc_b, rest_b = _wait(2 * one, s_b, t_b, tr_b, REST)
        gl.thread_barrier()  # all threads have read this block's keys and the previous values
        k_next = i + STAGES
        v_next = k_next - 1
        k_wanted = k_next < blocks
        v_wanted = v_next < blocks
        _fetch(rows, rows_rest, k_arrived, k, k_rest, slot, k_wanted, image, k_next * BLOCK, key, BLOCK, WIDTH, REST)
        _fetch(
            rows, rows_rest, v_arrived, v, v_rest, before, v_wanted, image, v_next * BLOCK, value, BLOCK, WIDTH, REST
        )
        p_b, best_b, total_b, fade = _softmax(score_b, best_b, total_b, scale, dtype)
        acc_b = _faded(acc_b, fade)
        if REST > 0:
            rest_b = _faded(rest_b, fade)
        score_a, acc_a, rest_a = _wait(0, s_a, t_a, tr_a, REST)

    last: gl.constexpr = (blocks - 1) % STAGES
    there = (gl.arange(0, BLOCK, gl.SliceLayout(0, scores)) < TOKENS - (blocks - 1) * BLOCK)[None, :]
    t_b, tr_b = _seen(p_b, v, v_rest, (blocks - 2) % STAGES, acc_b, rest_b, BLOCK, WIDTH, REST)
    s_b = _scores(q_b, r_b, k, k_rest, last, none, BLOCK, WIDTH, REST)
    score_a = gl.where(there, score_a, -float("inf"))
    p, best_a, total_a, fade = _softmax(score_a, best_a, total_a, scale, dtype)
    mbarrier.wait(v_arrived.index(last), ((blocks - 1) // STAGES) & 1)
    acc_a = _faded(acc_a, fade)
    if REST > 0:
        rest_a = _faded(rest_a, fade)
    t_a, tr_a = _seen(p, v, v_rest, last, acc_a, rest_a, BLOCK, WIDTH, REST)
    score_b, acc_b, rest_b = _wait(one, s_b, t_b, tr_b, REST)
    score_b = gl.where(there, score_b, -float("inf"))
    p_b, best_b, total_b, fade = _softmax(score_b, best_b, total_b, scale, dtype)
    acc_b = _faded(acc_b, fade)
    if REST > 0:
        rest_b = _faded(rest_b, fade)
    t_b, tr_b = _seen(p_b, v, v_rest, last, acc_b, rest_b, BLOCK, WIDTH, REST)
    if REST > 0:
        acc_a, rest_a, acc_b, rest_b = warpgroup_mma_wait(0, deps=(t_a, tr_a, t_b, tr_b))
    else:
        acc_a, acc_b = warpgroup_mma_wait(0, deps=(t_a, t_b))
    gl.thread_barrier()  # all threads have read the queries, whose buffer is reused for results
    if REST > 0:
        _store(rest_a, total_a, out_rest, q_rest.index(0), image, token, head, WIDTH, HALF, REST)
        _store(rest_b, total_b, out_rest, q_rest.index(1), image, token + HALF, head, WIDTH, HALF, REST)
    _store(acc_a, total_a, out, q.index(0), image, token, head, 0, HALF, WIDTH)
    _store(acc_b, total_b, out, q.index(1), image, token + HALF, head, 0, HALF, WIDTH)
    tma.store_wait(0)


def supports(dtype: torch.dtype, head_dim: int, tokens: int) -> bool:
    """Return whether the image attention kernel supports this dtype, head width and number of tokens per image."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and tokens >= MIN_TOKENS
        and 64 <= head_dim <= 64 + _REST  # a width of 128 spills registers
        and head_dim % 8 == 0
    )


def aligned(heads: torch.Tensor) -> bool:
    """Return whether the address and row stride of `heads` are aligned for the Tensor Memory Accelerator (TMA)."""
    return heads.stride(0) % 8 == heads.data_ptr() % 16 == 0


def image_attention(heads: torch.Tensor, out: torch.Tensor, images: int, n_heads: int, n_kv_heads: int) -> None:
    """Compute the attention of every token to all tokens of its image. The softmax is in float32.

    Args:
        heads: (images · tokens, (n_heads + 2 n_kv_heads) · head_dim): queries, keys and values. The rows must be
            `aligned`.
        out: (images · tokens, n_heads · head_dim), overwritten. The rows must be `aligned`.
        images: number of images.
        n_heads: number of query heads.
        n_kv_heads: number of key heads, which is also the number of value heads.
    """
    tokens, dim = len(heads) // images, out.shape[1] // n_heads
    width = 1 << (dim.bit_length() - 1)
    rest = _REST if dim > width else 0

    def tiles(rows: torch.Tensor, length: int, part: int) -> TensorDescriptor | None:
        if part == 0:
            return None
        stride, layout = rows.stride(0), gl.NVMMASharedLayout(2 * part, 16, rank=4)
        shape, strides = [images, tokens, rows.shape[1] // dim, dim], [tokens * stride, stride, dim, 1]
        return TensorDescriptor(rows, shape, strides, [1, length, 1, part], layout)

    _image_attention_kernel[(triton.cdiv(tokens, 2 * _HALF), n_heads, images)](
        tiles(heads, _HALF, width),
        tiles(heads, _HALF, rest),
        tiles(heads, _BLOCK, width),
        tiles(heads, _BLOCK, rest),
        tiles(out, _HALF, width),
        tiles(out, _HALF, rest),
        dim**-0.5 * _LOG2_E,
        N_HEADS=n_heads,
        N_KV=n_kv_heads,
        TOKENS=tokens,
        WIDTH=width,
        REST=rest,
        HALF=_HALF,
        BLOCK=_BLOCK,
        STAGES=_STAGES,
        num_warps=4,
    )
