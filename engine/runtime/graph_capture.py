"""CUDA graphs: capture repeated work once, then launch it with one driver call."""

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
_FIRST_RETRY = 8  # runs between a failed capture and the first retry; doubled after each further failure
_TOLD_AT = 64  # a failure is reported when this number of runs is reached; by then, video decoders are open
# Seconds to wait before each attempt to capture a kind; images of this kind wait for it.
_TRIES_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)
_capturing = threading.Lock()  # torch supports only one capture at a time


class Graphs:
    """Captures and replays CUDA graphs by key.

    Work runs directly the first time. Later it is captured and replayed as a CUDA graph. Work that cannot be captured,
    because device memory is too low, runs directly.

    Args:
        stream: CUDA stream that runs all work; not the default stream.
        fallbacks: receives a note if some work cannot be captured.
    """

    def __init__(self, stream: torch.cuda.Stream, fallbacks: Fallbacks) -> None:
        self._stream, self._fallbacks = stream, fallbacks
        self._memory = torch.cuda.graph_pool_handle()  # shared, because the graphs never overlap
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}  # None if memory was too low
        # After a failed capture: runs until the next attempt, and the interval of attempts.
        self._retries: dict[Hashable, tuple[int, int]] = {}

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def __contains__(self, key: Hashable) -> bool:
        return self._graphs.get(key) is not None

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Run work on the current CUDA stream: replay its CUDA graph, or call `work` and then capture the graph.

        Args:
            key: identifier of the work. Equal keys must mean equal work.
            work: function that launches kernels on tensors with fixed addresses.
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
                reason = f"because its capture ran out of memory: {reason}"
            else:
                self._retries[key] = wait, 2 * wait
                reason = f"because its capture failed: {reason}"
            if key in self._graphs or wait >= _TOLD_AT:
                self._fallbacks.note(f"some steps take longer without a CUDA graph, {reason}")
            self._memory = torch.cuda.graph_pool_handle()  # torch may believe that the old pool is still being captured
        else:
            self._retries.pop(key, None)


class GraphsByKind(Generic[K]):
    """Cache of CUDA graphs by key, such as the size and format of an image.

    All graphs must run sequentially on one stream. They are never freed.

    Args:
        device: the CUDA device.
        most: maximum number of keys with graphs.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        self._most, self._aside = most, torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: dict[K, list[torch.cuda.CUDAGraph]] = {}  # never freed: freeing a running graph is unsafe
        self._read: list[torch.Tensor] = []  # tensors that the graphs read

    def get(self, kind: K) -> list[torch.cuda.CUDAGraph] | None:
        """Return the cached CUDA graphs for the key `kind`, or None if `capture` was not called with this key.

        The list is empty if capture failed.
        """
        return self._graphs.get(kind)

    def capture(
        self, kind: K, name: str, works: Callable[[], tuple[Sequence[Callable[[], object]], list[torch.Tensor]]]
    ) -> list[torch.cuda.CUDAGraph]:
        """Capture CUDA graphs and cache them under the key `kind`. Not thread-safe.

        Args:
            kind: key of the graphs.
            name: name of the work, for a warning.
            works: compiles the kernels. Returns the functions to capture, and the tensors that these functions read.

        Returns:
            The graphs. The list is empty if the cache is full or if memory is too low.
        """
        if kind in self._graphs or len(self._graphs) >= self._most:
            return self._graphs.get(kind, [])
        graphs: list[torch.cuda.CUDAGraph] = []
        for wait_s in _TRIES_S:
            time.sleep(wait_s)
            try:
                # The caller's buffers may still be cleared there. A kernel would read old memory as addresses.
                self._aside.wait_stream(torch.cuda.current_stream(self._aside.device))
                with torch.inference_mode(), torch.cuda.stream(self._aside):
                    given, read = works()
                    self._aside.synchronize()
                    graphs = [captured(work, self._memory) for work in given]
                    self._read += read
                    break
            # Out of memory in torch or in the driver, whose errors have no type of their own.
            except RuntimeError as error:
                failure = reason_of(error)
                # Torch may believe that the old pool is still being captured.
                self._memory = torch.cuda.graph_pool_handle()
                if lacks_memory(error):
                    log.warning("%s runs without a CUDA graph, which is slower: %s", name, failure)
                    break
        else:
            log.warning("%s runs without a CUDA graph, which is slower: %s", name, failure)
        self._graphs[kind] = graphs
        return graphs


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error means that the GPU is out of memory.

    PyTorch has an exception type for this error. Errors of the CUDA driver have only a message.
    """
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error)


def captured(work: Callable[[], object], memory: Any) -> torch.cuda.CUDAGraph:
    """Capture work on the current CUDA stream as a CUDA graph. The work must have run before.

    The current stream must not be the default stream.

    Args:
        work: function that launches the kernels. The graph owns the memory of tensors that it allocates.
        memory: memory pool from `torch.cuda.graph_pool_handle`. Graphs that share a pool must not run concurrently.
    """
    with _capturing:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        gc.disable()  # if garbage collection freed another graph in this thread, the capture would be aborted
        try:
            return _capture(graph, work, memory)
        finally:
            if collects:
                gc.enable()


def _capture(graph: torch.cuda.CUDAGraph, work: Callable[[], object], memory: Any) -> torch.cuda.CUDAGraph:
    graph.capture_begin(pool=memory, capture_error_mode="thread_local")  # other threads continue to use the device
    try:
        work()
    except BaseException:  # such as OutOfMemoryError, because captures also run while the engine serves requests
        with suppress(RuntimeError):  # ending the capture may also fail
            graph.capture_end()  # otherwise the stream stays unusable
        raise
    graph.capture_end()
    return graph
