"""Runs steps on a CPU: prefill and decode over paged keys and values, sampling, and the copy out of a slot.

What a sequence needs from one step to the next, the embedding of what it sampled last, stays in its lane: a step can be
launched before the one before it is read. `graphs` does the same on CUDA. Knows nothing of requests, names or results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from saccade.engine.backends.cpu_paged_cache import TokenPool, TokenRows
from saccade.engine.backends.fused_decoder import FusedText
from saccade.engine.backends.lora import AdapterBank
from saccade.engine.backends.onednn import fuse
from saccade.engine.backends.plain_runner import SAMPLED, PlainSampling, take_tokens
from saccade.engine.models.moondream.image_crops import make_crops, normalise
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.text import TextDecoder
from saccade.engine.runtime.cpu_settings import share_among
from saccade.engine.runtime.device_streams import Event, Stream, open_stream
from saccade.engine.runtime.sampling_inputs import Draw, Draws, likeliest
from saccade.engine.scheduling.output_state import Phase
from saccade.engine.scheduling.scheduler import Look, Row, Step, StepKind

_ALONE = 10_000_000  # multiplications of a step that one thread does sooner than several, which wait for each other


@dataclass(slots=True, frozen=True)
class Crops:
    """A picture as the vision tower takes it: (1 + rows · columns, size, size, 3) uint8 crops, and the tiling."""

    pixels: NDArray[np.uint8]
    tiling: tuple[int, int]


class Executor:
    """One model on a CPU, with `depth` step slots. Used by one thread, but for `prepare`.

    Args:
        model: the model.
        depth: step slots.
        n_lanes: most sequences at a time.
        n_pages: pages of the pool; page 0 is for what is written and never read.
        page_size: tokens of a page.
        n_adapters: slots for adapters.
        adapter_rank: largest rank of one.
    """

    def __init__(
        self,
        model: Moondream,
        depth: int,
        n_lanes: int,
        n_pages: int,
        page_size: int,
        n_adapters: int = 0,
        adapter_rank: int = 0,
    ) -> None:
        self.model = model
        self.pool = TokenPool(model, n_pages, page_size)
        device = model.device
        self._compute, self._copy = open_stream(device, "compute"), open_stream(device, "copy")
        self._state = torch.zeros(n_lanes, model.config.text.dim, dtype=model.dtype)
        self._sampled = torch.zeros(depth, n_lanes, SAMPLED)
        self._host = torch.zeros(depth, n_lanes, SAMPLED)
        self._hidden: list[torch.Tensor | None] = [None] * depth
        self._rows: list[torch.Tensor | None] = [None] * depth  # lanes and phases of the slot's step
        self._ready: list[Event | None] = [None] * depth
        self._threads = torch.get_num_threads()
        self._few = _ALONE // sum(one.numel() for one in model.text.blocks.parameters())
        self._fused = FusedText(model.text)
        fuse(model.vision)
        self._plain = PlainSampling(model)
        self._draws = Draws(depth, n_lanes, model.config.text.vocab_size, device)
        self._adapter_room = n_adapters, adapter_rank
        self._bank: AdapterBank | None = None  # made when the first adapter is used

    @property
    def streams(self) -> dict[str, Stream]:
        """By name: 'compute' and 'copy'."""
        return {"compute": self._compute, "copy": self._copy}

    def prepare(self, view: NDArray[np.uint8]) -> Crops:
        """Cut a picture (height, width, 3) uint8 RGB into crops; may be called by any thread."""
        return Crops(*make_crops(view, self.model.config.vision))

    def launch(self, slot: int, step: Step[Crops]) -> None:
        """Put a step's forward on the compute stream."""
        phases = [int(row.phase) for row in step.rows]
        lanes = [row.answer.lane for row in step.rows]
        rows = torch.tensor([lanes, phases])
        longest = 1 if step.kind is StepKind.DECODE else max(len(row.answer.prompt) for row in step.rows)
        length = longest + max(row.position for row in step.rows)  # of the longest sequence with what is fed now
        table = torch.tensor(self._tables(step.rows, length))
        positions = torch.tensor([row.position for row in step.rows]).unsqueeze(1)
        slots = [row.answer.look.adapter_slot for row in step.rows]
        adapters = torch.tensor(slots) if any(slots) else None
        if step.kind is StepKind.DECODE:

            def forward() -> None:
                self._rows[slot] = rows
                self._share(len(positions))
                x, cache = self._state[rows[0]].unsqueeze(1), TokenRows(self.pool, table, length)
                hidden = self._text(adapters)(x, positions, cache, cache.before(positions))
                self._hidden[slot] = hidden.squeeze(1)
        else:
            prompts = torch.tensor(
                [[*row.answer.prompt, *[0] * (longest - len(row.answer.prompt))] for row in step.rows]
            )
            lengths = torch.tensor([len(row.answer.prompt) for row in step.rows])
            prefixes = torch.tensor([list(look.pages) for look in step.looks])
            look_slots = [look.adapter_slot for look in step.looks]
            look_adapters = torch.tensor(look_slots) if any(look_slots) else None

            def forward() -> None:
                self._rows[slot] = rows
                share_among(self._threads)
                self._prefix(step.looks, prefixes, look_adapters)
                self._share(len(positions) * longest)
                at, cache = positions + torch.arange(longest), TokenRows(self.pool, table, length)
                hidden = self._text(adapters)(self.model.text.embed(prompts), at, cache, cache.before(at))
                self._hidden[slot] = hidden[torch.arange(len(lengths)), lengths - 1]

        self._compute.run(torch.inference_mode()(forward))

    def finalize(self, slot: int, step: Step[Crops]) -> None:
        """Put a step's sampling on the compute stream, and the copy of its values on the copy stream behind it.

        To be called once the step before is committed.
        """
        present = {row.phase for row in step.rows}
        count = len(step.rows)
        draw = self._draws.send(slot, step, self._copy, self._compute) if Phase.TOKEN in present else likeliest
        self._compute.run(torch.inference_mode()(lambda: self._sample(slot, present, draw)))
        self._copy.wait(self._compute.record())

        def copy() -> None:
            self._host[slot, :count].copy_(self._sampled[slot, :count])

        self._copy.run(copy)
        self._ready[slot] = self._copy.record()

    def read(self, slot: int, step: Step[Crops]) -> list[tuple[float, float, float]]:
        """Wait for a step's values, one triple a row.

        Raises:
            BaseException: whatever the step has raised.
        """
        ready = self._ready[slot]
        assert ready is not None
        ready.synchronize()
        return [(a, b, c) for a, b, c in self._host[slot, : len(step.rows)].tolist()]

    def close(self) -> None:
        """End the streams."""
        self._compute.close()
        self._copy.close()

    def _share(self, tokens: int) -> None:
        """Let as many threads go on as are worth it for so many tokens, and the sampling behind them."""
        share_among(1 if tokens <= self._few else self._threads)

    def _text(self, slots: torch.Tensor | None) -> FusedText | TextDecoder:
        """The decoder for rows with adapters in the given slots."""
        if slots is None:
            return self._fused
        if self._bank is None:
            self._bank = AdapterBank(self.model.text, *self._adapter_room)
        return self._bank.text(slots)

    def _prefix(self, looks: Sequence[Look[Crops]], pages: torch.Tensor, adapters: torch.Tensor | None) -> None:
        """Look at pictures, and keep what was seen in their pages."""
        model, text = self.model, self.model.text
        tokens: list[torch.Tensor | None] = [None] * len(looks)
        plain = [i for i, look in enumerate(looks) if look.image.tiling == (1, 1)]
        if plain:  # the tower runs once over all pictures that are a single crop
            pixels = torch.from_numpy(np.concatenate([looks[i].image.pixels[:1] for i in plain]))
            features = model.vision.features(normalise(pixels, model.dtype))
            for i, one in zip(plain, model.vision.project(features, features), strict=True):
                tokens[i] = one
        for i, look in enumerate(looks):
            if tokens[i] is None:
                pixels = torch.from_numpy(look.image.pixels)
                tokens[i] = model.vision(normalise(pixels, model.dtype), look.image.tiling)
        bos = text.wte[model.config.tokenizer.bos_id].expand(len(looks), 1, -1)
        x = torch.cat([bos, torch.stack([one for one in tokens if one is not None])], dim=1)
        decoder = self._text(adapters)
        for look in looks:
            if look.adapter is not None and self._bank is not None:
                self._bank.fill(look.adapter_slot, look.adapter)
        decoder.remember(x, TokenRows(self.pool, pages, x.shape[1]))

    def _sample(self, slot: int, present: set[Phase], draw: Draw) -> None:
        """Sample what each row's phase says, from its hidden state; keep its embedding for the next step."""
        hidden, rows = self._hidden[slot], self._rows[slot]
        assert hidden is not None
        assert rows is not None
        lanes, phases = rows
        sampled = self._sampled[slot, : len(hidden)]
        places, sizes = not present.isdisjoint({Phase.BEGIN, Phase.Y}), Phase.SIZE in present
        if places or sizes:
            self._plain.objects(hidden, phases, lanes, places, sizes, sampled, self._state)
        if Phase.TOKEN in present:
            take_tokens(self.model.text, draw(self._plain.logits(hidden)), phases, lanes, sampled, self._state)

    def _tables(self, rows: Sequence[Row[Crops]], length: int) -> list[list[int]]:
        """Pages of each row that hold `length` positions; page 0 where there is none."""
        count = self.pool.pages_upto(length)
        tables = [[*row.answer.look.pages, *row.answer.pages] for row in rows]
        return [[*table, *[0] * (count - len(table))][:count] for table in tables]
