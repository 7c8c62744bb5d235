"""The device work of a step, on tensors at fixed addresses so that CUDA graphs can replay it.

A runner feeds tokens, prefills images and samples. `Runner` uses the model's PyTorch modules on any device and dtype.
`cpu.decoder.CpuRunner` has a fused decoder for CPUs; `cuda.decoder.PackedRunner` uses kernels for few rows.
"""

from __future__ import annotations

import copy
from typing import Protocol

import torch
from torch.nn import functional as F

from saccade.engine.models.lora import AdapterBank
from saccade.engine.models.protocol import Cache, Model, Phase, TextDecoder
from saccade.engine.models.sampling import SAMPLED


class PagedCache(Protocol):
    """Paged KV cache."""

    prefix_length: int
    prefix_pages: int

    def rows(self, table: torch.Tensor, length: int | None = None) -> Cache:
        """Return a view of sequences by page table (rows, pages) int64, prefix pages first, up to `length` tokens."""
        ...


class Runner:
    """Runs the steps of one model. Index tensors are int32; `owners` maps each row to a row of `tables`.

    Args:
        model: the model.
        cache: the paged KV cache.
    """

    def __init__(self, model: Model, cache: PagedCache) -> None:
        self._model, self._cache = model, cache
        self._adapters: tuple[AdapterBank, torch.Tensor] | None = None

    def with_adapters(self, bank: AdapterBank, slots: torch.Tensor) -> Runner:
        """Return a runner that applies LoRA adapters in its next call.

        Args:
            bank: adapter slots.
            slots: (rows,) slot of each row of `forward_tokens`; for `prefill`, of the images and then of the tokens.
        """
        adapted = copy.copy(self)
        adapted._adapters = bank, slots
        return adapted

    def _text(self, rows: slice | torch.Tensor) -> TextDecoder:
        """Return the decoder with adapters for these rows."""
        if self._adapters is None:
            return self._model.text
        bank, slots = self._adapters
        return bank.text(slots[rows])

    def forward_tokens(
        self, x: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor, tables: torch.Tensor, together: bool
    ) -> torch.Tensor:
        """Run one token per row through the decoder and write its keys and values to its pages.

        Args:
            x: (rows, dim) embeddings; may be overwritten.
            positions: (rows,) sequence positions after the prefix.
            owners: (rows,) rows of `tables`.
            tables: (sequences, pages).
            together: whether several rows may belong to one sequence and attend to earlier rows. This runner always
                allows it, because it writes all keys first.

        Returns:
            (rows, dim) hidden states.
        """
        return self._forward(0, x, positions, owners, tables)

    def _forward(
        self, first: int, x: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor, tables: torch.Tensor
    ) -> torch.Tensor:
        """Run `forward_tokens` for rows whose adapter slots start at `first`."""
        rows = self._cache.rows(tables[owners.long()].long())
        at = positions.long().unsqueeze(1)
        # Explicit mask, because the first positions of a sequence without an image are causal.
        seen = (rows.key_positions <= at.unsqueeze(-1)).unsqueeze(1)
        return self._text(slice(first, None))(x.unsqueeze(1), at, rows, seen).squeeze(1)

    def prefill(
        self,
        images: torch.Tensor,
        prefixes: torch.Tensor,
        prompts: torch.Tensor | None,
        positions: torch.Tensor,
        owners: torch.Tensor,
        tables: torch.Tensor,
    ) -> torch.Tensor | None:
        """Write image prefixes to their pages and run the prompts after them.

        Args:
            images: (images, prefix length, dim) embeddings.
            prefixes: (images, pages).
            prompts: (tokens, dim) embeddings of all prompts, or None.
            positions: (tokens,) sequence positions.
            owners: (tokens,) rows of `tables`.
            tables: (sequences, pages).

        Returns:
            (tokens, dim) hidden states, or None without prompts.
        """
        count, length, _ = images.shape
        self._text(slice(count)).write_kv(images, self._cache.rows(prefixes.long(), length))
        return None if prompts is None else self._forward(count, prompts, positions, owners, tables)

    def sample_regions(
        self,
        hidden: torch.Tensor,
        phases: torch.Tensor,
        batch_slots: torch.Tensor,
        coords: bool,
        sizes: bool,
        sampled: torch.Tensor,
        state: torch.Tensor,
    ) -> None:
        """Sample coordinates and sizes for rows of detect and point.

        Args:
            hidden: (rows, dim) hidden states.
            phases: (rows,) `Phase`; results of text rows are undefined.
            batch_slots: (rows,) rows of `state` for the embeddings of the samples.
            coords: whether any row is at X_OR_EOS or Y.
            sizes: whether any row is at SIZE.
            sampled: (rows, 3) float32, written for `output_state.OutputState.commit`.
            state: (batch slots, dim), written.
        """
        region, phase = self._model.region, phases.unsqueeze(1)
        if coords:
            coord = region.coord(hidden)
            coord_logit, eos_logit = self._model.coord_eos_logits(hidden).split(1, dim=-1)
            first = torch.cat([coord_logit - eos_logit, coord, coord], dim=-1)
            values = torch.where(phase == Phase.X_OR_EOS, first, coord)
            embedded = region.encode_coord(coord)
        if sizes:
            size = region.size(hidden)
            value, code = F.pad(size, (0, SAMPLED - 2)), region.encode_size(size)
            values = torch.where(phase == Phase.SIZE, value, values) if coords else value
            embedded = torch.where(phase == Phase.SIZE, code, embedded) if coords else code
        sampled.copy_(values)
        state[batch_slots.long()] = embedded

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return next-token logits (rows, vocab) in float32."""
        return self._model.text.logits(hidden).float()
