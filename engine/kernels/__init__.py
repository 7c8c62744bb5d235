"""Triton kernels: GEMMs and attention for decode steps with few rows, and fused element-wise operations.

Each kernel has a reference implementation in `models`, and their results must match. This package imports no other part
of the engine. Its modules need Triton, so call `available` before importing them.
"""

from __future__ import annotations

import torch

# The FP8 format e4m3 (sign, 4 exponent and 3 mantissa bits) of weights, activations and KV cache.
E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # the largest finite e4m3 value
LEAST_KV_SCALE = 2.0**-14  # the smallest normal float16


def available(device: torch.device) -> bool:
    """Return whether the Triton kernels run on `device`.

    The kernels need a recent Triton, CUDA, and compute capability 8.0 or later.
    """
    try:
        from saccade.engine.kernels import common  # noqa: F401
    except ImportError:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def supports_fp8(device: torch.device) -> bool:
    """Return whether the GPU has FP8 arithmetic (Ada or later).

    On other GPUs, kernels convert FP8 weights to half precision.
    """
    return torch.cuda.get_device_capability(device) >= (8, 9)
