"""Runs steps on CUDA: every forward is a graph captured at the start, so that a step costs the host a launch or two.

    compute stream, prefill   image tokens (`pictures`); image prefixes and prompts together → first samples
    compute stream, decode    one graph: embeddings of the lanes → blocks → samples → next embeddings
    copy stream               a slot's samples to the host, behind the event of the step that wrote them

Page tables lie on the device from an answer's prefill on, so a decode step sends three numbers a row. Inputs on the
device are shared by both slots, as the compute stream runs in order; what the host writes and reads is each slot's own.
Steps with adapters run without graphs. The face is `cpu_executor.Executor`'s. Knows nothing of requests or results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from saccade.engine import kernels
from saccade.engine.backends.lora import AdapterBank
from saccade.engine.backends.paged_cache import PagedPool
from saccade.engine.backends.plain_runner import SAMPLED, PlainRunner, Runner, take_tokens
from saccade.engine.model_loader import Progress
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.runtime.cuda_images import PICTURES, Graphs, Picture, PictureReader, bucket_of
from saccade.engine.runtime.device_streams import CudaStream, Event, Stream
from saccade.engine.runtime.sampling_inputs import Draws, likeliest
from saccade.engine.runtime.step_inputs import Numbers
from saccade.engine.scheduling.output_state import Phase
from saccade.engine.scheduling.scheduler import Look, Row, Step, StepKind

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # a decode step is padded to the next of these
TOKENS = (8, 16, 32, 64, 128)  # as is a prefill in tokens of its prompts; more run without a graph
_PLACES, _SIZES, _TEXT = 1, 2, 4  # what a graph samples, as bits
_KINDS = {Phase.BEGIN: _PLACES, Phase.Y: _PLACES, Phase.SIZE: _SIZES, Phase.TOKEN: _TEXT}


class _Slot:
    """A step's outputs, on the device and on the host, and the graphs that write them."""

    def __init__(self, n_rows: int, vocab: int, device: torch.device) -> None:
        self.sampled = torch.zeros(n_rows, SAMPLED, device=device)
        self.logits = torch.zeros(n_rows, vocab, device=device)
        self.host = torch.zeros(n_rows, SAMPLED, pin_memory=True)
        self.decode: Graphs = {}
        self.first: Graphs = {}
        self.ready: Event | None = None


class GraphExecutor:
    """One model on one CUDA device, with `depth` step slots. `prepare` may be called by any thread, the rest by one.

    Args:
        model: the model.
        depth: step slots.
        n_lanes: most sequences at a time.
        n_pages: pages of the pool; page 0 is for what is written and never read.
        page_size: tokens of a page.
        n_adapters: slots for adapters.
        adapter_rank: largest rank of one.
        texts: whether it is asked for text as well.
        progress: told how the capture of the graphs goes.
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
        *,
        texts: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self.model = model
        self.pool = PagedPool(model, n_pages, page_size)
        text, device = model.config.text, model.device
        self._device, self._spare = device, n_lanes  # the lane of rows that only fill a bucket; its pages are page 0
        self._rows = [rows for rows in ROWS if rows < n_lanes] + [n_lanes]
        ours = kernels.available(device)
        self._runner: Runner = PlainRunner(model, self.pool)
        if ours:
            from saccade.engine.backends import packed_runner as packed

            if packed.fits(model):
                self._runner = packed.PackedRunner(model, self.pool, max(TOKENS[-1], n_lanes))
        self._reader = PictureReader(model, ours)
        self._compute, self._copy = CudaStream(device), CudaStream(device)
        # Past the last prefix page a sequence has at most what is left of the context.
        width = self.pool.prefix_pages + -(-(text.max_context - text.prefix_attn) // page_size)
        self._steps = Numbers(depth, device, lanes=(n_lanes,), phases=(n_lanes,), positions=(n_lanes,))
        self._asks = Numbers(
            depth,
            device,
            prefixes=(PICTURES[-1], self.pool.prefix_pages),
            ids=(TOKENS[-1],),
            positions=(TOKENS[-1],),
            owners=(TOKENS[-1],),
            lasts=(n_lanes,),
            lanes=(n_lanes,),
            tables=(n_lanes, width),
        )

        def kept(*shape: int, dtype: torch.dtype = model.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._tables = kept(n_lanes + 1, width, dtype=torch.int32)
        self._state = kept(n_lanes + 1, text.dim)
        self._last = kept(n_lanes, text.dim)  # hidden states at the ends of a prefill's prompts
        self._slots = [_Slot(n_lanes, text.vocab_size if texts else 1, device) for _ in range(depth)]
        self._draws = Draws(depth, n_lanes, text.vocab_size if texts else 1, device)
        self._adapter_room = n_adapters, adapter_rank
        self._bank: AdapterBank | None = None  # made when the first adapter is used
        self._looks: Graphs = {}
        self._memory = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(device)  # weights and buffers come from other streams
        self._capture_all(texts, progress)

    @property
    def streams(self) -> dict[str, Stream]:
        """By name: 'compute' and 'copy'."""
        return {"compute": self._compute, "copy": self._copy}

    def prepare(self, view: NDArray[np.uint8]) -> Picture:
        """See `PictureReader.prepare`."""
        return self._reader.prepare(view)

    # ---- a step

    def launch(self, slot: int, step: Step[Picture]) -> None:
        """Put a step's forward and its plain sampling on the compute stream."""
        work = self._decode if step.kind is StepKind.DECODE else self._prefill
        with torch.inference_mode():
            self._compute.run(partial(work, slot, step))

    def finalize(self, slot: int, step: Step[Picture]) -> None:
        """Draw what was not sampled with the forward, and put the copy of all samples on the copy stream behind it.

        To be called once the step before is committed.
        """
        held, count = self._slots[slot], len(step.rows)
        if any(row.phase is Phase.TOKEN for row in step.rows):
            draw = self._draws.send(slot, step, self._copy, self._compute)
            if draw is not likeliest:

                def drawn() -> None:
                    lanes, phases = self._sent(count)
                    token = draw(held.logits[:count])
                    take_tokens(self.model.text, token, phases, lanes, held.sampled[:count], self._state)

                with torch.inference_mode():
                    self._compute.run(drawn)
        self._copy.wait(self._compute.record())

        def copy() -> None:
            held.host[:count].copy_(held.sampled[:count], non_blocking=True)

        self._copy.run(copy)
        held.ready = self._copy.record()

    def read(self, slot: int, step: Step[Picture]) -> list[tuple[float, float, float]]:
        """Wait for a step's values, one triple a row.

        Raises:
            BaseException: whatever the step has raised.
        """
        held = self._slots[slot]
        assert held.ready is not None
        held.ready.synchronize()
        return [(a, b, c) for a, b, c in held.host[: len(step.rows)].tolist()]

    def close(self) -> None:
        """Wait for what is on the streams."""
        for part in (self._reader, self._compute, self._copy):
            part.close()

    # ---- what a step costs

    @torch.inference_mode()
    def time_step(self, rows: int, position: int, repeats: int = 100) -> list[float]:
        """Seconds of the GPU's clock of decode steps that sample places, while nothing else runs.

        Args:
            rows: sequences, with pages of their own as far as there are any.
            position: where each goes on.
            repeats: how many steps to time.
        """
        bucket = bucket_of(self._rows, rows)
        own = -(-(position + 1 + self.pool.gap) // self.pool.page_size)
        pages = torch.arange(bucket * own, dtype=torch.int32, device=self._device) % (self.pool.n_pages - 1) + 1
        self._tables[:bucket, :own] = pages.view(bucket, own)
        device = self._steps.device
        device["lanes"][:bucket] = torch.arange(bucket, device=self._device)
        device["phases"].fill_(Phase.BEGIN)
        device["positions"].fill_(position)
        times = self._timed(self._slots[0].decode[bucket, _PLACES], repeats)
        self._tables.zero_()
        return times

    def time_sampling(self, rows: int, repeats: int = 100) -> float:
        """Median seconds of the GPU's clock of a step's sampling of places, while nothing else runs."""
        self._steps.device["lanes"].fill_(self._spare)
        self._steps.device["phases"].fill_(Phase.BEGIN)
        return float(np.median(self._timed(self._slots[0].first[bucket_of(self._rows, rows), _PLACES], repeats)))

    def _timed(self, graph: torch.cuda.CUDAGraph, repeats: int) -> list[float]:
        torch.cuda.synchronize(self._device)
        pairs = []
        with torch.cuda.stream(self._compute.stream):
            for number in range(repeats + 5):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                graph.replay()
                end.record()
                pairs += [(begin, end)] if number >= 5 else []
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]

    # ---- decode

    def _decode(self, slot: int, step: Step[Picture]) -> None:
        kind = _kind_of(step.rows)
        adapters = [row.answer.look.adapter_slot for row in step.rows]
        if any(adapters):
            self._send(slot, step.rows, len(step.rows))
            runner = self._adapted(adapters)
            return self._step(self._slots[slot], len(step.rows), kind, runner)
        bucket = bucket_of(self._rows, len(step.rows))
        self._send(slot, step.rows, bucket)
        self._slots[slot].decode[bucket, kind].replay()
        return None

    def _send(self, slot: int, rows: Sequence[Row[Picture]], bucket: int) -> None:
        """Lanes, phases and positions to the device; rows that fill the bucket go to the spare lane."""
        host, count = self._steps.host[slot], len(rows)
        host["lanes"][:count] = [row.answer.lane for row in rows]
        host["phases"][:count] = [row.phase for row in rows]
        host["positions"][:count] = [row.position for row in rows]
        host["lanes"][count:bucket] = self._spare
        host["phases"][count:bucket] = Phase.BEGIN
        host["positions"][count:bucket] = self.pool.prefix_length
        self._steps.send(slot)

    def _sent(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._steps.device["lanes"][:rows], self._steps.device["phases"][:rows]

    def _step(self, slot: _Slot, rows: int, kind: int, runner: Runner) -> None:
        lanes, phases = self._sent(rows)
        positions = self._steps.device["positions"][:rows]
        hidden = runner.rows(F.embedding(lanes, self._state), positions, lanes, self._tables, together=False)
        self._sample(slot, hidden, lanes, phases, kind)

    def _sample(self, slot: _Slot, hidden: torch.Tensor, lanes: torch.Tensor, phases: torch.Tensor, kind: int) -> None:
        count = len(hidden)
        places, sizes = bool(kind & _PLACES), bool(kind & _SIZES)
        if places or sizes:
            self._runner.objects(hidden, phases, lanes, places, sizes, slot.sampled[:count], self._state)
        if kind & _TEXT:
            logits = slot.logits[:count].copy_(self._runner.logits(hidden))
            take_tokens(self.model.text, likeliest(logits), phases, lanes, slot.sampled[:count], self._state)

    # ---- prefill

    def _prefill(self, slot: int, step: Step[Picture]) -> None:
        looks, rows = step.looks, step.rows
        # Keeps the device busy for milliseconds, in which the rest is put together. Looks keep their pictures until the
        # step is committed.
        self._reader.look([look.image for look in looks], self._compute.stream)
        host = self._asks.host[slot]
        for name in ("prefixes", "lasts", "tables"):
            host[name].fill(0)
        host["lanes"].fill(self._spare)
        for number, look in enumerate(looks):
            host["prefixes"][number] = look.pages
        ids = list(chain.from_iterable(row.answer.prompt for row in rows))
        owners = [row.answer.lane for row in rows for _ in row.answer.prompt]
        positions = [row.position + i for row in rows for i in range(len(row.answer.prompt))]
        host["lasts"][: len(rows)] = np.cumsum([len(row.answer.prompt) for row in rows]) - 1
        host["lanes"][: len(rows)] = [row.answer.lane for row in rows]
        for number, row in enumerate(rows):
            pages = (*row.answer.look.pages, *row.answer.pages)
            host["tables"][number, : len(pages)] = pages
        bucket, count = next((tokens for tokens in TOKENS if tokens >= len(ids)), None), len(ids)
        adapted = any(look.adapter_slot for look in looks)
        if bucket is not None:
            host["ids"][:count], host["ids"][count:bucket] = ids, 0
            host["positions"][:count], host["positions"][count:bucket] = positions, self.pool.prefix_length
            host["owners"][:count], host["owners"][count:bucket] = owners, self._spare
        self._asks.send(slot)
        if bucket is None or adapted:
            self._ask(looks, rows, self._upload([ids, positions, owners]), adapted)
        else:
            self._looks[bucket_of(PICTURES, len(looks)), bucket].replay()
        whole, kind = bucket_of(self._rows, len(rows)), _kind_of(rows)
        self._send(slot, rows, whole)
        self._slots[slot].first[whole, kind].replay()

    def _ask(
        self, looks: Sequence[Look[Picture]], rows: Sequence[Row[Picture]], sent: torch.Tensor, adapted: bool
    ) -> None:
        """What `_looks` do, without a graph: for long prompts, and for adapters."""
        ids, positions, owners = sent
        self._keep_tables()
        images, prefixes = self._prefixes(len(looks))
        looking = self._adapted([look.adapter_slot for look in looks]) if adapted else self._runner
        for look in looks:
            if look.adapter is not None and self._bank is not None:
                self._bank.fill(look.adapter_slot, look.adapter)
        looking.look(images, prefixes, None, positions, owners, self._tables)
        slots = [row.answer.look.adapter_slot for row in rows for _ in row.answer.prompt]
        asking = self._adapted(slots) if adapted else self._runner
        hidden = asking.rows(self.model.text.embed(ids), positions, owners, self._tables, together=True)
        self._last.copy_(F.embedding(self._asks.device["lasts"], hidden))

    def _keep_tables(self) -> None:
        self._tables.index_copy_(0, self._asks.device["lanes"].long(), self._asks.device["tables"])

    def _prefixes(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of the first n pictures, bos first, and their pages."""
        bos = self.model.text.wte[self.model.config.tokenizer.bos_id].expand(n, 1, -1)
        return torch.cat([bos, self._reader.images[:n]], dim=1), self._asks.device["prefixes"][:n]

    def _adapted(self, slots: list[int]) -> PlainRunner:
        """A runner for rows with adapters in the given slots, to be used before the next one is made."""
        if self._bank is None:
            self._bank = AdapterBank(self.model.text, *self._adapter_room)
        return PlainRunner(self.model, self.pool, self._bank.text(self._upload(slots).long()))

    # ---- what is captured

    @torch.inference_mode()
    def _capture_all(self, texts: bool, progress: Progress | None) -> None:
        kinds = [_PLACES, _SIZES, _PLACES | _SIZES]
        firsts = [_PLACES]
        if texts:
            firsts += [_TEXT, _TEXT | _PLACES]
            kinds += [_TEXT, _TEXT | _PLACES, _TEXT | _SIZES, _TEXT | _PLACES | _SIZES]
        jobs = self._reader.jobs()
        for n in PICTURES:
            jobs += [(self._looks, (n, tokens), partial(self._read, n, tokens)) for tokens in TOKENS]
        for slot in self._slots:
            for n in self._rows:
                jobs += [(slot.decode, (n, kind), partial(self._step, slot, n, kind, self._runner)) for kind in kinds]
                jobs += [(slot.first, (n, kind), partial(self._begin, slot, n, kind)) for kind in firsts]
        # Rehearsals write where nobody reads.
        self._steps.device["lanes"].fill_(self._spare)
        self._steps.device["positions"].fill_(self.pool.prefix_length)
        for name, value in (("owners", self._spare), ("lanes", self._spare), ("positions", self.pool.prefix_length)):
            self._asks.device[name].fill_(value)
        torch.cuda.synchronize(self._device)
        for done, (graphs, key, work) in enumerate(jobs, start=1):
            graphs[key] = self._captured(work)
            if progress is not None:
                progress(done, len(jobs))

    def _captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream, graph = self._compute.stream, torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            work()  # compiles kernels and lets libraries set themselves up, which a capture does not allow
            stream.synchronize()
            # Other threads may go on using the device meanwhile.
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            work()
            graph.capture_end()
        return graph

    def _read(self, n: int, tokens: int) -> None:
        asks = self._asks.device
        self._keep_tables()
        images, prefixes = self._prefixes(n)
        x = self.model.text.embed(asks["ids"][:tokens])
        positions, owners = asks["positions"][:tokens], asks["owners"][:tokens]
        hidden = self._runner.look(images, prefixes, x, positions, owners, self._tables)
        assert hidden is not None
        self._last.copy_(F.embedding(asks["lasts"], hidden))

    def _begin(self, slot: _Slot, rows: int, kind: int) -> None:
        self._sample(slot, self._last[:rows], *self._sent(rows), kind)

    def _upload(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, pin_memory=True).to(self._device, non_blocking=True)


def _kind_of(rows: Sequence[Row[Picture]]) -> int:
    kind = 0
    for row in rows:
        kind |= _KINDS[row.phase]
    return kind
