"""The text decoder on CUDA for few rows at a time: weights packed, four kernels a layer. Agrees with `PlainRunner`.

A step of one to 64 rows is a walk over the weights: 2.4 GB in bf16 for Moondream 2, 0.56 ms at an H200's 4.3 TB/s. Each
layer's four matrices are packed into two, as both halves of a block read the same input and add to the same residual:

    add and norm → product into heads and MLP → attention (rotary positions, new entry, GELU) → product out of both

From Hopper on most of them begin while the previous one still runs (`kernels.pdl`). The rows of a step of 1 / 8 / 32 at
760 keys take 0.86 / 1.18 / 1.99 ms on one H200, with FP8 weights 0.67 / 0.98 / 1.86; with cuBLAS's products and kernels
one after the other it was 1.08 / 1.34 / 2.18. Needs Triton, bf16 or fp16, a GPU that Triton compiles for.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.backends.packed_linear import PackedLinear, add_layernorm_rows
from saccade.engine.backends.paged_cache import PagedCache
from saccade.engine.backends.quantization import supports_fp8, supports_fp8_gemm
from saccade.engine.kernels import fp8_linear as fp8_kernels
from saccade.engine.kernels import region_sampling
from saccade.engine.kernels import skinny_gemm as gemm
from saccade.engine.kernels.add_layernorm import add_layernorm
from saccade.engine.kernels.paged_attention import PagedAttention
from saccade.engine.kernels.pdl import supports_pdl
from saccade.engine.kernels.skinny_gemm import MAX_ROWS, skinny_gemm, split_k_for
from saccade.engine.models.moondream.layers import Mlp
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.text import Block, join


def supports(model: Moondream) -> bool:
    """Whether the kernels take this model."""
    text, region = model.config.text, model.config.region
    return (
        model.dtype in (torch.bfloat16, torch.float16)
        and text.moe is None
        and not text.tau
        and text.head_dim % 8 == 0
        and text.head_dim >= 16
        and region_sampling.supports(
            region.coord_out_dim, region.size_out_dim // 2, region.coord_feat_dim, region.size_feat_dim, text.dim
        )
    )


class _Layer:
    """One block's weights: into heads and MLP, and out of both."""

    __slots__ = ("into", "norm", "out")

    def __init__(self, block: Block, fp8: bool) -> None:
        joined = join(block)
        self.norm: nn.LayerNorm = block.ln
        self.into = PackedLinear(joined.into, joined.into_bias, fp8)
        self.out = PackedLinear(joined.out, joined.out_bias, fp8)


class _BinHead:
    """A region head from hidden states to logits of bins, as two skinny products where the kernels support it.

    Args:
        head: the model's.
        width: bins.
        pdl: whether kernels begin before the previous one has ended.
    """

    __slots__ = ("_gelu", "_head", "_no_bias", "_pdl", "_skinny", "_split_k")

    def __init__(self, head: nn.Module, width: int, pdl: bool) -> None:
        self._head, self._pdl, self._skinny = head, pdl, False
        weight = next(head.parameters())
        self._no_bias = weight.new_zeros(width)  # to be added where the module adds its own
        if isinstance(head, Mlp):
            splits = split_k_for(head.fc2.in_features, False)
            supported = gemm.supports(*head.fc1.weight.shape) and gemm.supports(*head.fc2.weight.shape)
            self._skinny = splits > 1 and supported
            self._gelu = weight.new_zeros(MAX_ROWS, head.fc1.out_features)
            self._split_k = weight.new_zeros(splits * width * MAX_ROWS, dtype=torch.float32)

    def uses_pdl(self, rows: int) -> bool:
        """Whether the logits of so many rows come from kernels that begin before the previous one has ended."""
        return self._pdl and self._skinny and rows <= MAX_ROWS

    def scores(self, hidden: torch.Tensor, wanted: bool) -> region_sampling.Scores:
        """Of rows (rows, dim); if they are not wanted, only their shape is right."""
        head, rows, width = self._head, len(hidden), len(self._no_bias)
        if not self._skinny or rows > MAX_ROWS:
            return (head(hidden) if wanted else hidden.new_empty(rows, width)).unsqueeze(0), self._no_bias
        assert isinstance(head, Mlp)
        split_k = self._split_k[: len(self._split_k) // MAX_ROWS * rows].view(-1, rows, width)
        if wanted:
            gelu = self._gelu[:rows]
            skinny_gemm(hidden, head.fc1.weight, gelu, bias=head.fc1.bias, apply_gelu=True, pdl=self._pdl)
            skinny_gemm(gelu, head.fc2.weight, split_k, pdl=self._pdl)
        return split_k, head.fc2.bias


class PackedRunner:
    """`plain_runner.Runner` on CUDA for up to `max_rows` rows. Packs the model's weights, which it goes on to share.

    Args:
        model: one that `supports` accepts.
        cache: where keys and values go.
        max_rows: most rows of a call.
    """

    def __init__(self, model: Moondream, cache: PagedCache, max_rows: int) -> None:
        text = model.config.text
        self._model, self._cache, self._dim = model, cache, text.dim
        self._heads = (text.n_heads + 2 * text.n_kv_heads) * text.head_dim
        self._pdl = supports_pdl(model.device)
        fp8 = model.fp8 and supports_fp8(model.device)
        self._fp8 = (
            fp8
            and supports_fp8_gemm(model.device)
            and fp8_kernels.supports(cache.prefix_length, text.dim, self._heads, text.ff_dim)
        )
        self._layers = [_Layer(block, fp8) for block in model.text.blocks if isinstance(block, Block)]
        self._attention = PagedAttention(
            text.n_heads,
            text.n_kv_heads,
            text.head_dim,
            cache.page_size,
            cache.prefix_length,
            cache.gap,
            model.text.cosine,
            model.text.sine,
        )
        region = model.config.region
        weight, bias = model.coord_eos_head()
        self._coord_eos = weight.contiguous(), bias.contiguous()
        self._coord_features = model.region.coord_features.float()
        self._size_features = model.region.size_features.float()

        def scratch(*shape: int, dtype: torch.dtype = model.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=model.device)

        self._wide = scratch(max_rows, self._heads + text.ff_dim)
        self._both = scratch(max_rows, text.dim + text.ff_dim)
        self._delta, self._normed = scratch(max_rows, text.dim), scratch(max_rows, text.dim)
        self._split_k = scratch(split_k_for(text.dim + text.ff_dim, fp8), MAX_ROWS, text.dim, dtype=torch.float32)
        self._coords = _BinHead(model.region.coord_decoder, region.coord_out_dim, self._pdl)
        self._sizes = _BinHead(model.region.size_decoder, region.size_out_dim, self._pdl)
        self._features = scratch(max_rows, region.size_feat_dim)
        self._prefix_positions = torch.arange(cache.prefix_length, dtype=torch.int32, device=model.device)
        self._skinny = gemm.supports(self._wide.shape[1], text.dim) and gemm.supports(
            text.dim, self._both.shape[1], len(self._split_k)
        )

    def forward_tokens(
        self, x: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor, tables: torch.Tensor, together: bool
    ) -> torch.Tensor:
        """As `plain_runner.Runner.forward_tokens`; x is overwritten."""
        most = len(self._wide)
        if len(x) > most:  # a very long prompt, piece by piece: each attends to those before it in the cache
            cut = [slice(at, at + most) for at in range(0, len(x), most)]
            hidden = [self.forward_tokens(x[one], positions[one], owners[one], tables, together) for one in cut]
            return torch.cat(hidden)
        count, pre_gelu = x.shape[0], self._wide.shape[1] - self._heads
        wide, both = self._wide[:count], self._both[:count]
        delta, normed = self._delta[:count], self._normed[:count]
        skinny = self._skinny and count <= MAX_ROWS
        pdl = self._pdl and skinny and not together
        before: torch.Tensor | None = None
        bias: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            keys, values = self._cache.keys[number], self._cache.values[number]
            add_layernorm(x, before, layer.norm, normed, bias=bias, pdl=pdl)
            into, out = layer.into, layer.out
            if skinny:
                skinny_gemm(normed, into.packed, wide, scale=into.scale, bias=into.bias, pdl=pdl)
            else:
                torch.addmm(into.bias, normed, into.weight.t(), out=wide)
            if together:
                self._attention.write_kv(wide, positions, owners, tables, keys, values)
            self._attention.attend(
                wide, positions, owners, tables, keys, values, both, write=not together, pre_gelu=pre_gelu, pdl=pdl
            )
            if skinny:
                before = skinny_gemm(both, out.packed, self._split_k[:, :count], scale=out.scale, pdl=pdl)
                bias = out.bias
            else:
                before = torch.addmm(out.bias, both, out.weight.t(), out=delta)
        return add_layernorm(x, before, None, bias=bias, pdl=pdl)

    def prefill(
        self,
        images: torch.Tensor,
        prefixes: torch.Tensor,
        prompts: torch.Tensor | None,
        positions: torch.Tensor,
        owners: torch.Tensor,
        tables: torch.Tensor,
    ) -> torch.Tensor | None:
        """As `plain_runner.Runner.prefill`; prompts share the images' products, which costs them next to nothing."""
        count, length, dim = images.shape
        config, prefix_rows = self._model.config.text, count * length
        own = torch.arange(count, dtype=torch.int32, device=images.device).repeat_interleave(length)
        at = self._prefix_positions.repeat(count)
        flat = images.reshape(-1, dim) if prompts is None else torch.cat([images.reshape(-1, dim), prompts])
        before: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            keys, values = self._cache.keys[number], self._cache.values[number]
            last = number == len(self._layers) - 1
            fp8 = self._fp8 and not last  # whose rows are few
            x = add_layernorm_rows(flat, before, layer.norm, fp8)
            # In FP8 there is no GELU in cuBLAS's product, so heads and MLP come out of one.
            wide = layer.into.linear(x, stop=None if fp8 else self._heads)
            qkv = wide[:, : self._heads]
            image, prompt = qkv[:prefix_rows], qkv[prefix_rows:]
            self._attention.write_kv(image, at, own, prefixes, keys, values, rotate=True)
            if last and prompts is None:
                return None
            if last:  # the hidden states of an image are not read
                flat, x = flat[prefix_rows:], (x[0][prefix_rows:], None)
            attended = torch.empty_like(flat)
            if prompts is not None:
                self._attention.write_kv(prompt, positions, owners, tables, keys, values)
                answered = attended if last else attended[prefix_rows:]
                self._attention.attend(prompt, positions, owners, tables, keys, values, answered, write=False)
            if not last:
                heads = image.unflatten(0, (count, length)).unflatten(2, (-1, config.head_dim)).transpose(1, 2)
                q, k, v = heads.split([config.n_heads, config.n_kv_heads, config.n_kv_heads], dim=1)
                whole = F.scaled_dot_product_attention(q, k, v, enable_gqa=config.n_heads != config.n_kv_heads)
                attended[:prefix_rows].view(count, length, config.n_heads, -1).copy_(whole.transpose(1, 2))
            if fp8:
                before = layer.out.linear(fp8_kernels.quantize_rows(attended, wide[:, self._heads :]))
            else:
                gelu = layer.into.linear_gelu(x[0], start=self._heads)
                both = F.linear(gelu, layer.out.weight[:, self._dim :], layer.out.bias)
                before = both.addmm_(attended, layer.out.weight[:, : self._dim].t())
        return add_layernorm(flat, before, None)

    def sample_regions(
        self,
        hidden: torch.Tensor,
        phases: torch.Tensor,
        batch_slots: torch.Tensor,
        coords: bool,
        sizes: bool,
        sampled: torch.Tensor,
        state: torch.Tensor,
    ) -> None:
        """As `plain_runner.Runner.sample_regions`; TOKEN rows are left alone."""
        count, region = len(hidden), self._model.region
        features = self._features[:count]
        pdl = self._coords.uses_pdl(count) and self._sizes.uses_pdl(count)
        region_sampling.sample(
            hidden,
            phases,
            self._model.text.post_ln,
            self._coord_eos,
            self._coords.scores(hidden, coords),
            self._sizes.scores(hidden, sizes),
            self._coord_features,
            self._size_features,
            sampled,
            features,
            pdl=pdl,
        )
        encoders = region.coord_encoder, region.size_encoder
        region_sampling.encode(features, phases, batch_slots, *encoders, state, pdl=pdl)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `plain_runner.Runner.logits`."""
        text = self._model.text
        return text.lm_head(add_layernorm(hidden, None, text.post_ln)).float()  # type: ignore[no-any-return]
