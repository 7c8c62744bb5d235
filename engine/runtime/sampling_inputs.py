"""Sampling parameters of a step, from output states to the device: temperatures, seeds, masks of grammars.

The host fills a slot's pinned buffers when the step is finalized; the copy stream brings them to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from saccade.engine.core.request import ScheduledSequence, Step, StepKind
from saccade.engine.models.protocol import Model
from saccade.engine.models.sampling import sample, take_allowed, take_coordinates, take_tokens
from saccade.engine.phase import TEXT_PHASES
from saccade.engine.runtime.executor import Stream
from saccade.engine.tasks.output_state import ANY_TOKEN, MAX_SCORED, Sampled, TokenRule


@dataclass(slots=True, frozen=True)
class AllowedTokens:
    """Rows of a step that take the likeliest token of a lasting mask; tensors of fixed addresses for each `count`.

    Attributes:
        count: of rows, the last of which may be there several times: as many as a graph is made for.
        rows, which, masks: as `take_allowed` takes them.
    """

    count: int
    rows: torch.Tensor
    which: torch.Tensor
    masks: torch.Tensor


@dataclass(slots=True, frozen=True)
class TokenSampler:
    """How rows of a step sample tokens that do not take the likeliest of all; to be used on the compute stream.

    Attributes:
        rows: (n,) int64, which rows of the step; the others take the likeliest.
        draw: from logits (n, vocab) to tokens (n,) int64.
        grounded: (n,) int64, 1 where the coordinate token brings a coordinate; None where no row may.
        scored: (n, ids) int64 whose log probabilities are wanted; None where no row's are.
    """

    rows: torch.Tensor
    draw: Callable[[torch.Tensor], torch.Tensor]
    grounded: torch.Tensor | None = None
    scored: torch.Tensor | None = None

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Log probabilities (n, ids) float32 of what is `scored`, of all tokens of logits (rows, vocab)."""
        assert self.scored is not None
        return logits.index_select(0, self.rows.contiguous()).float().log_softmax(-1).gather(1, self.scored)


_MOST_KEPT = 16  # lasting masks, of 51 KB each


class SamplingInputs:
    """Pinned and device buffers for `depth` slots of `n_rows` rows, at fixed addresses."""

    def __init__(self, depth: int, n_rows: int, vocab: int, device: torch.device) -> None:
        self._temperatures = _PinnedBuffer(device, torch.float32, depth, n_rows, 2)  # temperature and top-p of each row
        self._seeds = _PinnedBuffer(device, torch.int64, depth, n_rows, 4)  # its seed, step, whether grounded, its row
        self._masks = _PinnedBuffer(device, torch.bool, depth, n_rows, vocab)
        self._lasting: dict[int, tuple[Sequence[int], int, torch.Tensor]] = {}
        self._kept = torch.zeros(_MOST_KEPT, vocab, dtype=torch.bool, device=device)
        self._chosen = _PinnedBuffer(device, torch.int64, depth, 2, n_rows)  # rows, and which mask each has
        self._scored = _PinnedBuffer(device, torch.int64, depth, n_rows, min(vocab, MAX_SCORED))

    def send(self, slot: int, step: Step[Any], copy: Stream, compute: Stream) -> TokenSampler | AllowedTokens | None:
        """The sampler of a step's tokens, to be run on the compute stream; its inputs are put on the copy stream.

        None where all rows take the likeliest token. What else a row wants costs the others nothing: only such rows
        are in the sampler. To be called once the step is finalized by the scheduler, and the last step of the slot is
        committed.
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
        # A step's number is the position of what it feeds: no two steps of a sequence that are drawn share one.
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
        """The row of `_kept` that a rule's mask has, or gets; None if there is no room for it."""
        assert rule.allowed is not None
        kept = self._lasting.get(id(rule.allowed))
        if kept is None:
            number = len(self._lasting)
            if number == len(self._kept):
                return None
            mask = torch.zeros(self._kept.shape[1], dtype=torch.bool, pin_memory=self._kept.is_cuda)
            mask[list(rule.allowed)] = True
            copy.run(partial(_put, self._kept[number], mask))
            kept = self._lasting[id(rule.allowed)] = rule.allowed, number, mask  # the sequence is kept, and so its id
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
    """A pinned buffer (slots, rows, …) on the host, and its copy on the device."""

    __slots__ = ("device", "host")

    def __init__(self, device: torch.device, dtype: torch.dtype, *shape: int) -> None:
        self.host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.device = torch.zeros(shape, dtype=dtype, device=device)

    def upload(self, slot: int, count: int) -> None:
        self.device[slot, :count].copy_(self.host[slot, :count], non_blocking=True)


def _is_special(row: ScheduledSequence[Any]) -> bool:
    """Whether a row wants more than the likeliest of all tokens."""
    if row.phase not in TEXT_PHASES:
        return False
    rule = row.rule
    wanted = rule.allowed is not None or rule.forbidden or rule.grounded or rule.scored
    return bool(wanted) or row.sequence.output.sampling.temperature > 0


def with_scores(sampled: torch.Tensor, scores: torch.Tensor, step: Step[Any]) -> list[Sampled]:
    """What a step's rows have sampled, with the log probabilities that their rules have wanted.

    Args:
        sampled: (at least rows, 3) on the host.
        scores: (at least rows, `MAX_SCORED`) likewise.
        step: its rows.
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
    """Sample the rows of a sampler in place of the likeliest tokens that they have got; the others stay as they are.

    Args:
        model: the model.
        sampler: which rows, and how.
        hidden: (rows, dim) of the whole step.
        logits: (rows, vocab) likewise, as the next ones.
        phases: (rows,).
        batch_slots: (rows,) rows of `state`.
        sampled: (rows, 3) float32.
        state: (batch slots, dim).
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
