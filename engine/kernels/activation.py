"""The activations of the family: tanh-approximated GELU of its MLPs, exact GELU of experts and temperatures."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gelu(x) -> tl.tensor:
    """tanh-approximated GELU of float32."""
    # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), which is exact at both ends; u = sqrt(2/π) (x + 0.044715 x³), and log2(e).
    return x / (1.0 + tl.exp2(-x * (2.302208198144325 + 0.10294324 * x * x)))


@triton.jit
def exact_gelu(x) -> tl.tensor:
    """GELU of float32 with the error function itself."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
