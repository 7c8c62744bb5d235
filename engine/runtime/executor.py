"""Execution of batch steps on a device: prefill and decode with a paged KV cache, sampling, and copies to the host.

The compute stream runs the steps one after another. The copy stream copies the samples of each step to the host.

The device stores the page table of each sequence and the embedding of its last sample. A step can therefore launch
before the host has read the samples of the previous step. `cpu_executor` and `cuda_executor` contain the parts for
each kind of device.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from saccade.engine.config import GRAPH_PROMPT_TOKENS, EngineConfig
from saccade.engine.core.request import Step, StepKind
from saccade.engine.core.speculative import Rows, drafted_from_images, put_found
from saccade.engine.errors import Fallbacks
from saccade.engine.image import Pixels, YuvImage
from saccade.engine.models.lora import AdapterBank
from saccade.engine.models.protocol import TEXT_PHASES, DraftingEncoder, Model, Phase
from saccade.engine.models.runner import (
    SAMPLED,
    PagedCache,
    Runner,
    embed_fed,
    put_values,
    seen_values,
    suppress,
    take_tokens,
)
from saccade.engine.runtime.graph_capture import Job
from saccade.engine.runtime.step_inputs import (
    NO_CLASS,
    AllowedTokens,
    DecodeInputs,
    PrefillInputs,
    PromptTokens,
    SamplingInputs,
    TokenSampler,
    bucket_of,
    sample_again,
    with_scores,
)
from saccade.engine.runtime.streams import Event, Stream
from saccade.engine.tasks.task import MAX_SCORED, Sampled, Window

COORDS, SIZES, TEXT, DRAFTED = (
    1,
    2,
    4,
    8,
)  # bit flags: what a step samples, and whether it has drafts
OBJECTS = COORDS | SIZES
_KINDS = {Phase.X_OR_EOS: COORDS, Phase.Y: COORDS, Phase.SIZE: SIZES, **dict.fromkeys(TEXT_PHASES, TEXT)}

PreparedT = TypeVar("PreparedT")
"""A prepared (cropped) image in the format of an `ImageEncoder`."""


class ImageEncoder(Protocol[PreparedT]):
    """Runs the vision encoder of a model. `prepare` is thread-safe; the other methods must be called from one thread.

    Attributes:
        batch_sizes: batch sizes to which the number of images is padded.
        tokens: (images, tokens, dim) image tokens of the last `encode` call, in the order of its images.
        objects: (images, objects, 5) detections, if the encoder is a `DraftingEncoder`. Other encoders have one unused
            entry.
        encoder: the vision encoder of the model, or a faster implementation of it.
    """

    @property
    def batch_sizes(self) -> Sequence[int]: ...  # noqa: D102 - above

    tokens: torch.Tensor
    objects: torch.Tensor

    @property
    def encoder(self) -> object: ...  # noqa: D102 - above

    def prepare(self, image: Pixels, window: Window | None = None) -> PreparedT:
        """Split an image into crops for the vision encoder.

        Args:
            image: (height, width, 3) uint8 RGB pixels, or a decoded video frame.
            window: part of the image to use; None for the whole image.
        """
        ...

    def encode(self, slot: int, images: Sequence[PreparedT]) -> None:
        """Encode the images of a step on the compute stream and write their tokens to `tokens`.

        The call does not wait for the device. Until the work has run, the images must stay alive and the step slot must
        not be reused.
        """
        ...

    def close(self) -> None:
        """Wait until the device has encoded all images, then release all resources."""
        ...


class Sizes(NamedTuple):
    """Sizes to which batches are padded, so that few CUDA graphs cover all steps.

    Attributes:
        batch: possible numbers of rows of a decode step.
        prompt_tokens: possible numbers of prompt tokens of a prefill.
    """

    batch: Sequence[int]
    prompt_tokens: Sequence[int]


class StepOutputs:
    """Output buffers of a step slot, on the device and on the host: samples, and detections in the step's images.

    Args:
        number: index of the step slot.
        rows: maximum number of rows of a step.
        vocab: number of logits per row.
        model: the model.
        objects: buffer of the encoder's detections; see `ImageEncoder`.
    """

    def __init__(self, number: int, rows: int, vocab: int, model: Model, objects: torch.Tensor) -> None:
        device, dim, pin = model.device, model.limits.dim, model.device.type == "cuda"
        self.number = number
        # These outputs are contiguous, so that nearly every step needs one copy. Each copy costs 10 µs in the driver.
        read = torch.zeros(rows * SAMPLED + objects.numel(), device=device)
        read_host = torch.zeros(len(read), pin_memory=pin)
        self._read, self._read_host = read, read_host
        self.sampled, self.objects = read[: rows * SAMPLED].view(rows, SAMPLED), read[rows * SAMPLED :].view_as(objects)
        self.host = read_host[: rows * SAMPLED].view(rows, SAMPLED)
        self._found = read_host[rows * SAMPLED :].view_as(objects).numpy()
        self.logits = torch.zeros(rows, vocab, device=device)
        self.hidden = torch.zeros(
            rows, dim, dtype=model.dtype, device=device
        )  # hidden states from which the logits were computed
        self.scores = torch.zeros(rows, MAX_SCORED, device=device)
        self.host_scores = torch.zeros(rows, MAX_SCORED, pin_memory=pin)
        # Sequences drafted from the detections, see `speculative.drafted_from_images`.
        self.drafted: list[tuple[int, Rows]] = []
        self.computed: Event | None = None
        self.ready: Event | None = None

    def copy(self, count: int, *, scored: bool) -> None:
        """Copy the outputs of the first `count` rows to the host, on the copy stream."""
        if self.drafted:
            self._read_host.copy_(self._read, non_blocking=True)
        else:
            self.host[:count].copy_(self.sampled[:count], non_blocking=True)
        if scored:
            self.host_scores[:count].copy_(self.scores[:count], non_blocking=True)

    def put_found(self, asked: Mapping[tuple[int, ...], int]) -> None:
        """Insert detections of the vision encoder into the drafts. The outputs of the step must be on the host.

        Args:
            asked: mapping from the token IDs of a prompt to the index of the detector class.
        """
        if not self.drafted:
            return
        wanted = np.array([asked.get(rows[0].sequence.prompt, NO_CLASS) for _, rows in self.drafted], np.float32)
        numbers = [number for number, _ in self.drafted]
        same = self._found[numbers, :, 0] == wanted[:, None]
        for (number, rows), chosen in zip(self.drafted, same, strict=True):
            put_found(rows, self._found[number, chosen].tolist())


class Executor(Generic[PreparedT]):
    """Executes the prefill and decode steps of one model on one device, with `depth` step slots.

    `prepare` is thread-safe. The other methods must be called from one thread.

    Args:
        model: the model.
        config: engine configuration.
        products: dtype of most matrix products (GEMMs).
        fallbacks: collects messages about slower implementations that are used.
        cache: paged KV cache. Padding rows write to page 0, which is never read.
        runner: computes prefills, decode steps and samples.
        images: image encoder that works on the compute stream.
        compute: stream for all computations.
        copy: stream for copies to the host.
        run: function (key, work) that runs work on the compute stream. On CUDA, work with the same key uses the same
            CUDA graph.
        sizes: sizes to which batches are padded.
        texts: whether the model supports text tasks in addition to object tasks.

    Attributes:
        model: the model.
        products: dtype of most matrix products (GEMMs).
        fallbacks: messages about slower implementations that are used.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        products: torch.dtype,
        fallbacks: Fallbacks,
        cache: PagedCache,
        runner: Runner,
        images: ImageEncoder[PreparedT],
        compute: Stream,
        copy: Stream,
        run: Callable[[Hashable, Callable[[], None]], None],
        sizes: Sizes,
        *,
        texts: bool,
    ) -> None:
        self.model, self.products, self.fallbacks = model, products, fallbacks
        self._runner, self._images, self._compute, self._copy = runner, images, compute, copy
        self._run, self._sizes = run, sizes
        limits, device, depth, rows = model.limits, model.device, config.depth, config.max_sequences
        # The batch slot `rows` is for padding; its page table contains only page 0.
        self._device, self._spare = device, rows
        self._unread = set[int]()  # slots whose step is launched and not read
        self._on_ready: Callable[[], None] | None = None
        self._asked = model.vision.asked if isinstance(model.vision, DraftingEncoder) else {}
        # A sequence has at most the pages of the prefix, and pages for the rest of the context.
        width = cache.prefix_pages + -(-(limits.max_context - limits.prefix_length) // config.page_size)
        self._steps = DecodeInputs(depth, device, rows, cache.prefix_length)
        shapes = rows, images.batch_sizes[-1], GRAPH_PROMPT_TOKENS, cache.prefix_pages, width
        self._prefills = PrefillInputs(depth, device, *shapes, cache.prefix_length, self._asked)
        self._bos = torch.full((1, 1), limits.bos_id, device=device)
        self._suppressed = torch.tensor(limits.suppressed_ids, dtype=torch.int64, device=device)
        self._tables = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        self._state = torch.zeros(rows + 1, limits.dim, dtype=model.dtype, device=device)
        # Hidden states after the prompts of a prefill.
        self._last = torch.zeros(rows, limits.dim, dtype=model.dtype, device=device)
        vocab = limits.vocab_size if texts else 1
        self._slots = [StepOutputs(number, rows, vocab, model, images.objects) for number in range(depth)]
        self._sampling_inputs = SamplingInputs(depth, rows, vocab, device)
        self._adapter_room = config.adapter_slots, config.adapter_rank
        self._bank: AdapterBank | None = None  # created when the first adapter is used

    @property
    def encoder(self) -> object:
        """The vision encoder of the model, or a faster implementation of it."""
        return self._images.encoder

    @property
    def streams(self) -> dict[str, Stream]:
        """Streams of the executor by name: 'compute' and 'copy'."""
        return {"compute": self._compute, "copy": self._copy}

    def prepare(self, image: Pixels, window: Window | None = None) -> PreparedT:
        """Split an image, or a part of it (`window`), into crops for the vision encoder. Thread-safe."""
        return self._images.prepare(image, window)

    # ---- a step

    def launch(self, slot: int, step: Step[PreparedT]) -> None:
        """Launch the forward pass and the greedy sampling of a batch step on the compute stream."""
        self._slots[slot].drafted = drafted_from_images(step)
        self._unread.add(slot)
        work = self._decode if step.kind is StepKind.DECODE else self._prefill
        try:
            self._compute.run(torch.inference_mode()(partial(work, slot, step)))
        except BaseException:
            self._unread.discard(slot)  # the failed step is never read
            raise

    def finalize(self, slot: int, step: Step[PreparedT]) -> None:
        """Queue random and masked sampling of the rows that need it, then the copy of all samples to the host.

        If a row samples text, call `Scheduler.commit` for the previous step first: it sets the allowed tokens.
        """
        held, count = self._slots[slot], len(step.sequences)
        try:
            sampler = self._sampling_inputs.send(slot, step, self._copy, self._compute)
            if sampler is not None:
                self._compute.run(torch.inference_mode()(partial(self._sample_again, held, count, sampler)))
            held.computed = self._compute.record(held.computed)
            self._copy.wait(held.computed)
            scored = isinstance(sampler, TokenSampler) and sampler.scored is not None
            self._copy.run(partial(held.copy, count, scored=scored))
            held.ready = self._copy.record(held.ready, self._on_ready)
        except BaseException:
            self._unread.discard(slot)
            raise

    def _sample_again(self, held: StepOutputs, count: int, sampler: TokenSampler | AllowedTokens) -> None:
        if isinstance(sampler, AllowedTokens):
            (outs, phases), state = self._sent(len(held.logits)), self._state
            whole = held.hidden, held.logits, phases, outs, held.sampled, state
            self._run(("allowed", held.number, sampler.count), partial(sample_again, self.model, sampler, *whole))
            return
        (outs, phases), logits = self._sent(count), held.logits[:count]
        sampled, hidden = held.sampled[:count], held.hidden[:count]
        sample_again(self.model, sampler, hidden, logits, phases, outs, sampled, self._state)
        if sampler.scored is not None:
            scores = sampler.scores(logits)
            held.scores[:, : scores.shape[1]].index_copy_(0, sampler.rows.contiguous(), scores)

    def call_when_ready(self, callback: Callable[[], None]) -> bool:
        """Register a callback that is called, in any thread, when a batch step has run.

        Returns:
            False if the device does not support callbacks. Poll `has_run` instead.
        """
        return False

    def has_run(self, slot: int) -> bool:
        """Return whether the step in a slot has run or failed. If so, `read` does not block."""
        ready = self._slots[slot].ready
        return ready is not None and bool(ready.query())

    def wait(self, slot: int, step: Step[PreparedT]) -> None:
        """Wait until a batch step has run.

        Raises:
            BaseException: any error of the step; `read` raises it again.
        """
        ready = self._slots[slot].ready
        assert ready is not None
        ready.synchronize()

    def read(self, slot: int, step: Step[PreparedT]) -> list[Sampled]:
        """Return the samples of a batch step that has run: one tuple per row.

        Raises:
            BaseException: any error of the step.
        """
        held = self._slots[slot]
        self._unread.discard(slot)
        assert held.ready is not None
        held.ready.synchronize()  # raises the error of the step, if any; does not wait
        held.put_found(self._asked)
        return with_scores(held.host, held.host_scores, step)

    @property
    def n_graphs(self) -> int:
        """Number of CUDA graphs captured for batch steps; 0 on a CPU."""
        return 0

    def close(self) -> None:
        """Wait for the work on all streams, then close them."""
        for part in (self._images, self._compute, self._copy):
            part.close()

    # ---- decode

    def _decode(self, slot: int, step: Step[PreparedT]) -> None:
        rows, kind, held = step.sequences, _kind_of(step), self._slots[slot]
        bucket = bucket_of(self._sizes.batch, len(rows))
        self._steps.fill(slot, rows, bucket)
        adapted = any(row.sequence.window.adapter_slot for row in rows)
        self._run(*self._decode_job(held, bucket, kind, adapted))

    def _decode_job(self, slot: StepOutputs, rows: int, kind: int, adapted: bool = False) -> Job:
        kind = _sampled_by(rows, kind)
        work = partial(self._decode_step, slot, rows, kind, adapted)
        return ("decode", slot.number, rows, kind, adapted), work

    def _sent(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the batch slot (rows,) that receives each row's next input embedding, and each row's phase (rows,)."""
        return self._steps.device["outs"][:rows], self._steps.device["phases"][:rows]

    def _decode_step(self, slot: StepOutputs, rows: int, kind: int, adapted: bool = False) -> None:
        self._steps.fetch(slot.number)
        device = self._steps.device
        runner = self._adapted(device["adapters"][:rows]) if adapted else self._runner
        batch_slots, drafted = device["batch_slots"][:rows], bool(kind & DRAFTED)
        x, positions = F.embedding(batch_slots, self._state), device["positions"][:rows]
        if drafted:
            x = embed_fed(self.model, device["kinds"][:rows], self._steps.values[:rows], x)
        hidden = runner.forward_tokens(x, positions, batch_slots, self._tables, together=drafted)
        self._sample(slot, hidden, *self._sent(rows), kind)

    def _sample(
        self, slot: StepOutputs, hidden: torch.Tensor, outs: torch.Tensor, phases: torch.Tensor, kind: int
    ) -> None:
        sampled = slot.sampled[: len(hidden)]
        coords, sizes = bool(kind & COORDS), bool(kind & SIZES)
        if coords or sizes:
            self._runner.sample_regions(hidden, phases, outs, coords, sizes, sampled, self._state)
        if kind & TEXT:
            logits = slot.logits[: len(hidden)].copy_(self._runner.logits(hidden))
            slot.hidden[: len(hidden)].copy_(hidden)
            suppress(logits, phases, self._suppressed)
            take_tokens(self.model.text, logits.argmax(-1), phases, outs, sampled, self._state)

    # ---- prefill

    def _prefill(self, slot: int, step: Step[PreparedT]) -> None:
        rows, held = step.sequences, self._slots[slot]
        # Queue the encoding first: the GPU is busy with it for milliseconds, while the host prepares the prefill.
        self._images.encode(slot, step.images)
        prompts = self._prefills.fill(slot, step, held.drafted)
        whole = bucket_of(self._sizes.batch, len(rows))
        self._steps.fill_sampled(slot, rows, whole)  # next to another copy: a copy between two graphs takes longer
        adapted = any(window.adapter_slot for window in step.windows)
        if adapted:
            for window in step.windows:
                if window.request.adapter is not None:
                    self._adapter_bank().fill(window.adapter_slot, window.request.adapter)
        n = bucket_of((0, *self._images.batch_sizes), len(step.imaged))
        if len(prompts.ids) > GRAPH_PROMPT_TOKENS:
            self._prefill_long(step, prompts, adapted)
        else:
            self._run(*self._prefill_job(n, bucket_of(self._sizes.prompt_tokens, len(prompts.ids)), adapted))
        if rows:
            self._run(*self._first_job(held, whole, _kind_of(step)))

    def _prefill_job(self, n: int, tokens: int, adapted: bool = False) -> Job:
        return ("prefill", n, tokens, adapted), partial(self._prefill_step, n, tokens, adapted)

    def _first_job(self, slot: StepOutputs, rows: int, kind: int) -> Job:
        kind = _sampled_by(rows, kind & ~DRAFTED)
        return ("first", slot.number, rows, kind), partial(self._first_samples, slot, rows, kind)

    def _prefill_step(self, n: int, tokens: int, adapted: bool = False) -> None:
        inputs, runner = self._prefills.device, self._runner
        if adapted:
            runner = self._adapted(torch.cat([inputs["image_adapters"][:n], inputs["adapters"][:tokens]]))
        self._write_tables()
        x = self._fed(self.model.text.embed(inputs["ids"][:tokens])) if tokens else None
        positions, owners = inputs["positions"][:tokens], inputs["owners"][:tokens]
        hidden: torch.Tensor | None = None
        if n:
            hidden = runner.prefill(*self._prefixes(n), x, positions, owners, self._tables)
        elif x is not None:
            hidden = runner.forward_tokens(x, positions, owners, self._tables, together=True)
        if hidden is not None:
            self._last.copy_(F.embedding(inputs["lasts"], hidden))

    def _prefill_long(self, step: Step[PreparedT], prompts: PromptTokens, adapted: bool) -> None:
        """Run a prefill without a CUDA graph, because its prompt tokens do not fit into the buffers of the graph."""
        # Use separate tensors, because slices of one tensor may be unaligned, for which kernels are recompiled.
        ids, positions, owners = map(self._upload, (np.array(prompts.ids), prompts.positions, prompts.owners))
        self._write_tables()
        if n := len(step.imaged):
            runner = self._adapted(self._prefills.device["image_adapters"][:n]) if adapted else self._runner
            runner.prefill(*self._prefixes(n), None, positions, owners, self._tables)
        runner = self._adapted(self._upload(prompts.adapter_slots)) if adapted else self._runner
        x = self.model.text.embed(ids)
        put_values(self.model.region, x, prompts.values)  # such a long prefill has no drafts
        hidden = runner.forward_tokens(x, positions, owners, self._tables, together=True)
        self._last.copy_(F.embedding(self._prefills.device["lasts"], hidden))

    def _first_samples(self, slot: StepOutputs, rows: int, kind: int) -> None:
        if self._asked:  # the next prefill overwrites the detections
            slot.objects.copy_(self._images.objects)
        self._sample(slot, self._last[:rows], *self._sent(rows), kind)

    def _fed(self, x: torch.Tensor) -> torch.Tensor:
        """Replace the embeddings x (tokens, dim) of prefill tokens that represent coordinates or sizes."""
        inputs, count = self._prefills.device, len(x)
        values = self._prefills.values[:count]
        if self._asked:
            values = seen_values(self._images.objects, inputs["objects"][:count], values)
        return embed_fed(self.model, inputs["kinds"][:count], values, x)

    def _write_tables(self) -> None:
        device = self._prefills.device
        self._tables.index_copy_(0, device["batch_slots"].long(), device["tables"])

    def _prefixes(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the embeddings and the KV cache pages of the image prefixes of the first `n` images.

        A prefix consists of BOS and the image tokens.
        """
        tokens = self._images.tokens[:n]
        x = tokens.new_empty(n, 1 + tokens.shape[1], tokens.shape[2])
        x[:, :1], x[:, 1:] = self.model.text.embed(self._bos), tokens  # `torch.cat` takes 66 µs for 8 images
        return x, self._prefills.device["prefixes"][:n]

    def _adapted(self, slots: torch.Tensor) -> Runner:
        """Return a runner that applies the LoRA adapters in `slots` (rows,) to the rows of its next batch."""
        return self._runner.with_adapters(self._adapter_bank(), slots)

    def _adapter_bank(self) -> AdapterBank:
        if self._bank is None:
            self._bank = AdapterBank(self.model.text, *self._adapter_room)
        return self._bank

    def _upload(self, values: NDArray[np.int64]) -> torch.Tensor:
        there = torch.from_numpy(values.astype(np.int32))
        return there.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else there


def part_of(image: Pixels, window: Window) -> Pixels:
    """Return a part of an image: a copy of RGB, or a view of YUV that starts at even pixel coordinates."""
    if isinstance(image, YuvImage):
        return image.part(window.x, window.y, window.width, window.height)
    return image[window.y : window.y + window.height, window.x : window.x + window.width].copy()


def _kind_of(step: Step[Any]) -> int:
    """Return bit flags for the values that a step samples (coordinates, sizes, text) and for drafts."""
    kind = DRAFTED if step.drafted else 0
    for row in step.sequences:
        kind |= _KINDS[row.phase]
    return kind


def _sampled_by(rows: int, kind: int) -> int:
    """Return the bit flags of the CUDA graph for a step with `rows` rows.

    To limit the number of graphs, coordinates and sizes share one graph. Only steps with a single row and no draft have
    separate graphs for coordinates and for sizes.
    """
    objects = OBJECTS if rows > 1 or kind & DRAFTED else kind & OBJECTS
    return kind & (TEXT | DRAFTED) | (objects if kind & (OBJECTS | DRAFTED) else 0)
