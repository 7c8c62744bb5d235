"""What a step runs on the device, in tensors of fixed addresses that a CUDA graph can replay: the plain form.

A *runner* takes rows (one token each), image prefixes, and samples. `PlainRunner` does it with the model's own modules;
`packed_runner.PackedRunner` does the same with kernels made for few rows. Knows nothing of steps, slots or requests.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional as F

from saccade.engine.backends.paged_cache import PagedPool, PagedRows
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.region import size_value
from saccade.engine.models.moondream.text import TextDecoder
from saccade.engine.scheduling.output_state import Phase

SAMPLED = 3  # numbers that a step yields for each row, see `output_state.Skill.commit`


class Runner(Protocol):
    """One model's steps. Index tensors are int32; `owners` says which row of `tables` is each row's."""

    def rows(
        self, x: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor, tables: torch.Tensor, together: bool
    ) -> torch.Tensor:
        """Feed one token a row behind what its pages hold, and keep its keys and values there.

        Args:
            x: (rows, dim) embeddings; may be overwritten.
            positions: (rows,) in their sequences, behind the prefix.
            owners: (rows,) rows of `tables`.
            tables: (any, pages).
            together: several rows may be of one sequence, and see those before them.

        Returns:
            (rows, dim) hidden states.
        """
        ...

    def look(
        self,
        images: torch.Tensor,
        prefixes: torch.Tensor,
        asked: torch.Tensor | None,
        positions: torch.Tensor,
        owners: torch.Tensor,
        tables: torch.Tensor,
    ) -> torch.Tensor | None:
        """Keep image prefixes in their pages, and feed prompts behind them.

        Args:
            images: (pictures, prefix length, dim) embeddings.
            prefixes: (pictures, pages).
            asked: (tokens, dim) embeddings of all prompts; None for none.
            positions: (tokens,) as for `rows`.
            owners: (tokens,) as for `rows`.
            tables: (any, pages).

        Returns:
            (tokens, dim) hidden states, if anything was asked.
        """
        ...

    def objects(
        self,
        hidden: torch.Tensor,
        phases: torch.Tensor,
        lanes: torch.Tensor,
        places: bool,
        sizes: bool,
        sampled: torch.Tensor,
        state: torch.Tensor,
    ) -> None:
        """Sample rows of detect and point.

        Args:
            hidden: (rows, dim) hidden states.
            phases: (rows,) `Phase`; TOKEN rows get nothing of use.
            lanes: (rows,) rows of `state` that get the embedding of what was sampled.
            places: whether any row is at BEGIN or Y.
            sizes: whether any row is at SIZE.
            sampled: (rows, 3) float32, written as `output_state.Skill.commit` takes it.
            state: (lanes, dim).
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores (rows, vocab) float32 of the next token."""
        ...


class PlainSampling:
    """What `Runner` says of sampling, with the model's own modules; any device, any dtype."""

    def __init__(self, model: Moondream) -> None:
        self._model = model
        self._choice = model.begin_or_stop()

    def objects(
        self,
        hidden: torch.Tensor,
        phases: torch.Tensor,
        lanes: torch.Tensor,
        places: bool,
        sizes: bool,
        sampled: torch.Tensor,
        state: torch.Tensor,
    ) -> None:
        """As `Runner.objects`."""
        region, phase, lane = self._model.region, phases.unsqueeze(1), lanes.long()
        if places:
            scores = region.decode_coord(hidden)
            place = (scores.argmax(-1, keepdim=True) / scores.shape[-1]).float()
            coord, eos = F.linear(self._model.text.post_ln(hidden), *self._choice).float().split(1, dim=-1)
            values = torch.where(phase == Phase.BEGIN, torch.cat([coord - eos, place, place], dim=-1), place)
            embedded = region.encode_coord(place)
        if sizes:
            scores = region.decode_size(hidden)
            size = size_value(scores.argmax(-1), scores.shape[-1])
            value, code = F.pad(size, (0, SAMPLED - 2)), region.encode_size(size)
            values = torch.where(phase == Phase.SIZE, value, values) if places else value
            embedded = torch.where(phase == Phase.SIZE, code, embedded) if places else code
        sampled.copy_(values)
        state[lane] = embedded

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `Runner.logits`."""
        return self._model.text.logits(hidden).float()


class PlainRunner(PlainSampling):
    """The model's own modules over a paged cache; any device, any dtype.

    Args:
        model: the model.
        pool: the cache.
        text: a decoder that shares the model's weights and adds to them, in place of the model's own.
    """

    def __init__(self, model: Moondream, pool: PagedPool, text: TextDecoder | None = None) -> None:
        super().__init__(model)
        self._pool = pool
        self._text = model.text if text is None else text

    def rows(
        self, x: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor, tables: torch.Tensor, together: bool
    ) -> torch.Tensor:
        """As `Runner.rows`; every row's keys are written before any is read, so `together` changes nothing."""
        cache = PagedRows(self._pool, tables[owners.long()].long())
        return self._text(x.unsqueeze(1), positions.long().unsqueeze(1), cache).squeeze(1)  # type: ignore[no-any-return]

    def look(
        self,
        images: torch.Tensor,
        prefixes: torch.Tensor,
        asked: torch.Tensor | None,
        positions: torch.Tensor,
        owners: torch.Tensor,
        tables: torch.Tensor,
    ) -> torch.Tensor | None:
        """As `Runner.look`."""
        self._text.remember(images, PagedRows(self._pool, prefixes.long()))
        return None if asked is None else self.rows(asked, positions, owners, tables, together=True)


def take_tokens(
    text: TextDecoder,
    token: torch.Tensor,
    phases: torch.Tensor,
    lanes: torch.Tensor,
    sampled: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Make a token the sample of each row of text, and its embedding what the next step begins with.

    Args:
        text: the decoder.
        token: (rows,) ids; of no meaning where a row's phase is not TOKEN.
        phases: (rows,).
        lanes: (rows,) rows of `state`.
        sampled: (rows, 3) float32.
        state: (lanes, dim).
    """
    wanted, lane = (phases == Phase.TOKEN).unsqueeze(1), lanes.long()
    sampled.copy_(torch.where(wanted, token.unsqueeze(1).float(), sampled))
    state[lane] = torch.where(wanted, text.embed(token), state[lane])
