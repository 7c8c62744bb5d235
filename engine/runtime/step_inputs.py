"""Small integer inputs of a step, sent from host to device in one copy; and what a prefill's are. Knows no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from saccade.engine.scheduling.step import Step


class StepInputs:
    """Named int32 arrays that travel to the device in one copy, from as many pinned buffers as there are slots.

    Args:
        depth: slots.
        device: where they go.
        shapes: the arrays' shapes by name.

    Attributes:
        host: for each slot, its arrays by name, to be written.
        device: the arrays on the device, at fixed addresses, whichever slot they came from.
    """

    def __init__(self, depth: int, device: torch.device, **shapes: tuple[int, ...]) -> None:
        sizes = [int(np.prod(shape)) for shape in shapes.values()]
        self._pinned = [
            torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda") for _ in range(depth)
        ]
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        ends = np.cumsum(sizes).tolist()

        def views(whole: torch.Tensor) -> dict[str, torch.Tensor]:
            parts = zip(shapes.items(), sizes, ends, strict=True)
            return {name: whole[end - size : end].view(shape) for (name, shape), size, end in parts}

        self.host: list[dict[str, NDArray[np.int32]]] = [
            {name: view.numpy() for name, view in views(pinned).items()} for pinned in self._pinned
        ]
        self.device = views(self._device)

    def send(self, slot: int) -> None:
        """Copy a slot's arrays over; does not wait."""
        self._device.copy_(self._pinned[slot], non_blocking=True)


@dataclass(slots=True, frozen=True)
class PromptTokens:
    """The tokens of all prompts of a prefill, one prompt behind the other.

    Attributes:
        ids, positions, owners: of each token: its id, its place in its sequence, its sequence's batch slot.
        values: what stands in place of some of them, see `Sequence.values`.
    """

    ids: list[int]
    positions: list[int]
    owners: list[int]
    values: dict[int, tuple[float, ...]]


def put_prompts(
    host: Mapping[str, NDArray[np.int32]], step: Step[Any], spare: int, unused_position: int
) -> PromptTokens:
    """Write a prefill's inputs: pages of images and sequences, and as many of the prompts' tokens as there is room for.

    Args:
        host: `prefixes`, `lasts`, `tables` and `batch_slots` of images and sequences; `ids`, `positions`, `owners`, and
            `valued` of tokens, 1 where a value stands in place of one. What is not used gets page 0 and `spare`.
        step: the prefill.
        spare: the batch slot of tokens that only fill up.
        unused_position: their position.
    """
    rows = step.sequences
    for name in ("prefixes", "lasts", "tables", "ids", "valued"):
        host[name].fill(0)
    for name, value in (("batch_slots", spare), ("owners", spare), ("positions", unused_position)):
        host[name].fill(value)
    for number, request in enumerate(step.imaged):
        host["prefixes"][number] = request.pages
    ends = np.cumsum([len(row.sequence.prompt) for row in rows], dtype=np.int32)
    host["lasts"][: len(rows)] = ends - 1
    host["batch_slots"][: len(rows)] = [row.sequence.batch_slot for row in rows]
    for number, row in enumerate(rows):
        pages = (*row.sequence.request.pages, *row.sequence.pages)
        host["tables"][number, : len(pages)] = pages
    tokens = PromptTokens(
        list(chain.from_iterable(row.sequence.prompt for row in rows)),
        [row.position + i for row in rows for i in range(len(row.sequence.prompt))],
        [row.sequence.batch_slot for row in rows for _ in row.sequence.prompt],
        {
            end - len(row.sequence.prompt) + place: numbers
            for end, row in zip(ends.tolist(), rows, strict=True)
            for place, numbers in row.sequence.values.items()
        },
    )
    count = len(tokens.ids)
    if count <= len(host["ids"]):
        host["ids"][:count], host["positions"][:count] = tokens.ids, tokens.positions
        host["owners"][:count] = tokens.owners
        host["valued"][list(tokens.values)] = 1
    return tokens
