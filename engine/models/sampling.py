"""Sampling, and feeding what was sampled, with a model's own modules: any device, any dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from saccade.engine.models.protocol import Model, RegionHeads, TextDecoder
from saccade.engine.phase import Phase

SAMPLED = 3  # numbers that a step yields for each row, see `output_state.OutputState.commit`


class PlainSampling:
    """Sampling as `Runner` defines it, with the model's own modules; any device, any dtype."""

    def __init__(self, model: Model) -> None:
        self._model = model

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
        """As `Runner.sample_regions`."""
        model, region, phase = self._model, self._model.region, phases.unsqueeze(1)
        if coords:
            coord = region.coord(hidden)
            coord_logit, eos_logit = model.coord_eos_logits(hidden).split(1, dim=-1)
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
        """As `Runner.logits`."""
        return self._model.text.logits(hidden).float()


def embed_fed(model: Model, kinds: torch.Tensor, values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Embeddings of values that the host feeds: what a sequence has sampled, or a guess of that.

    Args:
        model: the model.
        kinds: (…) int, `Phase.Y` for a coordinate, `Phase.SIZE` for a size, `Phase.TOKEN` for a token, 0 for none.
        values: (…, 2) float32: (coordinate, any), (width, height), (token id, any).
        others: (…, dim) embeddings where the kind is 0.

    Returns:
        (…, dim).
    """
    kind = kinds.unsqueeze(-1)
    x = torch.where(kind == Phase.Y, model.region.encode_coord(values[..., :1]), others)
    x = torch.where(kind == Phase.SIZE, model.region.encode_size(values), x)
    ids = torch.where(kinds == Phase.TOKEN, values[..., 0], 0.0)
    return torch.where(kind == Phase.TOKEN, model.text.embed(ids.to(torch.int64)), x)


def seen_values(objects: torch.Tensor, which: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """What is fed of objects that a vision encoder has seen, see `embed_fed`.

    Args:
        objects: (images, n, 5) float32, see `DraftingEncoder.features_and_drafts`.
        which: (tokens, 4) int32: the image; the class, -1 for none of this; which of its objects; 0 for x, 1 for y, 2
            for width and height.
        others: (tokens, 2) float32, what is fed where there is no class.

    Returns:
        (tokens, 2); zeros where there are fewer objects.
    """
    image, label, number, part = which.unsqueeze(-1).unbind(1)
    of = F.embedding(image.squeeze(1), objects.flatten(1)).view(-1, *objects.shape[1:])
    same = of[..., 0] == label
    wanted = same & (same.cumsum(1) == number + 1)  # one at most
    x, y, width, height = torch.where(wanted.unsqueeze(-1), of[..., 1:], 0.0).sum(1).split(1, dim=1)
    first = torch.where(part == 0, x, torch.where(part == 1, y, width))
    values = torch.cat([first, torch.where(part == 2, height, 0.0)], dim=1)
    return torch.where(label == -1, others, values)


def suppress(logits: torch.Tensor, phases: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Logits (rows, vocab), in place with those of `ids` (n,) at -inf where a row's phase is LATER_TOKEN."""
    later = (phases == Phase.LATER_TOKEN).unsqueeze(1)
    return logits.index_copy_(1, ids, logits.index_select(1, ids).masked_fill(later, -torch.inf))


def take_tokens(
    text: TextDecoder,
    token: torch.Tensor,
    phases: torch.Tensor,
    batch_slots: torch.Tensor,
    sampled: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Make a token the sample of each row of text, and its embedding what the next step begins with.

    Args:
        text: the decoder.
        token: (rows,) ids; of no meaning where a row's phase is none of text.
        phases: (rows,).
        batch_slots: (rows,) rows of `state`.
        sampled: (rows, 3) float32.
        state: (batch slots, dim).
    """
    wanted, slots = (phases >= Phase.TOKEN).unsqueeze(1), batch_slots.long()
    sampled.copy_(torch.where(wanted, token.unsqueeze(1).float(), sampled))
    state[slots] = torch.where(wanted, text.embed(token), state[slots])


def take_coordinates(
    region: RegionHeads,
    hidden: torch.Tensor,
    wanted: torch.Tensor,
    batch_slots: torch.Tensor,
    sampled: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Where a row of text has sampled the coordinate token, sample its coordinate, which the next step begins with.

    Args:
        region: the model's region heads.
        hidden: (rows, dim) hidden states that the tokens were sampled from.
        wanted: (rows,) bool.
        batch_slots: (rows,) rows of `state`.
        sampled: (rows, 3) float32; the coordinate becomes the second number.
        state: (batch slots, dim).
    """
    coordinate, slots = region.coord(hidden), batch_slots.long()
    sampled[:, 1] = torch.where(wanted, coordinate.squeeze(1), sampled[:, 1])
    state[slots] = torch.where(wanted.unsqueeze(1), region.encode_coord(coordinate), state[slots])


def put_values(region: RegionHeads, embeddings: torch.Tensor, values: Mapping[int, tuple[float, ...]]) -> None:
    """Put coordinates and sizes in place of some embeddings (tokens, dim); does not wait.

    Args:
        region: the model's region heads.
        embeddings: as above.
        values: one number is a coordinate, two are a size, in 0..1; by their rows of `embeddings`.
    """
    device = embeddings.device
    for length, encode in ((1, region.encode_coord), (2, region.encode_size)):
        at = [place for place, numbers in values.items() if len(numbers) == length]
        if at:
            pinned = device.type == "cuda"
            rows = torch.tensor(at, pin_memory=pinned).to(device, non_blocking=True)
            numbers = torch.tensor([values[place] for place in at], pin_memory=pinned).to(device, non_blocking=True)
            embeddings.index_copy_(0, rows, encode(numbers).to(embeddings.dtype))
