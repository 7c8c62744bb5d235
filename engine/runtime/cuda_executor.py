"""Executor for CUDA. Each forward pass is a CUDA graph, so that the host needs only one or two launches per step.

A decode step needs three numbers per sequence. Its graph reads them from pinned memory. Graphs for object steps and
text steps are captured at startup. All other graphs are captured after the first such step has run: tilings, long
prompts, drafts, adapters, and steps that mix objects and text.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from saccade.engine.config import MAX_PROMPT_TOKENS, EngineConfig
from saccade.engine.core.request import Step, StepKind
from saccade.engine.cuda.paged_cache import PagedCache
from saccade.engine.cuda.select import cuda_runner
from saccade.engine.errors import Fallbacks
from saccade.engine.models.protocol import Model
from saccade.engine.runtime.executor import COORDS, OBJECTS, SIZES, TEXT, Executor, Sizes
from saccade.engine.runtime.graph_capture import Graphs, Job, Progress
from saccade.engine.runtime.image_encoder import CudaImageEncoder, PreparedImage
from saccade.engine.runtime.streams import CudaStream

DECODE_BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # decode steps are padded to the next size
# The prompt tokens of a prefill are padded to these sizes. Longer prompts run without a graph. 48 tokens with 8 images
# fill the GEMM tiles (16.4 ms instead of 16.8).
PROMPT_TOKEN_SIZES = (8, 16, 48, 128, 256, MAX_PROMPT_TOKENS)
_COMMON_TOKENS = 128  # graphs of prefills with at most this number of prompt tokens are captured at startup


class CudaExecutor(Executor[PreparedImage]):
    """Executes the steps of a model on one CUDA device; see `Executor`.

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
        runner = cuda_runner(model, self.cache, max(MAX_PROMPT_TOKENS, rows), fallbacks)
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
        """See `Executor.wait`."""
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
        """Number of captured CUDA graphs of steps."""
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
        """Yield the key and the function of each graph to capture at startup."""
        yield from images.jobs()
        yield self._prefill_job(1, PROMPT_TOKEN_SIZES[0])
        common = [size for size in PROMPT_TOKEN_SIZES[1:] if size <= _COMMON_TOKENS]
        yield from (self._prefill_job(n, tokens) for n in images.batch_sizes for tokens in common)
        for slot in self._slots:
            for n in self._sizes.batch:
                kinds = [COORDS, SIZES] if n == 1 else [OBJECTS]
                yield from (self._decode_job(slot, n, kind) for kind in [*kinds, *[TEXT] * texts])
                yield from (self._first_job(slot, n, kind) for kind in [kinds[0], *[TEXT] * texts])
