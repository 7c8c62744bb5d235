"""The text decoder in few and large operations, for a CPU, where a small one costs as much to start as to run.

Does what `TextDecoder` does, with its weights, and only in evaluation. `CpuRunner` puts the tokens of steps through it.
Knows nothing of slots or requests.
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
"""Cosines (rows, length, 1, 1, rotary_dim / 2) and sines (rows, length, 1, 2, rotary_dim / 2), first the negative."""

_SINGLE_THREADED = 10_000_000  # multiplications of a step that one thread does sooner than several, which synchronize


class CpuRunner(Runner):
    """`Runner` on a CPU. Tokens of one sequence are a row of several, and read its keys once.

    Args:
        model: the model; its layers are fused in place.
        cache: where keys and values go.
        exact: see `EngineConfig.exact`.
        fallbacks: told what does not run here.
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
        # As many threads as pay off, also for the sampling behind it.
        set_threads(1 if len(x) <= self._few_tokens else self._threads)
        lines, counts = torch.unique_consecutive(owners, return_counts=True)
        starts = counts.cumsum(0) - counts
        longest, length = int(counts.max()), int(positions.max()) + 1
        # A shorter line repeats its last token, which writes what is there.
        places = starts.unsqueeze(1) + torch.arange(longest).minimum(counts.unsqueeze(1) - 1)
        at = positions[places].long()
        cache = self._cache.rows(tables[lines, : self._cache.pages_upto(length)].long(), length)
        hidden: torch.Tensor = self._text(first + starts)(x[places], at, cache, cache.before(at))
        if longest == 1:
            return hidden.squeeze(1)
        of = torch.arange(len(lines)).repeat_interleave(counts)
        return hidden[of, torch.arange(len(x)) - starts[of]]


class FusedDecoder:
    """A decoder whose attention and MLP read through one matrix, and write through another.

    Args:
        text: the decoder. Its modules are views of the joined weights from here on: nothing is stored twice, but for
            prefixes.
        prefixes: what these are multiplied in, the decoder's own type by default. In bfloat16 nano's take 3.9 ms, not
            5.3, and answers on val have the same AP50 and AP to .001 (`python -m training.score`).
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
        """As `TextDecoder.forward`; the mask is one that is added."""
        rotation = self._cosine[positions].unsqueeze(2), self._sine[positions].unsqueeze(2)
        ops = _FusedOps(x, positions, rotation, mask)
        run_blocks(self._layers, cache.layers(positions), ops)
        return ops.x

    def write_kv(self, x: torch.Tensor, cache: CpuPagedRows) -> None:
        """As `TextDecoder.write_kv`."""
        rows, length, _ = x.shape
        rotation = self._cosine[:length].unsqueeze(1), self._sine[:length].unsqueeze(1)
        positions = torch.arange(length)
        ops = _FusedOps(x, positions, rotation, None)
        run_blocks(self._for_prefixes, cache.layers(positions.expand(rows, -1)), ops, kv_only=True)


class _Layer:
    """One block's weights."""

    __slots__ = ("experts", "into", "into_kv", "kept", "norm", "out", "queries", "split", "temperature", "width")

    def __init__(self, block: Block, joined: Joined, dtype: torch.dtype | None) -> None:
        config = block.attn.config
        self.norm: nn.LayerNorm = block.ln
        self.temperature: Temperature | None = block.temperature
        self.width, self.queries, self.kept = config.head_dim, config.n_heads, config.n_kv_heads
        self.split = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        self.into = Linear(joined.into, joined.into_bias, dtype)
        self.out = Linear(joined.out, joined.out_bias, dtype)
        # Where keys and values are all that is wanted; a temperature is computed from the queries, too.
        start = 0 if self.temperature is not None else self.queries * self.width
        self.into_kv = Linear(joined.into[start : self.split], joined.into_bias[start : self.split], dtype)
        self.experts = joined.experts


_Heads = tuple[torch.Tensor, torch.Tensor]
"""Heads (rows, length, heads, head_dim), queries first, and what goes into the GELU (rows, length, ff_dim or 0)."""


@dataclass(slots=True)
class _FusedOps:
    """`BlockOps` on x (rows, length, dim); without a mask x attends to itself only."""

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
        """What attention saw (rows, length, dim), and what goes into the GELU."""
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
    """`text.rotate` of x (rows, length, heads, head_dim) in its place."""
    cosine, sine = rotation
    half = cosine.shape[-1]
    pairs = x[..., : 2 * half].view(*x.shape[:-1], 2, half)  # real and imaginary parts
    turned = pairs.flip(-2)
    pairs.mul_(cosine).addcmul_(turned, sine)


# ---- the cache


class CpuPagedCache:
    """Keys and values of all sequences: (n_layers, n_pages · page_size, 2 · n_kv_heads · head_dim), keys first.

    A token's keys and values in a layer are one piece of memory: whole rows of a matrix are copied four times as fast
    as what an index of several dimensions picks (`cuda.paged_cache`), and a step reads only as far as its sequences
    reach. Knows page numbers; reference counts are `core.resources.PagePool`'s.

    Args:
        model: gives their shape.
        n_pages: pages.
        page_size: tokens of a page.
    """

    def __init__(self, model: Model, n_pages: int, page_size: int) -> None:
        limits = model.limits
        self.heads = limits.n_kv_heads, limits.head_dim
        shape = limits.n_layers, n_pages * page_size, 2 * limits.n_kv_heads * limits.head_dim
        # Not torch.zeros, which writes all of it: of nano's 100 MB one stream uses 2.
        memory = np.zeros(math.prod(shape) * model.dtype.itemsize, np.uint8)
        self.both = torch.from_numpy(memory).view(model.dtype).view(shape)
        self.page_size, self.prefix_length = page_size, limits.prefix_length
        self.prefix_pages = -(-self.prefix_length // page_size)
        # Private pages begin on a page of their own: the rest of the prefix's last page stays unused.
        self.positions = torch.arange(self.prefix_length + limits.max_context)
        gap = self.prefix_pages * page_size - self.prefix_length
        at = torch.where(self.positions < self.prefix_length, self.positions, self.positions + gap)
        self.page_of, self.offset_of = at // page_size, at % page_size

    def pages_upto(self, position: int) -> int:
        """How many pages of a sequence hold what comes before a position."""
        return self.prefix_pages + max(0, -(-(position - self.prefix_length) // self.page_size))

    def rows(self, table: torch.Tensor, length: int | None = None) -> CpuPagedRows:
        """See `runner.PagedCache`."""
        assert length is not None
        return CpuPagedRows(self, table, length)


class CpuPagedRows:
    """A cache of some sequences, up to a position.

    Args:
        cache: where they are.
        table: (rows, pages) int64, prefix pages first; as many as `CpuPagedCache.pages_upto` gives.
        length: positions of the longest.
    """

    __slots__ = ("_cache", "_tokens", "key_positions")

    def __init__(self, cache: CpuPagedCache, table: torch.Tensor, length: int) -> None:
        self._cache = cache
        self.key_positions = cache.positions[:length]
        self._tokens = (
            table.index_select(1, cache.page_of[:length]).mul_(cache.page_size).add_(cache.offset_of[:length])
        )

    def layers(self, positions: torch.Tensor) -> Sequence[CpuPagedLayer]:
        """The layers, ready to write at (rows, length) int64 positions."""
        at = self._tokens.gather(1, positions).view(-1)
        return [CpuPagedLayer(both, self._cache.heads, self._tokens, at) for both in self._cache.both]

    def before(self, positions: torch.Tensor) -> torch.Tensor:
        """A mask for (rows, length) positions behind the prefix, (rows, 1, length, keys): 0 where a key is seen."""
        unseen = (self.key_positions > positions.unsqueeze(-1)).unsqueeze(1)
        return self._cache.both.new_zeros(unseen.shape).masked_fill_(unseen, -torch.inf)


class CpuPagedLayer:
    """One layer of the cache: (rows, keys) `seen` are the tokens to read, `at` those to write in order."""

    __slots__ = ("_at", "_both", "_seen", "_shape")

    def __init__(self, both: torch.Tensor, heads: tuple[int, int], seen: torch.Tensor, at: torch.Tensor) -> None:
        self._both, self._seen, self._at = both, seen.view(-1), at
        self._shape = *seen.shape, 2, *heads

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put in new keys and values (rows, length, heads, head_dim)."""
        self.write_both(torch.cat([k, v], dim=2))

    def write_both(self, kv: torch.Tensor) -> None:
        """Put in new keys, and values behind them, (rows, length, 2 · heads, head_dim)."""
        self._both.index_copy_(0, self._at, kv.reshape(len(self._at), -1))

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values seen, each (rows, heads, keys, head_dim)."""
        k, v = self._both.index_select(0, self._seen).view(self._shape).transpose(1, 3).unbind(2)
        return k, v
