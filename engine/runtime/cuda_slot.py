"""What a step leaves in its slot on CUDA: samples, and what was seen in its images, on the device and on the host."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from saccade.engine.backends.plain_runner import SAMPLED
from saccade.engine.models.protocol import Model
from saccade.engine.runtime.cuda_images import Graphs
from saccade.engine.runtime.device_streams import Event
from saccade.engine.scheduling.drafts import Rows, put_found
from saccade.engine.scheduling.output_state import MAX_SCORED


class CudaSlot:
    """A step's outputs, and the graphs that write them.

    Args:
        rows: most of a step.
        vocab: of the logits.
        model: the model.
        objects: buffer of what a `DraftingEncoder` sees in a prefill's images, see `CudaImageEncoder`.
    """

    def __init__(self, rows: int, vocab: int, model: Model, objects: torch.Tensor) -> None:
        device, dim = model.device, model.limits.dim
        self.sampled = torch.zeros(rows, SAMPLED, device=device)
        self.logits = torch.zeros(rows, vocab, device=device)
        self.hidden = torch.zeros(rows, dim, dtype=model.dtype, device=device)  # what the logits were made of
        self.scores = torch.zeros(rows, MAX_SCORED, device=device)
        self.host = torch.zeros(rows, SAMPLED, pin_memory=True)
        self.host_scores = torch.zeros(rows, MAX_SCORED, pin_memory=True)
        self.objects = torch.zeros_like(objects)
        self.host_objects = torch.zeros(objects.shape, pin_memory=True)
        self.drafted: list[tuple[int, Rows]] = []  # by them, see `drafts.drafted_from_images`
        self.decode: Graphs = {}
        self.adapted: Graphs = {}
        self.first: Graphs = {}
        self.ready: Event | None = None

    def copy(self, count: int, *, scored: bool) -> None:
        """Copy what the host reads of so many rows to it; on the copy stream."""
        self.host[:count].copy_(self.sampled[:count], non_blocking=True)
        if scored:
            self.host_scores[:count].copy_(self.scores[:count], non_blocking=True)
        if self.drafted:
            self.host_objects.copy_(self.objects, non_blocking=True)

    def put_found(self, asked: Mapping[tuple[int, ...], int]) -> None:
        """Put into the rows what the device has read from their images, once that is copied."""
        objects = self.host_objects.numpy()
        for number, rows in self.drafted:
            label, seen = asked.get(rows[0].sequence.prompt), objects[number]
            put_found(rows, [] if label is None else seen[seen[:, 0] == label].tolist())
