"""GEMM of few rows with a large weight matrix in half precision or FP8.

Most of its time is spent on reading the weights.

FP8 weights (e4m3, one scale per output) are converted to float16 for the tensor cores. bfloat16 activations are
converted to float16 and must be within ±65504.

| 8 rows, block of Moondream 2, H200 | input matrix | output matrix |
|---|---|---|
| bf16 | 16.4 µs | 11.6 µs |
| bf16, cuBLAS | 17.3 µs | 14.7 µs |
| bf16, only reading the weights | 13.7 µs | 9.8 µs |
| FP8 | 10.5 µs | 7.5 µs |
| FP8, only reading the weights | 6.8 µs | 4.9 µs |
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.common import L2_LINE_BYTES, gelu, pdl_join, pdl_launch, pdl_options, pdl_wait, prefetch_l2

MAX_ROWS = 64
_LEAST_ROWS = 16  # minimum of `tl.dot`


class _Shape(NamedTuple):
    """Tile sizes of a GEMM with few rows.

    Attributes:
        block_n: number of outputs per program.
        block_k: number of inputs per tile.
        stages: number of pipeline stages.
        warps: number of warps per program.
        prefetch_bytes: number of bytes of each output's weights to load into L2 while the previous kernel runs.
        pdl: whether to use programmatic dependent launch. It makes kernels with few, slow programs slower, because
            programs that launch early are distributed unevenly over the GPU.
    """

    block_n: int
    block_k: int
    stages: int
    warps: int
    prefetch_bytes: int
    pdl: bool


# Best of about 200 variants each on an H200, timed within a whole step.
_HALF, _HALF_SPLIT = _Shape(64, 128, 4, 4, 0, True), _Shape(64, 256, 3, 4, 128, True)
_FP8, _FP8_SPLIT = _Shape(32, 256, 3, 2, 256, True), _Shape(32, 256, 4, 4, 256, True)
_FP8_MANY, _FP8_SPLIT_MANY = _Shape(128, 128, 3, 8, 0, True), _Shape(64, 128, 4, 2, 0, False)


@triton.jit
def _skinny_gemm_kernel(
    x,
    x_stride,
    weight,
    scale,
    bias,
    out,
    out_stride,
    split_stride,
    rows,
    K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    GELU: tl.constexpr,
    PDL: tl.constexpr,
    LATE: tl.constexpr,
    LINES: tl.constexpr,
    PER_LINE: tl.constexpr,
):
    """Compute BLOCK_N outputs of all rows over one of SPLIT_K parts of the inputs.

    With LATE, this kernel waits for the previous kernel only at the end. The previous kernel must not write the inputs.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)[None, :]
    real = m < rows
    line = weight + n[:, None].to(tl.int64) * K
    kind: tl.constexpr = tl.float16 if SCALED else x.dtype.element_ty
    cached: tl.constexpr = ".cg" if LATE else ""
    if PDL and LATE:
        pdl_launch()
    if PDL and not LATE:
        if LINES > 0:
            prefetch_l2(line + split * (K // SPLIT_K) + tl.arange(0, LINES)[None, :] * PER_LINE)
        pdl_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(split * (K // SPLIT_K), (split + 1) * (K // SPLIT_K), BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        w = tl.load(line + k[None, :])
        a = tl.load(x + m * x_stride + k[:, None], mask=real, other=0.0, cache_modifier=cached)
        acc = tl.dot(w.to(kind), a.to(kind), acc)
    if SCALED:
        acc *= tl.load(scale + n)[:, None]
    if BIAS:
        acc += tl.load(bias + n).to(tl.float32)[:, None]
    if GELU:
        acc = gelu(acc)
    if PDL and LATE:
        pdl_join()
    at = out + split * split_stride + m * out_stride + n[:, None]
    tl.store(at, acc.to(out.dtype.element_ty), mask=real)


def split_k_for(inputs: int, scaled: bool) -> int:
    """Return the split-K factor for a GEMM with few outputs. `scaled` means that the weights are FP8."""
    return next((split_k for split_k in ((8, 4, 2) if scaled else (4, 2)) if supports(128, inputs, split_k)), 1)


def supports(outputs: int, inputs: int, split_k: int = 1) -> bool:
    """Return whether `skinny_gemm` supports weights (outputs, inputs) with this split-K factor."""
    return outputs % 128 == 0 and inputs % (split_k * 256) == 0


def skinny_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    apply_gelu: bool = False,
    pdl: bool = False,
    late: bool = False,
) -> torch.Tensor:
    """Write the product of x and the transposed weights to `out`, and return `out`.

    Args:
        x: (rows, inputs), at most MAX_ROWS rows with any stride.
        weight: (outputs, inputs), contiguous, in the dtype of x or float8_e4m3fn.
        out: (rows, outputs), or float32 (split_k, rows, outputs) for split-K. The caller adds these partial sums.
            Split-K uses the whole GPU even if there are few outputs.
        scale: (outputs,) float32 for FP8 weights, else None.
        bias: (outputs,) or None. It must be None with split-K.
        apply_gelu: whether to apply tanh-approximated GELU to the outputs. Not allowed with split-K.
        pdl: whether the kernels of the step use programmatic dependent launch, see `kernels.common`.
        late: whether the previous kernel did not write x. With `pdl`, only the end of this kernel then waits for it.
    """
    rows, (outputs, inputs) = len(x), weight.shape
    assert rows <= MAX_ROWS
    split_k, block_m = len(out) if out.ndim == 3 else 1, max(_LEAST_ROWS, triton.next_power_of_2(rows))
    if scale is None:
        shape = _HALF if split_k == 1 else _HALF_SPLIT
    elif split_k == 1:
        shape = _FP8 if block_m < MAX_ROWS else _FP8_MANY
    else:
        shape = _FP8_SPLIT if block_m == _LEAST_ROWS else _FP8_SPLIT_MANY
    tile = (shape.block_n * weight.element_size() + block_m * x.element_size()) * shape.block_k
    per_line = L2_LINE_BYTES // weight.element_size()
    _skinny_gemm_kernel[(outputs // shape.block_n, split_k)](
        x,
        x.stride(0),
        weight,
        weight if scale is None else scale,
        weight if bias is None else bias,
        out,
        out.stride(-2),
        out.stride(0),
        rows,
        K=inputs,
        SPLIT_K=split_k,
        BLOCK_M=block_m,
        BLOCK_N=shape.block_n,
        BLOCK_K=shape.block_k,
        STAGES=max(1, min(shape.stages, shared_memory(x.device) // tile)),
        SCALED=scale is not None,
        BIAS=bias is not None,
        GELU=apply_gelu,
        PDL=pdl,
        LATE=pdl and late,
        LINES=shape.prefetch_bytes // L2_LINE_BYTES,
        PER_LINE=per_line,
        num_warps=shape.warps,
        **pdl_options(pdl and shape.pdl),
    )
    return out


@cache
def shared_memory(device: torch.device) -> int:
    """Return the shared memory in bytes that one program (thread block) may use on the GPU."""
    if device.type != "cuda":  # Triton's interpreter
        return 1 << 20
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 96 << 10))
