"""Executor for CUDA. Each forward pass is a CUDA graph, so the host needs only one or two launches per step.

A decode step needs three numbers per sequence, which its CUDA graph reads from pinned memory. Graphs for steps that
sample only objects or only text are captured at startup. Graphs for images with tiles, long prompts, drafts, LoRA
adapters, and steps that sample both objects and text are captured on demand: the first step of a kind runs without a
graph, then its graph is captured.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from saccade.engine.config import GRAPH_PROMPT_TOKENS, EngineConfig
from saccade.engine.core.request import Step, StepKind
from saccade.engine.cuda.paged_cache import PagedCache
from saccade.engine.cuda.select import cuda_runner
from saccade.engine.errors import Fallbacks
from saccade.engine.models.protocol import Model
from saccade.engine.runtime.executor import COORDS, OBJECTS, SIZES, TEXT, Executor, Sizes
from saccade.engine.runtime.graph_capture import Graphs, Job, Progress
from saccade.engine.runtime.image_encoder import CudaImageEncoder, PreparedImage
from saccade.engine.runtime.streams import Event, Watcher

DECODE_BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128)  # decode steps are padded to the next size
# The prompt tokens of a prefill are padded to these sizes. Longer prompts run without a graph. 48 tokens with 8 images
# fill the GEMM tiles (16.4 ms instead of 16.8).
PROMPT_TOKEN_SIZES = (8, 16, 48, 128, 256, GRAPH_PROMPT_TOKENS)
_COMMON_TOKENS = 128  # graphs of prefills with at most this number of prompt tokens are captured at startup


class CudaExecutor(Executor[PreparedImage]):
    """Executes the prefill and decode steps of a model on one CUDA device; see `Executor`.

    Args:
        model: the model.
        config: engine configuration.
        n_pages: number of KV cache pages.
        texts: whether the model supports text tasks in addition to object tasks.
        progress: callback for the progress of graph capture.
    """

    _compute: CudaStream
    _copy: CudaStream

    def __init__(
        self, model: Model, config: EngineConfig, n_pages: int, *, texts: bool = True, progress: Progress | None = None
    ) -> None:
        fallbacks, rows, device = Fallbacks(), config.max_sequences, model.device
        self.cache = PagedCache(model, n_pages, config.page_size, config.kv_dtype)
        runner = cuda_runner(model, self.cache, max(GRAPH_PROMPT_TOKENS, rows), fallbacks)
        compute, copy = CudaStream(device), CudaStream(device)
        self.graphs = Graphs(compute.stream, fallbacks)
        images = CudaImageEncoder(
            model, config.images_per_prefill, config.depth, compute.stream, self.graphs, fallbacks
        )
        batch_sizes = [size for size in DECODE_BATCH_SIZES if size < rows] + [rows]
        sizes = Sizes(batch_sizes, PROMPT_TOKEN_SIZES)
        super().__init__(
            model,
            config,
            model.dtype,
            fallbacks,
            self.cache,
            runner,
            images,
            compute,
            copy,
            self.graphs.run,
            sizes,
            texts=texts,
        )
        unread = self._unread
        # No closure over the executor: a reference cycle would keep its memory until garbage collection.
        images.idle = lambda: not unread
        self._reached = torch.cuda.Event()
        torch.cuda.synchronize(device)  # weights and buffers were written on other streams
        self._capture_all(images, texts, progress)

    def wait(self, slot: int, step: Step[PreparedImage]) -> None:
        """Wait until a step has run on the GPU; see `Executor.wait`."""
        self._unread.discard(slot)
        # Busy-wait: waiting for an interrupt would wake this thread 0.1 to 0.2 ms later per frame. The busy-wait
        # occupies a CPU until the copy stream is idle.
        if step.kind is StepKind.DECODE and not self._unread and len(self._slots) > 1:
            self._reached.record(self._copy.stream)
            self._reached.synchronize()
        else:
            super().wait(slot, step)

    @property
    def n_graphs(self) -> int:
        """Number of CUDA graphs captured for batch steps."""
        return len(self.graphs)

    @torch.inference_mode()
    def _capture_all(self, images: CudaImageEncoder, texts: bool, progress: Progress | None) -> None:
        # Warm-up runs write only to pages and slots that are never read.
        for host in self._steps.host:
            host["batch_slots"].fill(self._spare)
            host["positions"].fill(self.cache.prefix_length)
            host["outs"].fill(self._spare)
        self._steps.send(0)
        unused = {"owners": self._spare, "batch_slots": self._spare, "positions": self.cache.prefix_length}
        for name, value in unused.items():
            self._prefills.device[name].fill_(value)
        torch.cuda.synchronize(self._device)
        jobs = list(self._jobs(images, texts))
        for done, job in enumerate(jobs, start=1):
            self._compute.run(partial(self.graphs.run, *job))
            if progress is not None:
                progress(done, len(jobs))

    def _jobs(self, images: CudaImageEncoder, texts: bool) -> Iterator[Job]:
        """Yield the key and the function of each CUDA graph to capture at startup."""
        yield from images.jobs()
        yield self._prefill_job(1, PROMPT_TOKEN_SIZES[0])
        common = [size for size in PROMPT_TOKEN_SIZES[1:] if size <= _COMMON_TOKENS]
        yield from (self._prefill_job(n, tokens) for n in images.batch_sizes for tokens in common)
        for slot in self._slots:
            for n in self._sizes.batch:
                kinds = [COORDS, SIZES] if n == 1 else [OBJECTS]
                yield from (self._decode_job(slot, n, kind) for kind in [*kinds, *[TEXT] * texts])
                yield from (self._first_job(slot, n, kind) for kind in [kinds[0], *[TEXT] * texts])


# ---- streams


class _CudaTimer:
    """Measures the start and end of work on a CUDA stream, with one timing event before and one after the work.

    CUDA returns only the time between two events, in single precision. Host times are therefore computed from a
    reference event with a known host time. The last measured event becomes the reference for the next one, because the
    single precision of CUDA is too coarse for intervals of minutes.
    """

    def __init__(self, stream: torch.cuda.Stream, watcher: Watcher) -> None:
        self._stream, self._watcher = stream, watcher
        self._pending: deque[tuple[Any, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []  # events for reuse, because creating one takes 2 µs
        self._lock = threading.Lock()
        self._known, self._known_at = _reference(stream.device)

    def run(self, work: Callable[[], None]) -> None:
        self.settle(wait=False)
        about = self._watcher.about()
        start, end = self._event(), self._event()
        start.record(self._stream)
        work()
        end.record(self._stream)
        self._pending.append((about, start, end))

    def _event(self) -> torch.cuda.Event:
        return self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)

    def settle(self, *, wait: bool) -> None:
        with self._lock:
            while self._pending:
                about, start, end = self._pending[0]
                if wait:
                    end.synchronize()
                elif not end.query():
                    return
                self._pending.popleft()
                started = self._known_at + self._known.elapsed_time(start) / 1e3
                ended = started + start.elapsed_time(end) / 1e3
                self._spare += [self._known, start]
                self._known, self._known_at = end, ended
                self._watcher.ran(about, started, ended)


def _reference(device: torch.device) -> tuple[torch.cuda.Event, float]:
    """Return a timing event and the host time of its completion in seconds. The device must be idle."""
    stream = torch.cuda.Stream(device)
    tries = []
    for _ in range(5):
        event = torch.cuda.Event(enable_timing=True)
        before = time.perf_counter()
        event.record(stream)
        event.synchronize()
        after = time.perf_counter()
        tries.append((after - before, event, (before + after) / 2))
    _, event, at = min(tries, key=lambda one: one[0])
    return event, at


class CudaStream:
    """`Stream` that launches work on a CUDA stream. Launch errors are raised in the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self._default = torch.cuda.default_stream(device)
        self._timer: _CudaTimer | None = None

    def run(self, work: Callable[[], None]) -> None:
        """Launch work on the CUDA stream. If the work raises, the device may already run a part of it."""
        timer = self._timer
        torch.cuda.set_stream(self.stream)  # 1 µs; the context manager also queries the stream, which takes 15
        try:
            if timer is None:
                work()
            else:
                timer.run(work)
        finally:
            torch.cuda.set_stream(self._default)

    def record(self, again: Event | None = None, reached: Callable[[], None] | None = None) -> Event:
        """Return an event that completes when all work submitted so far has run. `reached` is ignored."""
        # Creating an event takes 2 µs, so `again` is reused. Events are polled: a callback would wait for the GIL.
        # A blocking event lets the host sleep until an interrupt.
        event = again if isinstance(again, torch.cuda.Event) else torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return event

    def wait(self, event: Event) -> None:
        """Delay all later work of this stream until an event of another stream has completed."""
        assert isinstance(event, torch.cuda.Event)
        self.stream.wait_event(event)

    def watch(self, watcher: Watcher | None) -> None:
        """Let `watcher` record the times of work submitted from now on. None stops the recording."""
        self._timer = None if watcher is None else _CudaTimer(self.stream, watcher)

    def settle(self, *, wait: bool = False) -> None:
        """Report the run times of finished work. If `wait` is True, first wait for all submitted work."""
        timer = self._timer
        if timer is not None:
            timer.settle(wait=wait)

    def close(self) -> None:
        """Wait for all work on the stream."""
        self.stream.synchronize()
