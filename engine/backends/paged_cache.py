"""The paged KV cache: keys and values of all sequences, and what a step reads of it through page tables.

Knows tensors and page numbers; reference counts of pages are `resources.PagePool`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from saccade.engine.models.protocol import Model

_PAGES_CPU = 1024
_SHARE = 0.4  # of the memory left beside the weights; graphs and images need some, too


class PagedLayer:
    """One layer of the cache seen through page tables; `at` are (rows, length) page and offset indices."""

    __slots__ = ("_at", "_keys", "_table", "_values")

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        at: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._keys, self._values, self._table, self._at = keys, values, table, at

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put in new keys and values (rows, length, heads, head_dim)."""
        page, offset = self._at
        self._keys[page, :, offset] = k
        self._values[page, :, offset] = v

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of all keys and values of the tables' pages, each (rows, heads, pages · page size, head_dim)."""
        return (
            self._keys[self._table].transpose(1, 2).flatten(2, 3),
            self._values[self._table].transpose(1, 2).flatten(2, 3),
        )


class PagedRows:
    """A cache of some sequences: their (rows, pages) page tables, prefix pages first."""

    __slots__ = ("_cache", "_table", "key_positions")

    def __init__(self, cache: PagedCache, table: torch.Tensor) -> None:
        self._cache, self._table = cache, table
        self.key_positions = cache.key_positions[: table.shape[1] * cache.page_size]

    def layers(self, positions: torch.Tensor) -> Sequence[PagedLayer]:
        """The layers, ready to write at (rows, length) int64 positions."""
        cache = self._cache
        # Private pages begin on a page of their own: the rest of the prefix's last page stays unused.
        index = torch.where(positions < cache.prefix_length, positions, positions + cache.gap)
        at = self._table.gather(1, index // cache.page_size), index % cache.page_size
        return [PagedLayer(k, v, self._table, at) for k, v in zip(cache.keys, cache.values, strict=True)]


class PagedCache:
    """Keys and values of all sequences: each (n_layers, n_pages, n_kv_heads, page_size, head_dim).

    One head's part of a page is one piece of memory, which is what a program of the attention kernel reads.
    """

    def __init__(self, model: Model, n_pages: int, page_size: int) -> None:
        limits = model.limits
        shape = (limits.n_layers, n_pages, limits.n_kv_heads, page_size, limits.head_dim)
        self.keys = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.values = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.n_pages, self.page_size, self.prefix_length = n_pages, page_size, limits.prefix_length
        self.prefix_pages = -(-self.prefix_length // page_size)
        self.gap = self.prefix_pages * page_size - self.prefix_length
        index = torch.arange(self.prefix_pages * page_size + limits.max_context, device=model.device)
        # Keys in the gap have a position past every sequence.
        private = index >= self.prefix_pages * page_size
        unused = torch.where(index < self.prefix_length, index, torch.iinfo(torch.int64).max)
        self.key_positions = torch.where(private, index - self.gap, unused)


def pages_for(model: Model, page_size: int, max_sequences: int) -> int:
    """How many pages to have; on CUDA what all sequences can ever use at a time, as far as memory is free for them."""
    if model.device.type != "cuda":
        return _PAGES_CPU
    limits = model.limits
    page = 2 * limits.n_layers * page_size * limits.n_kv_heads * limits.head_dim * model.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(model.device)
    longest = -(-limits.max_context // page_size) + 2
    return max(longest, min(max_sequences * longest, int(_SHARE * free) // page))
