"""Paged KV cache on CUDA: keys and values of all sequences, addressed through page tables.

`core.admission.PagePool` allocates the pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from saccade.engine.kernels import E4M3
from saccade.engine.models.protocol import Model
from saccade.engine.models.quantization import dequantize_kv, quantize_kv

_PAGES_CPU = 1024
_SHARE = 0.4  # fraction of the free memory after loading weights; graphs and images need the rest

LayerCache = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Keys and values of one layer. With FP8, also the scales of both, else None."""


class PagedLayer:
    """One layer of the paged KV cache, for the sequences of a page table.

    `at` says where new keys and values are written: the page indices and the offsets in the pages, each (rows, length).
    """

    __slots__ = ("_at", "_dtype", "_layer", "_table")

    def __init__(
        self,
        layer: LayerCache,
        dtype: torch.dtype,
        table: torch.Tensor,
        at: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._layer, self._dtype, self._table, self._at = layer, dtype, table, at

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store new keys and values, each (rows, length, heads, head_dim)."""
        keys, values, key_scales, value_scales = self._layer
        self._write(keys, key_scales, k)
        self._write(values, value_scales, v)

    def _write(self, into: torch.Tensor, scales: torch.Tensor | None, x: torch.Tensor) -> None:
        page, offset = self._at
        if scales is None:
            into[page, :, offset] = x
        else:
            packed, scales[page, :, offset] = quantize_kv(x)
            into.view(torch.uint8)[page, :, offset] = packed.view(torch.uint8)  # not every torch version can index FP8

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of all keys and values in the sequences' pages, each (rows, heads, tokens, head_dim)."""
        keys, values, key_scales, value_scales = self._layer
        return self._read(keys, key_scales), self._read(values, value_scales)

    def _read(self, of: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        if scales is None:
            read = of[self._table]
        else:
            read = dequantize_kv(of.view(torch.uint8)[self._table].view(E4M3), scales[self._table], self._dtype)
        return read.transpose(1, 2).flatten(2, 3)


class PagedRows:
    """View of the paged KV cache for the sequences in a page table (rows, pages). Image prefix pages come first."""

    __slots__ = ("_cache", "_table", "key_positions")

    def __init__(self, cache: PagedCache, table: torch.Tensor) -> None:
        self._cache, self._table = cache, table
        self.key_positions = cache.key_positions[: table.shape[1] * cache.page_size]

    def layers(self, positions: torch.Tensor) -> Sequence[PagedLayer]:
        """Return the KV cache of each layer. Layers store new keys and values at `positions` (rows, length) int64."""
        cache = self._cache
        # Private pages start on a new page; the rest of the prefix's last page stays unused.
        index = torch.where(positions < cache.prefix_length, positions, positions + cache.gap)
        at = self._table.gather(1, index // cache.page_size), index % cache.page_size
        return [PagedLayer(layer, cache.dtype, self._table, at) for layer in cache.layers]


class PagedCache:
    """Keys and values of all sequences, each (n_layers, n_pages, n_kv_heads, page_size, head_dim).

    The part of a page that belongs to one head is contiguous, because one program of the attention kernel reads this
    part.

    Args:
        model: model that determines the shape and the device.
        n_pages: number of pages.
        page_size: number of tokens per page.
        kv_dtype: 'fp8' stores keys and values in FP8; None uses the model's dtype.

    Attributes:
        dtype: compute dtype of the model.
        layers: keys and values of each decoder block.
    """

    def __init__(self, model: Model, n_pages: int, page_size: int, kv_dtype: str | None = None) -> None:
        limits = model.limits
        shape = (limits.n_layers, n_pages, limits.n_kv_heads, page_size, limits.head_dim)
        self.dtype = model.dtype
        kept = model.dtype if kv_dtype is None else E4M3
        self.keys, self.values = (torch.zeros(shape, dtype=kept, device=model.device) for _ in range(2))
        none = [None] * limits.n_layers
        self.layers: list[LayerCache] = list(zip(self.keys, self.values, none, none, strict=True))
        if kv_dtype is not None:
            scales = torch.zeros(2, *shape[:-1], dtype=torch.float16, device=model.device)
            self.layers = list(zip(self.keys, self.values, *scales, strict=True))
        self.n_pages, self.page_size, self.prefix_length = n_pages, page_size, limits.prefix_length
        self.prefix_pages = -(-self.prefix_length // page_size)
        self.gap = self.prefix_pages * page_size - self.prefix_length
        index = torch.arange(self.prefix_pages * page_size + limits.max_context, device=model.device)
        # Keys in the gap get a position after every sequence, so they are never visible.
        private = index >= self.prefix_pages * page_size
        unused = torch.where(index < self.prefix_length, index, torch.iinfo(torch.int64).max)
        self.key_positions = torch.where(private, index - self.gap, unused)

    def rows(self, table: torch.Tensor, length: int | None = None) -> PagedRows:
        """Return a view of the KV cache for the sequences in a page table (rows, pages). `length` is not used."""
        return PagedRows(self, table)


def pages_for(model: Model, page_size: int, max_sequences: int, kv_dtype: str | None = None) -> int:
    """Return the number of KV cache pages for `max_sequences` sequences, or fewer if GPU memory is too small."""
    if model.device.type != "cuda":
        return _PAGES_CPU
    limits = model.limits
    head = limits.head_dim * model.dtype.itemsize if kv_dtype is None else limits.head_dim + torch.float16.itemsize
    page = 2 * limits.n_layers * page_size * limits.n_kv_heads * head
    free, _ = torch.cuda.mem_get_info(model.device)
    longest = -(-limits.max_context // page_size) + 2
    return max(longest, min(max_sequences * longest, int(_SHARE * free) // page))
