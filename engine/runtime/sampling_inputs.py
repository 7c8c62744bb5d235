"""Sampling parameters of a step, from output states to the device: temperatures, seeds, masks of grammars.

The host fills a slot's pinned buffers when the step is finalized; the copy stream brings them to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from saccade.engine.runtime.device_streams import Stream
from saccade.engine.runtime.sampler import sample
from saccade.engine.scheduling.output_state import MAX_SCORED, Sampled, TokenRule
from saccade.engine.scheduling.step import Step, StepKind


@dataclass(slots=True, frozen=True)
class TokenSampler:
    """How the rows of a step sample tokens, and what else is wanted of them; to be used on the compute stream.

    Attributes:
        draw: from logits (rows, vocab) to tokens (rows,) int64.
        grounded: (rows,) int64, 1 where the coordinate token brings a coordinate; None where no row may.
        scored: (rows, n) int64 ids whose log probabilities are wanted; None where no row's are.
    """

    draw: Callable[[torch.Tensor], torch.Tensor]
    grounded: torch.Tensor | None = None
    scored: torch.Tensor | None = None

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Log probabilities (rows, n) float32 of what is `scored`, of all tokens of logits (rows, vocab)."""
        assert self.scored is not None
        return logits.float().log_softmax(-1).gather(1, self.scored)


class SamplingInputs:
    """Pinned and device buffers for `depth` slots of `n_rows` rows, at fixed addresses."""

    def __init__(self, depth: int, n_rows: int, vocab: int, device: torch.device) -> None:
        self._temperatures = _PinnedBuffer(device, torch.float32, depth, n_rows, 2)  # temperature and top-p of each row
        self._seeds = _PinnedBuffer(device, torch.int64, depth, n_rows, 3)  # its seed, its step, whether it is grounded
        self._masks = _PinnedBuffer(device, torch.bool, depth, n_rows, vocab)
        self._scored = _PinnedBuffer(device, torch.int64, depth, n_rows, min(vocab, MAX_SCORED))

    def send(self, slot: int, step: Step[Any], copy: Stream, compute: Stream) -> TokenSampler:
        """The sampler of a step's tokens, to be run on the compute stream; its inputs are put on the copy stream.

        To be called once the step is finalized by the scheduler, and the last step of the slot is committed.
        """
        count = len(step.sequences)
        sampling = [row.sequence.output.sampling for row in step.sequences]
        rules = [row.rule for row in step.sequences]
        masked = any(rule.allowed is not None or rule.forbidden for rule in rules)
        warm = any(one.temperature > 0 for one in sampling)
        grounded, n_scored = any(rule.grounded for rule in rules), max(len(rule.scored) for rule in rules)
        if not (masked or warm or grounded or n_scored):
            return GREEDY
        sent = [self._temperatures, self._seeds]
        # A step's number is the position of what it feeds: no two steps of a sequence that are drawn share one.
        ends = [len(row.sequence.prompt) - 1 if step.kind is StepKind.PREFILL else 0 for row in step.sequences]
        steps = [row.position + end for row, end in zip(step.sequences, ends, strict=True)]
        self._temperatures.host[slot, :count] = torch.tensor([(one.temperature, one.top_p) for one in sampling])
        self._seeds.host[slot, :count] = torch.tensor(
            [(one.seed, at, rule.grounded) for one, at, rule in zip(sampling, steps, rules, strict=True)]
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
        seed, at, grounds = self._seeds.device[slot, :count].unbind(-1)
        narrow = top_p if any(one.top_p < 1 for one in sampling) else None
        seen = self._masks.device[slot, :count] if masked else None
        heat = temperature if warm else None
        return TokenSampler(
            lambda logits: sample(logits.float(), heat, narrow, seed, at, seen),
            grounds if grounded else None,
            self._scored.device[slot, :count, :n_scored] if n_scored else None,
        )

    def _fill_masks(self, slot: int, rules: Sequence[TokenRule]) -> None:
        mask = self._masks.host[slot, : len(rules)].fill_(True)
        for row, rule in zip(mask, rules, strict=True):
            if rule.allowed is not None:
                row.fill_(False)[list(rule.allowed)] = True
            elif rule.forbidden:
                row[list(rule.forbidden)] = False


class _PinnedBuffer:
    """A pinned buffer (slots, rows, …) on the host, and its copy on the device."""

    __slots__ = ("device", "host")

    def __init__(self, device: torch.device, dtype: torch.dtype, *shape: int) -> None:
        self.host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.device = torch.zeros(shape, dtype=dtype, device=device)

    def upload(self, slot: int, count: int) -> None:
        self.device[slot, :count].copy_(self.host[slot, :count], non_blocking=True)


GREEDY = TokenSampler(lambda logits: logits.argmax(-1))
"""The likeliest token of each row, whatever it is."""


def with_scores(sampled: torch.Tensor, scores: torch.Tensor, step: Step[Any]) -> list[Sampled]:
    """What a step's rows have sampled, with the log probabilities that their rules have wanted.

    Args:
        sampled: (at least rows, 3) on the host.
        scores: (at least rows, `MAX_SCORED`) likewise.
        step: its rows.
    """
    values = [tuple(row) for row in sampled[: len(step.sequences)].tolist()]
    for number, row in enumerate(step.sequences):
        if row.rule.scored:
            values[number] += tuple(scores[number, : len(row.rule.scored)].tolist())
    return values
