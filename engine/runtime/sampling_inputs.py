"""Sampling parameters of a step, from output states to the device: temperatures, seeds, masks of grammars.

The host fills a slot's pinned buffers when the step is finalized; the copy stream brings them to the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from saccade.engine.runtime.device_streams import Stream
from saccade.engine.runtime.sampler import sample
from saccade.engine.scheduling.step import Step, StepKind

TokenSampler = Callable[[torch.Tensor], torch.Tensor]
"""From logits (rows, vocab) to tokens (rows,) int64."""


class SamplingInputs:
    """Pinned and device buffers for `depth` slots of `n_rows` rows, at fixed addresses."""

    def __init__(self, depth: int, n_rows: int, vocab: int, device: torch.device) -> None:
        self._temperatures = _PinnedBuffer(device, torch.float32, depth, n_rows, 2)  # temperature and top-p of each row
        self._seeds = _PinnedBuffer(device, torch.int64, depth, n_rows, 2)  # its seed and its step
        self._masks = _PinnedBuffer(device, torch.bool, depth, n_rows, vocab)

    def send(self, slot: int, step: Step[Any], copy: Stream, compute: Stream) -> TokenSampler:
        """The sampler of a step's tokens, to be run on the compute stream; its inputs are put on the copy stream.

        To be called once the step is finalized by the scheduler, and the last step of the slot is committed.
        """
        count = len(step.sequences)
        sampling = [row.sequence.output.sampling for row in step.sequences]
        allowed = [row.allowed for row in step.sequences]
        masked = any(ids is not None for ids in allowed)
        if not masked and all(one.temperature == 0 for one in sampling):
            return greedy
        # A step's number is the position of what it feeds: no two steps of a sequence share one.
        ends = [len(row.sequence.prompt) - 1 if step.kind is StepKind.PREFILL else 0 for row in step.sequences]
        steps = [row.position + end for row, end in zip(step.sequences, ends, strict=True)]
        self._temperatures.host[slot, :count] = torch.tensor([(one.temperature, one.top_p) for one in sampling])
        self._seeds.host[slot, :count] = torch.tensor([(one.seed, at) for one, at in zip(sampling, steps, strict=True)])
        if masked:
            mask = self._masks.host[slot, :count].fill_(True)
            for row, ids in zip(mask, allowed, strict=True):
                if ids is not None:
                    row.fill_(False)[list(ids)] = True

        def upload() -> None:
            for mirror in (self._temperatures, self._seeds, *([self._masks] if masked else [])):
                mirror.upload(slot, count)

        copy.run(upload)
        compute.wait(copy.record())
        temperature, top_p = self._temperatures.device[slot, :count].unbind(-1)
        seed, at = self._seeds.device[slot, :count].unbind(-1)
        narrow = top_p if any(one.top_p < 1 for one in sampling) else None
        seen = self._masks.device[slot, :count] if masked else None
        return lambda logits: sample(logits.float(), temperature, narrow, seed, at, seen)


class _PinnedBuffer:
    """A pinned buffer (slots, rows, …) on the host, and its copy on the device."""

    __slots__ = ("device", "host")

    def __init__(self, device: torch.device, dtype: torch.dtype, *shape: int) -> None:
        self.host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.device = torch.zeros(shape, dtype=dtype, device=device)

    def upload(self, slot: int, count: int) -> None:
        self.device[slot, :count].copy_(self.host[slot, :count], non_blocking=True)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Greedy tokens (rows,) of logits (rows, vocab)."""
    return logits.argmax(-1)
