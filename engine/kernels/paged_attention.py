"""Attention of single tokens over the paged KV cache in decode steps, fused with RoPE and the KV cache write.

Models with an attention temperature (Moondream 3) multiply queries and values by factors that depend on position and
token. The kernel adds the partial sums of these factors from `temperature`.

Rows with the same image share the KV cache pages of the image. After the first read, these pages are in the L2 cache.
The pages of one image take 6 MB per layer in Moondream 2, and an H200 has 60 MB of L2. `prompt_attention` is the kernel
for several rows of one sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.common import gelu, pdl_launch, pdl_options, pdl_wait
from saccade.engine.kernels.gemv import Beside, product_beside
from saccade.engine.kernels.kv_cache import (
    LOWEST,
    entries,
    factor,
    kv_scale,
    rotated,
    running_softmax,
    scaled_to_fp8,
    write_kv_kernel,
)
from saccade.engine.kernels.prompt_attention import counters, prompt_attention

# Tuned on an H200 for a whole step. The keys of a head are split among programs if there are few programs.
_PROGRAMS, _MOST_SPLITS = 384, 8
_BLOCK_T = 64  # keys per block; doubled if rows · heads is at most `_FEW`
_FEW = 512
# FP8 is bound by latency: with blocks of 64 keys, 128 registers and two stages, a layer of 24 rows took 43.5 µs, of
# which instructions 12 and memory traffic 18. With 32 keys and four stages a program uses 72 registers, and most
# programs of a step are resident at the same time.
_FP8_MOST_SPLITS, _FP8_BLOCK_T, _FP8_STAGES = 16, 32, 4
_BLOCK_F = 512  # MLP values per program
_MOST_KV_HEADS = 32  # key heads that one program writes
_LARGEST_HALF = 65280.0  # largest value in both bfloat16 and float16; the GEMM after GELU may use float16


@triton.jit
def _attend_kernel(
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
    key_scales,
    value_scales,
    out,
    out_stride,
    partial,
    weights,
    arrived,
    scale,
    products,
    products_stride,
    alpha,
    N_HEADS: tl.constexpr,
    N_KV: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    PREFIX: tl.constexpr,
    GAP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PRE_GELU: tl.constexpr,
    BLOCK_F: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    beside_x,
    beside_weight,
    beside_stride,
    beside_out,
    BESIDE: tl.constexpr,
    BESIDE_BLOCK: tl.constexpr,
    BESIDE_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute the attention of one head of one row over one of SPLITS parts of the keys (split-KV).

    The program that ends last combines the parts. Additional programs apply GELU to MLP values, or compute a `Beside`
    GEMV.
    """
    if PDL and EARLY:
        pdl_launch()
    head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    if head >= N_HEADS:
        if PDL:
            pdl_wait()
        if split == 0:
            f = (head - N_HEADS) * BLOCK_F + tl.arange(0, BLOCK_F)
            inside = f < PRE_GELU
            x = tl.load(heads + row.to(tl.int64) * heads_stride + (N_HEADS + 2 * N_KV) * D + f, mask=inside, other=0.0)
            gelu_out = tl.minimum(gelu(x.to(tl.float32)), LIMIT).to(out.dtype.element_ty)
            tl.store(out + row.to(tl.int64) * out_stride + N_HEADS * D + f, gelu_out, mask=inside)
        return
    if BESIDE > 0 and split >= SPLITS:
        part = (split - SPLITS) * N_HEADS + head
        product_beside(part, beside_x, beside_weight, beside_stride, beside_out, BESIDE, BESIDE_BLOCK, BESIDE_N, PDL)
        return
    kv = head // (N_HEADS // N_KV)
    d = tl.arange(0, WIDTH)
    real = d < D
    position = tl.load(positions + row)
    own = tl.where(position < PREFIX, position, position + GAP)  # cache cell of the row's own token
    table = tables + tl.load(owners + row) * tables_stride
    share = tl.cdiv(tl.cdiv(own, SPLITS), BLOCK_T) * BLOCK_T
    stop = tl.minimum(own, (split + 1) * share)
    start = split * share
    # The cache holds the keys and values of earlier steps.
    k, v, k_scale, v_scale, seen = entries(
        keys, values, key_scales, value_scales, table, kv, start, stop, d, D, N_KV, PAGE, PREFIX, GAP, BLOCK_T
    )
    if PDL:
        pdl_wait()
    at = heads + row.to(tl.int64) * heads_stride
    q = rotated(at + head * D, real, position, cosine, sine, d, D // 4)
    if PARTS > 0:
        own_products = products + row * 2 * N_HEADS
        q *= factor(own_products, products_stride, alpha, head, head, position, PARTS, PARTS_BLOCK)
    # `tl.dot` needs 16 rows; all of them hold the query.
    fp8: tl.constexpr = key_scales is not None
    states: tl.constexpr = BLOCK_T if fp8 else 16
    best = tl.full((states,), LOWEST, tl.float32)
    total = tl.zeros((states,), tl.float32)
    acc = tl.zeros((states, WIDTH), tl.float16 if fp8 else tl.float32)
    if split == 0:
        k_new = rotated(at + (N_HEADS + kv) * D, real, position, cosine, sine, d, D // 4)
        v_new = tl.load(at + (N_HEADS + N_KV + kv) * D + d, mask=real, other=0.0)
        if PARTS > 0:
            v_factor = factor(own_products, products_stride, alpha, N_HEADS + kv, kv, position, PARTS, PARTS_BLOCK)
            v_new = (v_new * v_factor).to(heads.dtype.element_ty)
        if fp8:
            new_k_scale = kv_scale(tl.max(tl.abs(k_new), 0))
            new_v_scale = kv_scale(tl.max(tl.abs(v_new.to(tl.float32)), 0))
            k_kept, v_kept = scaled_to_fp8(k_new, new_k_scale), scaled_to_fp8(v_new, new_v_scale)
            k_new, v_new = k_kept.to(tl.float32) * new_k_scale, v_kept.to(tl.float32) * new_v_scale
        else:
            k_kept, v_kept = k_new.to(keys.dtype.element_ty), v_new
            k_new = k_kept.to(tl.float32)
        own_state = (tl.arange(0, states) == 0) | (not fp8)
        best = tl.where(own_state, tl.sum(q * k_new, 0) * scale, best)
        total = tl.where(own_state, 1.0, total)
        acc = tl.where(own_state[:, None], v_new.to(acc.dtype)[None, :], acc)
        if head % (N_HEADS // N_KV) == 0:
            page = tl.load(table + own // PAGE).to(tl.int64)
            cell = (page * N_KV + kv) * PAGE + own % PAGE
            tl.store(keys + cell * D + d, k_kept, mask=real)
            tl.store(values + cell * D + d, v_kept, mask=real)
            if fp8:
                tl.store(key_scales + cell, new_k_scale)
                tl.store(value_scales + cell, new_v_scale)
    query = q if fp8 else tl.broadcast_to(q.to(keys.dtype.element_ty)[None, :], (16, WIDTH))
    if start < stop:
        best, total, acc = running_softmax(query, k, v, k_scale, v_scale, seen, scale, best, total, acc)
    for start in tl.range(split * share + BLOCK_T, stop, BLOCK_T, num_stages=STAGES):
        k, v, k_scale, v_scale, seen = entries(
            keys, values, key_scales, value_scales, table, kv, start, stop, d, D, N_KV, PAGE, PREFIX, GAP, BLOCK_T
        )
        best, total, acc = running_softmax(query, k, v, k_scale, v_scale, seen, scale, best, total, acc)
    if fp8:
        highest = tl.max(best, 0)
        weight = tl.exp(best - highest)
        best, total, acc = highest, tl.sum(weight * total, 0), tl.sum(weight[:, None] * acc.to(tl.float32), 0)
    else:  # all 16 rows are equal
        best, total, acc = tl.max(best, 0), tl.max(total, 0), tl.max(acc, 0)
    out_at = out + row.to(tl.int64) * out_stride + head * D + d
    if SPLITS == 1:
        tl.store(out_at, (acc / total).to(out.dtype.element_ty), mask=real)
    else:
        slot = (row * N_HEADS + head) * SPLITS
        tl.store(partial + (slot + split) * WIDTH + d, acc)
        tl.store(weights + (slot + split) * 2, best)
        tl.store(weights + (slot + split) * 2 + 1, total)
        tl.debug_barrier()  # all stores of this program precede its signal
        count = tl.atomic_add(arrived + row * N_HEADS + head, 1, sem="acq_rel")
        if count == SPLITS - 1:
            tl.debug_barrier()
            s = tl.arange(0, SPLITS)
            bests = tl.load(weights + (slot + s) * 2, cache_modifier=".cg")
            totals = tl.load(weights + (slot + s) * 2 + 1, cache_modifier=".cg")
            parts = tl.load(partial + (slot + s)[:, None] * WIDTH + d[None, :], cache_modifier=".cg")
            part = tl.exp(bests - tl.max(bests, 0))
            mixed = tl.sum(part[:, None] * parts, 0) / tl.sum(part * totals, 0)
            tl.store(out_at, mixed.to(out.dtype.element_ty), mask=real)
            tl.store(arrived + row * N_HEADS + head, 0)


Temperature = tuple[torch.Tensor, torch.Tensor]
"""Attention temperature: float32 partial sums (parts, rows, 2 · n_heads), queries first; and alpha (n_heads,)."""


class PagedAttention:
    """Attention kernels for one KV cache, with their shared scratch buffers.

    Args:
        n_heads, n_kv_heads, head_dim: sizes of the text decoder.
        page_size: number of tokens per page.
        prefix_length: number of tokens of an image prefix (BOS and image tokens).
        gap: number of unused positions after the image prefix in its last page.
        cosine, sine: (positions, head_dim / 4) float32 RoPE tables.
    """

    def __init__(
        self,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        page_size: int,
        prefix_length: int,
        gap: int,
        cosine: torch.Tensor,
        sine: torch.Tensor,
    ) -> None:
        assert gap < _BLOCK_T  # otherwise a block of keys could be fully masked
        self._n_heads, self._n_kv, self._dim = n_heads, n_kv_heads, head_dim
        self._width = triton.next_power_of_2(head_dim)
        self._layout = {"PAGE": page_size, "PREFIX": prefix_length, "GAP": gap}
        self._cosine, self._sine = cosine, sine
        # Heads are split only below this number of programs.
        self._partial = torch.empty(2 * _PROGRAMS * self._width, device=cosine.device)
        self._weights = torch.empty(2 * _PROGRAMS * 2, device=cosine.device)
        self._arrived = torch.zeros(_PROGRAMS, dtype=torch.int32, device=cosine.device)
        self._arrived_prompts = counters(cosine.device)

    def attend(
        self,
        heads: torch.Tensor,
        positions: torch.Tensor,
        owners: torch.Tensor,
        tables: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        out: torch.Tensor,
        *,
        write: bool,
        pre_gelu: int = 0,
        temperature: Temperature | None = None,
        beside: Beside | None = None,
        pdl: bool = False,
        early: bool = False,
    ) -> None:
        """Compute the attention of each row's token to all cached tokens of its sequence, including itself.

        Args:
            heads: (rows, (n_heads + 2 n_kv_heads) · head_dim + pre_gelu): queries, keys and values before RoPE, then
                values of the MLP.
            positions: (rows,) int32 position of each token in its sequence, including the image prefix.
            owners: (rows,) int32 index into `tables` of each row.
            tables: (sequences, pages) int32 page tables.
            cache: keys and values of one layer (n_pages, n_kv_heads, page_size, head_dim). For e4m3, also the float16
                scales (n_pages, n_kv_heads, page_size) of both, else None.
            out: (rows, n_heads · head_dim + pre_gelu), overwritten.
            pre_gelu: number of MLP values per row to which GELU is applied.
            temperature: attention temperature of queries and new values (partial sums and alpha), or None. It requires
                n_heads == n_kv_heads.
            beside: GEMV for additional programs. It requires a single row, `write`, and a number of programs that is a
                multiple of `n_heads`.
            write: whether to store the key and value of each row in its pages. If False, they must already be stored,
                and the rows of a sequence should be adjacent.
            pdl: whether to use programmatic dependent launch, see `kernels.common`. It requires `write`.
            early: whether to launch the next kernel immediately. It requires `pdl` and `write`. Before its wait, the
                next kernel must not read data that this step writes.
        """
        rows = heads.shape[0]
        if not write:
            prompt_attention(
                heads,
                (self._cosine, self._sine),
                positions,
                owners,
                tables,
                cache,
                out,
                self._arrived_prompts,
                n_heads=self._n_heads,
                pre_gelu=pre_gelu,
                limit=_LARGEST_HALF,
                products=_products(temperature, heads),
                parts=0 if temperature is None else len(temperature[0]),
                layout=self._layout,
            )
            return
        # Powers of two, so that one reduction combines the parts.
        splits = 1
        fp8 = cache[2] is not None
        most = _FP8_MOST_SPLITS if fp8 else _MOST_SPLITS
        while splits < most and rows * self._n_heads * splits < _PROGRAMS:
            splits *= 2
        if fp8:  # at the maximum split, a program has one block of keys
            block = _FP8_BLOCK_T if splits < most else 2 * _FP8_BLOCK_T
        else:
            block = _BLOCK_T if rows * self._n_heads > _FEW else 2 * _BLOCK_T
        further = 0 if beside is None else len(beside.out) // (beside.block_n * self._n_heads)
        _attend_kernel[(self._n_heads + triton.cdiv(pre_gelu, _BLOCK_F), splits + further, rows)](
            heads,
            heads.stride(0),
            self._cosine,
            self._sine,
            positions,
            owners,
            tables,
            tables.stride(0),
            *cache,
            out,
            out.stride(0),
            self._partial,
            self._weights,
            self._arrived,
            self._dim**-0.5,
            *_products(temperature, heads),
            N_HEADS=self._n_heads,
            N_KV=self._n_kv,
            D=self._dim,
            WIDTH=self._width,
            SPLITS=splits,
            BLOCK_T=block,
            PRE_GELU=pre_gelu,
            BLOCK_F=_BLOCK_F,
            LIMIT=_LARGEST_HALF,
            PDL=pdl,
            PARTS=0 if temperature is None else len(temperature[0]),
            PARTS_BLOCK=1 if temperature is None else triton.next_power_of_2(len(temperature[0])),
            STAGES=_FP8_STAGES if fp8 else None,
            beside_x=heads if beside is None else beside.x,
            beside_weight=heads if beside is None else beside.weight,
            beside_stride=0 if beside is None else beside.weight.stride(0),
            beside_out=heads if beside is None else beside.out,
            BESIDE=0 if beside is None else beside.x.shape[1],
            BESIDE_BLOCK=1 if beside is None else triton.next_power_of_2(beside.x.shape[1]),
            BESIDE_N=1 if beside is None else beside.block_n,
            EARLY=early,
            num_warps=4,
            num_stages=1 if splits == most else 2,
            **pdl_options(pdl),
            **self._layout,
        )

    def write_kv(
        self,
        heads: torch.Tensor,
        positions: torch.Tensor,
        owners: torch.Tensor,
        tables: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
        *,
        prefixes: torch.Tensor | None = None,
        temperature: Temperature | None = None,
    ) -> None:
        """Store the keys and values of images and prompt tokens in the pages of the KV cache.

        Args:
            heads: (rows, (n_heads + 2 n_kv_heads) · head_dim): `prefix_length` rows per image, then tokens. RoPE is
                applied in place to the queries and keys of images.
            positions: (tokens or more,) int32 position of each token in its sequence.
            owners: (tokens or more,) int32 row of `tables` for each token.
            tables: (sequences, pages) int32 page tables.
            cache: one layer of the cache, see `attend`.
            prefixes: (images, prefix pages) int32 page tables of the images, or None.
            temperature: attention temperature of the values (partial sums and alpha), or None. In image rows, queries
                and values are both multiplied in place.
        """
        half = self._dim // 4
        block = min(_MOST_KV_HEADS, triton.next_power_of_2(self._n_kv))
        write_kv_kernel[(heads.shape[0], triton.cdiv(self._n_kv, block))](
            heads,
            heads.stride(0),
            self._cosine,
            self._sine,
            0 if prefixes is None else len(prefixes) * self._layout["PREFIX"],
            tables if prefixes is None else prefixes,
            0 if prefixes is None else prefixes.stride(0),
            positions,
            owners,
            tables,
            tables.stride(0),
            *cache,
            *_products(temperature, heads),
            N_HEADS=self._n_heads,
            N_KV=self._n_kv,
            D=self._dim,
            HALF=half,
            HALF_BLOCK=triton.next_power_of_2(half),
            REST_BLOCK=triton.next_power_of_2(self._dim - 2 * half),
            BLOCK_H=block,
            PARTS=0 if temperature is None else len(temperature[0]),
            num_warps=4,
            **self._layout,
        )


def _products(temperature: Temperature | None, unused: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
    if temperature is None:
        return unused, 0, unused
    products, alpha = temperature
    return products, products.stride(0), alpha
