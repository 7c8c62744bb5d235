"""The paged KV cache of the CPU: a token's keys and values in a layer are one piece of memory.

Whole rows of a matrix are copied four times as fast as what an index of several dimensions picks (`paged_cache`), and a
step reads only as far as its sequences reach. Knows tensors and page numbers; reference counts are
`core.resources.PagePool`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from saccade.engine.models.protocol import Model


class CpuPagedCache:
    """Keys and values of all sequences: (n_layers, n_pages · page_size, 2 · n_kv_heads · head_dim), keys first.

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
