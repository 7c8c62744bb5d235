"""What a step leaves in its slot on CUDA: samples, and what was seen in its images, on the device and on the host."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from saccade.engine.core.speculative import Rows, put_found
from saccade.engine.models.protocol import Model
from saccade.engine.models.sampling import SAMPLED
from saccade.engine.runtime.step_inputs import NO_CLASS
from saccade.engine.tasks.output_state import MAX_SCORED


class CudaSlot:
    """A step's outputs.

    Args:
        number: the slot's.
        rows: most of a step.
        vocab: of the logits.
        model: the model.
        objects: buffer of what a `DraftingEncoder` sees in a prefill's images, see `CudaImageEncoder`.
    """

    def __init__(self, number: int, rows: int, vocab: int, model: Model, objects: torch.Tensor) -> None:
        device, dim = model.device, model.limits.dim
        self.number = number
        # What the host reads of nearly every step lies in line: one copy, as the driver takes 10 µs for each.
        read = torch.zeros(rows * SAMPLED + objects.numel(), device=device)
        read_host = torch.zeros(len(read), pin_memory=True)
        self._read, self._read_host = read, read_host
        self.sampled, self.objects = read[: rows * SAMPLED].view(rows, SAMPLED), read[rows * SAMPLED :].view_as(objects)
        self.host = read_host[: rows * SAMPLED].view(rows, SAMPLED)
        self._found = read_host[rows * SAMPLED :].view_as(objects).numpy()
        self.logits = torch.zeros(rows, vocab, device=device)
        self.hidden = torch.zeros(rows, dim, dtype=model.dtype, device=device)  # what the logits were made of
        self.scores = torch.zeros(rows, MAX_SCORED, device=device)
        self.host_scores = torch.zeros(rows, MAX_SCORED, pin_memory=True)
        self.drafted: list[tuple[int, Rows]] = []  # by them, see `speculative.drafted_from_images`
        # A blocking event interrupts the host, which sleeps: only the one that is waited for so.
        self.ready = torch.cuda.Event(blocking=True)
        self.computed, self._reached = torch.cuda.Event(), torch.cuda.Event()

    def copy(self, count: int, *, scored: bool) -> None:
        """Copy what the host reads of so many rows to it; on the copy stream."""
        if self.drafted:
            self._read_host.copy_(self._read, non_blocking=True)
        else:
            self.host[:count].copy_(self.sampled[:count], non_blocking=True)
        if scored:
            self.host_scores[:count].copy_(self.scores[:count], non_blocking=True)

    def wait(self, stream: torch.cuda.Stream, *, spin: bool) -> None:
        """Wait for what is copied; with `spin`, which takes a CPU, for all that is on the copy stream."""
        if spin:
            self._reached.record(stream)
            self._reached.synchronize()
        else:
            self.ready.synchronize()

    def put_found(self, asked: Mapping[tuple[int, ...], int]) -> None:
        """Put into the rows what the device has read from their images, once that is copied."""
        if not self.drafted:
            return
        wanted = np.array([asked.get(rows[0].sequence.prompt, NO_CLASS) for _, rows in self.drafted], np.float32)
        numbers = [number for number, _ in self.drafted]
        same = self._found[numbers, :, 0] == wanted[:, None]
        for (number, rows), chosen in zip(self.drafted, same, strict=True):
            put_found(rows, self._found[number, chosen].tolist())
