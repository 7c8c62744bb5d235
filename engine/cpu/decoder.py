"""The text decoder in few and large operations, for a CPU, where a small one costs as much to start as to run.

Does what `TextDecoder` does, with its weights, and only in evaluation. Knows nothing of steps, slots or requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.cpu.onednn import Linear
from saccade.engine.cpu.paged_cache import CpuPagedLayer, CpuPagedRows
from saccade.engine.models.moondream.text import Block, Joined, Temperature, TextDecoder, join, run_blocks

_Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines (rows, length, 1, 1, rotary_dim / 2) and sines (rows, length, 1, 2, rotary_dim / 2), first the negative."""


class FusedDecoder:
    """A decoder whose attention and MLP read through one matrix, and write through another.

    Args:
        text: the decoder. Its modules are views of the joined weights from here on: nothing is stored twice, but for
            prefixes.
        prefixes: what these are multiplied in, the decoder's own type by default. In bfloat16 nano's take 3.9 ms, not
            5.3, and answers on val have the same AP50 and AP to .001 (`python -m training.score`).
    """

    def __init__(self, text: TextDecoder, prefixes: torch.dtype | None = None) -> None:
        blocks = [(block, join(block)) for block in text.blocks if isinstance(block, Block)]
        self._layers = [_Layer(*block, text.wte.dtype) for block in blocks]
        rounded = prefixes not in (None, text.wte.dtype)
        self._for_prefixes = [_Layer(*block, prefixes) for block in blocks] if rounded else self._layers
        self._cosine = text.cosine.unsqueeze(1)
        self._sine = torch.stack([-text.sine, text.sine], dim=1)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, cache: CpuPagedRows, mask: torch.Tensor
    ) -> torch.Tensor:
        """As `TextDecoder.forward`; the mask is one that is added."""
        rotation = self._cosine[positions].unsqueeze(2), self._sine[positions].unsqueeze(2)
        ops = _FusedOps(x, positions, rotation, mask)
        run_blocks(self._layers, cache.layers(positions), ops)
        return ops.x

    def write_kv(self, x: torch.Tensor, cache: CpuPagedRows) -> None:
        """As `TextDecoder.write_kv`."""
        rows, length, _ = x.shape
        rotation = self._cosine[:length].unsqueeze(1), self._sine[:length].unsqueeze(1)
        positions = torch.arange(length)
        ops = _FusedOps(x, positions, rotation, None)
        run_blocks(self._for_prefixes, cache.layers(positions.expand(rows, -1)), ops, kv_only=True)


class _Layer:
    """One block's weights."""

    __slots__ = ("experts", "into", "into_kv", "kept", "norm", "out", "queries", "split", "temperature", "width")

    def __init__(self, block: Block, joined: Joined, dtype: torch.dtype | None) -> None:
        config = block.attn.config
        self.norm: nn.LayerNorm = block.ln
        self.temperature: Temperature | None = block.temperature
        self.width, self.queries, self.kept = config.head_dim, config.n_heads, config.n_kv_heads
        self.split = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        self.into = Linear(joined.into, joined.into_bias, dtype)
        self.out = Linear(joined.out, joined.out_bias, dtype)
        # Where keys and values are all that is wanted; a temperature is computed from the queries, too.
        start = 0 if self.temperature is not None else self.queries * self.width
        self.into_kv = Linear(joined.into[start : self.split], joined.into_bias[start : self.split], dtype)
        self.experts = joined.experts


_Heads = tuple[torch.Tensor, torch.Tensor]
"""Heads (rows, length, heads, head_dim), queries first, and what goes into the GELU (rows, length, ff_dim or 0)."""


@dataclass(slots=True)
class _FusedOps:
    """`BlockOps` on x (rows, length, dim); without a mask x attends to itself only."""

    x: torch.Tensor
    positions: torch.Tensor
    rotation: _Rotation
    mask: torch.Tensor | None

    def norm(self, layer: _Layer) -> torch.Tensor:
        norm = layer.norm
        return F.layer_norm(self.x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)

    def heads(self, layer: _Layer, normed: torch.Tensor, kv_only: bool) -> _Heads:
        wide = (layer.into_kv if kv_only else layer.into)(normed)
        split = min(layer.split, wide.shape[-1])
        heads, inner = wide.split([split, wide.shape[-1] - split], dim=-1)
        return heads.unflatten(-1, (-1, layer.width)), inner

    def temper(self, layer: _Layer, heads: _Heads) -> _Heads:
        assert layer.temperature is not None
        every = heads[0]
        for_q, for_v = layer.temperature(every.flatten(2), self.positions).unsqueeze(-1).unbind(-3)
        every[:, :, : layer.queries].mul_(for_q)
        every[:, :, -layer.kept :].mul_(for_v)
        return heads

    def write_kv(self, layer: _Layer, heads: _Heads, cache: CpuPagedLayer) -> None:
        kv = heads[0][:, :, -2 * layer.kept :]
        _rotate(kv[:, :, : layer.kept], self.rotation)
        cache.write_both(kv)

    def attend(self, layer: _Layer, heads: _Heads, cache: CpuPagedLayer) -> _Heads:
        """What attention saw (rows, length, dim), and what goes into the GELU."""
        every, inner = heads
        _rotate(every[:, :, : -layer.kept], self.rotation)
        cache.write_both(every[:, :, layer.queries :])
        q, k, v = every.transpose(1, 2).split([layer.queries, layer.kept, layer.kept], dim=1)
        if self.mask is not None:
            k, v = cache.read()
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=layer.queries != layer.kept)
        return seen.transpose(1, 2).flatten(2), inner

    def add(self, layer: _Layer, seen: _Heads, normed: torch.Tensor) -> None:
        both, inner = seen
        if layer.experts is None:
            both = torch.cat([both, F.gelu(inner, approximate="tanh")], dim=-1)
        self.x = layer.out(both, add=self.x)
        if layer.experts is not None:
            self.x = self.x + layer.experts(normed)


def _rotate(x: torch.Tensor, rotation: _Rotation) -> None:
    """`text.rotate` of x (rows, length, heads, head_dim) in its place."""
    cosine, sine = rotation
    half = cosine.shape[-1]
    pairs = x[..., : 2 * half].view(*x.shape[:-1], 2, half)  # real and imaginary parts
    turned = pairs.flip(-2)
    pairs.mul_(cosine).addcmul_(turned, sine)
