"""What a step runs on the device, in tensors of fixed addresses that a CUDA graph can replay.

A *runner* feeds tokens, prefills images and samples. `Runner` does it with the model's own modules, on any device, in
any dtype. A CPU has `cpu.decoder.CpuRunner`, whose decoder is fused; CUDA has `cuda.decoder.PackedRunner`, with kernels
made for few rows. Knows nothing of steps, slots or requests.
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
    """Where keys and values go."""

    prefix_length: int
    prefix_pages: int

    def rows(self, table: torch.Tensor, length: int | None = None) -> Cache:
        """The sequences of a (rows, pages) int64 page table, prefix pages first, as far as `length` positions."""
        ...


class Runner:
    """One model's steps. Index tensors are int32; `owners` is the row of `tables` that belongs to each row.

    Args:
        model: the model.
        cache: where keys and values go.
    """

    def __init__(self, model: Model, cache: PagedCache) -> None:
        self._model, self._cache = model, cache
        self._adapters: tuple[AdapterBank, torch.Tensor] | None = None

    def with_adapters(self, bank: AdapterBank, slots: torch.Tensor) -> Runner:
        """The same for rows with adapters; for the call that comes next.

        Args:
            bank: adapters in slots.
            slots: (rows,) of the rows of `forward_tokens`; of the images and then of the tokens of `prefill`.
        """
        adapted = copy.copy(self)
        adapted._adapters = bank, slots
        return adapted

    def _text(self, rows: slice | torch.Tensor) -> TextDecoder:
        """The decoder for some of the rows that have adapters, if any have."""
        if self._adapters is None:
            return self._model.text
        bank, slots = self._adapters
        return bank.text(slots[rows])

    def forward_tokens(
        self, x: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor, tables: torch.Tensor, together: bool
    ) -> torch.Tensor:
        """Feed one token a row behind what its pages hold, and write its keys and values there.

        Args:
            x: (rows, dim) embeddings; may be overwritten.
            positions: (rows,) in their sequences, behind the prefix.
            owners: (rows,) rows of `tables`.
            tables: (any, pages).
            together: several rows may be of one sequence, and attend to those before them. Here they always may, as
                all keys are written before any is read.

        Returns:
            (rows, dim) hidden states.
        """
        return self._forward(0, x, positions, owners, tables)

    def _forward(
        self, first: int, x: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor, tables: torch.Tensor
    ) -> torch.Tensor:
        """`forward_tokens` of rows whose adapters are those from `first` on."""
        rows = self._cache.rows(tables[owners.long()].long())
        at = positions.long().unsqueeze(1)
        # Given, as the first positions of a sequence without an image see only what is before them.
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
        """Write image prefixes to their pages, and feed prompts behind them.

        Args:
            images: (images, prefix length, dim) embeddings.
            prefixes: (images, pages).
            prompts: (tokens, dim) embeddings of all prompts; None for none.
            positions: (tokens,) as for `forward_tokens`.
            owners: (tokens,) as for `forward_tokens`.
            tables: (any, pages).

        Returns:
            (tokens, dim) hidden states, if there are prompts.
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
        """Sample rows of detect and point.

        Args:
            hidden: (rows, dim) hidden states.
            phases: (rows,) `Phase`; what rows of text get has no meaning.
            batch_slots: (rows,) rows of `state` that get the embedding of what was sampled.
            coords: whether any row is at X_OR_EOS or Y.
            sizes: whether any row is at SIZE.
            sampled: (rows, 3) float32, written as `output_state.OutputState.commit` takes it.
            state: (batch slots, dim).
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
        """Logits (rows, vocab) float32 of the next token."""
        return self._model.text.logits(hidden).float()
