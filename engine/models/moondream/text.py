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


class Attention(nn.Module):
    """Self-attention with rotary positions on the first half of each head, keys and values kept in a cache."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.dim, (config.n_heads + 2 * config.n_kv_heads) * config.head_dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(
        self,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        write: tuple[torch.Tensor, torch.Tensor] | None,
        keys: torch.Tensor | None,
        values: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend. `write` = (row, position) indices of x's entries in the layer's `keys` and `values`."""
        config = self.config
        rows, length, _ = x.shape
        heads = self.qkv(x).view(rows, length, -1, config.head_dim)
        turned, v = heads.split([config.n_heads + config.n_kv_heads, config.n_kv_heads], dim=2)
        turned = rotate(turned, rotation)
        q, k = turned.split([config.n_heads, config.n_kv_heads], dim=2)
        if keys is not None and values is not None and write is not None:
            keys.transpose(1, 2)[write] = k
            values.transpose(1, 2)[write] = v
            k, v = keys, values
        else:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, enable_gqa=config.n_heads != config.n_kv_heads
        )
        return self.proj(out.transpose(1, 2).reshape(rows, length, -1))  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(config.dim)
        self.attn = Attention(config)
        self.mlp = Mlp(config.dim, config.ff_dim, config.dim)


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
            at, prefix = positions.unsqueeze(-1), self.config.prefix_attn
            mask = ((seen <= at) | ((seen < prefix) & (at < prefix))).unsqueeze(1)
        write = None if cache is None else (torch.arange(rows, device=x.device).unsqueeze(1), positions)
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            keys, values = (None, None) if cache is None else (cache.keys[layer], cache.values[layer])
            normed = block.ln(x)
            x = x + block.attn(normed, rotation, mask, write, keys, values) + block.mlp(normed)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores (..., vocab_size) of the next token from hidden states (..., dim)."""
        return self.lm_head(self.post_ln(hidden))  # type: ignore[no-any-return]


def rotation_table(config: TextConfig, theta: float = 10000.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines (max_context, rotary_dim / 2) of rotary positions (Su et al. 2021, arXiv:2104.09864)."""
    # In numpy: under a meta device, where models are laid out before their weights come, torch.arange costs a second.
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)
    angles = np.arange(config.max_context, dtype=np.float32)[:, None] / np.float32(theta) ** exponents
    return torch.from_numpy(np.cos(angles)), torch.from_numpy(np.sin(angles))


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn the leading dimensions of x (rows, length, heads, head_dim) by (rows, length, 1, rotary_dim / 2) angles."""
    cosine, sine = rotation
    half = cosine.shape[-1]
    real, imaginary, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (real * cosine - imaginary * sine, real * sine + imaginary * cosine, rest)
    return torch.cat([part.to(x.dtype) for part in turned], dim=-1)
