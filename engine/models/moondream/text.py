"""Text decoder of Moondream.

In each block, attention and MLP are computed from the same normalized input. RoPE rotates a part of each head.
Attention is bidirectional in the image prefix. Moondream 3 adds an attention temperature and a mixture of experts.

`run_blocks` defines the sequence of operations for all backends. `TextDecoder` implements the operations with PyTorch
modules. The CPU and CUDA backends have faster implementations.

The results match the reference implementation of Moondream (github.com/vikhyat/moondream, Apache-2.0). The attention
temperature is that of vLLM's moondream3.py (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.models.moondream.config import TextConfig
from saccade.engine.models.moondream.layers import Experts, Mlp
from saccade.engine.models.protocol import Cache, CacheLayer

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines for RoPE, each (rows, length, 1, rotary_dim / 2) or (length, 1, rotary_dim / 2)."""


class Layer(Protocol):
    """Weights of a decoder block, stored in the format of one backend (such as PyTorch modules)."""

    @property
    def temperature(self) -> object | None:
        """Attention temperature of the decoder block, or None."""
        ...


L = TypeVar("L", bound=Layer, contravariant=True)
C = TypeVar("C", contravariant=True)


class BlockOps(Protocol[L, C]):
    """The operations of a decoder block, as a backend implements them.

    An instance stores the residual and the token positions. Each backend chooses its own format for the values that are
    passed from one operation to the next (normalized states, heads, attention output).
    """

    def norm(self, layer: L) -> Any:
        """Return the layer norm of the residual, which is the input of both attention and MLP."""
        ...

    def heads(self, layer: L, normed: Any, kv_only: bool) -> Any:
        """Return queries, keys and values before RoPE. If `kv_only` is True, a backend may omit the queries."""
        ...

    def temper(self, layer: L, heads: Any) -> Any:
        """Multiply queries and values by the attention temperature. Return queries, keys and values."""
        ...

    def write_kv(self, layer: L, heads: Any, cache: C) -> None:
        """Apply RoPE to the keys, and store keys and values in the KV cache. Attention is not computed."""
        ...

    def attend(self, layer: L, heads: Any, cache: C) -> Any:
        """Apply RoPE to queries and keys, store keys and values in the KV cache, and return the attention output."""
        ...

    def add(self, layer: L, seen: Any, normed: Any) -> None:
        """Add the projected attention output, and the output of the MLP or experts, to the residual."""
        ...


def run_blocks(layers: Iterable[L], caches: Sequence[C], ops: BlockOps[L, C], *, kv_only: bool = False) -> None:
    """Run the decoder blocks. Each block computes x += attention(norm(x)) + mlp(norm(x)).

    Args:
        layers: the blocks.
        caches: KV cache layer of each block.
        ops: operations of a backend.
        kv_only: whether the last block computes only keys and values.
    """
    for number, (layer, cache) in enumerate(zip(layers, caches, strict=True), start=1):
        last = kv_only and number == len(caches)
        normed = ops.norm(layer)
        heads = ops.heads(layer, normed, last)
        if layer.temperature is not None:
            heads = ops.temper(layer, heads)
        if last:
            ops.write_kv(layer, heads, cache)
            return
        ops.add(layer, ops.attend(layer, heads, cache), normed)


class Temperature(nn.Module):
    """Attention temperature of Moondream 3: for each head, a factor for the queries and a factor for the values.

    The factors depend on the token and its position. With p = ½ + sigmoid(alpha · log(position + 1)), the factor of a
    query is tanh(gelu(qkv) · wqᵀ) + p. The factor of a value uses wv instead of wq. GELU is exact. All computations are
    in float32.
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        heads, inner = config.n_heads, 3 * config.n_heads * config.head_dim
        self.approximate = "none" if config.gelu == "erf" else config.gelu
        self.alpha = nn.Parameter(torch.empty(heads))
        self.wq = nn.Parameter(torch.empty(heads, inner))
        self.wv = nn.Parameter(torch.empty(heads, inner))

    def forward(self, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the attention temperature factors (..., 2, heads) float32: for the queries, then for the values.

        Args:
            qkv: (..., 3 · heads · head_dim) before RoPE.
            positions: (...) positions in the sequences.
        """
        both = torch.cat([self.wq, self.wv]).float()
        by_token = F.linear(F.gelu(qkv.float(), approximate=self.approximate), both).tanh().unflatten(-1, (2, -1))
        by_position = 0.5 + (self.alpha.float() * (positions + 1.0).log().unsqueeze(-1)).sigmoid()
        factors: torch.Tensor = by_token + by_position.unsqueeze(-2)
        return factors


class Attention(nn.Module):
    """Weights of the text decoder's self-attention. RoPE rotates the first half of each head."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = nn.Linear(config.dim, (config.n_heads + 2 * config.n_kv_heads) * config.head_dim)
        self.proj = nn.Linear(config.dim, config.dim)
        if config.tau:
            self.tau = Temperature(config)


class Block(nn.Module):
    """Weights of one block of the text decoder. `number` is the index of the block."""

    def __init__(self, config: TextConfig, number: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(config.dim)
        self.attn = Attention(config)
        self.mlp: Mlp | Experts
        if config.moe is not None and number >= config.moe.start_layer:
            self.mlp = Experts(config.moe, config.dim, config.gelu)
        else:
            self.mlp = Mlp(config.dim, config.ff_dim, config.dim)

    @property
    def temperature(self) -> Temperature | None:
        """Attention temperature of the decoder block, or None."""
        return self.attn.tau if self.attn.config.tau else None


@dataclass(slots=True)
class _ModuleOps:
    """`BlockOps` with PyTorch modules, for any device and dtype. Gradients are supported.

    Attributes:
        x: (rows, length, dim) residual.
        positions: (rows, length) or (length,) token positions.
        rotation: RoPE tables for the positions.
        mask: attention mask; see `TextDecoder.forward`.
        alone: whether each sequence attends only to its tokens in x, without a KV cache.
    """

    x: torch.Tensor
    positions: torch.Tensor
    rotation: Rotation
    mask: torch.Tensor | None = None
    alone: bool = False

    def norm(self, layer: Block) -> torch.Tensor:
        return layer.ln(self.x)  # type: ignore[no-any-return]

    def heads(self, layer: Block, normed: torch.Tensor, kv_only: bool) -> torch.Tensor:
        return layer.attn.qkv(normed)  # type: ignore[no-any-return]

    def temper(self, layer: Block, heads: torch.Tensor) -> torch.Tensor:
        assert layer.temperature is not None
        config = layer.attn.config
        q, k, v = heads.unflatten(-1, (3, config.n_heads, config.head_dim)).unbind(-3)
        for_q, for_v = layer.temperature(heads, self.positions).unsqueeze(-1).unbind(-3)
        return torch.stack([(q * for_q).to(q.dtype), k, (v * for_v).to(v.dtype)], dim=-3).flatten(-3)

    def _rotated(self, layer: Block, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = layer.attn.config
        turned, v = heads.unflatten(-1, (-1, config.head_dim)).split(
            [config.n_heads + config.n_kv_heads, config.n_kv_heads], dim=2
        )
        q, k = rotate(turned, self.rotation).split([config.n_heads, config.n_kv_heads], dim=2)
        return q, k, v

    def write_kv(self, layer: Block, heads: torch.Tensor, cache: CacheLayer | None) -> None:
        _, k, v = self._rotated(layer, heads)
        if cache is not None:
            cache.write(k, v)

    def attend(self, layer: Block, heads: torch.Tensor, cache: CacheLayer | None) -> torch.Tensor:
        config = layer.attn.config
        q, k, v = self._rotated(layer, heads)
        if cache is not None:
            cache.write(k, v)
        k, v = (k.transpose(1, 2), v.transpose(1, 2)) if cache is None or self.alone else cache.read()
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=self.mask, enable_gqa=config.n_heads != config.n_kv_heads
        )
        return out.transpose(1, 2).flatten(2)

    def add(self, layer: Block, seen: torch.Tensor, normed: torch.Tensor) -> None:
        self.x = self.x + layer.attn.proj(seen) + layer.mlp(normed)


@dataclass(slots=True, frozen=True)
class Joined:
    """Concatenated weights of a decoder block: one input matrix and one output matrix for both attention and MLP.

    In a block with a mixture of experts, the matrices contain only the attention weights.

    Attributes:
        into: input weight (heads and MLP, dim); the rows of the attention heads come first.
        into_bias: (heads and MLP,) bias of the input matrix.
        out: output weight (dim, dim + ff_dim); the columns of attention come first.
        out_bias: (dim,) bias of the output matrix.
        experts: mixture of experts, or None.
    """

    into: torch.Tensor
    into_bias: torch.Tensor
    out: torch.Tensor
    out_bias: torch.Tensor
    experts: Experts | None


@torch.no_grad()
def join(block: Block) -> Joined:
    """Concatenate the matrices of attention and MLP in a dense block. The module weights become views of the result."""
    attn, mlp = block.attn, block.mlp
    if isinstance(mlp, Experts):
        qkv, proj = ((part.weight.detach(), part.bias.detach()) for part in (attn.qkv, attn.proj))
        return Joined(*qkv, *proj, mlp)
    into, out = torch.cat([attn.qkv.weight, mlp.fc1.weight]), torch.cat([attn.proj.weight, mlp.fc2.weight], dim=1)
    share(block, into, out)
    return Joined(into, torch.cat([attn.qkv.bias, mlp.fc1.bias]), out, attn.proj.bias + mlp.fc2.bias, None)


def share(block: Block, into: torch.Tensor, out: torch.Tensor) -> None:
    """Replace the weights of a decoder block's modules by views of the concatenated matrices, to save memory.

    Args:
        block: the decoder block, modified in place.
        into: (heads and MLP, dim) input matrix, of any dtype.
        out: (dim, dim + ff_dim) output matrix, of any dtype.
    """
    attn, mlp = block.attn, block.mlp
    split, dim = attn.qkv.out_features, attn.proj.in_features
    attn.qkv.weight.data, attn.proj.weight.data = into[:split], out[:, :dim]
    if isinstance(mlp, Mlp):
        mlp.fc1.weight.data, mlp.fc2.weight.data = into[split:], out[:, dim:]


class TextDecoder(nn.Module):
    """Text decoder of Moondream: token embeddings, decoder blocks and output head."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        self.blocks = nn.ModuleList(Block(config, number) for number in range(config.n_layers))
        self.post_ln = nn.LayerNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab_size)
        cosine, sine = rotation_table(config)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    @property
    def n_block_weights(self) -> int:
        """Number of decoder block parameters that are used for one token. Unselected experts are not counted."""
        weights = sum(parameter.numel() for parameter in self.blocks.parameters())
        for block in self._blocks():
            if isinstance(block.mlp, Experts):
                weights -= block.mlp.n_idle_weights
        return weights

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings (..., dim) of token IDs (...)."""
        return F.embedding(ids, self.wte)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cache: Cache | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the decoder blocks.

        Args:
            x: (rows, length, dim) embeddings.
            positions: (rows, length) int64 positions of x in their sequences.
            cache: KV cache that receives the keys and values of x, and contains those of all earlier positions. If
                None, x consists of whole sequences (training).
            mask: attention mask, broadcastable to (rows, heads, length, keys): either bool (True for visible keys), or
                numbers that are added to the attention scores. By default, attention is bidirectional among the first
                `prefix_attn` positions, then causal.

        Returns:
            (rows, length, dim) hidden states before the last norm.
        """
        rotation = (self.cosine[positions].unsqueeze(2), self.sine[positions].unsqueeze(2))
        if mask is None:
            keys = torch.arange(x.shape[1], device=x.device) if cache is None else cache.key_positions
            own, prefix = positions.unsqueeze(-1), self.config.prefix_attn
            mask = ((keys <= own) | ((keys < prefix) & (own < prefix))).unsqueeze(1)
        layers = [None] * len(self.blocks) if cache is None else cache.layers(positions)
        ops = _ModuleOps(x, positions, rotation, mask)
        run_blocks(self._blocks(), layers, ops)
        return ops.x

    def write_kv(self, x: torch.Tensor, cache: Cache) -> None:
        """Store the keys and values of image prefixes in the KV cache.

        A prefix (BOS and image tokens) starts at position 0 and has bidirectional attention. The last block computes
        only keys and values, because the hidden states of an image are not needed.

        Args:
            x: (rows, length, dim) embeddings of the whole prefixes.
            cache: KV cache with space for `length` positions.
        """
        rows, length, _ = x.shape
        rotation = (self.cosine[:length].unsqueeze(1), self.sine[:length].unsqueeze(1))
        layers = cache.layers(torch.arange(length, device=x.device).expand(rows, -1))
        ops = _ModuleOps(x, torch.arange(length, device=x.device), rotation, alone=True)
        run_blocks(self._blocks(), layers, ops, kv_only=True)

    def _blocks(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return next-token logits (..., vocab_size) for hidden states (..., dim)."""
        return self.lm_head(self.post_ln(hidden))  # type: ignore[no-any-return]


def rotation_table(config: TextConfig) -> Rotation:
    """Return the RoPE cosines and sines, each (max_context, rotary_dim / 2) (Su et al. 2021, arXiv:2104.09864)."""
    # Use NumPy: on the meta device, on which a model is built before loading, torch.arange would take a second.
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)
    angles = np.arange(config.max_context, dtype=np.float32)[:, None] / np.float32(config.rope_theta) ** exponents
    return torch.from_numpy(np.cos(angles)), torch.from_numpy(np.sin(angles))


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Apply RoPE to the first channels of x (rows, length, heads, dim).

    The cosines and sines in `rotation` have the shape (rows, length, 1, rotary_dim / 2).
    """
    cosine, sine = rotation
    half = cosine.shape[-1]
    real, imaginary, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (real * cosine - imaginary * sine, real * sine + imaginary * cosine, rest)
    return torch.cat([part.to(x.dtype) for part in turned], dim=-1)
