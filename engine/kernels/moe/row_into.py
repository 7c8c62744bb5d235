"""One kernel for everything that reads a row's layer norm: QKV heads, temperature products, and a router or dense MLP.

The kernel uses GEMVs instead of tensor cores and loads weights before it waits for the previous kernel, see
`kernels.gemv`. It also adds up the temperature products, so no kernel is needed between it and attention. The last
router program to finish chooses the experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.activation import exact_gelu, gelu
from saccade.engine.kernels.moe.one_row import Chosen
from saccade.engine.kernels.pdl import pdl_join, pdl_launch, pdl_options
from saccade.engine.kernels.row_products import GROW, PARTS, limited, shrunk, sum_products, tiles


class Shape(NamedTuple):
    """Tile sizes.

    Attributes:
        block_n: outputs per program.
        experts: logits per router program.
        warps: warps per program.
    """

    block_n: int
    experts: int
    warps: int


@triton.jit
def _normed(x, gain, shift, STEP: tl.constexpr, EPS: tl.constexpr):
    """Return the row's layer norm in float32 in PARTS parts; `gain` and `shift` have the same parts."""
    k = tl.arange(0, STEP)
    values = ()
    total = tl.zeros((STEP,), tl.float32)
    for part in tl.static_range(PARTS):
        value = tl.load(x + part * STEP + k).to(tl.float32)
        values += (value,)  # type: ignore[assignment]
        total += value
    mean = tl.sum(total, 0) / (PARTS * STEP)
    squares = tl.zeros((STEP,), tl.float32)
    for part in tl.static_range(PARTS):
        squares += (values[part] - mean) * (values[part] - mean)
    rstd = tl.rsqrt(tl.sum(squares, 0) / (PARTS * STEP) + EPS)
    normed = ()
    for part in tl.static_range(PARTS):
        y = (values[part] - mean) * rstd * gain[part].to(tl.float32) + shift[part].to(tl.float32)
        normed += (y,)  # type: ignore[assignment]
    return normed


@triton.jit
def _best(logits, EXPERTS: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr):
    """Return the TOP expert indices packed in BITS bits each; the lower index wins ties."""
    e = tl.arange(0, EXPERTS)
    own = tl.load(logits + e[:, None], cache_modifier=".cg")
    other = tl.load(logits + e[None, :], cache_modifier=".cg")
    above = (other > own) | ((other == own) & (e[None, :] < e[:, None]))
    rank = tl.sum(above.to(tl.int32), 1)
    # One sum packs all indices; every thread can unpack it.
    return tl.sum(tl.where(rank < TOP, e.to(tl.int64) << (rank * BITS).to(tl.int64), 0), 0)


@triton.jit
def _row_into_kernel(
    x,
    gain,
    shift,
    weight,
    scale,
    bias,
    tau,
    router,
    router_bias,
    heads,
    gelu_out,
    normed,
    products,
    logits,
    ready,
    packed,
    arrived,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TAU: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EPS: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute router logits of BLOCK_E experts in the first programs, and BLOCK_N outputs in each other program.

    The first HEADS outputs are stored unchanged, with their partial sums of TAU temperature products. The other outputs
    pass through GELU.
    """
    program = tl.program_id(0)
    routers: tl.constexpr = EXPERTS // BLOCK_E
    step: tl.constexpr = K // PARTS
    k = tl.arange(0, step)
    g = tiles(gain + k, step)
    s = tiles(shift + k, step)
    if PDL:
        pdl_launch()
    if EXPERTS > 0 and program < routers:
        e = program * BLOCK_E + tl.arange(0, BLOCK_E)
        r = tiles(router + e[:, None] * K + k[None, :], step)
        r_bias = tl.load(router_bias + e).to(tl.float32)
        if PDL:
            pdl_join()
        y = _normed(x, g, s, step, EPS)
        logit = tl.zeros((BLOCK_E, step), tl.float32)
        for part in tl.static_range(PARTS):
            logit += r[part].to(tl.float32) * y[part].to(x.dtype.element_ty).to(tl.float32)[None, :]
            if program == 0:
                tl.store(normed + part * step + k, shrunk(y[part]) if SCALED else y[part].to(x.dtype.element_ty))
        tl.store(logits + e, tl.sum(logit, 1) + r_bias)
        tl.debug_barrier()  # all stores of this program precede its signal
        if tl.atomic_add(arrived, 1, sem="acq_rel") == routers - 1:
            tl.debug_barrier()
            best = _best(logits, EXPERTS, TOP, BITS)
            tl.store(packed, best)
            tl.store(arrived, 0)
            tl.debug_barrier()
            tl.atomic_xchg(ready, best, sem="release")
    else:
        block = program - routers
        n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        is_heads = block * BLOCK_N < HEADS
        w = tiles(weight + n[:, None] * K + k[None, :], step)
        t = tl.arange(0, TAU)
        tau_w = tl.load(tau + t[:, None] * HEADS + n[None, :], mask=is_heads, other=0.0)
        b = tl.load(bias + n).to(tl.float32)
        if SCALED:
            factor = tl.load(scale + n)
        if PDL:
            pdl_join()
        y = _normed(x, g, s, step, EPS)
        inputs = ()
        for part in tl.static_range(PARTS):
            row = shrunk(y[part]) if SCALED else y[part].to(x.dtype.element_ty)
            inputs += (row,)  # type: ignore[assignment]
        acc = tl.sum(sum_products(w, inputs, SCALED), 1)
        if SCALED:
            acc *= factor * GROW
        value = (acc + b).to(heads.dtype.element_ty)
        if is_heads:
            tl.store(heads + n, value)
            through = exact_gelu(value.to(tl.float32)).to(tau.dtype.element_ty).to(tl.float32)
            tl.store(products + block * TAU + t, tl.sum(tau_w.to(tl.float32) * through[None, :], 1))
        else:
            tl.store(gelu_out + n - HEADS, limited(gelu(value.to(tl.float32))).to(gelu_out.dtype.element_ty))


def supports(dim: int, heads: int, ff_dim: int, tau: int, experts: int, shape: Shape) -> bool:
    """Return whether the kernel supports these widths (rows, heads, dense MLP, temperature) and number of experts."""
    powers = all(size & (size - 1) == 0 for size in (dim, tau, experts))
    return powers and heads % shape.block_n == 0 and ff_dim % shape.block_n == 0 and experts % shape.experts == 0


def row_into(
    x: torch.Tensor,
    norm: torch.nn.LayerNorm,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor,
    tau: torch.Tensor,
    router: torch.nn.Linear | None,
    heads: torch.Tensor,
    gelu_out: torch.Tensor,
    products: torch.Tensor,
    chosen: Chosen,
    shape: Shape,
    *,
    pdl: bool,
) -> None:
    """Write the QKV heads, temperature products, and router logits or MLP activations of a row's layer norm.

    Args:
        x: (1, dim).
        norm: layer norm over dim.
        weight: (outputs, dim), contiguous, of x's dtype or float8_e4m3fn; QKV heads come first.
        scale: (outputs,) float32 for FP8 weights, else None.
        bias: (outputs,).
        tau: (factors, heads), weights of the temperature.
        router: linear layer to expert logits, or None for a dense block.
        heads: (1, heads), written.
        gelu_out: (1, outputs - heads), written after tanh-approximated GELU.
        products: float32 (heads / `shape.block_n`, 1, factors), partial sums of the temperature products; the reader
            adds them.
        chosen: logits, chosen experts and layer norm; written if there is a router.
        shape: tile sizes.
        pdl: enable programmatic dependent launch, see `kernels.pdl`. The previous kernel may write x and read the
            outputs.
    """
    outputs, dim = weight.shape
    width, experts = heads.shape[1], 0 if router is None else router.out_features
    _row_into_kernel[(outputs // shape.block_n + experts // shape.experts,)](
        x,
        norm.weight,
        norm.bias,
        weight,
        weight if scale is None else scale,
        bias,
        tau,
        weight if router is None else router.weight,
        weight if router is None else router.bias,
        heads,
        gelu_out,
        chosen.normed,
        products,
        chosen.logits,
        chosen.ready,
        chosen.packed,
        chosen.arrived,
        HEADS=width,
        K=dim,
        BLOCK_N=shape.block_n,
        TAU=len(tau),
        EXPERTS=experts,
        TOP=chosen.top,
        BITS=chosen.bits,
        BLOCK_E=shape.experts,
        EPS=norm.eps,
        SCALED=scale is not None,
        PDL=pdl,
        num_warps=shape.warps,
        **pdl_options(pdl),
    )
