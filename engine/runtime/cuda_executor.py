"""The executor on CUDA: a forward is a graph, so that a step costs the host a launch or two.

A decode step needs three numbers a sequence, which its graph fetches from pinned memory. Graphs of what nearly every
engine meets, objects and text, are captured at the start; those of tilings, long prompts, drafts, adapters, and of
objects and text in one step when the first such step has run.
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

DECODE_BATCH_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # a decode step is padded to the next of these
# As is a prefill in tokens of prompts; more run without a graph. 48 of 8 images fill products' tiles (16.4 ms for 16.8)
PROMPT_TOKEN_SIZES = (8, 16, 48, 128, 256, MAX_PROMPT_TOKENS)
_COMMON_TOKENS = 128  # of a prefill whose graph is captured at the start


class CudaExecutor(Executor[PreparedImage]):
    """`Executor` on one CUDA device.

    Args:
        model, config: the model, and sizes.
        n_pages: pages of the cache.
        texts: whether it is asked for text as well.
        progress: called while graphs are captured.
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
        # Not a closure over the executor: in a cycle its memory would stay until Python collects garbage.
        images.idle = lambda: not unread
        self._reached = torch.cuda.Event()
        torch.cuda.synchronize(device)  # weights and buffers come from other streams
        self._capture_all(images, texts, progress)

    def wait(self, slot: int, step: Step[PreparedImage]) -> None:
        """See `Executor.wait`."""
        self._unread.discard(slot)
        # Behind a last decode step the device is idle: an interrupt wakes this thread later, by 0.1 to 0.2 ms a frame.
        # So it spins, which takes a CPU, until all that is on the copy stream has run.
        if step.kind is StepKind.DECODE and not self._unread and len(self._slots) > 1:
            self._reached.record(self._copy.stream)
            self._reached.synchronize()
        else:
            super().wait(slot, step)

    @property
    def n_graphs(self) -> int:
        """CUDA graphs of steps."""
        return len(self.graphs)

    @torch.inference_mode()
    def _capture_all(self, images: CudaImageEncoder, texts: bool, progress: Progress | None) -> None:
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
        jobs = list(self._jobs(images, texts))
        for done, job in enumerate(jobs, start=1):
            self._compute.run(partial(self.graphs.run, *job))
            if progress is not None:
                progress(done, len(jobs))

    def _jobs(self, images: CudaImageEncoder, texts: bool) -> Iterator[Job]:
        """What nearly every engine runs, each once."""
        yield from images.jobs()
        yield self._prefill_job(1, PROMPT_TOKEN_SIZES[0])
        common = [size for size in PROMPT_TOKEN_SIZES[1:] if size <= _COMMON_TOKENS]
        yield from (self._prefill_job(n, tokens) for n in images.batch_sizes for tokens in common)
        for slot in self._slots:
            for n in self._sizes.batch:
                kinds = [COORDS, SIZES] if n == 1 else [OBJECTS]
                yield from (self._decode_job(slot, n, kind) for kind in [*kinds, *[TEXT] * texts])
                yield from (self._first_job(slot, n, kind) for kind in [kinds[0], *[TEXT] * texts])
