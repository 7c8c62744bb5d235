"""Where Triton's kernels are tested by themselves: on a GPU, or in its interpreter on the CPU (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3_LIMIT = 0.01 if torch.cuda.is_available() else 0.06
"""How `far` numbers may be from those that torch rounds to e4m3: Triton's interpreter loses the carry where rounding up
changes the exponent, which was up to .044. With a carry put in, the bytes of normal numbers were all the same."""
_POSSIBLE = find_spec("triton") is not None and (DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")
needs_triton = [pytest.mark.gpu, pytest.mark.skipif(not _POSSIBLE, reason="needs Triton, and a GPU or its interpreter")]


def far(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖got − wanted‖ / ‖wanted‖."""
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())
