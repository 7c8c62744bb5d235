"""Runs steps on a CPU: prefill and decode over paged keys and values, sampling, and the copy out of a slot.

What a sequence needs from one step to the next, the embedding of what it sampled last, stays in its batch slot: a step
can be launched before the one ahead of it is read. `cuda_executor` does the same on CUDA. Knows nothing of requests.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import abc
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from saccade.engine.config import EngineConfig
from saccade.engine.core.request import PrefillWindow, ScheduledSequence, Step, StepKind
from saccade.engine.core.speculative import Rows, drafted_from_images, put_found
from saccade.engine.cpu.decoder import FusedDecoder
from saccade.engine.cpu.paged_cache import CpuPagedCache, CpuPagedRows
from saccade.engine.cpu.select import cpu_decoder, product_dtype
from saccade.engine.cpu.threads import image_threads, one_thread, set_threads, step_threads
from saccade.engine.fallbacks import Fallbacks
from saccade.engine.image import Pixels, as_array
from saccade.engine.models.lora import AdapterBank
from saccade.engine.models.protocol import DraftingEncoder, ImageCrops, Model, TextDecoder
from saccade.engine.models.sampling import SAMPLED, CpuSampling, feed, put_values, suppress, take_tokens
from saccade.engine.phase import TEXT_PHASES, Phase
from saccade.engine.runtime.executor import Event, Stream, Watcher
from saccade.engine.runtime.sampling_inputs import (
    AllowedTokens,
    SamplingInputs,
    TokenSampler,
    sample_again,
    with_scores,
)
from saccade.engine.tasks.output_state import MAX_SCORED, FedValue, Sampled

_SINGLE_THREADED = 10_000_000  # multiplications of a step that one thread does sooner than several, which synchronize


class CpuExecutor:
    """`executor.Executor` on a CPU.

    Args:
        model: the model.
        config: sizes.
        n_pages: pages of the cache; page 0 is for what is written and never read.
    """

    def __init__(self, model: Model, config: EngineConfig, n_pages: int) -> None:
        self.model, self.fallbacks = model, Fallbacks()
        self.products = product_dtype(model, config.exact)
        self._threads, self._image_threads = step_threads(), image_threads()
        with one_thread():
            self._allocate(model, config, n_pages)

    def _allocate(self, model: Model, config: EngineConfig, n_pages: int) -> None:
        limits, depth, rows = model.limits, config.depth, config.max_sequences
        self.cache = CpuPagedCache(model, n_pages, config.page_size)
        device = model.device
        self._compute, self._copy = CpuStream("compute"), CpuStream("copy")
        self._state = torch.zeros(rows + 1, limits.dim, dtype=model.dtype)
        self._spare = rows  # takes what is sampled behind a draft, and is never read
        self._sampled = torch.zeros(depth, rows, SAMPLED)
        self._host = torch.zeros(depth, rows, SAMPLED)
        self._scores = torch.zeros(2, depth, rows, MAX_SCORED)  # log probabilities, and what is copied of them
        self._hidden: list[torch.Tensor | None] = [None] * depth
        self._rows: list[torch.Tensor | None] = [None] * depth  # batch slots and phases of the slot's step
        self._ready: list[Event | None] = [None] * depth
        self._decoder = cpu_decoder(model, config.exact, self.fallbacks)
        self._few_tokens = _SINGLE_THREADED // max(1, model.text.n_block_weights)
        self._sampling = CpuSampling(model, self._spare)
        self._suppressed = torch.tensor(limits.suppressed_ids, dtype=torch.int64)
        self._sampling_inputs = SamplingInputs(depth, rows, limits.vocab_size, device)
        self._on_ready: Callable[[], None] = lambda: None
        self._adapter_room = config.adapter_slots, config.adapter_rank
        self._bank: AdapterBank | None = None  # made when the first adapter is used

    @property
    def streams(self) -> dict[str, Stream]:
        """By name: 'compute' and 'copy'."""
        return {"compute": self._compute, "copy": self._copy}

    @property
    def encoder(self) -> object:
        """See `Executor.encoder`."""
        return self.model.vision

    def prepare(self, image: Pixels) -> ImageCrops:
        """Cut an image into crops; may be called by any thread."""
        with one_thread():
            return self.model.vision.make_crops(as_array(image))

    def launch(self, slot: int, step: Step[ImageCrops]) -> None:
        """Put a step's forward on the compute stream."""
        if not step.sequences:
            self._compute.run(torch.inference_mode()(partial(self._write_prefixes, step, step.imaged, step.images)))
            return
        cells = _Cells(step)
        outs, phases = [self._out_of(row) for row in step.sequences], [int(row.phase) for row in step.sequences]
        rows = torch.tensor([outs, phases])
        longest, firsts = cells.longest, [group[0] for group in cells.groups]
        length = longest + max(row.position for row in firsts)  # of the longest sequence with what is fed now
        table = torch.tensor(self._tables(firsts, length))
        positions = torch.tensor([row.position for row in firsts]).unsqueeze(1)
        slots = [row.sequence.window.adapter_slot for row in firsts]
        adapters = torch.tensor(slots) if any(slots) else None
        model = self.model
        if step.kind is StepKind.DECODE:
            batch_slots = torch.tensor([row.sequence.batch_slot for row in firsts])

            def forward() -> None:
                self._rows[slot] = rows
                self._use_threads(len(positions) * longest)
                x, cache = self._state[batch_slots].unsqueeze(1), CpuPagedRows(self.cache, table, length)
                at = positions
                if cells.drafted:
                    x = x.repeat(1, longest, 1)
                    feed(model, x.view(-1, x.shape[-1]), cells.fed())
                    at = positions + cells.steps
                hidden = self._text(adapters)(x, at, cache, cache.before(at))
                self._hidden[slot] = hidden[cells.sampled] if longest > 1 else hidden.squeeze(1)
        else:
            prompts = torch.tensor(
                [[*row.sequence.prompt, *[0] * (longest - len(row.sequence.prompt))] for row in firsts]
            )
            imaged, images, drafted = step.imaged, step.images, drafted_from_images(step)
            values = {
                number * longest + place: numbers
                for number, row in enumerate(firsts)
                for place, numbers in row.sequence.values.items()
            }

            def forward() -> None:
                self._rows[slot] = rows
                self._write_prefixes(step, imaged, images, drafted)
                self._use_threads(len(positions) * longest)
                at, cache = positions + torch.arange(longest), CpuPagedRows(self.cache, table, length)
                x = model.text.embed(prompts)
                put_values(model.region, x.view(-1, x.shape[-1]), values)
                feed(model, x.view(-1, x.shape[-1]), cells.fed())
                if length > model.limits.max_context:  # a line that begins behind others is filled past the context
                    filled = cells.filled().expand(len(at), -1)
                    at, x = at.gather(1, filled), x.take_along_dim(filled.unsqueeze(-1), 1)
                self._hidden[slot] = self._text(adapters)(x, at, cache, cache.before(at))[cells.sampled]

        self._compute.run(torch.inference_mode()(forward))

    def finalize(self, slot: int, step: Step[ImageCrops]) -> None:
        """Put a step's sampling on the compute stream, and the copy of its values on the copy stream behind it.

        To be called once the step ahead is committed, if any row writes text.
        """
        present = {row.phase for row in step.sequences}
        count = len(step.sequences)
        sampler = self._sampling_inputs.send(slot, step, self._copy, self._compute)
        if count:
            self._compute.run(torch.inference_mode()(lambda: self._sample(slot, present, sampler)))
        self._copy.wait(self._compute.record())

        def copy() -> None:
            self._host[slot, :count].copy_(self._sampled[slot, :count])
            if isinstance(sampler, TokenSampler) and sampler.scored is not None:
                self._scores[1, slot].copy_(self._scores[0, slot])

        self._copy.run(copy)
        self._ready[slot] = self._copy.record(self._on_ready)

    def call_when_ready(self, callback: Callable[[], None]) -> bool:
        """See `Executor.call_when_ready`: the copy stream's thread does."""
        self._on_ready = callback
        return True

    def has_run(self, slot: int) -> bool:
        """Whether `read` will not wait."""
        ready = self._ready[slot]
        return ready is not None and ready.query()

    def wait(self, slot: int, step: Step[ImageCrops]) -> None:
        """See `Executor.wait`."""
        ready = self._ready[slot]
        assert ready is not None
        ready.synchronize()

    def read(self, slot: int, step: Step[ImageCrops]) -> list[Sampled]:
        """See `Executor.read`."""
        self.wait(slot, step)
        return with_scores(self._host[slot], self._scores[1, slot], step)

    def close(self) -> None:
        """End the streams."""
        self._compute.close()
        self._copy.close()

    def _out_of(self, row: ScheduledSequence[ImageCrops]) -> int:
        """Where the embedding of what a row samples goes."""
        return row.sequence.batch_slot if row.alone else self._spare

    def _use_threads(self, tokens: int) -> None:
        """Use as many threads as pay off for so many tokens, and for the sampling behind them."""
        set_threads(1 if tokens <= self._few_tokens else self._threads)

    def _text(self, slots: torch.Tensor | None) -> FusedDecoder | TextDecoder:
        """The decoder for sequences with adapters in the given slots."""
        if slots is None:
            return self._decoder
        return self._adapter_bank().text(slots)

    def _adapter_bank(self) -> AdapterBank:
        if self._bank is None:
            self._bank = AdapterBank(self.model.text, *self._adapter_room)
        return self._bank

    def _write_prefixes(
        self,
        step: Step[ImageCrops],
        windows: abc.Sequence[PrefillWindow[ImageCrops]],
        images: abc.Sequence[ImageCrops],
        drafted: abc.Sequence[tuple[int, Rows]] = (),
    ) -> None:
        """Encode the images of some windows, and write the keys and values of their prefixes to their pages.

        What is found in them is put in place of the drafts of some rows, given with the number of their image.
        """
        slots = [window.adapter_slot for window in windows]
        decoder = self._text(torch.tensor(slots) if any(slots) else None)
        for window in step.windows:
            if window.request.adapter is not None:
                self._adapter_bank().fill(window.adapter_slot, window.request.adapter)
        if not images:
            return
        model, vision, text = self.model, self.model.vision, self.model.text
        set_threads(self._image_threads.choose())
        begun = time.perf_counter()
        tokens: list[torch.Tensor | None] = [None] * len(images)
        single: dict[tuple[int, ...], list[int]] = {}
        for i, image in enumerate(images):
            if image.tiling == (1, 1):
                single.setdefault(image.pixels.shape[1:], []).append(i)
        for alike in single.values():  # the encoder runs once over all images that are a single crop of a shape
            pixels = torch.from_numpy(np.concatenate([images[i].pixels[:1] for i in alike]))
            crops = vision.normalize(pixels)
            if drafted and isinstance(vision, DraftingEncoder):
                features, objects = vision.features_and_drafts(crops)
                seen = dict(zip(alike, objects.tolist(), strict=True))
                for number, rows in drafted:
                    if number in seen:
                        label = vision.asked.get(rows[0].sequence.prompt)
                        put_found(rows, [one for one in seen[number] if one[0] == label])
            else:
                features = vision.features(crops)
            for i, one in zip(alike, vision.project(features, features), strict=True):
                tokens[i] = one
        for i, image in enumerate(images):
            if tokens[i] is None:
                features = vision.features(vision.normalize(torch.from_numpy(image.pixels)))
                tokens[i] = vision.join(features, image.tiling)
        bos = text.embed(torch.full((len(images), 1), model.limits.bos_id))
        x = torch.cat([bos, torch.stack([one for one in tokens if one is not None])], dim=1)
        pages = torch.tensor([list(window.pages) for window in windows])
        decoder.write_kv(x, CpuPagedRows(self.cache, pages, x.shape[1]))
        self._image_threads.took((time.perf_counter() - begun) / sum(len(image.pixels) for image in images))

    def _sample(self, slot: int, present: set[Phase], sampler: TokenSampler | AllowedTokens | None) -> None:
        """Sample what each row's phase says, from its hidden state; keep its embedding for the next step."""
        hidden, rows = self._hidden[slot], self._rows[slot]
        assert hidden is not None
        assert rows is not None
        batch_slots, phases = rows
        sampled = self._sampled[slot, : len(hidden)]
        coords, sizes = not present.isdisjoint({Phase.X_OR_EOS, Phase.Y}), Phase.SIZE in present
        if coords or sizes:
            self._sampling.sample_regions(hidden, phases, batch_slots, coords, sizes, sampled, self._state)
        if present & TEXT_PHASES:
            logits = suppress(self._sampling.logits(hidden), phases, self._suppressed)
            take_tokens(self.model.text, logits.argmax(-1), phases, batch_slots, sampled, self._state)
            if sampler is not None:
                sample_again(self.model, sampler, hidden, logits, phases, batch_slots, sampled, self._state)
                if isinstance(sampler, TokenSampler) and sampler.scored is not None:
                    scores = sampler.scores(logits)
                    self._scores[0, slot, sampler.rows, : scores.shape[1]] = scores

    def _tables(self, rows: abc.Sequence[ScheduledSequence[ImageCrops]], length: int) -> list[list[int]]:
        """Pages of each row that hold `length` positions; page 0 where there is none."""
        count = self.cache.pages_upto(length)
        tables = [[*row.sequence.window.pages, *row.sequence.pages] for row in rows]
        return [[*table, *[0] * (count - len(table))][:count] for table in tables]


class _Cells:
    """What a step feeds, as a table: a line a sequence, behind its prompt in a prefill, with its draft.

    Attributes:
        groups: the step's rows by sequence.
        longest: length of the lines.
        sampled: line and place of each row of the step.
        drafted: whether any value comes from the host;
        steps: (lines, longest) positions behind a line's first, in decode steps that are drafted.
    """

    def __init__(self, step: Step[ImageCrops]) -> None:
        decode = step.kind is StepKind.DECODE
        self.groups = step.groups
        starts = [0 if decode else len(group[0].sequence.prompt) - 1 for group in self.groups]
        ends = [start + len(group) for start, group in zip(starts, self.groups, strict=True)]
        self.longest, self.drafted, self._ends = max(ends), step.drafted, ends
        lines = [line for line, group in enumerate(self.groups) for _ in group]
        places = [start + i for start, group in zip(starts, self.groups, strict=True) for i in range(len(group))]
        self.sampled = torch.tensor(lines), torch.tensor(places)
        self._drafts: list[tuple[ScheduledSequence[ImageCrops], range]] = []
        if not self.drafted:
            return
        for row, line, place in zip(step.sequences, lines, places, strict=True):
            if row.value is not None:
                # What only fills a line of a decode step repeats its last cell: it writes what that one writes.
                fills = self.longest if decode and place == ends[line] - 1 else place + 1
                self._drafts.append((row, range(line * self.longest + place, line * self.longest + fills)))
        if decode:
            self.steps = self.filled()

    def filled(self) -> torch.Tensor:
        """(lines, longest) places in the lines, of which the last repeats itself where a line is shorter."""
        return torch.arange(self.longest).minimum(torch.tensor(self._ends).unsqueeze(1) - 1)

    def fed(self) -> dict[int, FedValue]:
        """The values that come from the host, by line · `longest` + place; once drafts are read from the images."""
        return {at: row.value for row, ats in self._drafts for at in ats if row.value is not None}


class _CpuEvent:
    __slots__ = ("error", "reached")

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.error: BaseException | None = None

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        self.reached.wait()
        if self.error is not None:
            raise self.error


class CpuStream:
    """A worker thread."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None  # of the work since the last event; only the worker touches it
        self._watcher: Watcher | None = None
        self._thread = threading.Thread(target=self._run, name=f"saccade-{name}", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        """Put work on the stream; what it raises is raised by the next event, and the work up to there is skipped."""
        watcher = self._watcher
        self._work.put(work if watcher is None else _watched(work, watcher))

    def record(self, reached: Callable[[], None] = lambda: None) -> Event:
        """An event behind all work given so far; `reached` is called behind it, in the worker's thread."""
        event = _CpuEvent()

        def reach() -> None:
            event.error, self._error = self._error, None
            event.reached.set()
            reached()

        self._work.put(_always(reach))
        return event

    def wait(self, event: Event) -> None:
        """Let work given from now on begin only after the event; its error becomes this stream's."""

        def wait() -> None:
            try:
                event.synchronize()
            except BaseException as error:
                self._error = self._error or error

        self._work.put(_always(wait))

    def watch(self, watcher: Watcher | None) -> None:
        """Notify a watcher, or none any more, of the work submitted from now on, in the worker's thread."""
        self._watcher = watcher

    def settle(self, *, wait: bool = False) -> None:
        """Wait for the work submitted, if asked to; the watcher knows of what has run."""
        if wait and self._thread.is_alive():
            reached = threading.Event()
            self._work.put(_always(reached.set))
            while not reached.wait(0.1) and self._thread.is_alive():
                pass

    def close(self) -> None:
        """End the thread after the work it has."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            if self._error is None or getattr(work, "always", False):
                try:
                    work()
                except BaseException as error:  # it is raised where the event is waited for
                    self._error = error


def _always(work: Callable[[], None]) -> Callable[[], None]:
    """Mark work that runs even behind work that failed."""

    def marked() -> None:
        work()

    marked.always = True  # type: ignore[attr-defined]
    return marked


def _watched(work: Callable[[], None], watcher: Watcher) -> Callable[[], None]:
    about = watcher.about()

    def watched() -> None:
        start = time.perf_counter()
        try:
            work()
        finally:
            watcher.ran(about, start, time.perf_counter())

    return watched
