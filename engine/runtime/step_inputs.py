"""Inputs of a batch step that the host uploads: integers in one buffer, prompt tokens, and sampling parameters.

The sampling parameters (temperatures, seeds, masks of allowed tokens) are known only when the step is finalized, and
are then uploaded on the copy stream.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from saccade.engine import kernels
from saccade.engine.core.request import NO_SLOT, ScheduledSequence, Step, StepKind
from saccade.engine.core.speculative import Rows
from saccade.engine.models.protocol import TEXT_PHASES, Model, Phase
from saccade.engine.models.runner import sample, take_allowed, take_coordinates, take_tokens
from saccade.engine.runtime.streams import Stream
from saccade.engine.tasks.task import ANY_TOKEN, FROM_IMAGE, MAX_SCORED, FedValue, Sampled, TokenRule

NO_CLASS = -2
"""Detector class of a prompt for which there are no detections."""


def bucket_of(sizes: Sequence[int], count: int) -> int:
    """Return the padded size for `count`: the smallest of the ascending `sizes` that is at least `count`."""
    return sizes[bisect_left(sizes, count)]


class StepInputs:
    """Named int32 arrays that are uploaded in one copy. Each step slot has its own pinned host buffer.

    Args:
        depth: number of step slots.
        device: destination of the upload.
        shapes: shape of each array by name.

    Attributes:
        host: the input arrays of each step slot, by name.
        device: the uploaded arrays by name. All step slots share them.
    """

    def __init__(self, depth: int, device: torch.device, **shapes: tuple[int, ...]) -> None:
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        self._pinned = [
            torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(depth)
        ]
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._kernels = device.type == "cuda" and kernels.available(device)
        ends = np.cumsum(sizes).tolist()

        def views(whole: torch.Tensor) -> dict[str, torch.Tensor]:
            parts = zip(shapes.items(), sizes, ends, strict=True)
            return {name: whole[end - size : end].view(shape) for (name, shape), size, end in parts}

        self.host: list[dict[str, NDArray[np.int32]]] = [
            {name: view.numpy() for name, view in views(pinned).items()} for pinned in self._pinned
        ]
        self.device = views(self._device)
        self._whole = [pinned.numpy() for pinned in self._pinned]

    def copy_of(self, slot: int) -> NDArray[np.int32]:
        """Return a copy of all input arrays of a step slot as one array, which `reset` can restore."""
        return self._whole[slot].copy()

    def reset(self, slot: int, whole: NDArray[np.int32]) -> None:
        """Restore all input arrays of a step slot from the array `whole` that `copy_of` returned."""
        self._whole[slot][:] = whole  # one copy, because each copy may release the GIL

    def send(self, slot: int) -> None:
        """Upload the input arrays of a step slot. The call does not wait for the upload."""
        self._device.copy_(self._pinned[slot], non_blocking=True)

    def fetch(self, slot: int) -> None:
        """Upload the input arrays of a step slot. On supported GPUs, a CUDA graph can capture the upload."""
        if self._kernels:
            from saccade.engine.kernels.common import fetch

            fetch(self._pinned[slot], self._device)
        else:
            self.send(slot)

    def feed(self, slot: int, values: Mapping[int, FedValue]) -> None:
        """Write decoder inputs to the host arrays of a step slot, at their row or token index.

        See `runner.embed_fed`.
        """
        host = self.host[slot]
        numbers = host["values"].view(np.float32)
        for place, value in values.items():
            host["kinds"][place], numbers[place] = value[0], value[1:]

    @property
    def values(self) -> torch.Tensor:
        """Decoder inputs on the device, (…, 2) float32; see `models.runner.embed_fed`."""
        return self.device["values"].view(torch.float32)


class DecodeInputs(StepInputs):
    """Inputs of decode steps, and of the sampling after a prefill.

    The CUDA graph of a decode step fetches its inputs from pinned memory. The inputs of the sampling after a prefill
    are uploaded by a copy.

    Args:
        depth: number of step slots.
        device: destination of the upload.
        rows: maximum number of rows. Padding rows use the batch slot with index `rows`, which is spare.
        prefix_length: sequence position of padding rows.
    """

    def __init__(self, depth: int, device: torch.device, rows: int, prefix_length: int) -> None:
        one, two = (rows,), (rows, 2)
        super().__init__(
            depth, device, batch_slots=one, outs=one, phases=one, positions=one, kinds=one, values=two, adapters=one
        )
        self._spare, self._prefix_length = rows, prefix_length

    def fill(self, slot: int, rows: Sequence[ScheduledSequence[Any]], bucket: int) -> None:
        """Write the inputs of the rows of a decode step, padded to `bucket` rows.

        Padding rows use the spare batch slot, which no sequence uses.
        """
        host, count = self.host[slot], len(rows)
        host["batch_slots"][:count] = [row.sequence.batch_slot for row in rows]
        # The host supplies the inputs after a draft, so such rows store their samples in the spare slot.
        host["outs"][:count] = [row.sequence.batch_slot if row.alone else self._spare for row in rows]
        host["phases"][:count] = [row.phase for row in rows]
        host["positions"][:count] = [row.position for row in rows]
        host["kinds"][:bucket] = 0
        adapters = [row.sequence.window.adapter_slot for row in rows]
        if any(adapters):  # without adapters, the array is not read
            host["adapters"][:bucket] = adapters + [NO_SLOT] * (bucket - count)
        host["batch_slots"][count:bucket] = host["outs"][count:bucket] = self._spare
        host["phases"][count:bucket] = Phase.X_OR_EOS
        host["positions"][count:bucket] = self._prefix_length
        self.feed(slot, {place: row.value for place, row in enumerate(rows) if row.value is not None})

    def fill_sampled(self, slot: int, rows: Sequence[ScheduledSequence[Any]], bucket: int) -> None:
        """Upload the inputs of the sampling after a prefill, padded to `bucket` rows."""
        host, spare = self.host[slot], self._spare
        outs = [row.sequence.batch_slot if row.alone else spare for row in rows]
        phases = [row.phase for row in rows]
        rest = bucket - len(rows)
        host["outs"][:bucket] = outs + [spare] * rest
        host["phases"][:bucket] = phases + [Phase.X_OR_EOS] * rest
        self.send(slot)


@dataclass(slots=True, frozen=True)
class PromptTokens:
    """Tokens of all prompts of a prefill, concatenated. Each prompt is followed by its draft (speculative decoding).

    Attributes:
        ids: ID of each token.
        positions: position of each token in its sequence.
        owners: batch slot of each token.
        values: coordinates and sizes that replace token embeddings, by token index.
        adapter_slots: LoRA adapter slot of each token.
    """

    ids: list[int]
    positions: NDArray[np.int64]
    owners: NDArray[np.int64]
    values: dict[int, tuple[float, ...]]
    adapter_slots: NDArray[np.int64]


class PrefillInputs(StepInputs):
    """Inputs of a prefill: KV cache pages of its images and sequences, and the prompt tokens.

    Args:
        depth: number of step slots.
        device: destination of the upload.
        rows: maximum number of sampled rows. Padding rows use the batch slot with index `rows`, which is spare.
        images: maximum number of images.
        tokens: maximum number of prompt and draft tokens, of all sequences together.
        prefix_pages: number of pages per image.
        pages: number of pages per sequence.
        prefix_length: sequence position of padding tokens.
        asked: detector class index, keyed by the token IDs of the prompt, for vision encoders that draft answers; see
            `DraftingEncoder`.
    """

    def __init__(
        self,
        depth: int,
        device: torch.device,
        rows: int,
        images: int,
        tokens: int,
        prefix_pages: int,
        pages: int,
        prefix_length: int,
        asked: Mapping[tuple[int, ...], int] | None = None,
    ) -> None:
        super().__init__(
            depth,
            device,
            prefixes=(images, prefix_pages),
            image_adapters=(images,),
            adapters=(tokens,),
            ids=(tokens,),
            positions=(tokens,),
            owners=(tokens,),
            kinds=(tokens,),
            values=(tokens, 2),
            objects=(tokens, 4),
            lasts=(rows,),
            batch_slots=(rows,),
            tables=(rows, pages),
        )
        self._most = tokens
        self._asked = asked or {}
        host = self.host[0]
        host["objects"][:, 1] = -1
        for name, value in (("batch_slots", rows), ("owners", rows), ("positions", prefix_length)):
            host[name].fill(value)
        self._nothing = self.copy_of(0)

    def fill(self, slot: int, step: Step[Any], drafted: Sequence[tuple[int, Rows]] = ()) -> PromptTokens:
        """Write the inputs of a prefill and upload them.

        Args:
            slot: index of the step slot.
            step: the prefill.
            drafted: sequences whose drafts are detections, and their rows.

        Returns:
            The tokens of all prompts. They are uploaded only if they fit into the buffers.
        """
        host, groups = self.host[slot], step.groups
        self.reset(slot, self._nothing)
        if imaged := step.imaged:
            host["prefixes"][: len(imaged)] = [window.pages for window in imaged]
            host["image_adapters"][: len(imaged)] = [window.adapter_slot for window in imaged]
        sequences = [group[0].sequence for group in groups]
        prompts, rows = _int([len(one.prompt) for one in sequences]), _int([len(group) for group in groups])
        lengths = prompts + rows - 1
        starts, count = lengths.cumsum() - lengths, int(lengths.sum())
        batch_slots = _int([one.batch_slot for one in sequences])
        lasts = _counted(starts + prompts - 1, rows)
        host["lasts"][: len(lasts)] = lasts
        host["batch_slots"][: len(groups)] = batch_slots
        for number, one in enumerate(sequences):
            pages = (*one.window.pages, *one.pages)
            host["tables"][number, : len(pages)] = pages
        ids, behind = list[int](), starts.tolist()
        values: dict[int, tuple[float, ...]] = {}
        for start, one, group in zip(behind, sequences, groups, strict=True):
            ids += one.prompt
            ids += [0] * (len(group) - 1)
            if one.values:
                values |= {start + at: numbers for at, numbers in one.values.items()}
        tokens = PromptTokens(
            ids,
            _counted(_int([group[0].position for group in groups]), lengths),
            batch_slots.repeat(lengths),
            values,
            _int([one.window.adapter_slot for one in sequences]).repeat(lengths),
        )
        if count <= self._most:
            for name, numbers in (("ids", ids), ("positions", tokens.positions), ("owners", tokens.owners)):
                host[name][:count] = numbers
            if tokens.adapter_slots.any():
                host["adapters"][:count] = tokens.adapter_slots
            if step.drafted:
                drafts = zip(lasts.tolist(), step.sequences, strict=True)
                self.feed(slot, {at: row.value for at, row in drafts if row.value not in (None, FROM_IMAGE)})
            self.feed(slot, {at: _fed(numbers) for at, numbers in values.items()})
            if drafted:
                firsts = dict(zip(map(id, groups), (starts + prompts).tolist(), strict=True))
                self._ask(slot, [firsts[id(group)] for _, group in drafted], drafted)
        self.send(slot)
        return tokens

    def _ask(self, slot: int, firsts: Sequence[int], drafted: Sequence[tuple[int, Rows]]) -> None:
        """Write the index of the detection that replaces each `FROM_IMAGE` placeholder in a draft.

        Args:
            slot: index of the step slot.
            firsts: index of the first draft token of each drafted sequence.
            drafted: the sequences and their rows; see `speculative.drafted_from_images`.
        """
        host, counts = self.host[slot], _int([len(rows) - 1 for _, rows in drafted])
        at, sequences = _counted(_int(firsts), counts), [rows[0].sequence for _, rows in drafted]
        classes = _int([self._asked.get(one.prompt, NO_CLASS) for one in sequences])
        parts = [_parts(one.output.phases, len(rows) - 1) for one, (_, rows) in zip(sequences, drafted, strict=True)]
        wanted = np.empty((len(at), 4), np.int32)
        wanted[:, 0], wanted[:, 1] = _int([number for number, _ in drafted]).repeat(counts), classes.repeat(counts)
        wanted[:, 2:] = np.concatenate([which for which, _ in parts])
        host["objects"][at] = wanted
        host["kinds"][at] = np.concatenate([kinds for _, kinds in parts])


def _int(numbers: Sequence[int]) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


def _counted(firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the integers of all ranges, concatenated. Range i has `counts[i]` integers and starts at `firsts[i]`."""
    numbers: NDArray[np.int64] = (firsts - counts.cumsum() + counts).repeat(counts) + np.arange(counts.sum())
    return numbers


@functools.cache
def _parts(phases: tuple[Phase, ...], count: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Describe the first `count` decoder inputs of an object list. The values of one object have these `phases`.

    Returns:
        (count, 2) index of the object and index into `phases`.
        (count,) `Phase.Y` for a coordinate, `Phase.SIZE` for a size.
    """
    which = np.stack(np.divmod(np.arange(count, dtype=np.int32), np.int32(len(phases))), axis=1)
    kinds = [Phase.SIZE if phases[part] is Phase.SIZE else Phase.Y for part in which[:, 1]]
    return which, np.array(kinds, np.int32)


def _fed(numbers: tuple[float, ...]) -> FedValue:
    """Convert a coordinate (one number) or a width and height (two numbers) to a decoder input."""
    return (Phase.Y, numbers[0], 0.0) if len(numbers) == 1 else (Phase.SIZE, numbers[0], numbers[1])


# ---- token sampling


@dataclass(slots=True, frozen=True)
class AllowedTokens:
    """Rows that sample greedily, but only among the tokens that a mask allows. The device caches the masks.

    For each `count`, the tensors have fixed addresses, as CUDA graphs require.

    Attributes:
        count: number of rows, padded to the size of a captured CUDA graph with copies of the last row.
        rows: (count,) int64 row indices.
        which: (count,) int64 index into `masks` for each of `rows`.
        masks: (masks, vocab) bool, True for allowed tokens.
    """

    count: int
    rows: torch.Tensor
    which: torch.Tensor
    masks: torch.Tensor


@dataclass(slots=True, frozen=True)
class TokenSampler:
    """Samples the next token of the rows with a temperature above 0 or a token constraint, such as allowed tokens.

    Attributes:
        rows: (n,) int64 indices of these rows in the step.
        draw: function that samples tokens (n,) int64 from logits (n, vocab).
        grounded: (n,) int64, 1 if the row also samples a coordinate after a coordinate token. None if no row does.
        scored: (n, ids) int64 token IDs whose log probabilities are requested, or None.
    """

    rows: torch.Tensor
    draw: Callable[[torch.Tensor], torch.Tensor]
    grounded: torch.Tensor | None = None
    scored: torch.Tensor | None = None

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the log probabilities (n, ids) float32 of the `scored` tokens, from logits (rows, vocab)."""
        assert self.scored is not None
        return logits.index_select(0, self.rows.contiguous()).float().log_softmax(-1).gather(1, self.scored)


_MOST_KEPT = 16  # cached masks of 51 KB each


class SamplingInputs:
    """Host and device buffers of sampling parameters, at fixed addresses: `depth` step slots of `n_rows` rows."""

    def __init__(self, depth: int, n_rows: int, vocab: int, device: torch.device) -> None:
        self._temperatures = _PinnedBuffer(device, torch.float32, depth, n_rows, 2)  # temperature and top-p of each row
        # For each row: seed, step, whether it is grounded, row index.
        self._seeds = _PinnedBuffer(device, torch.int64, depth, n_rows, 4)
        self._masks = _PinnedBuffer(device, torch.bool, depth, n_rows, vocab)
        self._lasting: dict[int, tuple[Sequence[int], int, torch.Tensor]] = {}
        self._kept = torch.zeros(_MOST_KEPT, vocab, dtype=torch.bool, device=device)
        self._chosen = _PinnedBuffer(device, torch.int64, depth, 2, n_rows)  # rows, and the mask index of each
        self._scored = _PinnedBuffer(device, torch.int64, depth, n_rows, min(vocab, MAX_SCORED))

    def send(self, slot: int, step: Step[Any], copy: Stream, compute: Stream) -> TokenSampler | AllowedTokens | None:
        """Upload the sampling parameters of a step on the copy stream.

        The step must be finalized, and the previous step in the slot must be committed.

        Returns:
            The sampler for rows that need more than greedy decoding, or None if there are no such rows.
        """
        rows = [number for number, row in enumerate(step.sequences) if _is_special(row)]
        if not rows:
            return None
        chosen, count = [step.sequences[number] for number in rows], len(rows)
        sampling, rules = [row.sequence.output.sampling for row in chosen], [row.rule for row in chosen]
        if all(rule.lasting and one.temperature == 0 for rule, one in zip(rules, sampling, strict=True)):
            masks = [mask for rule in rules if (mask := self._mask_of(rule, copy)) is not None]
            if len(masks) == count:
                return self._send_allowed(slot, rows, masks, copy, compute)
        masked = any(rule.allowed is not None or rule.forbidden for rule in rules)
        warm = any(one.temperature > 0 for one in sampling)
        grounded, n_scored = any(rule.grounded for rule in rules), max(len(rule.scored) for rule in rules)
        sent = [self._temperatures, self._seeds]
        # Use the position of the input token as step number: it is unique within a sequence.
        prefill = step.kind is StepKind.PREFILL
        ends = [len(row.sequence.prompt) - 1 if prefill and row.value is None else 0 for row in chosen]
        steps = [row.position + end for row, end in zip(chosen, ends, strict=True)]
        self._temperatures.host[slot, :count] = torch.tensor([(one.temperature, one.top_p) for one in sampling])
        self._seeds.host[slot, :count] = torch.tensor(
            [(a.seed, at, rule.grounded, row) for a, at, rule, row in zip(sampling, steps, rules, rows, strict=True)]
        )
        if masked:
            sent.append(self._masks)
            self._fill_masks(slot, rules)
        if n_scored:
            sent.append(self._scored)
            for row, rule in zip(self._scored.host[slot], rules, strict=False):
                row[:n_scored] = torch.tensor([*rule.scored, *[0] * (n_scored - len(rule.scored))])

        def upload() -> None:
            for mirror in sent:
                mirror.upload(slot, count)

        copy.run(upload)
        compute.wait(copy.record())
        temperature, top_p = self._temperatures.device[slot, :count].unbind(-1)
        seed, at, grounds, numbers = self._seeds.device[slot, :count].unbind(-1)
        narrow = top_p if any(one.top_p < 1 for one in sampling) else None
        seen = self._masks.device[slot, :count] if masked else None
        heat = temperature if warm else None
        return TokenSampler(
            numbers,
            lambda logits: sample(logits.float(), heat, narrow, seed, at, seen),
            grounds if grounded else None,
            self._scored.device[slot, :count, :n_scored] if n_scored else None,
        )

    def _send_allowed(
        self, slot: int, rows: list[int], masks: list[int], copy: Stream, compute: Stream
    ) -> AllowedTokens:
        count = min(1 << (len(rows) - 1).bit_length(), self._chosen.host.shape[2])
        host, spare = self._chosen.host[slot, :, :count], count - len(rows)
        host.copy_(torch.tensor([rows + rows[-1:] * spare, masks + masks[-1:] * spare]))
        copy.run(lambda: self._chosen.upload(slot, 2))
        compute.wait(copy.record())
        numbers, which = self._chosen.device[slot, :, :count].unbind(0)
        return AllowedTokens(count, numbers, which, self._kept)

    def _mask_of(self, rule: TokenRule, copy: Stream) -> int | None:
        """Return the index of a rule's mask of allowed tokens in the device's mask cache.

        If the cache does not contain the mask, upload it. Return None if the cache is full.
        """
        assert rule.allowed is not None
        kept = self._lasting.get(id(rule.allowed))
        if kept is None:
            number = len(self._lasting)
            if number == len(self._kept):
                return None
            mask = torch.zeros(self._kept.shape[1], dtype=torch.bool, pin_memory=self._kept.is_cuda)
            mask[list(rule.allowed)] = True
            copy.run(partial(_put, self._kept[number], mask))
            # The reference keeps the list alive, so its id stays unique.
            kept = self._lasting[id(rule.allowed)] = rule.allowed, number, mask
        return kept[1]

    def _fill_masks(self, slot: int, rules: Sequence[TokenRule]) -> None:
        mask = self._masks.host[slot, : len(rules)].fill_(True)
        for row, rule in zip(mask, rules, strict=True):
            kept = self._lasting.get(id(rule.allowed))
            if kept is not None:
                row.copy_(kept[2])
            elif rule.allowed is not None:
                row.fill_(False)[list(rule.allowed)] = True
            elif rule.forbidden:
                row[list(rule.forbidden)] = False


def _put(place: torch.Tensor, mask: torch.Tensor) -> None:
    place.copy_(mask, non_blocking=True)


class _PinnedBuffer:
    """A pinned host buffer with separate rows for each step slot, and its copy on the device."""

    __slots__ = ("device", "host")

    def __init__(self, device: torch.device, dtype: torch.dtype, *shape: int) -> None:
        self.host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.device = torch.zeros(shape, dtype=dtype, device=device)

    def upload(self, slot: int, count: int) -> None:
        self.device[slot, :count].copy_(self.host[slot, :count], non_blocking=True)


def _is_special(row: ScheduledSequence[Any]) -> bool:
    """Return whether a row has a token rule (such as allowed tokens) or a temperature above 0."""
    if row.phase not in TEXT_PHASES:
        return False
    rule = row.rule
    wanted = rule.allowed is not None or rule.forbidden or rule.grounded or rule.scored
    return bool(wanted) or row.sequence.output.sampling.temperature > 0


def with_scores(sampled: torch.Tensor, scores: torch.Tensor, step: Step[Any]) -> list[Sampled]:
    """Return the sampled values of each row, followed by its requested log probabilities.

    Args:
        sampled: (at least rows, 3) samples on the host.
        scores: (at least rows, `MAX_SCORED`) log probabilities on the host.
        step: the step.
    """
    values: list[Sampled] = list(map(tuple, sampled[: len(step.sequences)].tolist()))
    for number, row in enumerate(step.sequences):
        if row.rule is not ANY_TOKEN and row.rule.scored:
            values[number] += tuple(scores[number, : len(row.rule.scored)].tolist())
    return values


def sample_again(
    model: Model,
    sampler: TokenSampler | AllowedTokens,
    hidden: torch.Tensor,
    logits: torch.Tensor,
    phases: torch.Tensor,
    batch_slots: torch.Tensor,
    sampled: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Sample the rows that need more than greedy decoding, and overwrite their greedy results.

    Args:
        model: the model.
        sampler: the rows and how to sample them.
        hidden: (rows, dim) hidden states of all rows of the step.
        logits: (rows, vocab) logits of all rows of the step.
        phases: (rows,) `Phase` of each row.
        batch_slots: (rows,) index of each row in `state`.
        sampled: (rows, 3) float32 samples; updated in place.
        state: (batch slots, dim) input embeddings of the next step; updated in place.
    """
    if isinstance(sampler, AllowedTokens):
        take_allowed(model.text, sampler.rows, sampler.masks, sampler.which, logits, batch_slots, sampled, state)
        return
    rows = sampler.rows.contiguous()
    token, slots = sampler.draw(logits.index_select(0, rows)), batch_slots.index_select(0, rows)
    part = sampled.index_select(0, rows)
    take_tokens(model.text, token, phases.index_select(0, rows), slots, part, state)
    if sampler.grounded is not None:
        wanted = (sampler.grounded > 0) & (token == model.limits.coord_id)
        take_coordinates(model.region, hidden.index_select(0, rows), wanted, slots, part, state)
    sampled.index_copy_(0, rows, part)
