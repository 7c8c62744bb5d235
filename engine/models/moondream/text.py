"""The text decoder: parallel attention and MLP from one norm, partial rotary positions, bidirectional over the prefix.

Knows nothing of images, prompts or sampling: embeddings in, hidden states out.
Behaviour after the public Apache-2.0 reference implementation of Moondream (github.com/vikhyat/moondream).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.models.moondream.config import TextConfig
from saccade.engine.models.moondream.layers import Mlp
from saccade.engine.models.protocol import Cache, CacheLayer

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each (rows or nothing, length, 1, rotary_dim / 2)."""


class Attention(nn.Module):
    """Self-attention with rotary positions on the first half of each head, keys and values kept in a cache."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.dim, (config.n_heads + 2 * config.n_kv_heads) * config.head_dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, mask: torch.Tensor | None, layer: CacheLayer | None, alone: bool
    ) -> torch.Tensor:
        """Attend from x (rows, length, dim), kept in the cache if any: to all of it, or if `alone` to x only."""
        config = self.config
        heads = self.qkv(x).unflatten(-1, (-1, config.head_dim))
        turned, v = heads.split([config.n_heads + config.n_kv_heads, config.n_kv_heads], dim=2)
        q, k = rotate(turned, rotation).split([config.n_heads, config.n_kv_heads], dim=2)
        if layer is not None:
            layer.write(k, v)
        k, v = (k.transpose(1, 2), v.transpose(1, 2)) if layer is None or alone else layer.read()
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=config.n_heads != config.n_kv_heads
        )
        return self.proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def write_kv(self, x: torch.Tensor, rotation: Rotation, layer: CacheLayer) -> None:
        """Write x's keys and values and go no further: all that an image's prefix needs of the last block."""
        config, start = self.config, self.config.n_heads * self.config.head_dim
        heads = F.linear(x, self.qkv.weight[start:], self.qkv.bias[start:]).unflatten(-1, (-1, config.head_dim))
        k, v = heads.chunk(2, dim=2)
        layer.write(rotate(k, rotation), v)


class Block(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(config.dim)
        self.attn = Attention(config)
        self.mlp = Mlp(config.dim, config.ff_dim, config.dim)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        mask: torch.Tensor | None,
        layer: CacheLayer | None,
        alone: bool = False,
    ) -> torch.Tensor:
        """Map (rows, length, dim) to the same shape; the rest as for `Attention`."""
        normed = self.ln(x)
        return x + self.attn(normed, rotation, mask, layer, alone) + self.mlp(normed)  # type: ignore[no-any-return]


@dataclass(slots=True, frozen=True)
class Joined:
    """A block's four matrices as two: both halves of it read the same input, and add to the same residual.

    Attributes:
        into: (heads and MLP, dim) weight; the heads first.
        into_bias: (heads and MLP,).
        out: (dim, dim + ff_dim) weight; attention's first.
        out_bias: (dim,).
    """

    into: torch.Tensor
    into_bias: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor


@torch.no_grad()
def join(block: Block) -> Joined:
    """Join a block's matrices. Its modules are views of the joined weights from here on: nothing is stored twice."""
    attn, mlp, dim = block.attn, block.mlp, block.attn.config.dim
    into, out = torch.cat([attn.qkv.weight, mlp.fc1.weight]), torch.cat([attn.proj.weight, mlp.fc2.weight], dim=1)
    split = attn.qkv.weight.shape[0]
    attn.qkv.weight.data, mlp.fc1.weight.data = into[:split], into[split:]
    attn.proj.weight.data, mlp.fc2.weight.data = out[:, :dim], out[:, dim:]
    return Joined(into, torch.cat([attn.qkv.bias, mlp.fc1.bias]), out, attn.proj.bias + mlp.fc2.bias)


class TextDecoder(nn.Module):
    """Token embeddings, the blocks, and the output head."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.post_ln = nn.LayerNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab_size)
        cosine, sine = rotation_table(config)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    @property
    def n_block_weights(self) -> int:
        """Weights that each token is multiplied with."""
        return sum(parameter.numel() for parameter in self.blocks.parameters())

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings (..., dim) of token ids (...)."""
        return F.embedding(ids, self.wte)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the blocks.

        Args:
            x: (rows, length, dim) embeddings.
            positions: (rows, length) int64 positions of x in their sequences.
            cache: receives x's keys and values at these positions; everything before them must be there. None keeps
                nothing: x holds whole sequences (training).
            mask: bool, broadcastable to (rows, heads, length, keys), True where a key is seen; or numbers that are
                added to what a key scores. By default every position sees itself and what is before it, and the first
                `prefix_attn` positions see each other.

        Returns:
            (rows, length, dim) hidden states, before the last norm.
        """
        rotation = (self.cosine[positions].unsqueeze(2), self.sine[positions].unsqueeze(2))
        if mask is None:
            keys = torch.arange(x.shape[1], device=x.device) if cache is None else cache.key_positions
            own, prefix = positions.unsqueeze(-1), self.config.prefix_attn
            mask = ((keys <= own) | ((keys < prefix) & (own < prefix))).unsqueeze(1)
        layers = [None] * len(self.blocks) if cache is None else cache.layers(positions)
        for block, layer in zip(self.blocks, layers, strict=True):
            x = block(x, rotation, mask, layer)
        return x

    def write_kv(self, x: torch.Tensor, cache: Cache) -> None:
        """Keep sequences that begin at position 0 and attend in both directions: images.

        The hidden states of an image are not read, so the last block stops at its keys and values.

        Args:
            x: (rows, length, dim) embeddings of the whole prefix.
            cache: with room for `length`.
        """
        rows, length, _ = x.shape
        rotation = (self.cosine[:length].unsqueeze(1), self.sine[:length].unsqueeze(1))
        layers = cache.layers(torch.arange(length, device=x.device).expand(rows, -1))
        for block, layer in zip(self.blocks[:-1], layers[:-1], strict=True):
            x = block(x, rotation, None, layer, alone=True)
        last = self.blocks[-1]
        assert isinstance(last, Block)
        last.attn.write_kv(last.ln(x), rotation, layers[-1])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores (..., vocab_size) of the next token from hidden states (..., dim)."""
        return self.lm_head(self.post_ln(hidden))  # type: ignore[no-any-return]


def rotation_table(config: TextConfig, theta: float = 10000.0) -> Rotation:
    """Cosines and sines (max_context, rotary_dim / 2) of rotary positions (Su et al. 2021, arXiv:2104.09864)."""
    # In numpy: under a meta device, where models are laid out before their weights come, torch.arange costs a second.
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)
    angles = np.arange(config.max_context, dtype=np.float32)[:, None] / np.float32(theta) ** exponents
    return torch.from_numpy(np.cos(angles)), torch.from_numpy(np.sin(angles))


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn the leading dimensions of x (rows, length, heads, head_dim) by (rows, length, 1, rotary_dim / 2) angles."""
    cosine, sine = rotation
    half = cosine.shape[-1]
    real, imaginary, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (real * cosine - imaginary * sine, real * sine + imaginary * cosine, rest)
    return torch.cat([part.to(x.dtype) for part in turned], dim=-1)
