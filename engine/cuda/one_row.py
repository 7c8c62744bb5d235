"""Decoder blocks on CUDA for a single row.

The kernels of a block, in order, separated by arrows:

    dense    norm, QKV, MLP fc1 → attention, MLP fc2 → attention projection
    experts  norm, QKV, attention temperature, router → attention → fc1, attention projection → fc2

The matrix products are GEMVs, fused with layer norm and residual addition. fc1 of the experts runs concurrently with
attention. Each kernel loads its weights before the previous kernel has ended (`kernels.common`). Steps with more rows
use `decoder`.

| on an H200 | bf16 | FP8 |
|---|---|---|
| step of Moondream 2 | 0.80 ms | 0.53 ms |
| step of Moondream 2, MLP not concurrent with attention | 0.83 ms | 0.59 ms |
| layer of Moondream 3 (with experts) | 40.6 µs | 24.4 µs |
| layer of Moondream 3, kernels of `decoder` | 44.7 µs | 38.2 µs |
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from saccade.engine.cuda.layers import PackedBlocks, PackedLayer
from saccade.engine.cuda.paged_cache import LayerCache
from saccade.engine.kernels import gemv
from saccade.engine.kernels.moe import one_row
from saccade.engine.kernels.moe.one_row import IntoShape


class Shapes(NamedTuple):
    """Tile sizes of the GEMV kernels of a decoder block."""

    into: gemv.Shape
    into_with_tau: IntoShape
    experts: one_row.Shape
    out: gemv.Shape


SHAPES = {
    False: Shapes(gemv.Shape(8, 4, True), IntoShape(8, 8, 4), one_row.Shape(4, 4, 2, 4), gemv.Shape(4, 4, True)),
    True: Shapes(gemv.Shape(16, 4, True), IntoShape(32, 4, 8), one_row.Shape(4, 2, 8, 8), gemv.Shape(4, 4, True)),
}
"""Tile sizes, with and without FP8 weights. All programs of fc2 can run on a GPU at the same time."""
MLP_N = 2
"""Outputs per program of the dense MLP's output GEMV, which runs concurrently with attention."""


class OneRow:
    """Decoder blocks for a single row, with their scratch buffers.

    Args:
        blocks: blocks of the decoder.
        logits: (layers, rows, experts) float32 buffer for router logits, or None without experts. Only row 0 is used.
    """

    def __init__(self, blocks: PackedBlocks, logits: torch.Tensor | None) -> None:
        text, like = blocks.text, blocks.layers[0].into.bias
        self.blocks, self.shapes = blocks, SHAPES[blocks.fp8]

        def scratch(*shape: int, dtype: torch.dtype = like.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=like.device)

        # In mixture-of-experts models, FP8 weights are multiplied in float16.
        row = torch.float16 if blocks.fp8 and text.moe is not None else like.dtype
        self.heads = scratch(1, blocks.heads)
        self.seen, self.mlp_inner = scratch(1, text.dim, dtype=row), scratch(1, text.ff_dim, dtype=row)
        self.delta = scratch(text.dim, dtype=torch.float32)
        if text.moe is not None:
            assert logits is not None
            top = text.moe.experts_per_token
            self.chosen = [one_row.Chosen(own[:1], top, text.dim, row) for own in logits]
            self.inner = scratch(top, text.moe.expert_inner_dim, dtype=row)
            parts = blocks.heads // self.shapes.into_with_tau.block_n
            self.products = scratch(parts, 1, 2 * text.n_heads, dtype=torch.float32)


def supports(blocks: PackedBlocks) -> bool:
    """Return whether the single-row kernels support this decoder."""
    text = blocks.text
    if not gemv.supports(text.dim, text.dim, text.ff_dim) or text.dim % (MLP_N * text.n_heads):
        return False
    if text.moe is None:
        return not text.tau and gemv.supports(blocks.heads + text.ff_dim, text.dim)
    experts, into = text.moe.num_experts, SHAPES[blocks.fp8].into_with_tau
    if any(layer.experts is not None and (layer.experts.scales is not None) != blocks.fp8 for layer in blocks.layers):
        return False  # one kernel computes the products of the experts and of attention
    widths = text.dim, blocks.heads, text.ff_dim, 2 * text.n_heads, text.moe.expert_inner_dim
    return one_row.supports(*widths, experts, blocks.top, into)


class OneRowOps:
    """Operations of a decoder block (`BlockOps`) for a single row.

    Args:
        row: decoder blocks with scratch buffers.
        x: (1, dim) residual, overwritten.
        rows: positions, owners and tables; see `Runner.forward_tokens`.
        pdl: whether to use programmatic dependent launch (PDL).
    """

    def __init__(
        self, row: OneRow, x: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], pdl: bool
    ) -> None:
        self._row, self.x, self._rows, self._pdl = row, x, rows, pdl

    def norm(self, layer: PackedLayer) -> torch.Tensor:
        """Return the residual stream without layer norm. The kernel of `heads` applies the norm."""
        return self.x

    def heads(self, layer: PackedLayer, normed: torch.Tensor, kv_only: bool) -> torch.Tensor:
        """Compute layer norm, queries, keys and values, and fc1 of a dense MLP or the router of the experts."""
        row, into = self._row, layer.into
        weights = into.weight, into.scale, into.bias
        if layer.temperature is None:
            gemv.norm_gemv(normed, layer.norm, *weights, row.heads, row.mlp_inner, row.shapes.into, pdl=self._pdl)
            return row.heads
        one_row.row_into(
            normed,
            layer.norm,
            *weights,
            layer.temperature[0],
            None if layer.experts is None else layer.experts.router,
            row.heads,
            row.mlp_inner,
            row.products,
            row.chosen[layer.number],
            row.shapes.into_with_tau,
            pdl=self._pdl,
        )
        return row.heads

    def temper(self, layer: PackedLayer, heads: torch.Tensor) -> torch.Tensor:
        """Return `heads` unchanged, because the attention kernel applies the attention temperature."""
        return heads

    def write_kv(self, layer: PackedLayer, heads: torch.Tensor, cache: LayerCache) -> None:
        """Raise NotImplementedError. For a single row, the attention kernel stores keys and values."""
        raise NotImplementedError

    def attend(self, layer: PackedLayer, heads: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        """Return the attention output. In a dense block, the same kernel also computes fc2 of the MLP."""
        row, dim, dense = self._row, self._row.blocks.text.dim, layer.experts is None
        row.blocks.attention.attend(
            heads,
            *self._rows,
            cache,
            row.seen,
            write=True,
            temperature=None if layer.temperature is None else (row.products, layer.temperature[1]),
            beside=gemv.Beside(row.mlp_inner, layer.out.weight[:, dim:], row.delta, MLP_N) if dense else None,
            pdl=self._pdl,
            early=not dense,  # fc1 waits for the router, not for attention
        )
        return row.seen

    def add(self, layer: PackedLayer, seen: torch.Tensor, normed: torch.Tensor) -> None:
        """Add the projected attention output and the output of the MLP or experts to the residual."""
        row, out, shapes = self._row, layer.out, self._row.shapes
        if layer.experts is not None:
            experts, chosen = layer.experts, row.chosen[layer.number]
            weights = experts.fc1, experts.fc2, experts.scales, row.inner, seen, out.weight, out.scale, out.bias
            one_row.add_experts(chosen, *weights, row.delta, self.x, shapes.experts, pdl=self._pdl)
            return
        dim = row.blocks.text.dim
        gemv.add_gemv(seen, self.x, out.weight, out.scale, out.bias, dim, shapes.out, delta=row.delta, pdl=self._pdl)
