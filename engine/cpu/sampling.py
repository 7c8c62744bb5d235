"""Coordinates and sizes on a CPU, sampled and fed: only of the rows that have one, through matrices laid out once.

Most of what `plain_runner` does is for rows that do not want it: of a draft of three boxes, one row in three wants a
size, and none an embedding, as the next step is fed by the host. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from saccade.engine.cpu.onednn import FusedLinear
from saccade.engine.models.protocol import Model
from saccade.engine.models.sampling import PlainSampling, put_values
from saccade.engine.phase import Phase


class CpuSampling(PlainSampling):
    """`PlainSampling` of a model on a CPU, whose region decoders are fused in place.

    Args:
        model: the model.
        spare: row of the state whose embedding is never read.
    """

    def __init__(self, model: Model, spare: int) -> None:
        super().__init__(model)
        self._spare = spare
        if isinstance(model.region, nn.Module):
            for name, decoder in list(model.region.named_children()):
                if isinstance(decoder, nn.Linear):
                    model.region.set_submodule(name, FusedLinear(decoder))

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
        """As `Runner.sample_regions`; what is not sampled is left as it was."""
        model, region = self._model, self._model.region
        if coords:
            rows = (phases <= Phase.Y).nonzero().squeeze(1)
            given = hidden[rows]
            values = region.coord(given)
            coord_logit, eos_logit = model.coord_eos_logits(given).split(1, dim=-1)
            begins = phases[rows].unsqueeze(1) == Phase.X_OR_EOS
            first = torch.where(begins, coord_logit - eos_logit, values)
            sampled[rows] = torch.cat([first, values, values], dim=-1)
            slots = batch_slots[rows]
            if len(at := (slots != self._spare).nonzero().squeeze(1)):
                state[slots[at]] = region.encode_coord(values[at])
        if sizes:
            rows = (phases == Phase.SIZE).nonzero().squeeze(1)
            values = region.size(hidden[rows])
            sampled[rows, :2] = values
            slots = batch_slots[rows]
            if len(at := (slots != self._spare).nonzero().squeeze(1)):
                state[slots[at]] = region.encode_size(values[at])


def feed(model: Model, embeddings: torch.Tensor, values: Mapping[int, tuple[Phase, float, float]]) -> None:
    """Put what the host feeds in place of some embeddings (tokens, dim).

    Args:
        model: the model.
        embeddings: as above.
        values: by their rows of `embeddings`, as `plain_runner.embed_fed` takes them.
    """
    tokens = [(row, int(number)) for row, (kind, number, _) in values.items() if kind is Phase.TOKEN]
    put_values(
        model.region,
        embeddings,
        {
            row: (first,) if kind is Phase.Y else (first, second)
            for row, (kind, first, second) in values.items()
            if kind is not Phase.TOKEN
        },
    )
    if tokens:
        rows, ids = torch.tensor(tokens).unbind(1)
        embeddings.index_copy_(0, rows, model.text.embed(ids))
