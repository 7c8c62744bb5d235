"""What a GPU can do at most, measured: bytes a second of a large copy, operations a second of a large product."""

from __future__ import annotations

from collections.abc import Callable

import torch

from saccade.engine.fallbacks import Fallbacks
from saccade.engine.kernels.fp8_format import E4M3
from saccade.engine.model_loader import DTYPES, FP8
from saccade.engine.models.quantization import supports_fp8_gemm

_REPEATS = 12


def bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written."""
    source = torch.ones(1 << 28, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * source.element_size() / _seconds(lambda: target.copy_(source))


def operations(device: torch.device, dtype: str) -> float:
    """Floating-point operations a second of the matrix units, on numbers that are not all alike.

    Args:
        device: a GPU.
        dtype: as `saccade.engine.model_loader.DTYPES` names it.
    """
    n = 8192
    a, b = (torch.randn(n, n, device=device) for _ in range(2))
    if dtype == FP8 and supports_fp8_gemm(device, Fallbacks(), n, n):
        one = torch.ones((), device=device)
        a, b = a.to(E4M3), b.to(E4M3)
        return 2 * n**3 / _seconds(lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16))
    a, b = (part.to(DTYPES[dtype]) for part in (a, b))
    return 2 * n**3 / _seconds(lambda: a @ b)


def _seconds(work: Callable[[], object]) -> float:
    """Median by the GPU's own clock."""
    times = []
    for _ in range(_REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(sorted(times)[_REPEATS // 2])
