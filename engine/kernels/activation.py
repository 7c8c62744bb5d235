"""The activations of the family: tanh-approximated GELU of its MLPs, exact GELU of experts and temperatures."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gelu(x) -> tl.tensor:
    """tanh-approximated GELU of float32."""
    # tanh(u) = 1 - 2 / (exp(2u) + 1), which is exact at both ends.
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x * (1.0 - 1.0 / (tl.exp(2.0 * u) + 1.0))


@triton.jit
def exact_gelu(x) -> tl.tensor:
    """GELU of float32 with the error function itself."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
