"""The text decoder on CUDA for few rows at a time: weights packed, four kernels a layer. Agrees with `PlainRunner`.

A step of one to 64 rows is a walk over the weights: 2.4 GB in bf16 for Moondream 2, 0.56 ms at an H200's 4.3 TB/s. Each
layer's four matrices are packed into two, as both halves of a block read the same input and add to the same residual:

    add and norm → product into heads and MLP → attention (rotary positions, new entry, GELU) → product out of both

A single row takes three, without tensor cores (`kernels.gemv`): norm and addition are in the products, and that out of
the MLP is beside attention.

With experts and a temperature (Moondream 3) it is

    add and norm → router → product into heads → temperature's products → attention → product out of it
                       └→ experts (two products), on a stream of their own: neither needs the other's

and of a single row what `cuda.moe` says: 24 layers in 0.95 ms, and 0.58 in FP8, for 1.05 and 0.85.

From Hopper on most of them begin while the previous one still runs (`kernels.pdl`). The rows of a step of 1 / 8 / 32 at
760 keys take 0.80 / 1.18 / 2.00 ms on one H200, with FP8 weights 0.55 / 0.98 / 1.87; with cuBLAS's products and kernels
one after the other it was 1.08 / 1.34 / 2.18; those of Moondream 3 take 0.99 / 3.23 / 5.29, and 0.61 / 2.24 / 3.73, of
which the bytes alone are 0.79 / 3.07 / 5.22, and 0.42 / 1.76 / 3.25. Needs Triton, bf16 or fp16, a GPU that
Triton compiles for.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from saccade.engine.cuda import moe
from saccade.engine.cuda.layers import PackedBlocks, PackedLayer
from saccade.engine.cuda.linear import BinHead, Rows, add_layernorm_rows
from saccade.engine.cuda.paged_cache import LayerCache, PagedCache
from saccade.engine.cuda.plain_runner import PlainRunner, Runner
from saccade.engine.cuda.prefill import PrefillOps
from saccade.engine.fallbacks import Fallbacks
from saccade.engine.kernels import gemv, region_sampling
from saccade.engine.kernels.moe.router import Routes, router_products
from saccade.engine.kernels.norm_quantize import add_layernorm, quantize_rows
from saccade.engine.kernels.paged_attention import Temperature
from saccade.engine.kernels.pdl import supports_pdl
from saccade.engine.kernels.skinny_gemm import MAX_ROWS
from saccade.engine.kernels.temperature import temperature_products
from saccade.engine.models.lora import AdaptedRows, AdapterBank
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.region import size_values
from saccade.engine.models.moondream.text import run_blocks

ONE_ROW = {
    False: (gemv.Shape(8, 4, True), gemv.Shape(4, 4, True)),
    True: (gemv.Shape(16, 4, True), gemv.Shape(4, 4, True)),
}
"""Of a step of one row, in half precision and FP8: shapes of the products into a block and out of its attention."""
ONE_ROW_MLP = 2
"""A program's outputs of such a step's product out of the MLP, beside attention."""


class PackedRunner:
    """`plain_runner.Runner` on CUDA for up to `max_rows` rows. Packs the model's weights, which it goes on to share.

    Args:
        model: one that `supports` accepts.
        cache: where keys and values go.
        max_rows: most rows of a call.
        fallbacks: told what does not run here.
    """

    def __init__(self, model: Moondream, cache: PagedCache, max_rows: int, fallbacks: Fallbacks) -> None:
        text = model.config.text
        self._model, self._cache = model, cache
        self._adapters: AdaptedRows | None = None
        self._pdl = supports_pdl(model.device)
        blocks = self._blocks = PackedBlocks(model, cache, fallbacks)
        region = model.config.region
        weight, bias = model.coord_eos_head()
        self._coord_eos = weight.contiguous(), bias.contiguous()
        self._coord_features = model.region.coord_features.float()
        self._size_features = model.region.size_features.float()
        self._size_values = size_values(region.size_out_dim // 2, model.device)

        def scratch(*shape: int, dtype: torch.dtype = model.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=model.device)

        self._wide = scratch(min(max_rows, MAX_ROWS), blocks.heads + text.ff_dim)
        self._both = scratch(max_rows, text.dim + text.ff_dim)
        self._normed = scratch(max_rows, text.dim)
        self._expert_row: moe.ExpertRow | None = None
        most_parts = blocks.splits
        if text.moe is not None:
            most_parts = max(most_parts, blocks.out_splits + blocks.top)
            self._delta = scratch(1 + blocks.top, max_rows, text.dim)  # attention's product, and behind it the experts'
            self._routes = Routes(text.moe.num_experts, MAX_ROWS * blocks.top, model.device)
            self._expert_inner = scratch(MAX_ROWS * blocks.top, text.moe.expert_inner_dim)
            # One for each layer: what was chosen can be counted after a step.
            self._logits = scratch(text.n_layers, max_rows, text.moe.num_experts, dtype=torch.float32)
            if moe.supports(blocks):
                self._expert_row = moe.ExpertRow(blocks, self._logits)
        self._products = scratch(blocks.tau_parts * max_rows * 2 * text.n_heads, dtype=torch.float32)
        self._split_k = scratch(most_parts, MAX_ROWS, text.dim, dtype=torch.float32)
        self._head_norms = model.region.norms
        self._head_input = scratch(max(1, len(self._head_norms)), max_rows, text.dim)
        self._coords = BinHead(model.region.coord_decoder, region.coord_out_dim, self._pdl)
        self._beside = torch.cuda.Stream(model.device)  # experts go there beside attention
        self._sizes = BinHead(model.region.size_decoder, region.size_out_dim, self._pdl)
        self._features = scratch(max_rows, region.size_feat_dim)
        dense = text.moe is None and not text.tau
        possible = dense and gemv.supports(self._wide.shape[1], text.dim) and gemv.supports(text.dim, text.ff_dim)
        possible &= text.dim % (ONE_ROW_MLP * text.n_heads) == 0
        self._one_row = ONE_ROW[blocks.fp8] if possible else None
        self._mlp_out = scratch(text.dim, dtype=torch.float32)

    def with_adapters(self, bank: AdapterBank, slots: torch.Tensor) -> Runner:
        """As `plain_runner.Runner.with_adapters`; shares this one's weights and scratch.

        The kernels of experts take no adapter: rows with one go through the model's own modules, which are slower.
        """
        if bank.has_experts:
            return PlainRunner(self._model, self._cache, (bank, slots))
        adapted = copy.copy(self)
        adapted._adapters = bank.rows(slots)
        return adapted

    def forward_tokens(
        self, x: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor, tables: torch.Tensor, together: bool
    ) -> torch.Tensor:
        """As `plain_runner.Runner.forward_tokens`; x is overwritten."""
        most = len(self._both)
        if len(x) > most:  # a very long prompt, piece by piece: each attends to those before it in the cache
            return torch.cat(
                [
                    self._piece(at).forward_tokens(
                        x[at : at + most], positions[at : at + most], owners[at : at + most], tables, together
                    )
                    for at in range(0, len(x), most)
                ]
            )
        single = len(x) == 1 and self._adapters is None and not together
        if single and self._expert_row is not None:
            row = moe.ExpertRowOps(self._expert_row, x, (positions, owners, tables), self._pdl)
            run_blocks(self._blocks.layers, self._blocks.caches, row)
            return x
        one = self._one_row if single else None
        few = self._blocks.skinny and len(x) <= MAX_ROWS
        form = _OneRowOps if one is not None else _TokenOps if few else _ManyRowsOps
        ops = form(self, x, positions, owners, tables, together)
        run_blocks(self._blocks.layers, self._blocks.caches, ops)
        if one is not None:
            return x
        return add_layernorm(x, ops.before, None, bias=ops.bias, pdl=ops.pdl, early=not ops.joined)

    def _piece(self, first: int) -> PackedRunner:
        """Itself for rows from `first` on."""
        if self._adapters is None:
            return self
        piece = copy.copy(self)
        piece._adapters = self._adapters.behind(first)
        return piece

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
        flat = images.reshape(-1, images.shape[2])
        if prompts is not None:
            flat = torch.cat([flat, prompts])
        adapters = None if self._adapters is None else self._adapters.spread(*images.shape[:2])
        ops = PrefillOps(
            self._blocks, flat, images.shape[:2], prefixes, positions, owners, tables, adapters, self._beside
        )
        run_blocks(self._blocks.layers, self._blocks.caches, ops, kv_only=prompts is None)
        return None if prompts is None else add_layernorm(ops.x, ops.before, None, bias=ops.bias)

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
        seen = hidden
        for norm, out in zip(self._head_norms, self._head_input, strict=False):
            seen = add_layernorm(seen, None, norm, out[:count], pdl=pdl)
        region_sampling.sample(
            hidden,
            phases,
            self._model.text.post_ln,
            self._coord_eos,
            self._coords.scores(seen, coords),
            self._sizes.scores(seen, sizes),
            self._coord_features,
            self._size_features,
            self._size_values,
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


class _TokenOps:
    """`BlockOps` on one token a row, in a runner's scratch. `before` and `bias` are still to be added to x."""

    _early = True  # kernels may begin before the previous one has ended

    def __init__(
        self,
        runner: PackedRunner,
        x: torch.Tensor,
        positions: torch.Tensor,
        owners: torch.Tensor,
        tables: torch.Tensor,
        together: bool,
    ) -> None:
        self._runner, self.x, self._rows = runner, x, (positions, owners, tables)
        self._adapters = runner._adapters
        self._count, self._together = len(x), together
        self.pdl = runner._pdl and self._early and not together
        self.joined = False  # whether the next kernel comes behind the experts' stream as well
        self.before: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        shape = runner._blocks.tau_parts, self._count, 2 * runner._blocks.text.n_heads
        self._products = runner._products[: shape[0] * shape[1] * shape[2]].view(shape)

    def norm(self, layer: PackedLayer) -> Any:
        """The norm; behind it the router, and experts on a stream of their own."""
        runner, normed = self._runner, self._runner._normed[: self._count]
        early, self.joined = not self.joined, False
        add_layernorm(self.x, self.before, layer.norm, normed, bias=self.bias, pdl=self.pdl, early=early)
        if layer.experts is not None:
            router, routes = layer.experts.router, runner._routes
            router_products(normed, router, self._logits(layer), routes, runner._blocks.top, pdl=self.pdl)
            # Their parts lie behind those of attention's product.
            parts = runner._split_k[runner._blocks.out_splits :, : self._count][: runner._blocks.top]
            runner._beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(runner._beside):
                layer.experts.few(normed, routes, runner._expert_inner, parts, pdl=self.pdl)
        return normed

    def heads(self, layer: PackedLayer, normed: Any, kv_only: bool) -> torch.Tensor:
        wide = self._runner._wide[: self._count]
        if layer.experts is not None:
            wide = wide[:, : self._runner._blocks.heads]
        # Behind the router, whose predecessor wrote what both read.
        layer.into.few(normed, wide, pdl=self.pdl, late=layer.experts is not None)
        self._adapt_into(layer, normed, wide)
        return wide

    def _adapt_into(self, layer: PackedLayer, normed: torch.Tensor, wide: torch.Tensor) -> None:
        if self._adapters is not None:
            width = self._runner._blocks.heads
            self._adapters.add(layer.number, "attn.qkv", normed, wide[:, :width])
            if layer.experts is None:
                self._adapters.add(layer.number, "mlp.fc1", normed, wide[:, width:])

    def temper(self, layer: PackedLayer, heads: torch.Tensor) -> torch.Tensor:
        """The heads as they are: attention multiplies by the factors, whose products these are."""
        assert layer.temperature is not None
        temperature_products(heads, layer.temperature[0], self._products, pdl=self.pdl)
        return heads

    def write_kv(self, layer: PackedLayer, heads: torch.Tensor, cache: LayerCache) -> None:
        self._runner._blocks.attention.write_kv(heads, *self._rows, cache, temperature=self._temperature(layer))

    def attend(self, layer: PackedLayer, heads: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        """What attention saw, and behind it the dense MLP's values through GELU."""
        runner, pre_gelu = self._runner, heads.shape[1] - self._runner._blocks.heads
        both = runner._both[: self._count, : runner._blocks.text.dim + pre_gelu]
        if self._together:
            self.write_kv(layer, heads, cache)
        runner._blocks.attention.attend(
            heads,
            *self._rows,
            cache,
            both,
            write=not self._together,
            pre_gelu=pre_gelu,
            temperature=self._temperature(layer),
            pdl=self.pdl,
        )
        return both

    def add(self, layer: PackedLayer, seen: torch.Tensor, normed: Any) -> None:
        blocks, experts = self._runner._blocks, layer.experts is not None
        self._adapt_out(layer, seen)
        splits = blocks.out_splits if experts else blocks.splits
        self.before = self._runner._split_k[: splits + (blocks.top if experts else 0), : self._count]
        self.bias = layer.out.bias
        layer.out.few(seen, self.before[:splits], pdl=self.pdl)
        if experts:
            torch.cuda.current_stream().wait_stream(self._runner._beside)
            self.joined = True

    def _adapt_out(self, layer: PackedLayer, seen: torch.Tensor) -> None:
        if self._adapters is not None:  # at once, where the next norm adds the rest
            width = self._runner._blocks.text.dim
            self._adapters.add(layer.number, "attn.proj", seen[:, :width], self.x)
            if layer.experts is None:
                self._adapters.add(layer.number, "mlp.fc2", seen[:, width:], self.x)

    def _logits(self, layer: PackedLayer) -> torch.Tensor:
        return self._runner._logits[layer.number, : self._count]

    def _temperature(self, layer: PackedLayer) -> Temperature | None:
        return None if layer.temperature is None else (self._products, layer.temperature[1])


class _ManyRowsOps(_TokenOps):
    """The same on more rows than fit the kernels of few, or where those do not take the shapes: cuBLAS's products.

    With FP8 on both sides where a prefill's are. A part gives another the norm as they read it, and in half precision.
    """

    _early = False

    def norm(self, layer: PackedLayer) -> tuple[Rows, torch.Tensor]:
        plain = self._runner._normed[: self._count]
        if self._runner._blocks.fp8_rows:
            return add_layernorm_rows(self.x, self.before, layer.norm, True, plain), plain
        return (add_layernorm(self.x, self.before, layer.norm, plain), None), plain

    def heads(self, layer: PackedLayer, normed: tuple[Rows, torch.Tensor], kv_only: bool) -> torch.Tensor:
        wide = layer.into.linear(normed[0])
        self._adapt_into(layer, normed[1], wide)
        return wide

    def add(self, layer: PackedLayer, seen: torch.Tensor, normed: tuple[Rows, torch.Tensor]) -> None:
        self._adapt_out(layer, seen)
        fp8, (rows, plain) = self._runner._blocks.fp8_rows, normed
        values = quantize_rows(seen, None) if fp8 else (seen, None)
        if layer.experts is None:
            self.before = layer.out.linear(values)
            return
        self.before = before = self._runner._delta[:, : self._count]
        chosen = layer.experts.sort(plain)
        self._logits(layer).copy_(chosen.logits)
        layer.experts.many(rows, chosen, before[1:])
        layer.out.linear(values, out=before[0])


class _OneRowOps(_TokenOps):
    """The same on one row: three kernels a layer, with the norm and the addition to x in the products.

    On an H200 a step takes 0.53 ms in FP8 and 0.80 in bf16 so; 0.59 and 0.83 with the MLP's half behind attention.
    """

    def norm(self, layer: PackedLayer) -> torch.Tensor:
        return self.x

    def heads(self, layer: PackedLayer, normed: Any, kv_only: bool) -> torch.Tensor:
        """Heads; what the MLP gives is left behind the place of what attention will have seen."""
        runner, into = self._runner, layer.into
        assert runner._one_row is not None
        heads = runner._wide[:1, : runner._blocks.heads]
        inner = runner._both[:1, runner._blocks.text.dim :]
        shape, _ = runner._one_row
        gemv.norm_gemv(normed, layer.norm, into.weight, into.scale, into.bias, heads, inner, shape, pdl=runner._pdl)
        return heads

    def attend(self, layer: PackedLayer, heads: torch.Tensor, cache: LayerCache) -> torch.Tensor:
        """What attention saw; beside it the MLP's half of the product out of the block, which does not wait for it."""
        runner, dim = self._runner, self._runner._blocks.text.dim
        seen, inner = runner._both[:1, :dim], runner._both[:1, dim:]
        mlp = gemv.Beside(inner, layer.out.weight[:, dim:], runner._mlp_out, ONE_ROW_MLP)
        runner._blocks.attention.attend(heads, *self._rows, cache, seen, write=True, beside=mlp, pdl=runner._pdl)
        return seen

    def add(self, layer: PackedLayer, seen: torch.Tensor, normed: Any) -> None:
        runner, out = self._runner, layer.out
        assert runner._one_row is not None
        _, shape = runner._one_row
        dim, mlp = runner._blocks.text.dim, runner._mlp_out
        gemv.add_gemv(seen, self.x, out.weight, out.scale, out.bias, dim, shape, delta=mlp, pdl=runner._pdl)
