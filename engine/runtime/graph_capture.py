"""CUDA graphs: repeated work launched with one driver call."""

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
"""Key and function for `Graphs.run`."""
Progress = Callable[[int, int], None]
"""Callback with the number of finished parts and the total."""
_FIRST_RETRY = 8  # runs after a capture that failed; each further one after twice as many
_TOLD_AT = 64  # such runs: by then decoders are open
_TRIES_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)  # to wait before each capture of a kind, whose images wait for it
_capturing = threading.Lock()  # one at a time: torch's allocator and generators know of one


class Graphs:
    """Work by key: run directly the first time, then captured and replayed as a CUDA graph.

    If memory is too low to capture some work, it always runs directly.

    Args:
        stream: non-default stream of all work.
        fallbacks: receives a note if memory is too low for a graph.
    """

    def __init__(self, stream: torch.cuda.Stream, fallbacks: Fallbacks) -> None:
        self._stream, self._fallbacks = stream, fallbacks
        self._memory = torch.cuda.graph_pool_handle()  # shared, because the graphs never overlap
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}  # None if memory was too low
        self._retries: dict[Hashable, tuple[int, int]] = {}  # of those that failed: runs to the next try, and before it

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def __contains__(self, key: Hashable) -> bool:
        return self._graphs.get(key) is not None

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Run work on the current stream.

        Args:
            key: identifies the work; equal keys mean equal work.
            work: launches kernels on tensors with fixed addresses.
        """
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        work()  # compiles kernels and initializes libraries, which is impossible during capture
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
        except RuntimeError as error:  # out of memory in torch or in the driver
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
    """CUDA graphs per kind of work, captured by a separate stream while the device is in use.

    Graphs are never dropped, because a running graph cannot be freed. All graphs run sequentially on one stream.

    Args:
        device: the CUDA device.
        most: maximum number of kinds with graphs.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        self._most, self._aside = most, torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: dict[K, list[torch.cuda.CUDAGraph]] = {}
        self._read: list[torch.Tensor] = []  # by the graphs

    def get(self, kind: K) -> list[torch.cuda.CUDAGraph] | None:
        """Return the graphs of a kind, [] if capture is impossible, or None before `capture`."""
        return self._graphs.get(kind)

    def capture(
        self, kind: K, name: str, works: Callable[[], tuple[Sequence[Callable[[], object]], list[torch.Tensor]]]
    ) -> list[torch.cuda.CUDAGraph]:
        """Capture the graphs of a kind; return [] if there are too many kinds or too little memory. Not thread-safe.

        Args:
            kind: key of the work.
            name: name of the work in a warning.
            works: called on the capture stream: compiles kernels, then returns the work of each graph and the tensors
                it reads.
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
                    log.warning("%s runs without a CUDA graph: %s", name, failure)
                    break
        else:
            log.warning("%s runs without a CUDA graph: %s", name, failure)
        self._graphs[kind] = graphs
        return graphs


def lacks_memory(error: BaseException) -> bool:
    """Whether a device has no memory left: torch says so by a type, the driver in words."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def captured(work: Callable[[], object], memory: Any) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of work on the current non-default stream; the work must have run before.

    Args:
        work: launches the kernels; tensors it allocates belong to the graph.
        memory: `torch.cuda.graph_pool_handle`, shared with graphs that never run concurrently.
    """
    with _capturing:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # garbage collection of other graphs in this thread would abort the capture
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
            graph.capture_end()  # otherwise the stream stays unusable
        raise
    graph.capture_end()
    return graph
