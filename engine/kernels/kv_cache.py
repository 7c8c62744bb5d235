"""Triton functions that store keys and values in the paged KV cache and load them.

RoPE is applied to keys before they are stored. Values are multiplied by an attention temperature if the model has one.
The module also contains the online softmax of one query over blocks of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.engine.kernels import LARGEST, LEAST_KV_SCALE

_LARGEST, _LEAST_SCALE = tl.constexpr(LARGEST), tl.constexpr(LEAST_KV_SCALE)


@triton.jit
def rotated(at, where, position, cosine, sine, d, HALF: tl.constexpr) -> tl.tensor:
    """Load the channels of a head at the pointer `at`, and apply RoPE to the first 2 · HALF channels."""
    value = tl.load(at + d, mask=where, other=0.0).to(tl.float32)
    turned = where & (d < 2 * HALF)
    other = tl.load(at + tl.where(d < HALF, d + HALF, d - HALF), mask=turned, other=0.0).to(tl.float32)
    angle = position * HALF + d % HALF
    c = tl.load(cosine + angle, mask=turned, other=1.0)
    s = tl.load(sine + angle, mask=turned, other=0.0)
    return value * c + tl.where(d < HALF, -other, other) * s


@triton.jit
def factor(products, stride, alpha, at, head, position, PARTS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Return a factor of the attention temperature: tanh(x) + ½ + sigmoid(alpha · log(position + 1)).

    x is the sum of PARTS partial sums, which are stored at `products` with a distance of `stride` elements.
    """
    i = tl.arange(0, BLOCK)
    x = tl.sum(tl.load(products + i * stride + at, mask=i < PARTS, other=0.0), 0)
    a = tl.load(alpha + head).to(tl.float32) * tl.log(position.to(tl.float32) + 1.0)
    # tanh(x) = 1 - 2 / (exp(2x) + 1), which is exact at both ends.
    return 1.5 - 2.0 / (tl.exp(2.0 * x) + 1.0) + 1.0 / (1.0 + tl.exp(-a))


@triton.jit
def kv_scale(widest) -> tl.tensor:
    """Return the float16 scale that quantizes vectors with the maximum absolute value `widest` to FP8."""
    return tl.maximum(widest / _LARGEST, _LEAST_SCALE).to(tl.float16)


@triton.jit
def scaled_to_fp8(x, scale) -> tl.tensor:
    """Quantize key or value vectors to FP8 (e4m3) with the given scales."""
    wide = x.to(tl.float32) / scale.to(tl.float32)
    return tl.minimum(tl.maximum(wide, -_LARGEST), _LARGEST).to(tl.float8e4nv)


@triton.jit
def _widest(first, second, rest, turned, behind):
    """Return the maximum absolute value of each head's channels, (heads, 1)."""
    halves = tl.maximum(tl.abs(first.to(tl.float32)), tl.abs(second.to(tl.float32)))
    of_halves = tl.max(tl.where(turned, halves, 0.0), 1, keep_dims=True)
    return tl.maximum(of_halves, tl.max(tl.where(behind, tl.abs(rest.to(tl.float32)), 0.0), 1, keep_dims=True))


@triton.jit
def _turned(first, second, c, s):
    """Apply RoPE to the two halves `first` and `second` of the rotated channels. Return both halves in float32."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    return a * c - b * s, b * c + a * s


@triton.jit(do_not_specialize=["image_rows"])  # avoids a second compilation for multiples of 16
def write_kv_kernel(
    heads,
    heads_stride,
    cosine,
    sine,
    image_rows,
    prefixes,
    prefixes_stride,
    positions,
    owners,
    tables,
    tables_stride,
    keys,
    values,
    key_scales,
    value_scales,
    products,
    products_stride,
    alpha,
    N_HEADS: tl.constexpr,
    N_KV: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAGE: tl.constexpr,
    PREFIX: tl.constexpr,
    GAP: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Store the keys and values of one token in the KV cache, after RoPE and attention temperature.

    For image tokens (the first `image_rows` rows), queries, keys and values are also updated in place.
    """
    row = tl.program_id(0)
    image = row < image_rows
    if image:
        position = row % PREFIX
        table = prefixes + (row // PREFIX) * prefixes_stride
    else:
        position = tl.load(positions + row - image_rows)
        table = tables + tl.load(owners + row - image_rows) * tables_stride
    own = tl.where(position < PREFIX, position, position + GAP)
    page = tl.load(table + own // PAGE).to(tl.int64)
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    i = tl.arange(0, HALF_BLOCK)[None, :]
    r = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    c = tl.load(cosine + position * HALF + i, mask=i < HALF, other=1.0)
    s = tl.load(sine + position * HALF + i, mask=i < HALF, other=0.0)
    turned = (h < N_KV) & (i < HALF)
    rest = (h < N_KV) & (r < D)
    at = heads + row.to(tl.int64) * heads_stride
    k_at = at + (N_HEADS + h) * D
    v_at = k_at + N_KV * D
    k_first, k_second = tl.load(k_at + i, mask=turned), tl.load(k_at + HALF + i, mask=turned)
    v_first, v_second = tl.load(v_at + i, mask=turned), tl.load(v_at + HALF + i, mask=turned)
    k_rest, v_rest = tl.load(k_at + r, mask=rest), tl.load(v_at + r, mask=rest)
    if PARTS > 0:  # models with a temperature have as many key heads as query heads
        inside = h < N_KV
        own_products = products + row * 2 * N_HEADS
        of_q = tl.zeros((BLOCK_H, 1), tl.float32)
        of_v = tl.zeros((BLOCK_H, 1), tl.float32)
        for part in tl.range(0, PARTS, loop_unroll_factor=6):  # six loads in flight
            of_q += tl.load(own_products + part * products_stride + h, mask=inside, other=0.0)
            of_v += tl.load(own_products + part * products_stride + N_HEADS + h, mask=inside, other=0.0)
        a = tl.load(alpha + h, mask=inside, other=0.0).to(tl.float32) * tl.log(position.to(tl.float32) + 1.0)
        by_position = 1.5 + 1.0 / (1.0 + tl.exp(-a))
        q_factor = by_position - 2.0 / (tl.exp(2.0 * of_q) + 1.0)
        v_factor = by_position - 2.0 / (tl.exp(2.0 * of_v) + 1.0)
        v_first = (v_first * v_factor).to(heads.dtype.element_ty)
        v_second = (v_second * v_factor).to(heads.dtype.element_ty)
        v_rest = (v_rest * v_factor).to(heads.dtype.element_ty)
    k_one, k_two = _turned(k_first, k_second, c, s)
    if image:
        for g in tl.static_range(N_HEADS // N_KV):
            q_at = at + (h * (N_HEADS // N_KV) + g) * D
            q_first, q_second = tl.load(q_at + i, mask=turned), tl.load(q_at + HALF + i, mask=turned)
            q_one, q_two = _turned(q_first, q_second, c, s)
            # If there are few heads, several warps load the same values. All of them must load before one of them
            # stores in place: otherwise RoPE was applied twice to a few FP8 keys of every 10,000.
            tl.debug_barrier()
            if PARTS > 0:
                q_one *= q_factor
                q_two *= q_factor
                q_rest = tl.load(q_at + r, mask=rest) * q_factor
                tl.store(q_at + r, q_rest.to(heads.dtype.element_ty), mask=rest)
            tl.store(q_at + i, q_one.to(heads.dtype.element_ty), mask=turned)
            tl.store(q_at + HALF + i, q_two.to(heads.dtype.element_ty), mask=turned)
        tl.store(k_at + i, k_one.to(heads.dtype.element_ty), mask=turned)
        tl.store(k_at + HALF + i, k_two.to(heads.dtype.element_ty), mask=turned)
        if PARTS > 0:
            tl.store(v_at + i, v_first, mask=turned)
            tl.store(v_at + HALF + i, v_second, mask=turned)
            tl.store(v_at + r, v_rest, mask=rest)
    cell = (page * N_KV + h) * PAGE + own % PAGE
    if key_scales is not None:
        k_scale = kv_scale(_widest(k_one, k_two, k_rest, turned, rest))
        v_scale = kv_scale(_widest(v_first, v_second, v_rest, turned, rest))
        tl.store(key_scales + cell, k_scale, mask=h < N_KV)
        tl.store(value_scales + cell, v_scale, mask=h < N_KV)
        k_one, k_two, k_rest = (
            scaled_to_fp8(k_one, k_scale),
            scaled_to_fp8(k_two, k_scale),
            scaled_to_fp8(k_rest, k_scale),
        )
        v_first, v_second = scaled_to_fp8(v_first, v_scale), scaled_to_fp8(v_second, v_scale)
        v_rest = scaled_to_fp8(v_rest, v_scale)
    cell *= D
    tl.store(keys + cell + i, k_one.to(keys.dtype.element_ty), mask=turned)
    tl.store(keys + cell + HALF + i, k_two.to(keys.dtype.element_ty), mask=turned)
    tl.store(keys + cell + r, k_rest, mask=rest)
    tl.store(values + cell + i, v_first, mask=turned)
    tl.store(values + cell + HALF + i, v_second, mask=turned)
    tl.store(values + cell + r, v_rest, mask=rest)


LOWEST = tl.constexpr(-1e30)  # lower than any score; the difference of two infinities would be NaN


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
    """Load BLOCK_T keys and values of a head from index `start`, with their FP8 scales and a mask of valid keys."""
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
    """Update the online softmax of a query with BLOCK_T keys (Milakov and Gimelshein 2018, arXiv:1805.02867)."""
    if k.dtype.is_fp8():
        # Each position in a block has its own accumulator; they are reduced at the end. 64 keys take a thread 297
        # instructions this way and 624 on tensor cores, which need FP8 widened in their layout. An H200 issues about
        # 420 instructions in the time that it takes to read the bytes.
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
