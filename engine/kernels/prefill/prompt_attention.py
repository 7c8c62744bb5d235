"""Attention of prompts over paged keys and values, which are there: rows of one sequence read them once.

What `paged_attention` does a row at a time, for rows that come sequence by sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.paged_attention import PagedAttention

_BLOCK_M = 16  # rows of a program, the least of a matrix product; they may be of several sequences
_BLOCK_T = 64  # keys at a time


@triton.jit
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
    out,
    out_stride,
    scale,
    rows,
    N_HEADS: tl.constexpr,
    N_KV: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    PREFIX: tl.constexpr,
    GAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One head of BLOCK_M rows, one sequence's after the other's."""
    head = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_M
    kv = head // (N_HEADS // N_KV)
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, WIDTH)
    real = m < rows
    both = real[:, None] & (d < D)[None, :]
    position = tl.load(positions + m, mask=real, other=0)
    owner = tl.load(owners + m, mask=real, other=-1)
    own = tl.where(position < PREFIX, position, position + GAP)
    half: tl.constexpr = D // 4
    at = heads + m.to(tl.int64)[:, None] * heads_stride + head * D
    turned = both & (d < 2 * half)[None, :]
    value = tl.load(at + d[None, :], mask=both, other=0.0).to(tl.float32)
    other = tl.load(at + tl.where(d < half, d + half, d - half)[None, :], mask=turned, other=0.0).to(tl.float32)
    angle = position[:, None] * half + (d % half)[None, :]
    c = tl.load(cosine + angle, mask=turned, other=1.0)
    s = tl.load(sine + angle, mask=turned, other=0.0)
    q = (value * c + tl.where(d < half, -1.0, 1.0)[None, :] * other * s).to(keys.dtype.element_ty)
    best = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    stop_m = tl.minimum(first + BLOCK_M, rows)
    row = first
    while row < stop_m:
        sequence = tl.load(owners + row)
        same = owner == sequence
        table = tables + sequence * tables_stride
        end = tl.max(tl.where(same, own, 0), 0) + 1
        for start in range(0, end, BLOCK_T):
            t = start + tl.arange(0, BLOCK_T)
            there = (t < end) & ((t < PREFIX) | (t >= PREFIX + GAP))
            page = tl.load(table + t // PAGE, mask=there, other=0).to(tl.int64)
            cell = ((page * N_KV + kv) * PAGE + t % PAGE)[:, None] * D + d[None, :]
            present = there[:, None] & (d < D)[None, :]
            k = tl.load(keys + cell, mask=present, other=0.0)
            v = tl.load(values + cell, mask=present, other=0.0)
            seen = same[:, None] & there[None, :] & (t[None, :] <= own[:, None])
            score = tl.where(seen, tl.dot(q, tl.trans(k)) * scale, -1e30)
            higher = tl.maximum(best, tl.max(score, 1))
            fade = tl.exp(best - higher)
            p = tl.where(seen, tl.exp(score - higher[:, None]), 0.0)
            total = total * fade + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
            best = higher
        # The sequence's rows come one behind the other, and the next one's behind them.
        row = tl.max(tl.where(same & real, m, row), 0) + 1
    mixed = acc / tl.maximum(total, 1e-30)[:, None]
    place = out + m.to(tl.int64)[:, None] * out_stride + head * D + d[None, :]
    tl.store(place, mixed.to(out.dtype.element_ty), mask=both)


def prompt_attention(
    attention: PagedAttention,
    heads: torch.Tensor,
    positions: torch.Tensor,
    owners: torch.Tensor,
    tables: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """What `attention.attend` does with these, without a temperature and without writing.

    Args:
        attention: of the same pool.
        heads: as for `attend`.
        positions: as for `attend`.
        owners: as for `attend`; rows of one sequence come one behind the other.
        tables: as for `attend`.
        keys: as for `attend`.
        values: as for `attend`.
        out: as for `attend`.
    """
    n_kv, head_dim = keys.shape[1], keys.shape[3]
    rows, n_heads = len(heads), out.shape[1] // head_dim
    _prompt_attention_kernel[(n_heads, triton.cdiv(rows, _BLOCK_M))](
        heads,
        heads.stride(0),
        attention.cosine,
        attention.sine,
        positions,
        owners,
        tables,
        tables.stride(0),
        keys,
        values,
        out,
        out.stride(0),
        head_dim**-0.5,
        rows,
        N_HEADS=n_heads,
        N_KV=n_kv,
        D=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        BLOCK_M=_BLOCK_M,
        BLOCK_T=_BLOCK_T,
        num_warps=4,
        **attention.layout,
    )
