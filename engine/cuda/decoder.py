"""Text decoder on CUDA for steps with 1 to 64 rows. Its results match those of `Runner`.

Such a step is limited by memory bandwidth, because it reads all weights. Attention and MLP of a layer have the same
input and the same residual. Their four matrices are therefore packed into two, which saves kernels:

    add and norm → input GEMM (QKV, fc1) → attention (RoPE, KV cache write, GELU) → output GEMM (projection, fc2)

A single row needs only three kernels, see `one_row`. `prefill` processes more rows than these kernels support. With
experts and an attention temperature (Moondream 3), a layer is:

    add and norm → router → GEMM (QKV heads) → temperature products → attention → output GEMM
                       └→ experts (two GEMMs) on a separate stream

Most kernels use programmatic dependent launch (`kernels.common`). Triton and bf16 or fp16 are required.

| time per step on an H200, 760 keys per row | 1 row | 8 rows | 32 rows |
|---|---|---|---|
| Moondream 2, bf16 | 0.80 ms | 1.18 ms | 2.00 ms |
| Moondream 2, FP8 weights | 0.55 ms | 0.98 ms | 1.87 ms |
| Moondream 2, bf16, cuBLAS without concurrent kernels | 1.08 ms | 1.34 ms | 2.18 ms |
| Moondream 3, bf16 | 0.99 ms | 3.23 ms | 5.29 ms |
| Moondream 3, FP8 weights | 0.61 ms | 2.24 ms | 3.73 ms |
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from saccade.engine.cuda import one_row
from saccade.engine.cuda.layers import PackedBlocks, PackedLayer
from saccade.engine.cuda.linear import BinHead
from saccade.engine.cuda.paged_cache import LayerCache, PagedCache
from saccade.engine.cuda.prefill import PrefillOps
from saccade.engine.errors import Fallbacks
from saccade.engine.kernels import region_sampling
from saccade.engine.kernels.common import supports_pdl
from saccade.engine.kernels.moe.few_experts import Routes, few_experts, router_products
from saccade.engine.kernels.norm_quantize import add_layernorm
from saccade.engine.kernels.paged_attention import Temperature
from saccade.engine.kernels.skinny_gemm import MAX_ROWS
from saccade.engine.kernels.temperature import temperature_products
from saccade.engine.models.lora import AdaptedRows, AdapterBank
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.region import size_values
from saccade.engine.models.moondream.text import run_blocks
from saccade.engine.models.runner import Runner


class PackedRunner(Runner):
    """Runs the batch steps of a model on CUDA with packed weights; see `Runner`.

    The model's modules share the packed weights.

    Args:
        model: a model that `supports` accepts.
        cache: the paged KV cache.
        max_rows: maximum number of rows (sequences) in a sampling step.
        fallbacks: collects messages about slower implementations that are used.
    """

    _model: Moondream

    def __init__(self, model: Moondream, cache: PagedCache, max_rows: int, fallbacks: Fallbacks) -> None:
        super().__init__(model, cache)
        text = model.config.text
        self._adapted: AdaptedRows | None = None
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

        self._wide = scratch(MAX_ROWS, blocks.heads + text.ff_dim)
        self._both = scratch(MAX_ROWS, text.dim + text.ff_dim)
        self._normed = scratch(MAX_ROWS, text.dim)
        logits: torch.Tensor | None = None
        most_parts = blocks.splits
        if text.moe is not None:
            most_parts = max(most_parts, blocks.out_splits + blocks.top)
            self._routes = Routes(text.moe.num_experts, MAX_ROWS * blocks.top, model.device)
            self._expert_inner = scratch(MAX_ROWS * blocks.top, text.moe.expert_inner_dim)
            # One buffer per layer, so that chosen experts can be counted after a step.
            self._logits = logits = scratch(text.n_layers, MAX_ROWS, text.moe.num_experts, dtype=torch.float32)
        self._products = scratch(blocks.tau_parts * MAX_ROWS * 2 * text.n_heads, dtype=torch.float32)
        self._split_k = scratch(most_parts, MAX_ROWS, text.dim, dtype=torch.float32)
        self._head_norms = model.region.norms
        self._head_input = scratch(max(1, len(self._head_norms)), max_rows, text.dim)
        self._coords = BinHead(model.region.coord_decoder, region.coord_out_dim, self._pdl)
        self._beside = torch.cuda.Stream(model.device)  # experts run concurrently with attention
        self._sizes = BinHead(model.region.size_decoder, region.size_out_dim, self._pdl)
        self._features = scratch(max_rows, region.size_feat_dim)
        self._one_row = one_row.OneRow(blocks, logits) if one_row.supports(blocks) else None

    def with_adapters(self, bank: AdapterBank, slots: torch.Tensor) -> Runner:
        """Return a runner with LoRA adapters. It shares the weights and scratch buffers of this runner.

        The kernels for experts do not support adapters. If an adapter has matrices for experts, the slower PyTorch
        modules run.
        """
        if bank.has_experts:
            return Runner(self._model, self._cache).with_adapters(bank, slots)
        adapted = copy.copy(self)
        adapted._adapted = bank.rows(slots)
        return adapted

    def forward_tokens(
        self, x: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor, tables: torch.Tensor, together: bool
    ) -> torch.Tensor:
        """Run one token per row through the decoder; see `Runner.forward_tokens`. `x` is overwritten."""
        blocks, rows = self._blocks, (positions, owners, tables)
        if len(x) == 1 and self._one_row is not None and self._adapted is None and not together:
            run_blocks(blocks.layers, blocks.caches, one_row.OneRowOps(self._one_row, x, rows, self._pdl))
            return x
        if not blocks.skinny or len(x) > MAX_ROWS:
            many = PrefillOps(blocks, x, None, rows, self._adapted, self._beside)
            run_blocks(blocks.layers, blocks.caches, many)
            return add_layernorm(many.x, many.before, None)
        ops = _TokenOps(self, x, rows, together)
        run_blocks(blocks.layers, blocks.caches, ops)
        return add_layernorm(x, ops.before, None, bias=ops.bias, pdl=ops.pdl, early=not ops.joined)

    def prefill(
        self,
        images: torch.Tensor,
        prefixes: torch.Tensor,
        prompts: torch.Tensor | None,
        positions: torch.Tensor,
        owners: torch.Tensor,
        tables: torch.Tensor,
    ) -> torch.Tensor | None:
        """Prefill images and prompts together; see `Runner.prefill`."""
        count, length, dim = images.shape
        flat = images.reshape(-1, dim)
        if prompts is not None:
            flat = torch.cat([flat, prompts])
        adapters = None if self._adapted is None else self._adapted.spread(count, length)
        ops = PrefillOps(self._blocks, flat, prefixes, (positions, owners, tables), adapters, self._beside)
        run_blocks(self._blocks.layers, self._blocks.caches, ops, kv_only=prompts is None)
        return None if prompts is None else add_layernorm(ops.x, ops.before, None)

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
        """Sample coordinates and sizes; see `Runner.sample_regions`."""
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
        """Return the logits (rows, vocab) float32 of the next token for hidden states (rows, dim)."""
        text = self._model.text
        return text.lm_head(add_layernorm(hidden, None, text.post_ln)).float()  # type: ignore[no-any-return]


class _TokenOps:
    """Operations of a decoder block (`BlockOps`) for one token per row.

    The output of a block is `before` plus `bias`. The layer norm of the next block adds it to the residual x.
    """

    def __init__(
        self,
        runner: PackedRunner,
        x: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        together: bool,
    ) -> None:
        self._runner, self.x, self._rows = runner, x, rows
        self._adapters = runner._adapted
        self._count, self._together = len(x), together
        self.pdl = runner._pdl and not together
        self.joined = False  # whether the next kernel must also wait for the experts' stream
        self.before: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None
        shape = runner._blocks.tau_parts, self._count, 2 * runner._blocks.text.n_heads
        self._products = runner._products[: shape[0] * shape[1] * shape[2]].view(shape)

    def norm(self, layer: PackedLayer) -> Any:
        runner, normed = self._runner, self._runner._normed[: self._count]
        early, self.joined = not self.joined, False
        add_layernorm(self.x, self.before, layer.norm, normed, bias=self.bias, pdl=self.pdl, early=early)
        if layer.experts is not None:
            router, routes = layer.experts.router, runner._routes
            logits = runner._logits[layer.number, : self._count]
            router_products(normed, router, logits, routes, runner._blocks.top, pdl=self.pdl)
            # The experts' partial sums are stored after those of attention's product.
            parts = runner._split_k[runner._blocks.out_splits :, : self._count][: runner._blocks.top]
            runner._beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(runner._beside):
                weights, scales = (layer.experts.fc1, layer.experts.fc2), layer.experts.scales
                few_experts(routes, normed, *weights, runner._expert_inner, parts, scales=scales, pdl=self.pdl)
        return normed

    def heads(self, layer: PackedLayer, normed: Any, kv_only: bool) -> torch.Tensor:
        wide = self._runner._wide[: self._count]
        if layer.experts is not None:
            wide = wide[:, : self._runner._blocks.heads]
        # Launched after the router: both read the output of the kernel before the router.
        layer.into.few(normed, wide, pdl=self.pdl, late=layer.experts is not None)
        if self._adapters is not None:
            width = self._runner._blocks.heads
            self._adapters.add(layer.number, "attn.qkv", normed, wide[:, :width])
            if layer.experts is None:
                self._adapters.add(layer.number, "mlp.fc1", normed, wide[:, width:])
        return wide

    def temper(self, layer: PackedLayer, heads: torch.Tensor) -> torch.Tensor:
        assert layer.temperature is not None
        temperature_products(heads, layer.temperature[0], self._products, pdl=self.pdl)
        return heads

    def write_kv(self, layer: PackedLayer, heads: torch.Tensor, cache: LayerCache) -> None:
        self._runner._blocks.attention.write_kv(heads, *self._rows, cache, temperature=self._temperature(layer))

    def attend(self, layer: PackedLayer, heads: torch.Tensor, cache: LayerCache) -> torch.Tensor:
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
        if self._adapters is not None:  # the adapter's result is added here; the next norm adds the rest
            width = self._runner._blocks.text.dim
            self._adapters.add(layer.number, "attn.proj", seen[:, :width], self.x)
            if not experts:
                self._adapters.add(layer.number, "mlp.fc2", seen[:, width:], self.x)
        splits = blocks.out_splits if experts else blocks.splits
        self.before = self._runner._split_k[: splits + (blocks.top if experts else 0), : self._count]
        self.bias = layer.out.bias
        layer.out.few(seen, self.before[:splits], pdl=self.pdl)
        if experts:
            torch.cuda.current_stream().wait_stream(self._runner._beside)
            self.joined = True

    def _temperature(self, layer: PackedLayer) -> Temperature | None:
        return None if layer.temperature is None else (self._products, layer.temperature[1])
