"""The text decoder on CUDA for few rows at a time: weights packed, four kernels a layer. Agrees with `PlainRunner`.

A step of one to 64 rows is a walk over the weights: 2.4 GB in bf16 for Moondream 2, 0.56 ms at an H200's 4.3 TB/s. Each
layer's four matrices are packed into two, as both halves of a block read the same input and add to the same residual:

    product into heads and MLP → attention (rotary positions, new entry, GELU) → product out of both → add and norm

The products are cuBLAS's: 17.6 and 16.3 µs for 8 rows of Moondream 2, floors 13.7 and 9.8; our own in Triton,
with norm and residual inside, took 27 and 21 (one H200). Needs Triton, bf16 or fp16, a GPU that Triton compiles for.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .cache import PagedPool
from .kernels import objects
from .kernels.attention import PagedAttention
from .kernels.norm import add_norm
from .models.moondream.model import Moondream
from .models.moondream.text import Block
from .models.moondream.vision import Block as VisionBlock
from .models.moondream.vision import VisionTower


def fits(model: Moondream) -> bool:
    """Whether the kernels take this model."""
    text, region = model.config.text, model.config.region
    return (
        model.dtype in (torch.bfloat16, torch.float16)
        and text.head_dim % 8 == 0
        and objects.fits(
            region.coord_out_dim, region.size_out_dim // 2, region.coord_feat_dim, region.size_feat_dim, text.dim
        )
    )


class _Layer:
    """One block's weights: into heads and MLP, and out of both."""

    __slots__ = ("bias_in", "bias_out", "into", "norm", "out")

    def __init__(self, block: Block, dim: int) -> None:
        attn, mlp = block.attn, block.mlp
        self.norm: nn.LayerNorm = block.ln
        self.into = torch.cat([attn.qkv.weight, mlp.fc1.weight])
        self.bias_in = torch.cat([attn.qkv.bias, mlp.fc1.bias])
        self.out = torch.cat([attn.proj.weight, mlp.fc2.weight], dim=1)
        self.bias_out = attn.proj.bias + mlp.fc2.bias
        # The modules look at the packed weights from here on: nothing is held twice.
        split = attn.qkv.weight.shape[0]
        attn.qkv.weight.data, mlp.fc1.weight.data = self.into[:split], self.into[split:]
        attn.proj.weight.data, mlp.fc2.weight.data = self.out[:, :dim], self.out[:, dim:]


class PackedRunner:
    """`runner.Runner` on CUDA for up to `max_rows` rows. Packs the model's weights, which it goes on to share.

    Args:
        model: one that `fits`.
        pool: the cache.
        max_rows: most rows of a call.
    """

    def __init__(self, model: Moondream, pool: PagedPool, max_rows: int) -> None:
        text = model.config.text
        self._model, self._pool, self._dim = model, pool, text.dim
        self._heads = (text.n_heads + 2 * text.n_kv_heads) * text.head_dim
        with torch.no_grad():
            self._layers = [_Layer(block, text.dim) for block in model.text.blocks if isinstance(block, Block)]
        self._attention = PagedAttention(
            text.n_heads,
            text.n_kv_heads,
            text.head_dim,
            pool.page_size,
            pool.prefix_length,
            pool.gap,
            model.text.cosine,
            model.text.sine,
        )
        region = model.config.region
        self._choice = tuple(part.contiguous() for part in model.begin_or_stop())
        self._coord_features = model.region.coord_features.float()
        self._size_features = model.region.size_features.float()

        def scratch(rows: int, width: int) -> torch.Tensor:
            return torch.zeros(rows, width, dtype=model.dtype, device=model.device)

        self._wide = scratch(max_rows, self._heads + text.ff_dim)
        self._both = scratch(max_rows, text.dim + text.ff_dim)
        self._delta, self._normed = scratch(max_rows, text.dim), scratch(max_rows, text.dim)
        self._blank = scratch(max_rows, max(region.coord_out_dim, region.size_out_dim))
        self._features = scratch(max_rows, region.size_feat_dim)
        self._prefix_positions = torch.arange(pool.prefix_length, dtype=torch.int32, device=model.device)

    def rows(
        self, x: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor, tables: torch.Tensor, together: bool
    ) -> torch.Tensor:
        """As `runner.Runner.rows`; x is overwritten."""
        most = len(self._wide)
        if len(x) > most:  # a very long prompt, piece by piece: each sees those before it in the cache
            cut = [slice(at, at + most) for at in range(0, len(x), most)]
            return torch.cat([self.rows(x[part], positions[part], owners[part], tables, together) for part in cut])
        count, bent = x.shape[0], self._wide.shape[1] - self._heads
        wide, both = self._wide[:count], self._both[:count]
        delta, normed = self._delta[:count], self._normed[:count]
        before: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            keys, values = self._pool.keys[number], self._pool.values[number]
            add_norm(x, before, layer.norm, normed)
            torch.addmm(layer.bias_in, normed, layer.into.t(), out=wide)
            if together:
                self._attention.remember(wide, positions, owners, tables, keys, values)
            self._attention.attend(wide, positions, owners, tables, keys, values, both, write=not together, bent=bent)
            before = torch.addmm(layer.bias_out, both, layer.out.t(), out=delta)
        return add_norm(x, before, None)

    def look(
        self,
        images: torch.Tensor,
        prefixes: torch.Tensor,
        asked: torch.Tensor | None,
        positions: torch.Tensor,
        owners: torch.Tensor,
        tables: torch.Tensor,
    ) -> torch.Tensor | None:
        """As `runner.Runner.look`; prompts ride along in the images' products, which costs them next to nothing."""
        pictures, length, dim = images.shape
        config, seen_by_all = self._model.config.text, pictures * length
        own = torch.arange(pictures, dtype=torch.int32, device=images.device).repeat_interleave(length)
        at = self._prefix_positions.repeat(pictures)
        flat = images.reshape(-1, dim) if asked is None else torch.cat([images.reshape(-1, dim), asked])
        before: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            keys, values = self._pool.keys[number], self._pool.values[number]
            normed = add_norm(flat, before, layer.norm)
            qkv = F.linear(normed, layer.into[: self._heads], layer.bias_in[: self._heads])
            image, prompt = qkv[:seen_by_all], qkv[seen_by_all:]
            self._attention.remember(image, at, own, prefixes, keys, values, turn=True)
            if asked is not None:
                self._attention.remember(prompt, positions, owners, tables, keys, values)
            last = number == len(self._layers) - 1
            if last and asked is None:
                return None
            if last:  # nobody reads the hidden states of an image
                flat, normed = flat[seen_by_all:], normed[seen_by_all:]
            seen = torch.empty_like(flat)
            if not last:
                heads = image.view(pictures, length, -1, config.head_dim).transpose(1, 2)
                q, k, v = heads.split([config.n_heads, config.n_kv_heads, config.n_kv_heads], dim=1)
                whole = F.scaled_dot_product_attention(q, k, v, enable_gqa=config.n_heads != config.n_kv_heads)
                seen[:seen_by_all].view(pictures, length, config.n_heads, -1).copy_(whole.transpose(1, 2))
            if asked is not None:
                answered = seen if last else seen[seen_by_all:]
                self._attention.attend(prompt, positions, owners, tables, keys, values, answered, write=False)
            bent = linear_gelu(normed, layer.into[self._heads :], layer.bias_in[self._heads :])
            both = F.linear(bent, layer.out[:, self._dim :], layer.bias_out)
            before = both.addmm_(seen, layer.out[:, : self._dim].t())
        return add_norm(flat, before, None)

    def objects(
        self,
        hidden: torch.Tensor,
        phases: torch.Tensor,
        lanes: torch.Tensor,
        places: bool,
        sizes: bool,
        sampled: torch.Tensor,
        state: torch.Tensor,
    ) -> None:
        """As `runner.Runner.objects`; TOKEN rows are left alone."""
        count, region = len(hidden), self._model.region
        blank = self._blank[:count]
        coords = region.decode_coord(hidden) if places else blank[:, : region.config.coord_out_dim].contiguous()
        spread = region.size_decoder(hidden) if sizes else blank[:, : region.config.size_out_dim].contiguous()
        objects.sample(
            hidden,
            phases,
            self._model.text.post_ln,
            (self._choice[0], self._choice[1]),
            coords,
            spread,
            self._coord_features,
            self._size_features,
            sampled,
            self._features[:count],
        )
        objects.encode(self._features[:count], phases, lanes, region.coord_encoder, region.size_encoder, state)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `runner.Runner.logits`."""
        text = self._model.text
        return text.lm_head(add_norm(hidden, None, text.post_ln)).float()  # type: ignore[no-any-return]


def features(tower: VisionTower, crops: torch.Tensor) -> torch.Tensor:
    """As `VisionTower.features`, for towers without convolutions, each sum and its norm in one pass."""
    x = (tower.patches(crops) + tower.pos_emb).contiguous()
    count, tokens, dim = x.shape
    flat = x.view(-1, dim)
    before: torch.Tensor | None = None
    for block in tower.blocks:
        assert isinstance(block, VisionBlock)
        heads = block.attn.qkv(add_norm(flat, before, block.ln1)).view(count, tokens, 3, block.attn.n_heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, dim)
        normed = add_norm(flat, block.attn.proj(seen), block.ln2)
        before = block.mlp.fc2(linear_gelu(normed, block.mlp.fc1.weight, block.mlp.fc1.bias))
    return add_norm(flat, before, tower.post_ln).view(count, tokens, dim)


def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Linear layer and tanh-approximated GELU, in one kernel: (rows, inputs) to (rows, outputs)."""
    return torch._addmm_activation(
        bias, x, weight.t(), use_gelu=True
    )  # cuBLASLt's epilogue has no public name in torch
