"""Triton kernels for decode steps of few rows, which are bound by memory bandwidth, and fused element-wise kernels.

Each kernel has a reference implementation in `models` that its results must match. This package imports nothing from
the engine except `Phase`. Its modules, except `fp8_format`, need Triton, so call `available` before importing them.
"""

from __future__ import annotations

import torch


def available(device: torch.device) -> bool:
    """Return whether the Triton kernels run on `device`: a recent Triton, CUDA, and compute capability 8.0 or later."""
    try:
        from saccade.engine.kernels import pdl  # noqa: F401
    except ImportError:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
