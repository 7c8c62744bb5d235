"""Device work of one batch step: decoder, prefill of images, and sampling.

All tensors have fixed addresses, as CUDA graphs require.

`Runner` uses the PyTorch modules of the model on any device. `cpu.decoder.CpuRunner` has a fused decoder for CPUs.
`cuda.decoder.PackedRunner` has kernels for steps with few rows.

| sampled value | implementation |
|---|---|
| coordinates and sizes | `Runner.sample_regions`; on CUDA `kernels.region_sampling` |
| tokens | `take_tokens` if greedy; `sample` with a temperature or a grammar |
| whether another object follows | on the host, by `ObjectsOutput.begins` (`tasks.objects`), from two logits |

Random noise is a hash of the request's seed, the step number and the token ID. An answer therefore does not depend on
the other requests in its batch, or on its launch time.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Protocol

import torch
from torch.nn import functional as F

from saccade.engine.models.lora import AdapterBank
from saccade.engine.models.protocol import Cache, Model, Phase, RegionHeads, TextDecoder

SAMPLED = 3
"""Values per row that a step returns; see `OutputState.commit`."""
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # constants of splitmix64 (Steele, Lea & Flood 2014) as signed integers
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


class PagedCache(Protocol):
    """KV cache that stores keys and values in pages."""

    prefix_length: int
    prefix_pages: int

    def rows(self, table: torch.Tensor, length: int | None = None) -> Cache:
        """Return a view of the KV cache for some sequences.

        Args:
            table: (rows, pages) int64 page table of the sequences. The pages of the image prefix come first.
            length: maximum number of tokens to read, or None for all.
        """
        ...


class Runner:
    """Runs the batch steps of one model with PyTorch modules. Index tensors are int32.

    Args:
        model: the model.
        cache: the paged KV cache.
    """

    def __init__(self, model: Model, cache: PagedCache) -> None:
        self._model, self._cache = model, cache
        self._adapters: tuple[AdapterBank, torch.Tensor] | None = None

    def with_adapters(self, bank: AdapterBank, slots: torch.Tensor) -> Runner:
        """Return a copy of this runner that uses LoRA adapters.

        Args:
            bank: the LoRA adapters, by slot.
            slots: (rows,) adapter slot of each row of the batch. In a prefill, images precede tokens.
        """
        adapted = copy.copy(self)
        adapted._adapters = bank, slots
        return adapted

    def _text(self, rows: slice | torch.Tensor) -> TextDecoder:
        """Return the text decoder with the LoRA adapters of some rows of the batch."""
        if self._adapters is None:
            return self._model.text
        bank, slots = self._adapters
        return bank.text(slots[rows])

    def forward_tokens(
        self, x: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor, tables: torch.Tensor, together: bool
    ) -> torch.Tensor:
        """Run one token per row through the decoder. Store keys and values in the KV cache pages of the sequences.

        Args:
            x: (rows, dim) embeddings; may be overwritten.
            positions: (rows,) positions in the sequences, including the image prefix.
            owners: (rows,) index of each row's sequence in `tables`.
            tables: (sequences, pages) page tables.
            together: whether several rows may belong to one sequence. A later row then also attends to the earlier
                rows. `Runner` ignores this flag, because it stores all keys before attention.

        Returns:
            (rows, dim) hidden states.
        """
        return self._forward(0, x, positions, owners, tables)

    def _forward(
        self, first: int, x: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor, tables: torch.Tensor
    ) -> torch.Tensor:
        """Run rows of a batch through the decoder. `first`, the batch index of the first row, selects LoRA adapters."""
        rows = self._cache.rows(tables[owners.long()].long())
        at = positions.long().unsqueeze(1)
        # The mask must be explicit: in a sequence without an image, attention is causal from the first position on.
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
        """Store the keys and values of image prefixes in their KV cache pages, then process the prompts after them.

        Args:
            images: (images, prefix length, dim) embeddings of BOS and image tokens.
            prefixes: (images, pages) pages of the prefixes.
            prompts: (tokens, dim) embeddings of all prompts, or None.
            positions: (tokens,) positions in the sequences.
            owners: (tokens,) index of each token's sequence in `tables`.
            tables: (sequences, pages) page tables.

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
        """Sample the coordinates and sizes of detect and point answers.

        Args:
            hidden: (rows, dim) hidden states.
            phases: (rows,) `Phase` of each row. The samples of text rows are undefined.
            batch_slots: (rows,) rows of `state` that receive the embeddings of the samples.
            coords: whether any row has the phase X_OR_EOS or Y.
            sizes: whether any row has the phase SIZE.
            sampled: (rows, 3) float32 sampled values, overwritten; see `OutputState.commit`.
            state: (batch slots, dim) next input embeddings, overwritten.
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
        """Return the logits (rows, vocab) float32 of the next token for hidden states (rows, dim)."""
        return self._model.text.logits(hidden).float()


# ---- sampling


def suppress(logits: torch.Tensor, phases: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Set the logits (rows, vocab) of the token IDs `ids` (n,) to -inf, in place.

    Only rows in the phase LATER_TOKEN (free text after the first token) change.
    """
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
    """Store the sampled tokens of text rows, and their embeddings as the inputs of the next step.

    Args:
        text: the text decoder.
        token: (rows,) token IDs; ignored for rows in other phases.
        phases: (rows,) `Phase` of each row.
        batch_slots: (rows,) rows of `state` that receive the embeddings.
        sampled: (rows, 3) float32 samples, overwritten.
        state: (batch slots, dim) next input embeddings, overwritten.
    """
    wanted, slots = (phases >= Phase.TOKEN).unsqueeze(1), batch_slots.long()
    sampled.copy_(torch.where(wanted, token.unsqueeze(1).float(), sampled))
    state[slots] = torch.where(wanted, text.embed(token), state[slots])


def take_allowed(
    text: TextDecoder,
    rows: torch.Tensor,
    masks: torch.Tensor,
    which: torch.Tensor,
    logits: torch.Tensor,
    batch_slots: torch.Tensor,
    sampled: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Choose the most likely allowed token of each row in `rows`. Store the token and its embedding.

    Args:
        text: the text decoder.
        rows: (n,) int64 row indices. Rows that occur twice must have the same mask.
        masks: (masks, vocab) bool, True for allowed tokens.
        which: (n,) int64 index into `masks` for each of `rows`.
        logits: (rows of the step, vocab) float32.
        batch_slots: (rows of the step,) rows of `state` that receive the embeddings.
        sampled: (rows of the step, 3) float32 samples; the first value of each selected row is overwritten.
        state: (batch slots, dim) next input embeddings, overwritten.
    """
    allowed = torch.where(masks.index_select(0, which), logits.index_select(0, rows), -torch.inf)
    token = allowed.argmax(-1)
    sampled.select(1, 0).index_copy_(0, rows, token.float())
    state.index_copy_(0, batch_slots.index_select(0, rows).long(), text.embed(token))


def take_coordinates(
    region: RegionHeads,
    hidden: torch.Tensor,
    wanted: torch.Tensor,
    batch_slots: torch.Tensor,
    sampled: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Sample a coordinate for each sequence that has sampled the coordinate token.

    The embedding of the coordinate is the next decoder input of the sequence.

    Args:
        region: region heads of the model.
        hidden: (rows, dim) hidden states from which the tokens were sampled.
        wanted: (rows,) bool, True for rows with the coordinate token.
        batch_slots: (rows,) rows of `state` that receive the embeddings.
        sampled: (rows, 3) float32 samples; the second value becomes the coordinate.
        state: (batch slots, dim) next input embeddings, overwritten.
    """
    coordinate, slots = region.coord(hidden), batch_slots.long()
    sampled[:, 1] = torch.where(wanted, coordinate.squeeze(1), sampled[:, 1])
    state[slots] = torch.where(wanted.unsqueeze(1), region.encode_coord(coordinate), state[slots])


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_p: torch.Tensor | None,
    seed: torch.Tensor,
    step: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample one token per row: the most likely token at temperature 0, otherwise with the Gumbel-max trick.

    Args:
        logits: (rows, vocab) float32.
        temperature: (rows,) float32, at least 0. None if all rows are greedy; no noise is then computed.
        top_p: (rows,) float32, above 0 and at most 1. None if no row uses it; no sort is then needed.
        seed: (rows,) int64 seed of the request.
        step: (rows,) int64 number of the sampling step within the request.
        mask: (rows, vocab) bool, True for allowed tokens, at least one per row.

    Returns:
        (rows,) int64 token IDs.
    """
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    if temperature is None:
        return logits.argmax(-1)
    warm = temperature > 0
    scores = logits.double() / torch.where(warm, temperature, 1.0).double().unsqueeze(1)
    if top_p is not None:
        scores = keep_top_p(scores, top_p)
    drawn = (scores + gumbel(seed, step, logits.shape[1])).argmax(-1)
    return torch.where(warm, drawn, logits.argmax(-1))


def keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set the scores (rows, vocab) of unlikely tokens to -inf (nucleus sampling).

    The remaining tokens are the smallest set with a total probability of at least `top_p` (rows,).
    """
    ordered, index = scores.sort(dim=-1, descending=True, stable=True)
    before = F.pad(ordered.softmax(-1).cumsum(-1)[:, :-1], (1, 0))  # total probability of more likely tokens
    wanted = top_p.double().unsqueeze(1)
    drop = (before >= wanted) & (wanted < 1)
    drop[:, 0] = False
    return torch.empty_like(scores).scatter(1, index, ordered.masked_fill(drop, -torch.inf))


def gumbel(seed: torch.Tensor, step: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return standard Gumbel noise (rows, vocab) float64.

    The noise depends only on `seed` (rows,), `step` (rows,) and the token ID.
    """
    key = _mix(_mix(seed + _GOLDEN) + step * _GOLDEN).unsqueeze(1)
    bits = _mix(key + torch.arange(1, vocab + 1, device=seed.device) * _GOLDEN)
    uniform = ((bits >> 11 & (1 << 53) - 1).double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of the splitmix64 hash. The int64 arithmetic wraps around."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _FIRST
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _SECOND
    return x ^ (x >> 31 & (1 << 33) - 1)


# ---- embedding of samples and drafts


def embed_fed(model: Model, kinds: torch.Tensor, values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Return the embeddings (…, dim) of earlier samples or drafts from the host.

    Args:
        model: the model.
        kinds: (…) int: `Phase.Y` for a coordinate, `Phase.SIZE` for a size, `Phase.TOKEN` for a token, or 0.
        values: (…, 2) float32: (coordinate, unused), (width, height) or (token ID, unused).
        others: (…, dim) embeddings to return where `kinds` is 0.
    """
    kind = kinds.unsqueeze(-1)
    x = torch.where(kind == Phase.Y, model.region.encode_coord(values[..., :1]), others)
    x = torch.where(kind == Phase.SIZE, model.region.encode_size(values), x)
    ids = torch.where(kinds == Phase.TOKEN, values[..., 0], 0.0)
    return torch.where(kind == Phase.TOKEN, model.text.embed(ids.to(torch.int64)), x)


def seen_values(objects: torch.Tensor, which: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Convert detections of the vision encoder to decoder inputs of drafts (speculative decoding).

    Args:
        objects: (images, n, 5) float32 detections; see `DraftingEncoder.features_and_drafts`.
        which: (tokens, 4) int32: index of the image; class, or -1 for a token without detection; index of the object in
            its class; part of the object (0 is x, 1 is y, 2 is width and height).
        others: (tokens, 2) float32 decoder inputs of the tokens without detection.

    Returns:
        (tokens, 2) float32 values for `embed_fed`. Values of objects that do not exist are 0.
    """
    image, label, number, part = which.unsqueeze(-1).unbind(1)
    of = F.embedding(image.squeeze(1), objects.flatten(1)).view(-1, *objects.shape[1:])
    same = of[..., 0] == label
    wanted = same & (same.cumsum(1) == number + 1)  # at most one object per row
    x, y, width, height = torch.where(wanted.unsqueeze(-1), of[..., 1:], 0.0).sum(1).split(1, dim=1)
    first = torch.where(part == 0, x, torch.where(part == 1, y, width))
    values = torch.cat([first, torch.where(part == 2, height, 0.0)], dim=1)
    return torch.where(label == -1, others, values)


def put_values(region: RegionHeads, embeddings: torch.Tensor, values: Mapping[int, tuple[float, ...]]) -> None:
    """Replace some embeddings (tokens, dim) by embeddings of coordinates and sizes, without synchronizing the device.

    Args:
        region: region heads of the model.
        embeddings: (tokens, dim), modified in place.
        values: numbers from 0 to 1 by row of `embeddings`: one number is a coordinate, two numbers are a size.
    """
    device = embeddings.device
    for length, encode in ((1, region.encode_coord), (2, region.encode_size)):
        at = [place for place, numbers in values.items() if len(numbers) == length]
        if at:
            pinned = device.type == "cuda"
            rows = torch.tensor(at, pin_memory=pinned).to(device, non_blocking=True)
            numbers = torch.tensor([values[place] for place in at], pin_memory=pinned).to(device, non_blocking=True)
            embeddings.index_copy_(0, rows, encode(numbers).to(embeddings.dtype))
