"""Kernels that run one row (token) through a decoder block with a mixture of experts.

The kernels compute matrix-vector products (GEMV) without tensor cores, which would require padding of the row.

`row_into` computes the layer norm of the row. From the norm it computes the QKV heads, partial sums for the attention
temperature, and the router or the dense MLP. The router program that ends last selects the experts. `add_experts`
computes the selected experts with two kernels, one per linear layer (fc1, fc2). The fc1 kernel also computes the output
projection of attention. The fc2 kernel adds all results to the residual. Each kernel loads its weights before it waits
for the previous kernel; see `kernels.gemv`.

FP8 weights are multiplied in float16, two at a time, because float32 would need 2.5 instructions per weight. Groups of
four products are added in float16, and the groups in float32. `shrunk` scales the inputs down, so that each product
fits float16. A sum of four products fits if no input exceeds 16,320.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.common import exact_gelu, gelu, pdl_join, pdl_launch, pdl_options

PARTS = tl.constexpr(4)
"""Number of parts into which the inputs are split. Products are first added across the parts."""
GROW = tl.constexpr(2.0**9)
"""Factor by which `shrunk` divides inputs: 448 (the largest e4m3 value) · 65,280 / 512 fits float16."""
_LARGEST_HALF = tl.constexpr(65280.0)  # largest value in both bfloat16 and float16


@triton.jit
def limited(x) -> tl.tensor:
    """Clamp float32 values to the range of float16."""
    return tl.minimum(tl.maximum(x, -_LARGEST_HALF), _LARGEST_HALF)


@triton.jit
def shrunk(x) -> tl.tensor:
    """Return x in float16, divided by GROW so that its products with FP8 weights do not overflow."""
    if x.dtype == tl.float16:
        return x * (1.0 / GROW)
    else:
        return (limited(x) * (1.0 / GROW)).to(tl.float16)


@triton.jit
def tiles(at, STEP: tl.constexpr) -> tl.tuple:
    """Load PARTS blocks from the pointers `at`, `at` + STEP, `at` + 2 · STEP and so on. Return them as a tuple."""
    loaded = ()
    for part in tl.static_range(PARTS):
        loaded += (tl.load(at + part * STEP),)  # type: ignore[assignment]
    return loaded


@triton.jit
def sum_products(weights, inputs, SCALED: tl.constexpr) -> tl.tensor:
    """Return the float32 dot products of weight tiles and inputs.

    If SCALED is True, multiply the result by the weight scales and by GROW.

    Args:
        weights: tiles of weights.
        inputs: one vector of input values per weight tile. If SCALED is True, pass results of `shrunk`.
        SCALED: whether the weights are FP8.
    """
    kind: tl.constexpr = tl.float16 if SCALED else tl.float32
    acc = weights[0].to(kind) * inputs[0].to(kind)[None]
    for part in tl.static_range(1, PARTS):
        more = tl.broadcast_to(inputs[part].to(kind)[None], weights[part].shape)
        acc = tl.fma(weights[part].to(kind), more, acc)
    return acc.to(tl.float32)


# ---- kernels that read the normalized row


class IntoShape(NamedTuple):
    """Tile sizes of the kernel `row_into`.

    Attributes:
        block_n: number of outputs per program.
        experts: number of router logits per router program.
        warps: number of warps per program.
    """

    block_n: int
    experts: int
    warps: int


@triton.jit
def _normed(x, gain, shift, STEP: tl.constexpr, EPS: tl.constexpr):
    """Return the layer norm of the row x in float32, split into a tuple of PARTS vectors."""
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
    """Return the indices of the TOP experts with the highest logits, packed into one integer, BITS bits per index.

    If logits are equal, the lower index wins.
    """
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
    """Kernel of `row_into`: a program computes BLOCK_E router logits or BLOCK_N outputs."""
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
    shape: IntoShape,
    *,
    pdl: bool,
) -> None:
    """Compute the first matrix products of a decoder block from the layer norm of one row.

    The outputs are the QKV heads and partial sums for the attention temperature. If `router` is given, the kernel also
    selects the experts. If not, it also computes the hidden activations of the dense MLP.

    Args:
        x: (1, dim).
        norm: layer norm over dim.
        weight: (outputs, dim), contiguous, in the dtype of x or float8_e4m3fn. The QKV heads come first.
        scale: (outputs,) float32 for FP8 weights, else None.
        bias: (outputs,).
        tau: (factors, heads) weights of the attention temperature.
        router: linear layer to the logits of experts, or None for a dense block.
        heads: (1, heads) output.
        gelu_out: (1, outputs - heads) output after tanh-approximated GELU.
        products: float32 (heads / `shape.block_n`, 1, factors) output: partial sums of the products for the attention
            temperature. The attention kernel adds them.
        chosen: output for the logits, the chosen experts and the layer norm, if there is a router.
        shape: tile sizes.
        pdl: whether to use programmatic dependent launch, see `kernels.common`. The previous kernel may write x and
            read the outputs.
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


# ---- the experts


class Shape(NamedTuple):
    """Launch parameters of the two kernels of `add_experts`: outputs per program and warps per program."""

    fc1_n: int
    fc1_warps: int
    fc2_n: int
    fc2_warps: int


class Chosen:
    """Experts that the router has selected for one row in one layer, and the router's logits.

    Each layer needs its own instance, because the L1 cache may return stale data from shared buffers.

    Args:
        logits: float32 (1, experts), owned by this layer.
        top: number of experts to choose.
        dim: width of the row.
        dtype: dtype of the row.

    Attributes:
        logits: logits of the router.
        ready: (1,) int64. It equals `packed` after all buffers are written and until fc2 has run; otherwise it is 0.
        packed: (1,) int64 expert indices with `bits` bits each. The best expert has the lowest bits.
        normed: (1, dim) input of the experts.
        arrived: number of programs that have written logits; 0 between launches.
        top: number of experts that are chosen.
        bits: number of bits per expert index.
    """

    __slots__ = ("arrived", "bits", "logits", "normed", "packed", "ready", "top")

    def __init__(self, logits: torch.Tensor, top: int, dim: int, dtype: torch.dtype) -> None:
        # Separate allocations begin on separate cache lines.
        self.logits, self.top, self.bits = logits, top, (logits.shape[1] - 1).bit_length()
        self.packed = torch.zeros(1, dtype=torch.int64, device=logits.device)
        self.ready = torch.zeros_like(self.packed)
        self.normed = torch.zeros(1, dim, dtype=dtype, device=logits.device)
        self.arrived = torch.zeros(1, dtype=torch.int32, device=logits.device)


@triton.jit
def _fc1_kernel(
    ready,
    x,
    weight,
    scale,
    inner,
    seen,
    out_weight,
    out_scale,
    bias,
    delta,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    TOP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_N hidden values gelu(h) · (g + 1) of one expert, where h and g are the halves of the fc1 output.

    The last programs compute the output projection of attention instead.
    """
    program = tl.program_id(0)
    slot = program // (INNER // BLOCK_N)
    n = program % (INNER // BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, DIM // PARTS)
    if slot < TOP:
        # Wait for the router's programs instead of the previous kernel. All router programs are resident by now.
        packed = tl.atomic_add(ready, 0, sem="acquire")
        while packed == 0:
            packed = tl.atomic_add(ready, 0, sem="acquire")
        if PDL:
            pdl_launch()
        expert = (packed >> (slot * BITS)) & ((1 << BITS) - 1)
        at = weight + (expert * (2 * INNER) + n[:, None]) * DIM + k[None, :]
        h_w = tiles(at, DIM // PARTS)
        g_w = tiles(at + INNER * DIM, DIM // PARTS)
        if SCALED:
            h_scale = tl.load(scale + expert * (2 * INNER) + n)
            g_scale = tl.load(scale + expert * (2 * INNER) + INNER + n)
        a = tiles(x + k, DIM // PARTS)
        h = tl.sum(sum_products(h_w, a, SCALED), 1)
        g = tl.sum(sum_products(g_w, a, SCALED), 1)
        if SCALED:
            h *= h_scale * GROW
            g *= g_scale * GROW
        value = exact_gelu(h) * (g + 1.0)
        tl.store(inner + slot * INNER + n, shrunk(value) if SCALED else value.to(inner.dtype.element_ty))
    else:
        if PDL:
            pdl_launch()
        o = (program - TOP * (INNER // BLOCK_N)) * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
        w = tiles(out_weight + o[:, None] * DIM + k[None, :], DIM // PARTS)
        b = tl.load(bias + o).to(tl.float32)
        if SCALED:
            factor = tl.load(out_scale + o) * GROW
        # Only these programs wait for attention; the expert programs do not, and exit early.
        if PDL:
            pdl_join()
        v = ()
        for part in tl.static_range(PARTS):
            seen_part = tl.load(seen + part * (DIM // PARTS) + k)
            v += (shrunk(seen_part) if SCALED else seen_part,)  # type: ignore[assignment]
        acc = tl.sum(sum_products(w, v, SCALED), 1)
        if SCALED:
            acc *= factor
        tl.store(delta + o, acc + b)


@triton.jit
def _fc2_kernel(
    logits,
    ready,
    packed,
    inner,
    weight,
    scale,
    delta,
    into,
    DIM: tl.constexpr,
    INNER: tl.constexpr,
    TOP: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_N outputs of the experts. Add them and the projected attention output to the residual."""
    if PDL:
        pdl_launch()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot = tl.arange(0, TOP)
    j = tl.arange(0, INNER // PARTS)
    expert = ((tl.load(packed) >> (slot * BITS).to(tl.int64)) & ((1 << BITS) - 1)).to(tl.int32)
    line = expert[None, :] * DIM + n[:, None]
    w = tiles(weight + line[:, :, None].to(tl.int64) * INNER + j[None, None, :], INNER // PARTS)
    logit = tl.load(logits + expert)
    share = tl.exp(logit - tl.max(logit, 0))
    factor = (share / tl.sum(share, 0))[None, :]
    if SCALED:
        factor *= tl.load(scale + line) * GROW
    if PDL:
        pdl_join()
    if tl.program_id(0) == 0:
        tl.store(ready, 0)
    a = tiles(inner + slot[:, None] * INNER + j[None, :], INNER // PARTS)
    before = tl.load(into + n).to(tl.float32) + tl.load(delta + n)
    acc = tl.sum(tl.sum(sum_products(w, a, SCALED), 2) * factor, 1)
    tl.store(into + n, (before + acc).to(into.dtype.element_ty))


def add_experts(
    chosen: Chosen,
    fc1: torch.Tensor,
    fc2: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    inner: torch.Tensor,
    seen: torch.Tensor,
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    bias: torch.Tensor,
    delta: torch.Tensor,
    into: torch.Tensor,
    shape: Shape,
    *,
    pdl: bool,
) -> None:
    """Add the outputs of the selected experts and of attention to the residual of a row, in place.

    Args:
        chosen: the selected experts.
        fc1: (experts, 2 · width, dim), in the dtype of the row or float8_e4m3fn. The first `width` rows of an expert
            compute h, the others g. A hidden value is gelu(h) · (g + 1).
        fc2: (experts, dim, width), in the dtype of `fc1`.
        scales: float32 (experts, 2 · width) and (experts, dim) for FP8 weights, else None.
        inner: (top, width) scratch buffer in the dtype of `chosen.normed`.
        seen: (1, at least dim) output of attention, in float16 if the weights are FP8.
        out: (dim, dim) weights of the attention projection, in the dtype of `fc1`.
        out_scale: float32 (dim,) for FP8 weights, else None.
        bias: (dim,) bias of the projection.
        delta: float32 (dim,) scratch buffer.
        into: (1, dim) residual.
        shape: tile sizes.
        pdl: whether fc1 runs concurrently with the previous kernel as soon as `chosen` is written, see
            `kernels.common`. All programs of the router's kernel must have started before.
    """
    (top, width), dim = inner.shape, fc1.shape[2]
    shared = {
        "DIM": dim,
        "INNER": width,
        "TOP": top,
        "BITS": chosen.bits,
        "SCALED": scales is not None,
        "PDL": pdl,
    }
    _fc1_kernel[(top * width // shape.fc1_n + dim // (2 * shape.fc1_n),)](
        chosen.ready,
        chosen.normed,
        fc1,
        fc1 if scales is None else scales[0],
        inner,
        seen,
        out,
        out if out_scale is None else out_scale,
        bias,
        delta,
        BLOCK_N=shape.fc1_n,
        num_warps=shape.fc1_warps,
        **shared,
        **pdl_options(pdl),
    )
    _fc2_kernel[(dim // shape.fc2_n,)](
        chosen.logits,
        chosen.ready,
        chosen.packed,
        inner,
        fc2,
        fc2 if scales is None else scales[1],
        delta,
        into,
        BLOCK_N=shape.fc2_n,
        num_warps=shape.fc2_warps,
        **shared,
        **pdl_options(pdl),
    )


def supports(dim: int, heads: int, ff_dim: int, tau: int, inner: int, experts: int, top: int, shape: IntoShape) -> bool:
    """Return whether the single-row kernels support a model with these widths and numbers of experts."""
    powers = all(size & (size - 1) == 0 and size > 1 for size in (dim, inner, experts, top)) and tau & (tau - 1) == 0
    whole = heads % shape.block_n == 0 and ff_dim % shape.block_n == 0 and experts % shape.experts == 0
    return powers and whole and min(dim, inner) >= 128 and top * (experts - 1).bit_length() < 64
