"""What products of one row are made of: tiles of weights, and sums of their products, without tensor cores.

FP8 weights are multiplied in float16, two at a time, where in float32 each of them takes 2.5 instructions. No more than
four products are added up so, the rest in float32. What the weights multiply is made smaller before (`shrunk`), so that
a product is a float16 whatever it is of, and four are if none is of more than 16,320.
"""

from __future__ import annotations

import triton
import triton.language as tl

PARTS = tl.constexpr(4)
"""Of the inputs, whose products are added up before those of a part."""
GROW = tl.constexpr(2.0**9)
"""How many times smaller `shrunk` makes rows: 448, the largest e4m3 number, times 65,280 / 512 is a float16."""
_LARGEST_HALF = tl.constexpr(65280.0)  # that is a bfloat16 and a float16


@triton.jit
def limited(x) -> tl.tensor:
    """float32 numbers that are float16 ones."""
    return tl.minimum(tl.maximum(x, -_LARGEST_HALF), _LARGEST_HALF)


@triton.jit
def shrunk(x) -> tl.tensor:
    """What FP8 weights multiply, float16: exact to 2^-16 where it is small."""
    if x.dtype == tl.float16:
        return x * (1.0 / GROW)
    else:
        return (limited(x) * (1.0 / GROW)).to(tl.float16)


@triton.jit
def tiles(at, STEP: tl.constexpr) -> tl.tuple:
    """A tuple of what lies at pointers, and STEP, 2 · STEP, … behind them."""
    loaded = ()
    for part in tl.static_range(PARTS):
        loaded += (tl.load(at + part * STEP),)  # type: ignore[assignment]
    return loaded


@triton.jit
def sum_products(weights, inputs, SCALED: tl.constexpr) -> tl.tensor:
    """The products of tiles, added up over PARTS: float32; if SCALED still to be scaled and grown.

    Args:
        weights: tiles.
        inputs: a tile for each, without its first dimension: from `shrunk` if SCALED.
        SCALED: whether weights are in FP8.
    """
    kind: tl.constexpr = tl.float16 if SCALED else tl.float32
    acc = weights[0].to(kind) * inputs[0].to(kind)[None]
    for part in tl.static_range(1, PARTS):
        more = tl.broadcast_to(inputs[part].to(kind)[None], weights[part].shape)
        acc = tl.fma(weights[part].to(kind), more, acc)
    return acc.to(tl.float32)
