"""The text decoder: parallel attention and MLP from one norm, partial rotary positions, bidirectional over the prefix.

Knows nothing of pictures, prompts or sampling: embeddings in, hidden states out.
Behaviour after the public Apache-2.0 reference implementation of Moondream (github.com/vikhyat/moondream).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from .config import TextConfig
from .layers import Mlp

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each (rows or nothing, length, 1, rotary_dim / 2)."""


class KVCache:
    """Keys and values of `rows` sequences, each (n_layers, rows, n_kv_heads, capacity, head_dim)."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    @classmethod
    def empty(cls, config: TextConfig, rows: int, capacity: int, like: torch.Tensor) -> KVCache:
        """A cache of zeros with the dtype and device of `like`."""
        shape = (config.n_layers, rows, config.n_kv_heads, capacity, config.head_dim)
        return cls(like.new_zeros(shape), like.new_zeros(shape))

    def fork(self, rows: int, capacity: int) -> KVCache:
        """Copy a one-row cache into `rows` rows with room for `capacity` positions."""

        def grow(one: torch.Tensor) -> torch.Tensor:
            grown = one.new_zeros((one.shape[0], rows, one.shape[2], capacity, one.shape[4]))
            grown[:, :, :, : one.shape[3]] = one
            return grown

        return KVCache(grow(self.keys), grow(self.values))

    def rows(self, index: torch.Tensor) -> KVCache:
        """Copy of the given rows."""
        return KVCache(self.keys[:, index], self.values[:, index])

    def upto(self, length: int) -> KVCache:
        """View of the first `length` positions."""
        return KVCache(self.keys[:, :, :, :length], self.values[:, :, :, :length])


class Slot:
    """One layer of a cache, and where its next entries go: (rows, 1) row and (rows, length) position indices."""

    __slots__ = ("at", "keys", "values")

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.keys, self.values, self.at = keys, values, at

    def write(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put in new keys and values (rows, length, heads, head_dim); all of them (rows, heads, capacity, head_dim)."""
        self.keys.transpose(1, 2)[self.at] = k
        self.values.transpose(1, 2)[self.at] = v
        return self.keys, self.values


class Attention(nn.Module):
    """Self-attention with rotary positions on the first half of each head, keys and values kept in a cache."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.dim, (config.n_heads + 2 * config.n_kv_heads) * config.head_dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, mask: torch.Tensor | None, slot: Slot | None
    ) -> torch.Tensor:
        """Attend from x (rows, length, dim) to all that the slot holds, x included; to x alone without a slot."""
        config = self.config
        heads = self.qkv(x).unflatten(-1, (-1, config.head_dim))
        turned, v = heads.split([config.n_heads + config.n_kv_heads, config.n_kv_heads], dim=2)
        q, k = rotate(turned, rotation).split([config.n_heads, config.n_kv_heads], dim=2)
        k, v = (k.transpose(1, 2), v.transpose(1, 2)) if slot is None else slot.write(k, v)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=config.n_heads != config.n_kv_heads
        )
        return self.proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def remember(self, x: torch.Tensor, rotation: Rotation, slot: Slot) -> None:
        """Write x's keys and values and go no further: all that the last block owes an image's prefix."""
        config, start = self.config, self.config.n_heads * self.config.head_dim
        heads = F.linear(x, self.qkv.weight[start:], self.qkv.bias[start:]).unflatten(-1, (-1, config.head_dim))
        k, v = heads.chunk(2, dim=2)
        slot.write(rotate(k, rotation), v)


class Block(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(config.dim)
        self.attn = Attention(config)
        self.mlp = Mlp(config.dim, config.ff_dim, config.dim)

    def forward(
        self, x: torch.Tensor, rotation: Rotation, mask: torch.Tensor | None, slot: Slot | None
    ) -> torch.Tensor:
        """Map (rows, length, dim) to the same shape."""
        normed = self.ln(x)
        return x + self.attn(normed, rotation, mask, slot) + self.mlp(normed)  # type: ignore[no-any-return]


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

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Embeddings (..., dim) of token ids (...)."""
        return F.embedding(ids, self.wte)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the blocks.

        Args:
            x: (rows, length, dim) embeddings.
            positions: (rows, length) int64 positions of x in their sequences.
            cache: receives x's keys and values at these positions; everything before them must be there. None keeps
                nothing: x holds whole sequences (training).
            mask: bool, broadcastable to (rows, heads, length, keys), True where a key is seen. By default every
                position sees itself and what is before it, and the first `prefix_attn` positions see each other.

        Returns:
            (rows, length, dim) hidden states, before the last norm.
        """
        rows, length, _ = x.shape
        rotation = (self.cosine[positions].unsqueeze(2), self.sine[positions].unsqueeze(2))
        if mask is None:
            seen = torch.arange(length if cache is None else cache.keys.shape[3], device=x.device)
            own, prefix = positions.unsqueeze(-1), self.config.prefix_attn
            mask = ((seen <= own) | ((seen < prefix) & (own < prefix))).unsqueeze(1)
        at = torch.arange(rows, device=x.device).unsqueeze(1), positions
        for layer, block in enumerate(self.blocks):
            slot = None if cache is None else Slot(cache.keys[layer], cache.values[layer], at)
            x = block(x, rotation, mask, slot)
        return x

    def remember(self, x: torch.Tensor, cache: KVCache) -> None:
        """Fill a cache with sequences that begin at position 0 and see themselves both ways: images.

        Nobody reads the hidden states of an image, so the last block stops at its keys and values.

        Args:
            x: (rows, length, dim) embeddings of the whole prefix.
            cache: of capacity `length`.
        """
        rows, length, _ = x.shape
        positions = torch.arange(length, device=x.device)
        rotation = (self.cosine[:length].unsqueeze(1), self.sine[:length].unsqueeze(1))
        at = torch.arange(rows, device=x.device).unsqueeze(1), positions.expand(rows, -1)
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            slot = Slot(cache.keys[layer], cache.values[layer], at)
            if layer == len(self.blocks) - 1:
                block.attn.remember(block.ln(x), rotation, slot)
            else:
                x = block(x, rotation, None, slot)

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
