"""The paged cache: keys and values of everybody in one pool, and what a step sees of it through page tables.

Knows tensors and page numbers; who holds which page is `page_pool.PagePool`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from saccade.engine.models.moondream.model import Moondream

_PAGES_CPU, _PAGES_CUDA = 1024, 2560
_SHARE = 0.4  # of the memory left beside the weights; graphs and pictures need some, too


class PagedSlot:
    """One layer of the pool seen through page tables; `at` are (rows, length) page and offset indices."""

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
    """A cache of some sequences: their (rows, pages) tables into the pool, prefix pages first."""

    __slots__ = ("_pool", "_table", "key_positions")

    def __init__(self, pool: PagedPool, table: torch.Tensor) -> None:
        self._pool, self._table = pool, table
        self.key_positions = pool.key_positions[: table.shape[1] * pool.page_size]

    def slots(self, positions: torch.Tensor) -> Sequence[PagedSlot]:
        """The layers, ready to write at (rows, length) int64 positions."""
        pool = self._pool
        # Private pages begin on a page of their own: what is left of the prefix's last page stays unused.
        index = torch.where(positions < pool.prefix_length, positions, positions + pool.gap)
        at = self._table.gather(1, index // pool.page_size), index % pool.page_size
        return [PagedSlot(k, v, self._table, at) for k, v in zip(pool.keys, pool.values, strict=True)]


class PagedPool:
    """Keys and values of everybody: each (n_layers, n_pages, n_kv_heads, page_size, head_dim).

    One head's part of a page is one piece of memory, which is what a program of the attention kernel reads.
    """

    def __init__(self, model: Moondream, n_pages: int, page_size: int) -> None:
        text = model.config.text
        shape = (text.n_layers, n_pages, text.n_kv_heads, page_size, text.head_dim)
        self.keys = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.values = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.n_pages, self.page_size, self.prefix_length = n_pages, page_size, text.prefix_attn
        self.prefix_pages = -(-self.prefix_length // page_size)
        self.gap = self.prefix_pages * page_size - self.prefix_length
        index = torch.arange(self.prefix_pages * page_size + text.max_context, device=model.device)
        # Keys in the gap have a position that nobody reaches.
        private = index >= self.prefix_pages * page_size
        unused = torch.where(index < self.prefix_length, index, torch.iinfo(torch.int64).max)
        self.key_positions = torch.where(private, index - self.gap, unused)


def pages_for(model: Moondream, page_size: int) -> int:
    """How many pages to have; on CUDA as many as 32 pictures of Moondream 2 take, if there is the memory."""
    if model.device.type != "cuda":
        return _PAGES_CPU
    text = model.config.text
    page = 2 * text.n_layers * page_size * text.n_kv_heads * text.head_dim * model.dtype.itemsize
    free, _ = torch.cuda.mem_get_info(model.device)
    least = -(-text.max_context // page_size) + 2  # for one sequence as long as they get
    return max(least, min(_PAGES_CUDA, int(_SHARE * free) // page))
