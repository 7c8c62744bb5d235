"""Measures the memory bandwidth of a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

_REPEATS = 12


def bandwidth(device: torch.device) -> float:
    """Return the memory bandwidth during a large copy, reads plus writes, in bytes per second."""
    source = torch.ones(1 << 28, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / _seconds(lambda: target.copy_(source))


def _seconds(work: Callable[[], object]) -> float:
    """Return the median GPU time of `work`, in seconds."""
    times = []
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(sorted(times)[_REPEATS // 2])
