"""The paged cache of the CPU: like `cache`'s, but a token's keys and values in a layer are one piece of memory.

Whole rows of a matrix are copied four times as fast as what an index of several dimensions picks, and a step reads
only as far as its sequences have come. Knows tensors and page numbers; who holds which page is `page_pool.PagePool`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from saccade.engine.models.moondream.model import Moondream


class TokenPool:
    """Keys and values of everybody: `both` is (n_layers, n_pages · page_size, 2 · n_kv_heads · head_dim), keys first.

    Args:
        model: whose they are.
        n_pages: pages.
        page_size: tokens of a page.
    """

    def __init__(self, model: Moondream, n_pages: int, page_size: int) -> None:
        text = model.config.text
        self.heads = text.n_kv_heads, text.head_dim
        shape = text.n_layers, n_pages * page_size, 2 * text.n_kv_heads * text.head_dim
        self.both = model.text.wte.new_zeros(shape)
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
        return [TokenSlot(both, self._pool.heads, self._tokens, at) for both in self._pool.both]

    def before(self, positions: torch.Tensor) -> torch.Tensor:
        """A mask for (rows, length) positions behind the prefix, (rows, 1, length, keys): 0 where a key is seen."""
        unseen = (self.key_positions > positions.unsqueeze(-1)).unsqueeze(1)
        return self._pool.both.new_zeros(unseen.shape).masked_fill_(unseen, -torch.inf)


class TokenSlot:
    """One layer of a pool: (rows, keys) `seen` are the tokens to read, and `at` those to write, one after another."""

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
