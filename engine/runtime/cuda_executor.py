"""Runs steps on CUDA: a forward is a graph, so that a step costs the host a launch or two.

    compute stream, prefill   image tokens (`cuda_images`); image prefixes and prompts together → first samples
    compute stream, decode    one graph: inputs → embeddings of the batch slots → blocks → samples → next embeddings
    copy stream               a slot's samples to the host, behind the event of the step that wrote them

Page tables lie on the device from a sequence's prefill on, so a decode step needs three numbers a sequence, which its
graph fetches from pinned memory. Inputs on the device are shared by both slots, as the compute stream runs in order;
what the host writes and reads is each slot's own. Graphs of what nearly every engine meets, objects and text, are
captured at the start; those of tilings, long prompts, drafts, adapters, and of objects and text in one step when the
first such step has run. Knows no requests, names or results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from saccade.engine.config import MAX_PROMPT_TOKENS, EngineConfig
from saccade.engine.core.request import Step, StepKind
from saccade.engine.core.speculative import drafted_from_images
from saccade.engine.cuda.paged_cache import PagedCache
from saccade.engine.cuda.plain_runner import Runner
from saccade.engine.cuda.select import cuda_runner
from saccade.engine.fallbacks import Fallbacks
from saccade.engine.image import Pixels
from saccade.engine.models.lora import AdapterBank
from saccade.engine.models.protocol import DraftingEncoder, Model
from saccade.engine.models.sampling import embed_fed, put_values, seen_values, suppress, take_tokens
from saccade.engine.phase import TEXT_PHASES, Phase
from saccade.engine.runtime.cuda_slot import CudaSlot
from saccade.engine.runtime.cuda_stream import CudaStream
from saccade.engine.runtime.executor import Progress, Stream
from saccade.engine.runtime.graph_capture import Graphs
from saccade.engine.runtime.image_encoder import CudaImageEncoder, Job, PreparedImage, bucket_of
from saccade.engine.runtime.sampling_inputs import (
    AllowedTokens,
    SamplingInputs,
    TokenSampler,
    sample_again,
    with_scores,
)
from saccade.engine.runtime.step_inputs import DecodeInputs, PrefillInputs, PromptTokens
from saccade.engine.tasks.output_state import Sampled

DECODE_BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # a decode step is padded to the next of these
# As is a prefill in tokens of prompts; more run without a graph. 48 of 8 images fill products' tiles (16.4 ms for 16.8)
PROMPT_TOKEN_SIZES = (8, 16, 48, 128, 256, MAX_PROMPT_TOKENS)
_COMMON_TOKENS = 128  # of a prefill whose graph is captured at the start
_COORDS, _SIZES, _TEXT, _DRAFTED = 1, 2, 4, 8  # what a graph samples, as bits; whether the host says what is fed
_OBJECTS = _COORDS | _SIZES
_KINDS = {Phase.X_OR_EOS: _COORDS, Phase.Y: _COORDS, Phase.SIZE: _SIZES, **dict.fromkeys(TEXT_PHASES, _TEXT)}


class CudaExecutor:
    """`executor.Executor` on one CUDA device.

    Args:
        model, config: the model, and sizes.
        n_pages: pages of the cache; page 0 is for what is written and never read.
        texts: whether it is asked for text as well.
        progress: called while graphs are captured.
    """

    def __init__(
        self, model: Model, config: EngineConfig, n_pages: int, *, texts: bool = True, progress: Progress | None = None
    ) -> None:
        self.model, self.products, self.fallbacks = model, model.dtype, Fallbacks()
        self.cache = PagedCache(model, n_pages, config.page_size, config.kv_dtype)
        limits, device, depth, rows = model.limits, model.device, config.depth, config.max_sequences
        self._device, self._spare = device, rows  # the slot of rows that only fill a bucket; its pages are page 0
        self._batch_sizes = [size for size in DECODE_BATCH_SIZES if size < rows] + [rows]
        self._runner = cuda_runner(model, self.cache, max(PROMPT_TOKEN_SIZES[-1], rows), self.fallbacks)
        unread = self._unread = set[int]()  # slots whose step is launched
        # Not a closure over the executor: in a cycle its memory would stay until Python collects garbage.
        self._compute, self._copy = CudaStream(device), CudaStream(device)
        self.graphs = Graphs(self._compute.stream, self.fallbacks)
        most = config.images_per_prefill
        self._images = CudaImageEncoder(model, most, depth, lambda: not unread, self.graphs, self.fallbacks)
        self._asked = model.vision.asked if isinstance(model.vision, DraftingEncoder) else {}
        # Past the last prefix page a sequence has at most the rest of the context.
        width = self.cache.prefix_pages + -(-(limits.max_context - limits.prefix_length) // config.page_size)
        self._steps = DecodeInputs(depth, device, rows, self.cache.prefix_length)
        sizes = rows, most, PROMPT_TOKEN_SIZES[-1], self.cache.prefix_pages, width
        self._prefills = PrefillInputs(depth, device, *sizes, self.cache.prefix_length, self._asked)

        def buffer(*shape: int, dtype: torch.dtype = model.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._bos = torch.full((1, 1), limits.bos_id, device=device)
        self._suppressed = torch.tensor(limits.suppressed_ids, dtype=torch.int64, device=device)
        self._tables = buffer(rows + 1, width, dtype=torch.int32)
        self._state = buffer(rows + 1, limits.dim)
        self._last = buffer(rows, limits.dim)  # hidden states at the ends of a prefill's prompts
        vocab = limits.vocab_size if texts else 1
        self._slots = [CudaSlot(number, rows, vocab, model, self._images.objects) for number in range(depth)]
        self._sampling_inputs = SamplingInputs(depth, rows, vocab, device)
        self._adapter_room = config.adapter_slots, config.adapter_rank
        self._bank: AdapterBank | None = None  # made when the first adapter is used
        torch.cuda.synchronize(device)  # weights and buffers come from other streams
        self._capture_all(texts, progress)

    @property
    def streams(self) -> dict[str, Stream]:
        """By name: 'compute' and 'copy'."""
        return {"compute": self._compute, "copy": self._copy}

    @property
    def encoder(self) -> object:
        """See `Executor.encoder`."""
        return self._images.encoder

    def prepare(self, image: Pixels) -> PreparedImage:
        """See `CudaImageEncoder.prepare`."""
        return self._images.prepare(image)

    # ---- a step

    def launch(self, slot: int, step: Step[PreparedImage]) -> None:
        """Put a step's forward and its greedy sampling on the compute stream."""
        self._slots[slot].drafted = drafted_from_images(step)
        self._unread.add(slot)
        work = self._decode if step.kind is StepKind.DECODE else self._prefill
        try:
            with torch.inference_mode():
                self._compute.run(partial(work, slot, step))
        except BaseException:
            self._unread.discard(slot)  # nobody reads it: the device is not busy with it until the slot's next step
            raise

    def finalize(self, slot: int, step: Step[PreparedImage]) -> None:
        """Sample what was not sampled with the forward, and put the copy of all samples on the copy stream behind it.

        To be called once the step ahead is committed, if any row writes text.
        """
        held, count = self._slots[slot], len(step.sequences)
        try:
            sampler = self._sampling_inputs.send(slot, step, self._copy, self._compute)
            if sampler is not None:
                self._compute.run(torch.inference_mode()(partial(self._sample_again, held, count, sampler)))
            held.computed.record(self._compute.stream)
            self._copy.wait(held.computed)
            scored = isinstance(sampler, TokenSampler) and sampler.scored is not None
            self._copy.run(partial(held.copy, count, scored=scored))
            held.ready.record(self._copy.stream)
        except BaseException:
            self._unread.discard(slot)
            raise

    def _sample_again(self, held: CudaSlot, count: int, sampler: TokenSampler | AllowedTokens) -> None:
        if isinstance(sampler, AllowedTokens):
            (outs, phases), state = self._sent(len(held.logits)), self._state
            whole = held.hidden, held.logits, phases, outs, held.sampled, state
            self.graphs.run(("allowed", held.number, sampler.count), partial(sample_again, self.model, sampler, *whole))
            return
        (outs, phases), logits = self._sent(count), held.logits[:count]
        sampled, hidden = held.sampled[:count], held.hidden[:count]
        sample_again(self.model, sampler, hidden, logits, phases, outs, sampled, self._state)
        if sampler.scored is not None:
            scores = sampler.scores(logits)
            held.scores[:, : scores.shape[1]].index_copy_(0, sampler.rows.contiguous(), scores)

    def call_when_ready(self, callback: Callable[[], None]) -> bool:
        """False: a driver's thread that calls Python waits for the GIL, longer than it takes to ask."""
        return False

    def has_run(self, slot: int) -> bool:
        """Whether `read` will not wait."""
        return bool(self._slots[slot].ready.query())

    def wait(self, slot: int, step: Step[PreparedImage]) -> None:
        """See `Executor.wait`."""
        self._unread.discard(slot)
        # Behind a last decode step the device is idle: an interrupt wakes this thread later, by 0.1 to 0.2 ms a frame.
        last = step.kind is StepKind.DECODE and not self._unread and len(self._slots) > 1
        self._slots[slot].wait(self._copy.stream, spin=last)

    def read(self, slot: int, step: Step[PreparedImage]) -> list[Sampled]:
        """See `Executor.read`."""
        held = self._slots[slot]
        self._unread.discard(slot)
        held.ready.synchronize()  # raises what the step has, and does not wait
        held.put_found(self._asked)
        return with_scores(held.host, held.host_scores, step)

    def close(self) -> None:
        """Wait for the work on the streams."""
        for part in (self._images, self._compute, self._copy):
            part.close()

    # ---- decode

    def _decode(self, slot: int, step: Step[PreparedImage]) -> None:
        rows, kind, held = step.sequences, _kind_of(step), self._slots[slot]
        bucket = bucket_of(self._batch_sizes, len(rows))
        self._steps.fill(slot, rows, bucket)
        adapted = any(row.sequence.window.adapter_slot for row in rows)
        self.graphs.run(*self._decode_job(held, bucket, kind, adapted))

    def _decode_job(self, slot: CudaSlot, rows: int, kind: int, adapted: bool = False) -> Job:
        kind = _sampled_by(rows, kind)
        work = partial(self._decode_step, slot, rows, kind, adapted)
        return ("decode", slot.number, rows, kind, adapted), work

    def _sent(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the embeddings of what rows sample go, and their phases."""
        return self._steps.device["outs"][:rows], self._steps.device["phases"][:rows]

    def _decode_step(self, slot: CudaSlot, rows: int, kind: int, adapted: bool = False) -> None:
        self._steps.fetch(slot.number)
        device = self._steps.device
        runner = self._adapted(device["adapters"][:rows]) if adapted else self._runner
        batch_slots, drafted = device["batch_slots"][:rows], bool(kind & _DRAFTED)
        x, positions = F.embedding(batch_slots, self._state), device["positions"][:rows]
        if drafted:
            x = embed_fed(self.model, device["kinds"][:rows], self._steps.values[:rows], x)
        hidden = runner.forward_tokens(x, positions, batch_slots, self._tables, together=drafted)
        self._sample(slot, hidden, *self._sent(rows), kind)

    def _sample(
        self, slot: CudaSlot, hidden: torch.Tensor, outs: torch.Tensor, phases: torch.Tensor, kind: int
    ) -> None:
        sampled = slot.sampled[: len(hidden)]
        coords, sizes = bool(kind & _COORDS), bool(kind & _SIZES)
        if coords or sizes:
            self._runner.sample_regions(hidden, phases, outs, coords, sizes, sampled, self._state)
        if kind & _TEXT:
            logits = slot.logits[: len(hidden)].copy_(self._runner.logits(hidden))
            slot.hidden[: len(hidden)].copy_(hidden)
            suppress(logits, phases, self._suppressed)
            take_tokens(self.model.text, logits.argmax(-1), phases, outs, sampled, self._state)

    # ---- prefill

    def _prefill(self, slot: int, step: Step[PreparedImage]) -> None:
        rows, held = step.sequences, self._slots[slot]
        # Keeps the device busy for milliseconds, in which the rest is put together.
        self._images.encode(slot, step.images, self._compute.stream)
        prompts = self._prefills.fill(slot, step, held.drafted)
        whole = bucket_of(self._batch_sizes, len(rows))
        self._steps.fill_sampled(slot, rows, whole)  # behind another copy: one between two graphs takes longer
        bucket = next((size for size in PROMPT_TOKEN_SIZES if size >= len(prompts.ids)), None)
        adapted = any(window.adapter_slot for window in step.windows)
        if adapted:
            for window in step.windows:
                if window.request.adapter is not None:
                    self._adapter_bank().fill(window.adapter_slot, window.request.adapter)
        n = bucket_of((0, *self._images.batch_sizes), len(step.imaged))
        if bucket is None:
            self._prefill_without_graph(step, prompts, adapted)
        else:
            self.graphs.run(*self._prefill_job(n, bucket, adapted))
        if rows:
            self.graphs.run(*self._first_job(held, whole, _kind_of(step)))

    def _prefill_job(self, n: int, tokens: int, adapted: bool = False) -> Job:
        return ("prefill", n, tokens, adapted), partial(self._prefill_step, n, tokens, adapted)

    def _first_job(self, slot: CudaSlot, rows: int, kind: int) -> Job:
        kind = _sampled_by(rows, kind & ~_DRAFTED)
        return ("first", slot.number, rows, kind), partial(self._first_samples, slot, rows, kind)

    def _prefill_without_graph(self, step: Step[PreparedImage], prompts: PromptTokens, adapted: bool) -> None:
        """What `_prefill_step` does, for long prompts. Kernels are compiled anew for an input that is not aligned."""
        ids, positions, owners = map(self._upload, (np.array(prompts.ids), prompts.positions, prompts.owners))
        self._write_tables()
        if n := len(step.imaged):
            runner = self._adapted(self._prefills.device["image_adapters"][:n]) if adapted else self._runner
            runner.prefill(*self._prefixes(n), None, positions, owners, self._tables)
        runner = self._adapted(self._upload(prompts.adapter_slots)) if adapted else self._runner
        x = self.model.text.embed(ids)
        put_values(self.model.region, x, prompts.values)  # too many for a draft
        hidden = runner.forward_tokens(x, positions, owners, self._tables, together=True)
        self._last.copy_(F.embedding(self._prefills.device["lasts"], hidden))

    def _fed(self, x: torch.Tensor) -> torch.Tensor:
        """Embeddings (tokens, dim) of a prefill's tokens, those that are values of prompts and drafts replaced."""
        inputs, count = self._prefills.device, len(x)
        values = self._prefills.values[:count]
        if self._asked:
            values = seen_values(self._images.objects, inputs["objects"][:count], values)
        return embed_fed(self.model, inputs["kinds"][:count], values, x)

    def _write_tables(self) -> None:
        device = self._prefills.device
        self._tables.index_copy_(0, device["batch_slots"].long(), device["tables"])

    def _prefixes(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of the first n images, bos first, and their pages."""
        tokens = self._images.tokens[:n]
        x = tokens.new_empty(n, 1 + tokens.shape[1], tokens.shape[2])
        x[:, :1], x[:, 1:] = self.model.text.embed(self._bos), tokens  # `torch.cat` takes 66 µs for 8 images
        return x, self._prefills.device["prefixes"][:n]

    def _adapted(self, slots: torch.Tensor) -> Runner:
        """A runner for the rows of the next call, with adapters in these slots."""
        return self._runner.with_adapters(self._adapter_bank(), slots)

    def _adapter_bank(self) -> AdapterBank:
        if self._bank is None:
            self._bank = AdapterBank(self.model.text, *self._adapter_room)
        return self._bank

    # ---- what is captured

    @torch.inference_mode()
    def _capture_all(self, texts: bool, progress: Progress | None) -> None:
        # Warm-up runs write to pages and slots that are never read.
        for host in self._steps.host:
            host["batch_slots"].fill(self._spare)
            host["positions"].fill(self.cache.prefix_length)
            host["outs"].fill(self._spare)
        self._steps.send(0)
        unused = {"owners": self._spare, "batch_slots": self._spare, "positions": self.cache.prefix_length}
        for name, value in unused.items():
            self._prefills.device[name].fill_(value)
        torch.cuda.synchronize(self._device)
        jobs = list(self._jobs(texts))
        for done, job in enumerate(jobs, start=1):
            self._compute.run(partial(self.graphs.run, *job))
            if progress is not None:
                progress(done, len(jobs))

    def _jobs(self, texts: bool) -> Iterator[Job]:
        """What nearly every engine runs, each once."""
        yield from self._images.jobs()
        yield self._prefill_job(1, PROMPT_TOKEN_SIZES[0])
        common = [size for size in PROMPT_TOKEN_SIZES[1:] if size <= _COMMON_TOKENS]
        yield from (self._prefill_job(n, tokens) for n in self._images.batch_sizes for tokens in common)
        for slot in self._slots:
            for n in self._batch_sizes:
                kinds = [_COORDS, _SIZES] if n == 1 else [_OBJECTS]
                yield from (self._decode_job(slot, n, kind) for kind in [*kinds, *[_TEXT] * texts])
                yield from (self._first_job(slot, n, kind) for kind in [kinds[0], *[_TEXT] * texts])

    def _prefill_step(self, n: int, tokens: int, adapted: bool = False) -> None:
        inputs, runner = self._prefills.device, self._runner
        if adapted:
            runner = self._adapted(torch.cat([inputs["image_adapters"][:n], inputs["adapters"][:tokens]]))
        self._write_tables()
        x = self._fed(self.model.text.embed(inputs["ids"][:tokens]))
        positions, owners = inputs["positions"][:tokens], inputs["owners"][:tokens]
        if n:
            hidden = runner.prefill(*self._prefixes(n), x, positions, owners, self._tables)
        else:
            hidden = runner.forward_tokens(x, positions, owners, self._tables, together=True)
        assert hidden is not None
        self._last.copy_(F.embedding(inputs["lasts"], hidden))

    def _first_samples(self, slot: CudaSlot, rows: int, kind: int) -> None:
        if self._asked:  # the next prefill writes over it
            slot.objects.copy_(self._images.objects)
        self._sample(slot, self._last[:rows], *self._sent(rows), kind)

    def _upload(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int32)).pin_memory().to(self._device, non_blocking=True)


def _kind_of(step: Step[PreparedImage]) -> int:
    """What a step samples."""
    kind = _DRAFTED if step.drafted else 0
    for row in step.sequences:
        kind |= _KINDS[row.phase]
    return kind


def _sampled_by(rows: int, kind: int) -> int:
    """What the graph samples that serves a step of a kind: objects, text, or both, so that there are few graphs.

    Only a single row, whose step is the shortest, has its coordinates and its sizes apart.
    """
    objects = _OBJECTS if rows > 1 or kind & _DRAFTED else kind & _OBJECTS
    return kind & (_TEXT | _DRAFTED) | (objects if kind & (_OBJECTS | _DRAFTED) else 0)
