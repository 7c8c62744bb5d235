"""What a token leaves in the paged cache: its key at its rotary position, its value at its temperature.

Programs of other kernels use the same parts on the way (`paged_attention`).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated(at, where, position, cosine, sine, d, HALF: tl.constexpr) -> tl.tensor:
    """A head's vector at `at`, its first 2 · HALF dimensions turned by the position's angles."""
    value = tl.load(at + d, mask=where, other=0.0).to(tl.float32)
    turned = where & (d < 2 * HALF)
    other = tl.load(at + tl.where(d < HALF, d + HALF, d - HALF), mask=turned, other=0.0).to(tl.float32)
    angle = position * HALF + d % HALF
    c = tl.load(cosine + angle, mask=turned, other=1.0)
    s = tl.load(sine + angle, mask=turned, other=0.0)
    return value * c + tl.where(d < HALF, -other, other) * s


@triton.jit
def factor(products, stride, alpha, at, head, position, PARTS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """A temperature: tanh of the sum of output `at` of a row's products, and ½ + sigmoid(alpha · log(position + 1)).

    `products` is the row's; `stride` lies between its parts.
    """
    i = tl.arange(0, BLOCK)
    x = tl.sum(tl.load(products + i * stride + at, mask=i < PARTS, other=0.0), 0)
    a = tl.load(alpha + head).to(tl.float32) * tl.log(position.to(tl.float32) + 1.0)
    # tanh(x) = 1 - 2 / (exp(2x) + 1), which is exact at both ends.
    return 1.5 - 2.0 / (tl.exp(2.0 * x) + 1.0) + 1.0 / (1.0 + tl.exp(-a))


@triton.jit
def write_kv_kernel(
    heads,
    heads_stride,
    cosine,
    sine,
    positions,
    owners,
    tables,
    tables_stride,
    keys,
    values,
    products,
    products_stride,
    alpha,
    N_HEADS: tl.constexpr,
    N_KV: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PAGE: tl.constexpr,
    PREFIX: tl.constexpr,
    GAP: tl.constexpr,
    ROTATE: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Put one row's keys and values into its pages; with ROTATE leave queries and keys rotated in place as well.

    With a temperature the values that are kept have it, and with ROTATE those in place and the queries, too.
    """
    row = tl.program_id(0)
    position = tl.load(positions + row)
    at = heads + row.to(tl.int64) * heads_stride
    own = tl.where(position < PREFIX, position, position + GAP)
    page = tl.load(tables + tl.load(owners + row) * tables_stride + own // PAGE).to(tl.int64)
    h = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    real = (h < N_KV) & (d < D)
    cell = ((page * N_KV + h) * PAGE + own % PAGE) * D + d
    k_at = at + (N_HEADS + h) * D
    k = rotated(k_at, real, position, cosine, sine, d, D // 4).to(keys.dtype.element_ty)
    v_at = at + (N_HEADS + N_KV + h) * D + d
    v = tl.load(v_at, mask=real, other=0.0)
    if PARTS > 0:  # of as many heads for keys as for queries
        inside = h < N_KV
        own_products = products + row * 2 * N_HEADS
        of_q = tl.zeros((BLOCK_H, 1), tl.float32)
        of_v = tl.zeros((BLOCK_H, 1), tl.float32)
        for part in range(PARTS):
            of_q += tl.load(own_products + part * products_stride + h, mask=inside, other=0.0)
            of_v += tl.load(own_products + part * products_stride + N_HEADS + h, mask=inside, other=0.0)
        a = tl.load(alpha + h, mask=inside, other=0.0).to(tl.float32) * tl.log(position.to(tl.float32) + 1.0)
        by_position = 1.5 + 1.0 / (1.0 + tl.exp(-a))
        v = (v * (by_position - 2.0 / (tl.exp(2.0 * of_v) + 1.0))).to(values.dtype.element_ty)
    tl.store(keys + cell, k, mask=real)
    tl.store(values + cell, v, mask=real)
    if ROTATE:
        tl.debug_barrier()  # every pair is read before either half is overwritten
        tl.store(k_at + d, k.to(heads.dtype.element_ty), mask=real)
        if PARTS > 0:
            tl.store(v_at, v.to(heads.dtype.element_ty), mask=real)
        for g in range(N_HEADS // N_KV):
            q_real = real & (d < D)
            q_at = at + (h * (N_HEADS // N_KV) + g) * D
            q = rotated(q_at, q_real, position, cosine, sine, d, D // 4)
            if PARTS > 0:
                q *= by_position - 2.0 / (tl.exp(2.0 * of_q) + 1.0)
            tl.debug_barrier()
            tl.store(q_at + d, q.to(heads.dtype.element_ty), mask=q_real)
