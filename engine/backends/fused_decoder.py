"""The text decoder in few and large operations, for a CPU, where a small one costs as much to start as to run.

Does what `TextDecoder` does, with its weights, and only in evaluation. Knows nothing of steps, slots or requests.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.backends.cpu_paged_cache import CpuPagedLayer, CpuPagedRows
from saccade.engine.backends.onednn import linear
from saccade.engine.models.moondream.text import Block, TextDecoder, join

_Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines (rows, length, 1, 1, rotary_dim / 2) and sines (rows, length, 1, 2, rotary_dim / 2), first the negative."""


class FusedDecoder:
    """A decoder whose attention and MLP read through one matrix, and write through another.

    Args:
        text: the decoder. Its modules are views of the joined weights from here on: nothing is stored twice.
    """

    def __init__(self, text: TextDecoder) -> None:
        self._layers = [_Layer(block) for block in text.blocks if isinstance(block, Block)]
        self._cosine = text.cosine.unsqueeze(1)
        self._sine = torch.stack([-text.sine, text.sine], dim=1)

    def __call__(
        self, x: torch.Tensor, positions: torch.Tensor, cache: CpuPagedRows, mask: torch.Tensor
    ) -> torch.Tensor:
        """As `TextDecoder.forward`; the mask is one that is added."""
        rotation = self._cosine[positions].unsqueeze(2), self._sine[positions].unsqueeze(2)
        for layer, kv in zip(self._layers, cache.layers(positions), strict=True):
            x = layer(x, rotation, kv, mask)
        return x

    def write_kv(self, x: torch.Tensor, cache: CpuPagedRows) -> None:
        """As `TextDecoder.write_kv`."""
        rows, length, _ = x.shape
        rotation = self._cosine[:length].unsqueeze(1), self._sine[:length].unsqueeze(1)
        *layers, last = cache.layers(torch.arange(length).expand(rows, -1))
        for layer, kv in zip(self._layers, layers, strict=False):
            x = layer(x, rotation, kv, None)
        self._layers[-1].write_kv(x, rotation, last)


class _Layer:
    """One block; arguments as for `Block`, but without a mask x attends to itself only."""

    def __init__(self, block: Block) -> None:
        config = block.attn.config
        self._norm, self._width = block.ln, config.head_dim
        self._queries, self._kept = config.n_heads, config.n_kv_heads
        self._split = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        joined = join(block)
        self._into, self._out = (joined.into, joined.into_bias), (joined.out, joined.out_bias)

    def __call__(
        self, x: torch.Tensor, rotation: _Rotation, kv: CpuPagedLayer, mask: torch.Tensor | None
    ) -> torch.Tensor:
        wide = linear(self._normed(x), *self._into)
        heads, inner = wide.split([self._split, wide.shape[-1] - self._split], dim=-1)
        heads = heads.view(*x.shape[:2], -1, self._width)
        _rotate(heads[:, :, : -self._kept], rotation)
        kv.write_both(heads[:, :, self._queries :])
        q, k, v = heads.transpose(1, 2).split([self._queries, self._kept, self._kept], dim=1)
        if mask is not None:
            k, v = kv.read()
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=self._queries != self._kept)
        inner = F.gelu(inner, approximate="tanh")
        return linear(torch.cat([seen.transpose(1, 2).flatten(2), inner], dim=-1), *self._out, add=x)

    def write_kv(self, x: torch.Tensor, rotation: _Rotation, kv: CpuPagedLayer) -> None:
        """Write x's keys and values and go no further."""
        start = self._queries * self._width
        weight, bias = (part[start : self._split] for part in self._into)
        new = linear(self._normed(x), weight, bias).view(*x.shape[:2], -1, self._width)
        _rotate(new[:, :, : self._kept], rotation)
        kv.write_both(new)

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        norm: nn.LayerNorm = self._norm
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _rotate(x: torch.Tensor, rotation: _Rotation) -> None:
    """`text.rotate` of x (rows, length, heads, head_dim) in its place."""
    cosine, sine = rotation
    half = cosine.shape[-1]
    pairs = x[..., : 2 * half].view(*x.shape[:-1], 2, half)  # real and imaginary parts
    turned = pairs.flip(-2)
    pairs.mul_(cosine).addcmul_(turned, sine)
