"""CUDA graphs: work that is launched again and again in one call of the driver. Knows no models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch


def captured(work: Callable[[], object], memory: Any) -> torch.cuda.CUDAGraph:
    """A graph of work on the current stream, which is no default one, that has been done before: no first time in it.

    Args:
        work: what it runs; what it allocates is the graph's.
        memory: of `torch.cuda.graph_pool_handle`, shared with graphs that never run beside this one.
    """
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=memory, capture_error_mode="thread_local")  # other threads go on using the device
    try:
        work()
    except BaseException:  # such as OutOfMemoryError: an image captures graphs of its size while an engine serves
        with suppress(RuntimeError):  # it may have failed itself
            graph.capture_end()  # or nothing else could be done on the stream
        raise
    graph.capture_end()
    return graph
