"""Triton kernels: for steps of few rows, whose time is that of reading weights and cache once, and between products.

Each has a plain counterpart in `engine.models` that it must agree with. Importing a module of this package needs
Triton: only `engine.packed`, `tower`, `weights` and `crops` do, and who uses those asks `available` first.
"""

from __future__ import annotations

import torch


def available(device: torch.device) -> bool:
    """Whether they can run: Triton is there, and the GPU is of a generation that it compiles for."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)
