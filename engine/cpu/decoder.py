"""Text decoder for CPUs with fused operations. On a CPU, starting a small operation costs as much as running it.

`FusedDecoder` has the same weights and results as `TextDecoder`, but supports only inference. `CpuRunner` runs the
batch steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.cpu.layers import Linear, fuse_model, product_dtype
from saccade.engine.cpu.threads import set_threads, step_threads
from saccade.engine.errors import Fallbacks
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.text import Block, Joined, Temperature, TextDecoder, join, run_blocks
from saccade.engine.models.protocol import Model
from saccade.engine.models.protocol import TextDecoder as AnyDecoder
from saccade.engine.models.runner import Runner

_Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines (rows, length, 1, 1, rotary_dim / 2) and sines (rows, length, 1, 2, rotary_dim / 2), negated first."""

_SINGLE_THREADED = 10_000_000  # multiplications per step below which one thread is faster than several


class CpuRunner(Runner):
    """Runs the batch steps of a model on a CPU; see `Runner`.

    Tokens of the same sequence are processed together, so that the sequence's keys are read only once.

    Args:
        model: the model. Its layers are fused in place.
        cache: the paged KV cache.
        exact: whether to compute in the model's dtype only; see `EngineConfig.exact`.
        fallbacks: collects messages about slower implementations that are used.
    """

    _cache: CpuPagedCache

    def __init__(self, model: Model, cache: CpuPagedCache, exact: bool, fallbacks: Fallbacks) -> None:
        super().__init__(model, cache)
        self._threads = step_threads()
        fuse_model(model, exact, fallbacks)
        self._decoder: AnyDecoder | FusedDecoder = model.text
        if isinstance(model, Moondream):
            self._decoder = FusedDecoder(model.text, product_dtype(model, exact))
        self._few_tokens = _SINGLE_THREADED // max(1, model.text.n_block_weights)

    def _text(self, rows: slice | torch.Tensor) -> Any:
        return self._decoder if self._adapters is None else super()._text(rows)

    def _forward(
        self, first: int, x: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor, tables: torch.Tensor
    ) -> torch.Tensor:
        # The number of threads also applies to the sampling afterwards.
        set_threads(1 if len(x) <= self._few_tokens else self._threads)
        lines, counts = torch.unique_consecutive(owners, return_counts=True)
        starts = counts.cumsum(0) - counts
        longest, length = int(counts.max()), int(positions.max()) + 1
        # Shorter sequences are padded with their last token, which overwrites its cache entry with the same values.
        places = starts.unsqueeze(1) + torch.arange(longest).minimum(counts.unsqueeze(1) - 1)
        at = positions[places].long()
        cache = self._cache.rows(tables[lines, : self._cache.pages_upto(length)].long(), length)
        hidden: torch.Tensor = self._text(first + starts)(x[places], at, cache, cache.before(at))
        if longest == 1:
            return hidden.squeeze(1)
        of = torch.arange(len(lines)).repeat_interleave(counts)
        return hidden[of, torch.arange(len(x)) - starts[of]]


class FusedDecoder:
    """Text decoder for CPUs with one input GEMM and one output GEMM per block.

    | dtype of nano's image prefix | time per prefix |
    |---|---|
    | float32 | 5.3 ms |
    | bfloat16 | 3.9 ms |

    Both dtypes have the same average precision on the validation set.

    Args:
        text: the decoder. Its weights become views of the concatenated weights. If `prefixes` is another dtype, a
            second copy of the weights is stored.
        prefixes: dtype for image prefixes (BOS and image tokens). The default is the dtype of the decoder.
    """

    def __init__(self, text: TextDecoder, prefixes: torch.dtype | None = None) -> None:
        blocks = [(block, join(block)) for block in text.blocks if isinstance(block, Block)]
        self._layers = [_Layer(*block, text.wte.dtype) for block in blocks]
        rounded = prefixes not in (None, text.wte.dtype)
        self._for_prefixes = [_Layer(*block, prefixes) for block in blocks] if rounded else self._layers
        self._cosine = text.cosine.unsqueeze(1)
        self._sine = torch.stack([-text.sine, text.sine], dim=1)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, cache: CpuPagedRows, mask: torch.Tensor
    ) -> torch.Tensor:
        """Run the decoder blocks on embeddings; see `TextDecoder.forward`. `mask` is an additive attention mask."""
        rotation = self._cosine[positions].unsqueeze(2), self._sine[positions].unsqueeze(2)
        ops = _FusedOps(x, positions, rotation, mask)
        run_blocks(self._layers, cache.layers(positions), ops)
        return ops.x

    def write_kv(self, x: torch.Tensor, cache: CpuPagedRows) -> None:
        """Store the keys and values of image prefixes (BOS and image tokens) in the KV cache."""
        rows, length, _ = x.shape
        rotation = self._cosine[:length].unsqueeze(1), self._sine[:length].unsqueeze(1)
        positions = torch.arange(length)
        ops = _FusedOps(x, positions, rotation, None)
        run_blocks(self._for_prefixes, cache.layers(positions.expand(rows, -1)), ops, kv_only=True)


class _Layer:
    __slots__ = ("experts", "into", "into_kv", "kept", "norm", "out", "queries", "split", "temperature", "width")

    def __init__(self, block: Block, joined: Joined, dtype: torch.dtype | None) -> None:
        config = block.attn.config
        self.norm: nn.LayerNorm = block.ln
        self.temperature: Temperature | None = block.temperature
        self.width, self.queries, self.kept = config.head_dim, config.n_heads, config.n_kv_heads
        self.split = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        self.into = Linear(joined.into, joined.into_bias, dtype)
        self.out = Linear(joined.out, joined.out_bias, dtype)
        # Compute only keys and values if they suffice. A temperature also needs the queries.
        start = 0 if self.temperature is not None else self.queries * self.width
        self.into_kv = Linear(joined.into[start : self.split], joined.into_bias[start : self.split], dtype)
        self.experts = joined.experts


_Heads = tuple[torch.Tensor, torch.Tensor]
"""Heads (rows, length, heads, head_dim), queries first, and GELU inputs (rows, length, ff_dim or 0)."""


@dataclass(slots=True)
class _FusedOps:
    """Operations of a decoder block (`BlockOps`) on a CPU. x is the residual (rows, length, dim).

    If `mask` is None, tokens attend only to each other, and not to the KV cache.
    """

    x: torch.Tensor
    positions: torch.Tensor
    rotation: _Rotation
    mask: torch.Tensor | None

    def norm(self, layer: _Layer) -> torch.Tensor:
        norm = layer.norm
        return F.layer_norm(self.x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)

    def heads(self, layer: _Layer, normed: torch.Tensor, kv_only: bool) -> _Heads:
        wide = (layer.into_kv if kv_only else layer.into)(normed)
        split = min(layer.split, wide.shape[-1])
        heads, inner = wide.split([split, wide.shape[-1] - split], dim=-1)
        return heads.unflatten(-1, (-1, layer.width)), inner

    def temper(self, layer: _Layer, heads: _Heads) -> _Heads:
        assert layer.temperature is not None
        every = heads[0]
        for_q, for_v = layer.temperature(every.flatten(2), self.positions).unsqueeze(-1).unbind(-3)
        every[:, :, : layer.queries].mul_(for_q)
        every[:, :, -layer.kept :].mul_(for_v)
        return heads

    def write_kv(self, layer: _Layer, heads: _Heads, cache: CpuPagedLayer) -> None:
        kv = heads[0][:, :, -2 * layer.kept :]
        _rotate(kv[:, :, : layer.kept], self.rotation)
        cache.write_both(kv)

    def attend(self, layer: _Layer, heads: _Heads, cache: CpuPagedLayer) -> _Heads:
        every, inner = heads
        _rotate(every[:, :, : -layer.kept], self.rotation)
        cache.write_both(every[:, :, layer.queries :])
        q, k, v = every.transpose(1, 2).split([layer.queries, layer.kept, layer.kept], dim=1)
        if self.mask is not None:
            k, v = cache.read()
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=layer.queries != layer.kept)
        return seen.transpose(1, 2).flatten(2), inner

    def add(self, layer: _Layer, seen: _Heads, normed: torch.Tensor) -> None:
        both, inner = seen
        if layer.experts is None:
            both = torch.cat([both, F.gelu(inner, approximate="tanh")], dim=-1)
        self.x = layer.out(both, add=self.x)
        if layer.experts is not None:
            self.x = self.x + layer.experts(normed)


def _rotate(x: torch.Tensor, rotation: _Rotation) -> None:
    """Apply RoPE to x (rows, length, heads, head_dim) in place, as `text.rotate` does."""
    cosine, sine = rotation
    half = cosine.shape[-1]
    pairs = x[..., : 2 * half].view(*x.shape[:-1], 2, half)  # real and imaginary parts
    turned = pairs.flip(-2)
    pairs.mul_(cosine).addcmul_(turned, sine)


# ---- the cache


class CpuPagedCache:
    """Paged KV cache for CPUs, a tensor (n_layers, n_pages · page_size, 2 · n_kv_heads · head_dim).

    In a layer, the keys and values of a token are contiguous, keys first. Reading them is four times as fast as in the
    layout of `cuda.paged_cache`. `core.admission.PagePool` allocates the pages.

    Args:
        model: model that determines the shape.
        n_pages: number of pages.
        page_size: number of tokens per page.
    """

    def __init__(self, model: Model, n_pages: int, page_size: int) -> None:
        limits = model.limits
        self.heads = limits.n_kv_heads, limits.head_dim
        shape = limits.n_layers, n_pages * page_size, 2 * limits.n_kv_heads * limits.head_dim
        # Not torch.zeros, which would touch all memory: one stream of nano uses only 2 of 100 MB.
        memory = np.zeros(math.prod(shape) * model.dtype.itemsize, np.uint8)
        self.both = torch.from_numpy(memory).view(model.dtype).view(shape)
        self.page_size, self.prefix_length = page_size, limits.prefix_length
        self.prefix_pages = -(-self.prefix_length // page_size)
        # Private pages start on a new page; the rest of the prefix's last page stays unused.
        self.positions = torch.arange(self.prefix_length + limits.max_context)
        gap = self.prefix_pages * page_size - self.prefix_length
        at = torch.where(self.positions < self.prefix_length, self.positions, self.positions + gap)
        self.page_of, self.offset_of = at // page_size, at % page_size

    def pages_upto(self, position: int) -> int:
        """Return the number of KV cache pages for the first `position` tokens of a sequence."""
        return self.prefix_pages + max(0, -(-(position - self.prefix_length) // self.page_size))

    def rows(self, table: torch.Tensor, length: int | None = None) -> CpuPagedRows:
        """Return a view of the KV cache for the sequences in a page table; see `runner.PagedCache.rows`."""
        assert length is not None
        return CpuPagedRows(self, table, length)


class CpuPagedRows:
    """View of the first `length` positions of several sequences in the KV cache.

    Args:
        cache: the paged cache.
        table: (rows, pages) int64 page table, with the pages of the image prefix first. `CpuPagedCache.pages_upto`
            returns the number of pages.
        length: number of positions of the longest sequence.
    """

    __slots__ = ("_cache", "_tokens", "key_positions")

    def __init__(self, cache: CpuPagedCache, table: torch.Tensor, length: int) -> None:
        self._cache = cache
        self.key_positions = cache.positions[:length]
        self._tokens = (
            table.index_select(1, cache.page_of[:length]).mul_(cache.page_size).add_(cache.offset_of[:length])
        )

    def layers(self, positions: torch.Tensor) -> Sequence[CpuPagedLayer]:
        """Return the KV cache of each layer. Layers store new keys and values at `positions` (rows, length) int64."""
        at = self._tokens.gather(1, positions).view(-1)
        return [CpuPagedLayer(both, self._cache.heads, self._tokens, at) for both in self._cache.both]

    def before(self, positions: torch.Tensor) -> torch.Tensor:
        """Return an additive attention mask (rows, 1, length, keys) for positions (rows, length).

        The mask is 0 for keys up to the position, and -inf for later keys.
        """
        unseen = (self.key_positions > positions.unsqueeze(-1)).unsqueeze(1)
        return self._cache.both.new_zeros(unseen.shape).masked_fill_(unseen, -torch.inf)


class CpuPagedLayer:
    """One layer of the KV cache. Tokens are read at the indices `seen`, and written at the indices `at`."""

    __slots__ = ("_at", "_both", "_seen", "_shape")

    def __init__(self, both: torch.Tensor, heads: tuple[int, int], seen: torch.Tensor, at: torch.Tensor) -> None:
        self._both, self._seen, self._at = both, seen.view(-1), at
        self._shape = *seen.shape, 2, *heads

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store new keys and values, each (rows, length, heads, head_dim)."""
        self.write_both(torch.cat([k, v], dim=2))

    def write_both(self, kv: torch.Tensor) -> None:
        """Store new keys and values in one tensor (rows, length, 2 · heads, head_dim), the key heads first."""
        self._both.index_copy_(0, self._at, kv.reshape(len(self._at), -1))

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values at the indices `seen`, each (rows, heads, keys, head_dim)."""
        k, v = self._both.index_select(0, self._seen).view(self._shape).transpose(1, 3).unbind(2)
        return k, v
