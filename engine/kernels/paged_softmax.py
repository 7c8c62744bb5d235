"""A block of a head's cached keys and values, and the running softmax of a single query over such blocks."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # less than any score; of two that are infinite there is no difference


@triton.jit
def entries(
    keys,
    values,
    key_scales,
    value_scales,
    table,
    kv,
    start,
    stop,
    d,
    D: tl.constexpr,
    N_KV: tl.constexpr,
    PAGE: tl.constexpr,
    PREFIX: tl.constexpr,
    GAP: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """BLOCK_T keys and values of a head from `start` on, their scales if any, and which are there to be seen."""
    t = start + tl.arange(0, BLOCK_T)
    seen = (t < stop) & ((t < PREFIX) | (t >= PREFIX + GAP))
    page = tl.load(table + t // PAGE, mask=seen, other=0).to(tl.int64)
    cell = (page * N_KV + kv) * PAGE + t % PAGE
    at = cell[:, None] * D + d[None, :]
    both = seen[:, None] & (d < D)[None, :]
    k, v = tl.load(keys + at, mask=both, other=0.0), tl.load(values + at, mask=both, other=0.0)
    k_scale, v_scale = seen, seen
    if key_scales is not None:
        k_scale = tl.load(key_scales + cell, mask=seen, other=0.0)
        v_scale = tl.load(value_scales + cell, mask=seen, other=0.0)
    return k, v, k_scale, v_scale, seen


@triton.jit
def running_softmax(
    query, k, v, k_scale, v_scale, seen, scale, best, total, acc
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) with BLOCK_T more keys in it."""
    if k.dtype.is_fp8():
        # One for each place in a block, put together at the end. 64 keys take a thread 297 instructions so, and 624 on
        # tensor cores, as FP8 has to be widened in their order; in the time to read the bytes an H200 issues some 420.
        score = tl.sum(k.to(tl.float32) * query[None, :], 1) * (k_scale.to(tl.float32) * scale)
        score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(best, score)
        fade = tl.exp(best - higher)
        p = tl.exp(score - higher)
        weight = (p * v_scale.to(tl.float32)).to(tl.float16)
        return higher, total * fade + p, acc * fade.to(tl.float16)[:, None] + weight[:, None] * v.to(tl.float16)
    else:
        score = tl.where(seen[None, :], tl.dot(query, tl.trans(k)) * scale, -float("inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        fade = tl.exp(best - higher)
        p = tl.exp(score - higher[:, None])
        return higher, total * fade + tl.sum(p, 1), tl.dot(p.to(v.dtype), v, acc * fade[:, None])
