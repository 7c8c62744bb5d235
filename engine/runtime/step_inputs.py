"""Small integer inputs of a step, on their way from host to device in one piece; and what a prefill's are."""

from __future__ import annotations

import functools
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from saccade.engine import kernels
from saccade.engine.core.request import NO_SLOT, ScheduledSequence, Step
from saccade.engine.core.speculative import Rows
from saccade.engine.phase import Phase
from saccade.engine.tasks.output_state import FROM_IMAGE, FedValue

NO_CLASS = -2
"""Of a prompt for which nothing is found."""


class StepInputs:
    """Named int32 arrays that travel to the device in one piece, from as many pinned buffers as there are slots.

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
        """All that a slot's arrays hold now, for `reset`."""
        return self._whole[slot].copy()

    def reset(self, slot: int, whole: NDArray[np.int32]) -> None:
        """Let a slot's arrays hold what they did; in one copy, as in each that numpy makes other threads may run."""
        self._whole[slot][:] = whole

    def send(self, slot: int) -> None:
        """Copy a slot's arrays over; does not wait."""
        self._device.copy_(self._pinned[slot], non_blocking=True)

    def fetch(self, slot: int) -> None:
        """The same as a part of the slot's graphs, which then need no `send` in front of them."""
        if self._kernels:
            from saccade.engine.kernels.pinned import fetch

            fetch(self._pinned[slot], self._device)
        else:
            self.send(slot)

    def feed(self, slot: int, values: Mapping[int, FedValue]) -> None:
        """Write what is fed at some places, as `sampling.embed_fed` takes it, to `kinds` and `values`."""
        host = self.host[slot]
        numbers = host["values"].view(np.float32)
        for place, value in values.items():
            host["kinds"][place], numbers[place] = value[0], value[1:]

    @property
    def values(self) -> torch.Tensor:
        """What is fed, (…, 2) float32, on the device."""
        return self.device["values"].view(torch.float32)


class DecodeInputs(StepInputs):
    """Of a decode step, whose graph fetches them, and of what is sampled behind a prefill, which are sent.

    Args:
        depth: slots.
        device: where they go.
        rows: most of them; also the batch slot that is nobody's.
        prefix_length: where rows feed that only fill a step.
    """

    def __init__(self, depth: int, device: torch.device, rows: int, prefix_length: int) -> None:
        one, two = (rows,), (rows, 2)
        super().__init__(
            depth, device, batch_slots=one, outs=one, phases=one, positions=one, kinds=one, values=two, adapters=one
        )
        self._spare, self._prefix_length = rows, prefix_length

    def fill(self, slot: int, rows: abc.Sequence[ScheduledSequence[Any]], bucket: int) -> None:
        """Write rows, to be fetched, and some that fill the bucket: they go to the spare slot."""
        host, count = self.host[slot], len(rows)
        host["batch_slots"][:count] = [row.sequence.batch_slot for row in rows]
        # What is sampled behind a draft is fed by the host, if at all.
        host["outs"][:count] = [row.sequence.batch_slot if row.alone else self._spare for row in rows]
        host["phases"][:count] = [row.phase for row in rows]
        host["positions"][:count] = [row.position for row in rows]
        host["kinds"][:bucket] = 0
        adapters = [row.sequence.window.adapter_slot for row in rows]
        if any(adapters):  # otherwise they are not read
            host["adapters"][:bucket] = adapters + [NO_SLOT] * (bucket - count)
        host["batch_slots"][count:bucket] = host["outs"][count:bucket] = self._spare
        host["phases"][count:bucket] = Phase.X_OR_EOS
        host["positions"][count:bucket] = self._prefix_length
        self.feed(slot, {place: row.value for place, row in enumerate(rows) if row.value is not None})

    def fill_sampled(self, slot: int, rows: abc.Sequence[ScheduledSequence[Any]], bucket: int) -> None:
        """Send what sampling behind a prefill needs of its rows: less, as no step's forward reads it."""
        host, spare = self.host[slot], self._spare
        outs = [row.sequence.batch_slot if row.alone else spare for row in rows]
        phases = [row.phase for row in rows]
        rest = bucket - len(rows)
        host["outs"][:bucket] = outs + [spare] * rest
        host["phases"][:bucket] = phases + [Phase.X_OR_EOS] * rest
        self.send(slot)


@dataclass(slots=True, frozen=True)
class PromptTokens:
    """The tokens of all prompts of a prefill, one prompt behind the other, each with its draft behind it.

    Attributes:
        ids, positions, owners: of each token: its id, its place in its sequence, its sequence's batch slot.
        values: what stands in place of some of them, see `Sequence.values`.
        adapter_slots: of each token's adapter.
    """

    ids: list[int]
    positions: NDArray[np.int64]
    owners: NDArray[np.int64]
    values: dict[int, tuple[float, ...]]
    adapter_slots: NDArray[np.int64]


class PrefillInputs(StepInputs):
    """Of a prefill: pages of its images and sequences, and the tokens behind the images.

    Args:
        depth: slots.
        device: where they go.
        rows: most that are sampled; also the batch slot that is nobody's.
        images: most of them.
        tokens: most behind the images.
        prefix_pages: of an image.
        pages: of a sequence.
        prefix_length: where tokens are that only fill a prefill.
        asked: the class that each prompt asks for, of an encoder that drafts answers, see `DraftingEncoder`.
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

    def fill(self, slot: int, step: Step[Any], drafted: abc.Sequence[tuple[int, Rows]] = ()) -> PromptTokens:
        """Send a prefill, without its tokens if they are too many for the buffers; returns these.

        Args:
            slot: which of the buffers.
            step: the prefill.
            drafted: see `speculative.drafted_from_images`.
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

    def _ask(self, slot: int, firsts: abc.Sequence[int], drafted: abc.Sequence[tuple[int, Rows]]) -> None:
        """Have tokens read from images: as many as each draft has, from its first one behind the prompt on."""
        host, counts = self.host[slot], _int([len(rows) - 1 for _, rows in drafted])
        at, sequences = _counted(_int(firsts), counts), [rows[0].sequence for _, rows in drafted]
        classes = _int([self._asked.get(one.prompt, NO_CLASS) for one in sequences])
        parts = [_parts(one.output.phases, len(rows) - 1) for one, (_, rows) in zip(sequences, drafted, strict=True)]
        wanted = np.empty((len(at), 4), np.int32)
        wanted[:, 0], wanted[:, 1] = _int([number for number, _ in drafted]).repeat(counts), classes.repeat(counts)
        wanted[:, 2:] = np.concatenate([which for which, _ in parts])
        host["objects"][at] = wanted
        host["kinds"][at] = np.concatenate([kinds for _, kinds in parts])


def _int(numbers: abc.Sequence[int]) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


def _counted(firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """From each first number on, so many that follow each other."""
    numbers: NDArray[np.int64] = (firsts - counts.cumsum() + counts).repeat(counts) + np.arange(counts.sum())
    return numbers


@functools.cache
def _parts(phases: tuple[Phase, ...], count: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Of the first values that an answer of these phases feeds: which object's and which part, and their kinds."""
    which = np.stack(np.divmod(np.arange(count, dtype=np.int32), np.int32(len(phases))), axis=1)
    kinds = [Phase.SIZE if phases[part] is Phase.SIZE else Phase.Y for part in which[:, 1]]
    return which, np.array(kinds, np.int32)


def _fed(numbers: tuple[float, ...]) -> FedValue:
    """A value of a prompt: one number is a coordinate, two are a size."""
    return (Phase.Y, numbers[0], 0.0) if len(numbers) == 1 else (Phase.SIZE, numbers[0], numbers[1])
