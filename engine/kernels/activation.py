"""GELU activations of Moondream models: tanh-approximated for MLPs, exact for experts and attention temperatures."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gelu(x) -> tl.tensor:
    """Return the tanh-approximated GELU of float32 values."""
    # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), which is exact at both ends; u = sqrt(2/π) (x + 0.044715 x³), and log2(e).
    # This takes 9 instructions, 4 fewer than a division. `exact_gelu` explains the square root.
    z = 1.0 + tl.exp2(x * (-2.302208198144325 - 0.10294324 * x * x))
    return x * tl.rsqrt(z * z)


@triton.jit
def exact_gelu(x) -> tl.tensor:
    """Return the exact GELU (with the error function) of float32 values; the absolute error is at most 4e-7."""
    # Abramowitz and Stegun 7.1.26 takes 19 instructions; `erf` takes about 50. `rsqrt(z * z)` is the reciprocal of z in
    # one instruction.
    z = 1.0 + 0.23164189 * tl.abs(x)
    t = tl.rsqrt(z * z)
    polynomial = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    tail = polynomial * tl.exp2(x * x * -0.72134752)
    return x * tl.where(x < 0.0, tail, 1.0 - tail)
