"""The activations of the family: tanh-approximated GELU of its MLPs, exact GELU of experts and temperatures."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gelu(x) -> tl.tensor:
    """tanh-approximated GELU of float32."""
    # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), which is exact at both ends; u = sqrt(2/π) (x + 0.044715 x³), and log2(e).
    # In 9 instructions, 4 less than with a division: see `exact_gelu` for the root.
    z = 1.0 + tl.exp2(x * (-2.302208198144325 - 0.10294324 * x * x))
    return x * tl.rsqrt(z * z)


@triton.jit
def exact_gelu(x) -> tl.tensor:
    """GELU of float32 with the error function itself, to 4e-7."""
    # Abramowitz and Stegun 7.1.26 in 19 instructions; `erf` has some 50. The root is a reciprocal: there is no other
    # in one instruction.
    z = 1.0 + 0.23164189 * tl.abs(x)
    t = tl.rsqrt(z * z)
    polynomial = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    tail = polynomial * tl.exp2(x * x * -0.72134752)
    return x * tl.where(x < 0.0, tail, 1.0 - tail)
