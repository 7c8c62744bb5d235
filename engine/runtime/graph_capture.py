"""CUDA graphs: work that is launched again and again in one call of the driver. Knows no models.

A capture may fail for a moment: where other threads open decoders (NVDEC) in the same context, the driver ends captures
that are under way. So one that fails is tried again. With 64 cameras in one process none of the graphs of 1080p came to
be, and each step took its 100 launches, each of which waits for the GIL.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch

from saccade.engine.errors import Fallbacks, reason_of

log = logging.getLogger(__name__)
K = TypeVar("K", bound=Hashable)
Job = tuple[Hashable, Callable[[], None]]
"""Work for `Graphs.run`."""
Progress = Callable[[int, int], None]
"""Called with how many parts of something are done, and of how many."""
_FIRST_RETRY = 8  # runs after a capture that failed; each further one after twice as many
_TOLD_AT = 64  # such runs: by then decoders are open
_TRIES_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)  # to wait before each capture of a kind, whose images wait for it
_capturing = threading.Lock()  # one at a time: torch's allocator and generators know of one


class Graphs:
    """Work by keys: run as it is the first time, and from a graph from then on.

    Work for which there is no memory left to capture is remembered, and run as it is. Where a capture fails otherwise,
    the work is captured again later.

    Args:
        stream: where all of it runs, in order; no default one.
        fallbacks: told if there is no memory for a graph, or it cannot be captured again and again.
    """

    def __init__(self, stream: torch.cuda.Stream, fallbacks: Fallbacks) -> None:
        self._stream, self._fallbacks = stream, fallbacks
        self._memory = torch.cuda.graph_pool_handle()  # shared: the graphs run one behind the other
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}  # None: there was no memory for it
        self._retries: dict[Hashable, tuple[int, int]] = {}  # of those that failed: runs to the next try, and before it

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def __contains__(self, key: Hashable) -> bool:
        return self._graphs.get(key) is not None

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Put work on the stream, which is the current one.

        Args:
            key: of the work: the same work for the same key.
            work: what it launches, with tensors of fixed addresses.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        work()  # compiles kernels and lets libraries set themselves up, which a capture cannot
        left, wait = self._retries.get(key, (0, _FIRST_RETRY))
        if left:
            self._retries[key] = left - 1, wait
        elif key not in self._graphs:
            self._capture(key, work, wait)

    def _capture(self, key: Hashable, work: Callable[[], None], wait: int) -> None:
        try:
            with torch.cuda.stream(self._stream):
                self._stream.synchronize()
                self._graphs[key] = captured(work, self._memory)
        except RuntimeError as error:  # torch has no memory, or the driver, whose error is of no other type
            reason = reason_of(error)
            if lacks_memory(error):
                self._graphs[key] = None
                reason = f"as there was no memory to capture it: {reason}"
            else:
                self._retries[key] = wait, 2 * wait
                reason = f"as the capture failed: {reason}"
            if key in self._graphs or wait >= _TOLD_AT:
                self._fallbacks.note(f"some steps take longer without a CUDA graph, {reason}")
            self._memory = torch.cuda.graph_pool_handle()  # torch may take this one for one that is being captured
        else:
            self._retries.pop(key, None)


class GraphsByKind(Generic[K]):
    """Some graphs for each kind of work, captured aside while other threads use the device and a stream runs them.

    Graphs are kept, as one that runs cannot be dropped. All of them run on one stream, one behind the other.

    Args:
        device: where they run.
        most: kinds that there are graphs of.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        self._most, self._aside = most, torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: dict[K, list[torch.cuda.CUDAGraph]] = {}
        self._read: list[torch.Tensor] = []  # by the graphs

    def get(self, kind: K) -> list[torch.cuda.CUDAGraph] | None:
        """The graphs of a kind, none where they cannot be had; None before `capture`."""
        return self._graphs.get(kind)

    def capture(
        self, kind: K, name: str, works: Callable[[], tuple[Sequence[Callable[[], object]], list[torch.Tensor]]]
    ) -> list[torch.cuda.CUDAGraph]:
        """Capture the graphs of a kind; none if there are too many kinds, or no memory. One thread at a time.

        Args:
            kind: of the work.
            name: of it, in a warning.
            works: called on the stream where they are captured: does what has to be done before, such as compiling
                kernels, and gives the work of each graph, and the tensors that it reads.
        """
        if kind in self._graphs or len(self._graphs) >= self._most:
            return self._graphs.get(kind, [])
        graphs: list[torch.cuda.CUDAGraph] = []
        for wait_s in _TRIES_S:
            time.sleep(wait_s)
            try:
                with torch.inference_mode(), torch.cuda.stream(self._aside):
                    given, read = works()
                    self._aside.synchronize()
                    graphs = [captured(work, self._memory) for work in given]
                    self._read += read
                    break
            except RuntimeError as error:  # no memory: torch's own error, or the driver's, which is of no other type
                failure = reason_of(error)
                self._memory = torch.cuda.graph_pool_handle()  # torch may take this one for one being captured
                if lacks_memory(error):
                    log.warning("%s without a graph: %s", name, failure)
                    break
        else:
            log.warning("%s without a graph: %s", name, failure)
        self._graphs[kind] = graphs
        return graphs


def lacks_memory(error: BaseException) -> bool:
    """Whether a device has no memory left: torch says so by a type, the driver in words."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def captured(work: Callable[[], object], memory: Any) -> torch.cuda.CUDAGraph:
    """A graph of work on the current stream, which is no default one, that has been done before: no first time in it.

    Args:
        work: what it runs; what it allocates is the graph's.
        memory: of `torch.cuda.graph_pool_handle`, shared with graphs that never run beside this one.
    """
    with _capturing:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # graphs of an engine that is collected in this thread meanwhile would end the capture
        try:
            return _capture(graph, work, memory)
        finally:
            if collects:
                gc.enable()


def _capture(graph: torch.cuda.CUDAGraph, work: Callable[[], object], memory: Any) -> torch.cuda.CUDAGraph:
    graph.capture_begin(pool=memory, capture_error_mode="thread_local")  # other threads go on using the device
    try:
        work()
    except BaseException:  # such as OutOfMemoryError: an image captures graphs of its size while an engine serves
        with suppress(RuntimeError):  # it may have failed itself
            graph.capture_end()  # or nothing else could be done on the stream
        raise
    graph.capture_end()
    return graph
