"""Building blocks of GEMVs for one row: tiles of weights, and sums of their products, without tensor cores.

FP8 weights are multiplied in float16, two at a time; in float32 each one takes 2.5 instructions. At most four products
are added in float16, the rest in float32. `shrunk` scales down the inputs, so that one product always fits float16, and
a sum of four fits if no input exceeds 16,320.
"""

from __future__ import annotations

import triton
import triton.language as tl

PARTS = tl.constexpr(4)
"""Number of parts of the inputs; products are first added across parts."""
GROW = tl.constexpr(2.0**9)
"""Factor by which `shrunk` divides inputs: 448 (the largest e4m3 value) · 65,280 / 512 fits float16."""
_LARGEST_HALF = tl.constexpr(65280.0)  # largest value in both bfloat16 and float16


@triton.jit
def limited(x) -> tl.tensor:
    """Clamp float32 values to the float16 range."""
    return tl.minimum(tl.maximum(x, -_LARGEST_HALF), _LARGEST_HALF)


@triton.jit
def shrunk(x) -> tl.tensor:
    """Return the inputs of FP8 weights divided by GROW, as float16; small values are exact to 2^-16."""
    if x.dtype == tl.float16:
        return x * (1.0 / GROW)
    else:
        return (limited(x) * (1.0 / GROW)).to(tl.float16)


@triton.jit
def tiles(at, STEP: tl.constexpr) -> tl.tuple:
    """Return a tuple of the tiles at the pointers, and at STEP, 2 · STEP, … after them."""
    loaded = ()
    for part in tl.static_range(PARTS):
        loaded += (tl.load(at + part * STEP),)  # type: ignore[assignment]
    return loaded


@triton.jit
def sum_products(weights, inputs, SCALED: tl.constexpr) -> tl.tensor:
    """Return the float32 products of tiles, added up over PARTS; if SCALED, without weight scales and GROW.

    Args:
        weights: weight tiles.
        inputs: one input tile per weight tile, without the first dimension; from `shrunk` if SCALED.
        SCALED: whether the weights are FP8.
    """
    kind: tl.constexpr = tl.float16 if SCALED else tl.float32
    acc = weights[0].to(kind) * inputs[0].to(kind)[None]
    for part in tl.static_range(1, PARTS):
        more = tl.broadcast_to(inputs[part].to(kind)[None], weights[part].shape)
        acc = tl.fma(weights[part].to(kind), more, acc)
    return acc.to(tl.float32)
