"""Triton kernels: for steps of few rows, whose time is that of reading weights and cache once, and between products.

Each has a plain counterpart in `models` that it must agree with. A leaf: it imports nothing of the engine.
Importing a module of this package needs Triton, so callers ask `available` first; `fp8_format` alone does not.
"""

from __future__ import annotations

import torch


def available(device: torch.device) -> bool:
    """Whether they can run: a Triton that is new enough, and a GPU of a generation that it compiles them for."""
    try:
        from saccade.engine.kernels import pdl  # noqa: F401
    except ImportError:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
