"""The paged cache of the CPU: like `cache`'s, but all of a token's keys in a layer are one piece of memory.

Whole rows of a matrix are copied four times as fast as what an index of several dimensions picks, and a step reads
only as far as its sequences have come. Knows tensors and page numbers; who holds which page is `pages.PagePool`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .models.moondream.model import Moondream


class TokenPool:
    """Keys and values of everybody: each (n_layers, n_pages · page_size, n_kv_heads · head_dim).

    Args:
        model: whose they are.
        n_pages: pages.
        page_size: tokens of a page.
    """

    def __init__(self, model: Moondream, n_pages: int, page_size: int) -> None:
        text = model.config.text
        self.heads = text.n_kv_heads, text.head_dim
        shape = text.n_layers, n_pages * page_size, text.n_kv_heads * text.head_dim
        self.keys, self.values = model.text.wte.new_zeros(shape), model.text.wte.new_zeros(shape)
        self.page_size, self.prefix_length = page_size, text.prefix_attn
        self.prefix_pages = -(-self.prefix_length // page_size)
        # Private pages begin on a page of their own: what is left of the prefix's last page stays unused.
        self.positions = torch.arange(self.prefix_length + text.max_context)
        gap = self.prefix_pages * page_size - self.prefix_length
        at = torch.where(self.positions < self.prefix_length, self.positions, self.positions + gap)
        self.page_of, self.offset_of = at // page_size, at % page_size

    def pages_upto(self, position: int) -> int:
        """How many pages of a sequence hold what comes before a position."""
        return self.prefix_pages + max(0, -(-(position - self.prefix_length) // self.page_size))


class TokenRows:
    """A cache of some sequences, up to a position.

    Args:
        pool: what holds it.
        table: (rows, pages) int64, prefix pages first; as many as `TokenPool.pages_upto` says.
        length: positions of the longest.
    """

    __slots__ = ("_pool", "_tokens", "key_positions")

    def __init__(self, pool: TokenPool, table: torch.Tensor, length: int) -> None:
        self._pool = pool
        self.key_positions = pool.positions[:length]
        self._tokens = table.index_select(1, pool.page_of[:length]).mul_(pool.page_size).add_(pool.offset_of[:length])

    def slots(self, positions: torch.Tensor) -> Sequence[TokenSlot]:
        """The layers, ready to write at (rows, length) int64 positions."""
        at = self._tokens.gather(1, positions).view(-1)
        return [
            TokenSlot(k, v, self._pool.heads, self._tokens, at)
            for k, v in zip(self._pool.keys, self._pool.values, strict=True)
        ]

    def before(self, positions: torch.Tensor) -> torch.Tensor:
        """A mask for (rows, length) positions behind the prefix, (rows, 1, length, keys): 0 where a key is seen."""
        unseen = (self.key_positions > positions.unsqueeze(-1)).unsqueeze(1)
        return self._pool.keys.new_zeros(unseen.shape).masked_fill_(unseen, -torch.inf)


class TokenSlot:
    """One layer of a pool: (rows, keys) `seen` are the tokens to read, and `at` those to write, one after another."""

    __slots__ = ("_at", "_heads", "_keys", "_seen", "_values")

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, heads: tuple[int, int], seen: torch.Tensor, at: torch.Tensor
    ) -> None:
        self._keys, self._values, self._heads, self._seen, self._at = keys, values, heads, seen, at

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put in new keys and values (rows, length, heads, head_dim)."""
        self._keys.index_copy_(0, self._at, k.reshape(len(self._at), -1))
        self._values.index_copy_(0, self._at, v.reshape(len(self._at), -1))

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the keys and values seen, each (rows, heads, keys, head_dim)."""
        shape, seen = (*self._seen.shape, *self._heads), self._seen.view(-1)
        keys, values = self._keys.index_select(0, seen), self._values.index_select(0, seen)
        return keys.view(shape).transpose(1, 2), values.view(shape).transpose(1, 2)
