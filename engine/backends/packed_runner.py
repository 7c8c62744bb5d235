"""The text decoder on CUDA for few rows at a time: weights packed, four kernels a layer. Agrees with `PlainRunner`.

A step of one to 64 rows is a walk over the weights: 2.4 GB in bf16 for Moondream 2, 0.56 ms at an H200's 4.3 TB/s. Each
layer's four matrices are packed into two, as both halves of a block read the same input and add to the same residual:

    add and norm → product into heads and MLP → attention (rotary positions, new entry, GELU) → product out of both

From Hopper on most of them begin while the one ahead still runs (`kernels.ahead`). The rows of a step of 1 / 8 / 32 at
760 keys take 0.86 / 1.18 / 1.99 ms on one H200, with FP8 weights 0.67 / 0.98 / 1.86; with cuBLAS's products and kernels
one after the other it was 1.08 / 1.34 / 2.18. Needs Triton, bf16 or fp16, a GPU that Triton compiles for.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.backends.packed_linear import Weights, normed
from saccade.engine.backends.paged_cache import PagedPool
from saccade.engine.backends.quantization import can_multiply, can_widen
from saccade.engine.kernels import fp8_linear as fp8_kernels
from saccade.engine.kernels import region_sampling as objects
from saccade.engine.kernels.add_layernorm import add_norm
from saccade.engine.kernels.paged_attention import PagedAttention
from saccade.engine.kernels.pdl import can_begin_early
from saccade.engine.kernels.skinny_gemm import MAX_ROWS, parts_for, product
from saccade.engine.kernels.skinny_gemm import fits as product_fits
from saccade.engine.models.moondream.layers import Mlp
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.text import Block, join


def fits(model: Moondream) -> bool:
    """Whether the kernels take this model."""
    text, region = model.config.text, model.config.region
    return (
        model.dtype in (torch.bfloat16, torch.float16)
        and text.head_dim % 8 == 0
        and text.head_dim >= 16
        and objects.fits(
            region.coord_out_dim, region.size_out_dim // 2, region.coord_feat_dim, region.size_feat_dim, text.dim
        )
    )


class _Layer:
    """One block's weights: into heads and MLP, and out of both."""

    __slots__ = ("into", "norm", "out")

    def __init__(self, block: Block, fp8: bool) -> None:
        joined = join(block)
        self.norm: nn.LayerNorm = block.ln
        self.into = Weights(joined.into, joined.into_bias, fp8)
        self.out = Weights(joined.out, joined.out_bias, fp8)


class _Bins:
    """A region head from hidden states to scores of bins, as two products of few rows where these fit.

    Args:
        head: the model's.
        width: bins.
        ahead: whether kernels begin early.
    """

    __slots__ = ("_ahead", "_bent", "_head", "_none", "_ours", "_parts")

    def __init__(self, head: nn.Module, width: int, ahead: bool) -> None:
        self._head, self._ahead, self._ours = head, ahead, False
        weight = next(head.parameters())
        self._none = weight.new_zeros(width)  # to be added where the module adds its own
        if isinstance(head, Mlp):
            parts = parts_for(head.fc2.in_features, False)
            self._ours = parts > 1 and product_fits(*head.fc1.weight.shape) and product_fits(*head.fc2.weight.shape)
            self._bent = weight.new_zeros(MAX_ROWS, head.fc1.out_features)
            self._parts = weight.new_zeros(parts * width * MAX_ROWS, dtype=torch.float32)

    def begins_early(self, rows: int) -> bool:
        """Whether the scores of so many rows come from kernels that do."""
        return self._ahead and self._ours and rows <= MAX_ROWS

    def scores(self, hidden: torch.Tensor, wanted: bool) -> objects.Scores:
        """Of rows (rows, dim); if they are not wanted, only their shape is right."""
        head, rows, width = self._head, len(hidden), len(self._none)
        if not self._ours or rows > MAX_ROWS:
            return (head(hidden) if wanted else hidden.new_empty(rows, width)).unsqueeze(0), self._none
        assert isinstance(head, Mlp)
        parts = self._parts[: len(self._parts) // MAX_ROWS * rows].view(-1, rows, width)
        if wanted:
            bent = product(hidden, head.fc1.weight, self._bent[:rows], bias=head.fc1.bias, bend=True, ahead=self._ahead)
            product(bent, head.fc2.weight, parts, ahead=self._ahead)
        return parts, head.fc2.bias


class PackedRunner:
    """`plain_runner.Runner` on CUDA for up to `max_rows` rows. Packs the model's weights, which it goes on to share.

    Args:
        model: one that `fits`.
        pool: the cache.
        max_rows: most rows of a call.
    """

    def __init__(self, model: Moondream, pool: PagedPool, max_rows: int) -> None:
        text = model.config.text
        self._model, self._pool, self._dim = model, pool, text.dim
        self._heads = (text.n_heads + 2 * text.n_kv_heads) * text.head_dim
        self._ahead = can_begin_early(model.device)
        fp8 = model.fp8 and can_widen(model.device)
        self._fp8 = (
            fp8
            and can_multiply(model.device)
            and fp8_kernels.fits(pool.prefix_length, text.dim, self._heads, text.ff_dim)
        )
        self._layers = [_Layer(block, fp8) for block in model.text.blocks if isinstance(block, Block)]
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

        def scratch(*shape: int, dtype: torch.dtype = model.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=model.device)

        self._wide = scratch(max_rows, self._heads + text.ff_dim)
        self._both = scratch(max_rows, text.dim + text.ff_dim)
        self._delta, self._normed = scratch(max_rows, text.dim), scratch(max_rows, text.dim)
        self._parts = scratch(parts_for(text.dim + text.ff_dim, fp8), MAX_ROWS, text.dim, dtype=torch.float32)
        self._coords = _Bins(model.region.coord_decoder, region.coord_out_dim, self._ahead)
        self._sizes = _Bins(model.region.size_decoder, region.size_out_dim, self._ahead)
        self._features = scratch(max_rows, region.size_feat_dim)
        self._prefix_positions = torch.arange(pool.prefix_length, dtype=torch.int32, device=model.device)
        self._ours = product_fits(self._wide.shape[1], text.dim) and product_fits(
            text.dim, self._both.shape[1], len(self._parts)
        )

    def rows(
        self, x: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor, tables: torch.Tensor, together: bool
    ) -> torch.Tensor:
        """As `plain_runner.Runner.rows`; x is overwritten."""
        most = len(self._wide)
        if len(x) > most:  # a very long prompt, piece by piece: each sees those before it in the cache
            cut = [slice(at, at + most) for at in range(0, len(x), most)]
            return torch.cat([self.rows(x[part], positions[part], owners[part], tables, together) for part in cut])
        count, bent = x.shape[0], self._wide.shape[1] - self._heads
        wide, both = self._wide[:count], self._both[:count]
        delta, normed = self._delta[:count], self._normed[:count]
        ours = self._ours and count <= MAX_ROWS
        ahead = self._ahead and ours and not together
        before: torch.Tensor | None = None
        bias: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            keys, values = self._pool.keys[number], self._pool.values[number]
            add_norm(x, before, layer.norm, normed, bias=bias, ahead=ahead)
            into, out = layer.into, layer.out
            if ours:
                product(normed, into.packed, wide, scale=into.scale, bias=into.bias, ahead=ahead)
            else:
                torch.addmm(into.bias, normed, into.weight.t(), out=wide)
            if together:
                self._attention.remember(wide, positions, owners, tables, keys, values)
            self._attention.attend(
                wide, positions, owners, tables, keys, values, both, write=not together, bent=bent, ahead=ahead
            )
            if ours:
                before = product(both, out.packed, self._parts[:, :count], scale=out.scale, ahead=ahead)
                bias = out.bias
            else:
                before = torch.addmm(out.bias, both, out.weight.t(), out=delta)
        return add_norm(x, before, None, bias=bias, ahead=ahead)

    def look(
        self,
        images: torch.Tensor,
        prefixes: torch.Tensor,
        asked: torch.Tensor | None,
        positions: torch.Tensor,
        owners: torch.Tensor,
        tables: torch.Tensor,
    ) -> torch.Tensor | None:
        """As `plain_runner.Runner.look`; prompts ride along in the images' products, which costs next to nothing."""
        pictures, length, dim = images.shape
        config, seen_by_all = self._model.config.text, pictures * length
        own = torch.arange(pictures, dtype=torch.int32, device=images.device).repeat_interleave(length)
        at = self._prefix_positions.repeat(pictures)
        flat = images.reshape(-1, dim) if asked is None else torch.cat([images.reshape(-1, dim), asked])
        before: torch.Tensor | None = None
        for number, layer in enumerate(self._layers):
            keys, values = self._pool.keys[number], self._pool.values[number]
            last = number == len(self._layers) - 1
            fp8 = self._fp8 and not last  # whose rows are few
            x = normed(flat, before, layer.norm, fp8)
            # In FP8 there is no GELU in cuBLAS's product, so heads and MLP come out of one.
            wide = layer.into.linear(x, stop=None if fp8 else self._heads)
            qkv = wide[:, : self._heads]
            image, prompt = qkv[:seen_by_all], qkv[seen_by_all:]
            self._attention.remember(image, at, own, prefixes, keys, values, turn=True)
            if last and asked is None:
                return None
            if last:  # nobody reads the hidden states of an image
                flat, x = flat[seen_by_all:], (x[0][seen_by_all:], None)
            seen = torch.empty_like(flat)
            if asked is not None:
                self._attention.remember(prompt, positions, owners, tables, keys, values)
                answered = seen if last else seen[seen_by_all:]
                self._attention.attend(prompt, positions, owners, tables, keys, values, answered, write=False)
            if not last:
                heads = image.unflatten(0, (pictures, length)).unflatten(2, (-1, config.head_dim)).transpose(1, 2)
                q, k, v = heads.split([config.n_heads, config.n_kv_heads, config.n_kv_heads], dim=1)
                whole = F.scaled_dot_product_attention(q, k, v, enable_gqa=config.n_heads != config.n_kv_heads)
                seen[:seen_by_all].view(pictures, length, config.n_heads, -1).copy_(whole.transpose(1, 2))
            if fp8:
                before = layer.out.linear(fp8_kernels.squeeze(seen, wide[:, self._heads :]))
            else:
                bent = layer.into.linear_gelu(x[0], start=self._heads)
                both = F.linear(bent, layer.out.weight[:, self._dim :], layer.out.bias)
                before = both.addmm_(seen, layer.out.weight[:, : self._dim].t())
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
        """As `plain_runner.Runner.objects`; TOKEN rows are left alone."""
        count, region = len(hidden), self._model.region
        coords = self._coords.scores(hidden, places)
        spread = self._sizes.scores(hidden, sizes)
        ahead = self._coords.begins_early(count) and self._sizes.begins_early(count)
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
            ahead=ahead,
        )
        objects.encode(
            self._features[:count], phases, lanes, region.coord_encoder, region.size_encoder, state, ahead=ahead
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `plain_runner.Runner.logits`."""
        text = self._model.text
        return text.lm_head(add_norm(hidden, None, text.post_ln)).float()  # type: ignore[no-any-return]
