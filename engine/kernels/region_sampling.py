"""Region heads for detect and point in two kernels: one samples from logits, the other embeds the samples.

Each row samples x, y or the size of an object. Rows of the same step may sample different values (`Phase`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from saccade.engine.kernels.common import pdl_options, pdl_wait

Scores = tuple[torch.Tensor, torch.Tensor]
"""Logits of bins: contiguous partial sums (split_k, rows, bins), and the bias (bins,) to add to their sum."""
_X_OR_EOS, _Y, _SIZE = (tl.constexpr(phase) for phase in range(3))  # as `models.protocol.Phase`


@triton.jit
def _turns(value):
    """Convert turns (full rotations) to radians from -π to π, because fast sine and cosine need small arguments."""
    return 6.283185307179586 * (value - tl.floor(value + 0.5))


@triton.jit
def _summed(
    scores, bias, row, rows, first, WIDTH: tl.constexpr, BINS: tl.constexpr, SPLIT_K: tl.constexpr
) -> tl.tensor:
    """Return the logits of BINS bins of one row, starting with the bin `first`.

    Each logit is the bias plus the SPLIT_K partial sums in `scores` (SPLIT_K, rows, WIDTH).
    """
    i = first + tl.arange(0, BINS)
    score = tl.load(bias + i).to(tl.float32)
    for split in tl.static_range(SPLIT_K):
        score += tl.load(scores + (split * rows + row) * WIDTH + i).to(tl.float32)
    return score


@triton.jit(do_not_specialize=["rows"])  # else it is compiled for 1, for multiples of 16 and for others
def _sample_kernel(
    hidden,
    hidden_stride,
    phases,
    gain,
    shift,
    coord_eos,
    coord_eos_bias,
    coords,
    coord_bias,
    sizes,
    size_bias,
    coord_features,
    size_features,
    size_values,
    sampled,
    features,
    rows,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    COORDS: tl.constexpr,
    COORD_SPLIT_K: tl.constexpr,
    SIZES: tl.constexpr,
    SIZE_SPLIT_K: tl.constexpr,
    COORD_HALF: tl.constexpr,
    SIZE_HALF: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sample the next value of one object, and compute the Fourier features of the value.

    Three numbers are written to `sampled`. They depend on the phase of the row:

    - X_OR_EOS (x, or the end of the list): coordinate logit − end logit, x, x
    - Y: y, y, y
    - SIZE: width, height, 0
    """
    row = tl.program_id(0)
    phase = tl.load(phases + row)
    # Constant data is loaded before the wait, and all other data before the first sum.
    d = tl.arange(0, DIM_BLOCK)
    real = d < DIM
    g = tl.load(gain + d, mask=real, other=0.0)
    s = tl.load(shift + d, mask=real, other=0.0)
    to_coord = tl.load(coord_eos + d, mask=real, other=0.0)
    to_eos = tl.load(coord_eos + DIM + d, mask=real, other=0.0)
    bias_coord = tl.load(coord_eos_bias).to(tl.float32)
    bias_eos = tl.load(coord_eos_bias + 1).to(tl.float32)
    c = tl.arange(0, COORD_HALF)
    of_coord = tl.load(coord_features + c)
    f = tl.arange(0, SIZE_HALF)
    of_w = tl.load(size_features + f)
    of_h = tl.load(size_features + SIZE_HALF + f)
    if PDL:
        pdl_wait()
    out = sampled + row * 3
    if phase == _SIZE:
        w_score = _summed(sizes, size_bias, row, rows, 0, 2 * SIZES, SIZES, SIZE_SPLIT_K)
        h_score = _summed(sizes, size_bias, row, rows, SIZES, 2 * SIZES, SIZES, SIZE_SPLIT_K)
        w = tl.load(size_values + tl.argmax(w_score, 0))
        h = tl.load(size_values + tl.argmax(h_score, 0))
        tl.store(out, w)
        tl.store(out + 1, h)
        tl.store(out + 2, 0.0)
        angle = _turns(w * of_w + h * of_h)
        tl.store(features + row * 2 * SIZE_HALF + f, tl.cos(angle).to(features.dtype.element_ty))
        tl.store(features + row * 2 * SIZE_HALF + SIZE_HALF + f, tl.sin(angle).to(features.dtype.element_ty))
    elif phase <= _Y:
        x = tl.load(hidden + row * hidden_stride + d, mask=real, other=0.0).to(tl.float32)
        score = _summed(coords, coord_bias, row, rows, 0, COORDS, COORDS, COORD_SPLIT_K)
        coord_value = tl.argmax(score, 0).to(tl.float32) / COORDS
        margin = coord_value
        if phase == _X_OR_EOS:
            centred = tl.where(real, x - tl.sum(x, 0) / DIM, 0.0)
            rstd = tl.rsqrt(tl.sum(centred * centred, 0) / DIM + EPS)
            normed = centred * rstd * g.to(tl.float32) + s.to(tl.float32)
            normed = normed.to(hidden.dtype.element_ty).to(tl.float32)
            coord = tl.sum(normed * to_coord.to(tl.float32), 0) + bias_coord
            eos = tl.sum(normed * to_eos.to(tl.float32), 0) + bias_eos
            margin = coord - eos
        tl.store(out, margin)
        tl.store(out + 1, coord_value)
        tl.store(out + 2, coord_value)
        angle = _turns(coord_value * of_coord)
        tl.store(features + row * 2 * SIZE_HALF + c, tl.cos(angle).to(features.dtype.element_ty))
        tl.store(features + row * 2 * SIZE_HALF + COORD_HALF + c, tl.sin(angle).to(features.dtype.element_ty))


@triton.jit(do_not_specialize=["rows"])  # else it is compiled for 1, for multiples of 16 and for others
def _encode_kernel(
    features,
    phases,
    batch_slots,
    coord_weight,
    coord_bias,
    size_weight,
    size_bias,
    state,
    rows,
    DIM: tl.constexpr,
    COORD: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a tile of the input embeddings of the next step: BLOCK_M rows, BLOCK_N columns.

    The phase of each row selects the encoder for coordinates or for sizes.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    phase = tl.load(phases + m, mask=m < rows, other=-1)
    batch_slot = tl.load(batch_slots + m, mask=m < rows, other=0).to(tl.int64)
    k, j = tl.arange(0, COORD), tl.arange(0, SIZE)
    to_coord = tl.load(coord_weight + n[:, None] * COORD + k[None, :])
    to_size = tl.load(size_weight + n[:, None] * SIZE + j[None, :])
    of_coord = tl.load(coord_bias + n).to(tl.float32)
    of_size = tl.load(size_bias + n).to(tl.float32)
    if PDL:
        pdl_wait()
    is_coord = (phase >= 0) & (phase <= _Y)
    is_size = phase == _SIZE
    a = tl.load(features + m[:, None] * SIZE + k[None, :], mask=is_coord[:, None], other=0.0)
    b = tl.load(features + m[:, None] * SIZE + j[None, :], mask=is_size[:, None], other=0.0)
    acc = tl.dot(a, tl.trans(to_coord)) + tl.where(is_coord[:, None], of_coord[None, :], 0.0)
    acc = tl.dot(b, tl.trans(to_size), acc) + tl.where(is_size[:, None], of_size[None, :], 0.0)
    at = state + batch_slot[:, None] * DIM + n[None, :]
    tl.store(at, acc.to(state.dtype.element_ty), mask=(is_coord | is_size)[:, None])


def supports(coord_bins: int, size_bins: int, coord_features: int, size_features: int, dim: int) -> bool:
    """Return whether the region sampling kernels support region heads of these widths."""
    powers = all(n >= 32 and n & (n - 1) == 0 for n in (coord_bins, size_bins, coord_features, size_features))
    return powers and coord_features <= size_features and dim % 32 == 0


def sample(
    hidden: torch.Tensor,
    phases: torch.Tensor,
    norm: torch.nn.LayerNorm,
    coord_eos: tuple[torch.Tensor, torch.Tensor],
    coords: Scores,
    sizes: Scores,
    coord_features: torch.Tensor,
    size_features: torch.Tensor,
    size_values: torch.Tensor,
    sampled: torch.Tensor,
    features: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Sample coordinates or sizes for the rows of detect and point tasks. Rows of text tasks are skipped.

    Args:
        hidden: (rows, dim) hidden states before the last norm.
        phases: (rows,) int32 `Phase`.
        norm: last layer norm of the text decoder.
        coord_eos: weight (2, dim) and bias (2,) for the logits of the coordinate token and the end token.
        coords: logits (rows, bins), used in the phases X_OR_EOS and Y.
        sizes: logits (rows, 2 · bins), used in the phase SIZE.
        coord_features: float32 (1, n) Fourier frequencies.
        size_features: float32 (2, m) Fourier frequencies.
        size_values: (bins,) float32 size of each bin as a fraction of the image.
        sampled: (rows, 3) float32 sampled values, overwritten; see `OutputState.commit`.
        features: (rows, 2 m) output: cosines and sines. Coordinates use the first 2 n columns.
        pdl: whether to use programmatic dependent launch, see `kernels.common`.
    """
    (coord_scores, coord_bias), (size_scores, size_bias) = coords, sizes
    _sample_kernel[(hidden.shape[0],)](
        hidden,
        hidden.stride(0),
        phases,
        norm.weight,
        norm.bias,
        *coord_eos,
        coord_scores,
        coord_bias,
        size_scores,
        size_bias,
        coord_features,
        size_features,
        size_values,
        sampled,
        features,
        len(hidden),
        DIM=hidden.shape[1],
        DIM_BLOCK=triton.next_power_of_2(hidden.shape[1]),
        COORDS=len(coord_bias),
        COORD_SPLIT_K=len(coord_scores),
        SIZES=len(size_bias) // 2,
        SIZE_SPLIT_K=len(size_scores),
        COORD_HALF=coord_features.shape[1],
        SIZE_HALF=size_features.shape[1],
        EPS=norm.eps,
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )


def encode(
    features: torch.Tensor,
    phases: torch.Tensor,
    batch_slots: torch.Tensor,
    coord: torch.nn.Linear,
    size: torch.nn.Linear,
    state: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Write the embedding of each row's sampled coordinate or size to its batch slot of `state`. Text rows are skipped.

    Args:
        features: (rows, 2 m) Fourier features from `sample`.
        phases: (rows,) int32 `Phase`.
        batch_slots: (rows,) int32 index into `state`.
        coord: linear encoder of coordinates.
        size: linear encoder of sizes.
        state: (batch_slots, dim), contiguous, overwritten.
        pdl: whether to use programmatic dependent launch, see `kernels.common`.
    """
    rows, block = features.shape[0], 16
    _encode_kernel[(state.shape[1] // 32, triton.cdiv(rows, block))](
        features,
        phases,
        batch_slots,
        coord.weight,
        coord.bias,
        size.weight,
        size.bias,
        state,
        rows,
        DIM=state.shape[1],
        COORD=coord.in_features,
        SIZE=size.in_features,
        BLOCK_M=block,
        BLOCK_N=32,
        PDL=pdl,
        num_warps=4,
        **pdl_options(pdl),
    )
