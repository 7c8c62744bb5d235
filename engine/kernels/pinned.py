"""Reading pinned host memory from a kernel, so that a CUDA graph fetches its own inputs without a copy before it.

A copy before a decode step's graph costs 11.7 µs on an H200. A kernel in the graph costs 2.1 µs (of a step of 529 µs)
and no driver call. The host must write the inputs before it launches the graph, and keep them unchanged until the graph
has ended.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _fetch_kernel(source, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    # Volatile: the host rewrites this memory between launches.
    tl.store(out + i, tl.load(source + i, mask=inside, volatile=True), mask=inside)


def fetch(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy int32 values from pinned host memory to a device tensor of the same number of elements.

    The kernel does not use programmatic dependent launch, because that was no faster (531.4 µs per step, 531.0
    without).
    """
    count = out.numel()
    _fetch_kernel[(triton.cdiv(count, _BLOCK),)](source, out, count, BLOCK=_BLOCK, num_warps=4)
