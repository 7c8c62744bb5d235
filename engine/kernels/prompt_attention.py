"""Attention of consecutive rows of a sequence (prompts and draft tokens) over the paged KV cache.

Up to 16 rows of a sequence share one read of its keys. `paged_attention` would read the keys of the image once per
token. The keys of the rows themselves must already be in the KV cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.common import gelu
from saccade.engine.kernels.kv_cache import LOWEST, rotated

_BLOCK_M = tl.constexpr(16)  # rows per program, the minimum of `tl.dot`
_BLOCK_T = 64  # keys per block
_BLOCK_F = 512  # MLP values per program
_PROGRAMS, _MOST_SPLITS = 512, 8  # keys are split if there are fewer programs
_ROWS_EACH = 8  # assumed rows per sequence, to estimate how many programs have work


@triton.jit(do_not_specialize=["rows"])  # avoids a second compilation for multiples of 16
def _prompt_attention_kernel(
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
    rows,
    limit,
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
    PARTS: tl.constexpr,
):
    """Compute the attention of one head for up to 16 adjacent rows of a sequence, over one part of the keys (split-KV).

    The program that ends last combines the SPLITS parts. Additional programs apply GELU to MLP values.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    if head >= N_HEADS:
        if split == 0:
            f = (head - N_HEADS) * BLOCK_F + tl.arange(0, BLOCK_F)
            inside = f < PRE_GELU
            x = tl.load(heads + row.to(tl.int64) * heads_stride + (N_HEADS + 2 * N_KV) * D + f, mask=inside, other=0.0)
            wide = tl.minimum(gelu(x.to(tl.float32)), limit).to(out.dtype.element_ty)
            tl.store(out + row.to(tl.int64) * out_stride + N_HEADS * D + f, wide, mask=inside)
        return
    owner = tl.load(owners + row)
    if (row % _BLOCK_M > 0) & (tl.load(owners + tl.maximum(row - 1, 0)) == owner):
        return
    kv = head // (N_HEADS // N_KV)
    m = row // _BLOCK_M * _BLOCK_M + tl.arange(0, _BLOCK_M)
    here = (m >= row) & (m < rows)
    here = here & (tl.load(owners + m, mask=here, other=-1) == owner)
    position = tl.load(positions + m, mask=here, other=0)
    own = tl.where(position < PREFIX, position, position + GAP)
    table = tables + owner * tables_stride
    end = tl.max(tl.where(here, own, 0), 0) + 1
    share = tl.cdiv(tl.cdiv(end, SPLITS), BLOCK_T) * BLOCK_T
    stop = tl.minimum(end, (split + 1) * share)
    d = tl.arange(0, WIDTH)
    both = here[:, None] & (d < D)[None, :]
    lines = m.to(tl.int64)[:, None]
    q = rotated(heads + lines * heads_stride + head * D, both, position[:, None], cosine, sine, d[None, :], D // 4)
    if PARTS > 0:
        x = tl.zeros((_BLOCK_M,), tl.float32)
        for part in tl.range(0, PARTS, loop_unroll_factor=6):  # six loads in flight
            x += tl.load(products + part * products_stride + m * 2 * N_HEADS + head, mask=here, other=0.0)
        a = tl.load(alpha + head).to(tl.float32) * tl.log(position.to(tl.float32) + 1.0)
        q *= (1.5 - 2.0 / (tl.exp(2.0 * x) + 1.0) + 1.0 / (1.0 + tl.exp(-a)))[:, None]
    query = q.to(keys.dtype.element_ty if key_scales is None else tl.float16)  # FP8 keys are widened to float16
    best = tl.full((_BLOCK_M,), LOWEST, tl.float32)  # finite, because all keys of a program may be masked for a row
    total = tl.zeros((_BLOCK_M,), tl.float32)
    acc = tl.zeros((_BLOCK_M, WIDTH), tl.float32)
    for start in range(split * share, stop, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        there = (t < stop) & ((t < PREFIX) | (t >= PREFIX + GAP))
        page = tl.load(table + t // PAGE, mask=there, other=0).to(tl.int64)
        cell = (page * N_KV + kv) * PAGE + t % PAGE
        at = cell[:, None] * D + d[None, :]
        real = there[:, None] & (d < D)[None, :]
        k = tl.load(keys + at, mask=real, other=0.0)
        v = tl.load(values + at, mask=real, other=0.0)
        # The running softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
        seen = there[None, :] & (t[None, :] <= own[:, None])
        score = tl.dot(query, tl.trans(k.to(query.dtype))) * scale
        if key_scales is not None:
            score *= tl.load(key_scales + cell, mask=there, other=0.0).to(tl.float32)[None, :]
        score = tl.where(seen, score, -float("inf"))
        higher = tl.maximum(best, tl.max(score, 1))
        fade = tl.exp(best - higher)
        p = tl.exp(score - higher[:, None])
        total = total * fade + tl.sum(p, 1)
        if key_scales is not None:
            v_scale = tl.load(value_scales + cell, mask=there, other=0.0).to(tl.float32)
            p *= v_scale[None, :]
        acc = tl.dot(p.to(query.dtype), v.to(query.dtype), acc * fade[:, None])
        best = higher
    out_at = out + lines * out_stride + head * D + d[None, :]
    if SPLITS == 1:
        tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=both)
    else:
        slot = (m * N_HEADS + head) * SPLITS
        of_width = tl.arange(0, WIDTH)[None, :]
        tl.store(partial + (slot + split)[:, None] * WIDTH + of_width, acc, mask=here[:, None])
        tl.store(weights + (slot + split) * 2, best, mask=here)
        tl.store(weights + (slot + split) * 2 + 1, total, mask=here)
        tl.debug_barrier()  # all stores of this program precede its signal
        if tl.atomic_add(arrived + row * N_HEADS + head, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            s = slot[:, None] + tl.arange(0, SPLITS)[None, :]
            bests = tl.load(weights + s * 2, mask=here[:, None], other=0.0, cache_modifier=".cg")
            highest = tl.max(bests, 1)
            total = tl.zeros((_BLOCK_M,), tl.float32)
            acc = tl.zeros((_BLOCK_M, WIDTH), tl.float32)
            for i in tl.static_range(SPLITS):
                of_part = tl.load(weights + (slot + i) * 2, mask=here, other=0.0, cache_modifier=".cg")
                faded = tl.exp(of_part - highest)
                total += faded * tl.load(weights + (slot + i) * 2 + 1, mask=here, other=1.0, cache_modifier=".cg")
                at = partial + (slot + i)[:, None] * WIDTH + of_width
                acc += faded[:, None] * tl.load(at, mask=here[:, None], other=0.0, cache_modifier=".cg")
            tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=both)
            tl.store(arrived + row * N_HEADS + head, 0)


def counters(device: torch.device) -> torch.Tensor:
    """Return int32 counters, set to zero, with which `prompt_attention` detects the program that ends last.

    Each call of `prompt_attention` resets the counters. Calls must not overlap.
    """
    # Keys are split only while (rows / _ROWS_EACH) · heads · 2 is at most _PROGRAMS.
    return torch.zeros(_PROGRAMS * _ROWS_EACH // 2, dtype=torch.int32, device=device)


def prompt_attention(
    heads: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    owners: torch.Tensor,
    tables: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    out: torch.Tensor,
    arrived: torch.Tensor,
    *,
    n_heads: int,
    pre_gelu: int,
    limit: float,
    products: tuple[torch.Tensor, int, torch.Tensor],
    parts: int,
    layout: dict[str, int],
) -> None:
    """Compute the attention of each row to all tokens of its sequence, up to and including the row's own token.

    The rows of a sequence should be adjacent. Other orders give the same result more slowly. `PagedAttention.attend`
    describes the tensors in detail.

    Args:
        heads: (rows, (n_heads + 2 n_kv_heads) · head_dim + pre_gelu).
        angles: cosine and sine tables for RoPE.
        positions: (rows,) int32.
        owners: (rows,) int32 index into `tables`.
        tables: (sequences, pages) int32 page tables.
        cache: one layer of the cache. It must contain the keys of these rows.
        out: (rows, n_heads · head_dim + pre_gelu), overwritten.
        arrived: buffer from `counters`.
        n_heads: number of query heads.
        pre_gelu: number of MLP values per row to which GELU is applied.
        limit: upper bound for the results of GELU.
        products: partial sums of the attention temperature, the stride between them, and alpha.
        parts: number of partial sums; 0 without an attention temperature.
        layout: numbers of tokens per page, of tokens of an image prefix, and of unused positions after the prefix.
    """
    rows, (_, n_kv, _, head_dim) = len(heads), cache[0].shape
    width = triton.next_power_of_2(head_dim)
    guess, splits = triton.cdiv(rows, _ROWS_EACH) * n_heads, 1
    while splits < _MOST_SPLITS and 2 * guess * splits <= _PROGRAMS:
        splits *= 2
    room = rows * n_heads * splits if splits > 1 else 1
    _prompt_attention_kernel[(n_heads + triton.cdiv(pre_gelu, _BLOCK_F), splits, rows)](
        heads,
        heads.stride(0),
        *angles,
        positions,
        owners,
        tables,
        tables.stride(0),
        *cache,
        out,
        out.stride(0),
        torch.empty(room * width, device=heads.device),
        torch.empty(room * 2, device=heads.device),
        arrived,
        head_dim**-0.5,
        *products,
        rows,
        limit,
        N_HEADS=n_heads,
        N_KV=n_kv,
        D=head_dim,
        WIDTH=width,
        SPLITS=splits,
        BLOCK_T=_BLOCK_T,
        PRE_GELU=pre_gelu,
        BLOCK_F=_BLOCK_F,
        PARTS=parts,
        num_warps=4,
        num_stages=2,
        **layout,
    )
