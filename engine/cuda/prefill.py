"""Prefill on CUDA. Image prefixes (BOS and image tokens) and prompts share their GEMMs. Triton is required.

The module also processes long prompts after a cached prefix, and decode steps with many rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from saccade.engine.cuda.layers import PackedBlocks, PackedExperts, PackedLayer
from saccade.engine.cuda.linear import Rows, add_layernorm_rows
from saccade.engine.cuda.paged_cache import LayerCache
from saccade.engine.kernels.norm_quantize import quantize_rows
from saccade.engine.kernels.paged_attention import Temperature
from saccade.engine.kernels.temperature import temperature_parts, temperature_products
from saccade.engine.models.lora import AdaptedRows

_Seen = tuple[torch.Tensor | None, torch.Tensor]
"""Attention output of the image rows and of the prompt rows. If the first is None, the second has all rows."""


@dataclass(slots=True)
class _Prefilled:
    """Intermediate results of a decoder block during prefill.

    Attributes:
        normed: layer norm in the dtype of the GEMMs.
        plain: layer norm in half precision, for routers and LoRA adapters.
        prompts: layer norm of the prompt rows only, for a dense MLP with FP8 in the last layer.
        wide: queries, keys and values. With FP8, the inputs of GELU in a dense MLP may follow.
        products: partial sums of the attention temperature.
        parts: results of the experts.
    """

    normed: Rows
    plain: torch.Tensor | None = None
    prompts: Rows | None = None
    wide: torch.Tensor | None = None
    products: torch.Tensor | None = None
    parts: torch.Tensor | None = None


class PrefillOps:
    """Operations of a decoder block (`BlockOps`) during prefill: image prefixes, followed by prompts.

    `before` is the output of a block. The layer norm of the next block adds it to the residual x.

    Args:
        blocks: blocks of the decoder.
        x: (rows, dim) residual of the images, then of the prompts.
        prefixes: (images, pages) page tables of the images, or None without images.
        prompts: positions, owners and tables of the prompt rows; see `Runner.forward_tokens`.
        adapters: LoRA adapters of the rows, or None.
        beside: CUDA stream for concurrent work.
    """

    def __init__(
        self,
        blocks: PackedBlocks,
        x: torch.Tensor,
        prefixes: torch.Tensor | None,
        prompts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        adapters: AdaptedRows | None,
        beside: torch.cuda.Stream,
    ) -> None:
        self._blocks, self.x, self._prefixes, self._prompts = blocks, x, prefixes, prompts
        self._adapters, self._beside = adapters, beside
        self._prefix_rows = 0 if prefixes is None else len(prefixes) * blocks.prefix_length
        self.before: torch.Tensor | None = None

    def _is_last(self, layer: PackedLayer) -> bool:
        """Return whether this is the last layer of a prefill with images."""
        # In this layer, images need only keys and values.
        return self._prefix_rows > 0 and layer.number == len(self._blocks.layers) - 1

    def norm(self, layer: PackedLayer) -> _Prefilled:
        """Return the layer norm in the dtype of the GEMMs, and also in half precision for routers and LoRA adapters."""
        fp8 = self._blocks.fp8_rows
        if layer.experts is None and self._adapters is None:
            rows, at = _Prefilled(add_layernorm_rows(self.x, self.before, layer.norm, fp8)), self._prefix_rows
            if fp8 and self._is_last(layer) and len(self.x) > at:
                rows.prompts = add_layernorm_rows(self.x[at:], None, layer.norm, fp8)
            return rows
        plain = torch.empty_like(self.x)
        rows = _Prefilled(add_layernorm_rows(self.x, self.before, layer.norm, fp8, plain), plain)
        if layer.experts is not None and self._forks(layer):
            self._beside.wait_stream(torch.cuda.current_stream())
            rows.parts = self._experts(layer.experts, rows.normed, plain, self._beside)
        return rows

    def _experts(
        self, experts: PackedExperts, normed: Rows, plain: torch.Tensor, stream: torch.cuda.Stream | None = None
    ) -> torch.Tensor:
        """Compute the mixture of experts. Return (1 + top, rows, dim), of which index 0 is left for attention."""
        parts = plain.new_empty(1 + self._blocks.top, *plain.shape)
        with torch.cuda.stream(stream):
            experts.many(normed, plain, parts[1:])
        return parts

    def _forks(self, layer: PackedLayer) -> bool:
        """Return whether the experts of a layer run concurrently with attention, which is faster.

        | prefill of one image, Moondream 3 | concurrent | sequential |
        |---|---|---|
        | bf16 | 8.1 ms | 8.6 ms |
        | FP8 | 6.1 ms | 6.7 ms |
        """
        return layer.experts is not None and not self._is_last(layer)

    def heads(self, layer: PackedLayer, normed: _Prefilled, kv_only: bool) -> _Prefilled:
        """Compute queries, keys and values, and the inputs of the MLP's GELU if the same GEMM computes them."""
        # cuBLAS has no GELU epilogue for FP8, so one GEMM computes heads and MLP. The last MLP has few rows.
        width = self._blocks.heads
        apart = normed.normed[1] is None or self._is_last(layer)
        stop = width if apart and self._adapters is None else None
        normed.wide = layer.into.linear(normed.normed, stop=stop)
        if self._adapters is not None:
            assert normed.plain is not None
            self._adapters.add(layer.number, "attn.qkv", normed.plain, normed.wide[:, :width])
            if layer.experts is None:
                self._adapters.add(layer.number, "mlp.fc1", normed.plain, normed.wide[:, width:])
        return normed

    def temper(self, layer: PackedLayer, heads: _Prefilled) -> _Prefilled:
        """Compute the partial sums of the attention temperature, which the attention kernels apply later."""
        assert heads.wide is not None
        assert layer.temperature is not None
        blocks, rows, wide = self._blocks, len(self.x), heads.wide
        tau = layer.temperature[0]
        parts = temperature_parts(blocks.heads, rows)
        heads.products = tau.new_empty(parts, rows, len(tau), dtype=torch.float32)
        temperature_products(wide[:, : blocks.heads], tau, heads.products)
        return heads

    def _temperature(self, layer: PackedLayer, heads: _Prefilled, rows: slice) -> Temperature | None:
        if layer.temperature is None or heads.products is None:
            return None
        return heads.products[:, rows], layer.temperature[1]

    def write_kv(self, layer: PackedLayer, heads: _Prefilled, cache: LayerCache) -> None:
        """Store keys and values in the KV cache. Apply RoPE to the queries and keys of images in place."""
        assert heads.wide is not None
        qkv = heads.wide[:, : self._blocks.heads]
        temperature = self._temperature(layer, heads, slice(None))
        self._blocks.attention.write_kv(qkv, *self._prompts, cache, prefixes=self._prefixes, temperature=temperature)

    def attend(self, layer: PackedLayer, heads: _Prefilled, cache: LayerCache) -> _Seen:
        """Return the attention output: bidirectional for images, causal for prompts. The last layer omits images."""
        assert heads.wide is not None
        blocks, at, last = self._blocks, self._prefix_rows, self._is_last(layer)
        qkv = heads.wide[:, : blocks.heads]
        self.write_kv(layer, heads, cache)
        if last:  # hidden states of images are not needed
            plain = heads.plain if blocks.fp8_rows else heads.normed[0]
            if plain is not None:
                heads.normed = plain[at:], None
            self.x = self.x[at:]
            heads.wide = heads.wide[at:]
            self._adapters = None if self._adapters is None else self._adapters.behind(at)
        attended = torch.empty_like(self.x)
        temperature, prompts = self._temperature(layer, heads, slice(at, None)), qkv[at:]

        def attend_prompts(out: torch.Tensor) -> None:
            if len(prompts):
                rows = self._prompts
                blocks.attention.attend(prompts, *rows, cache, out, write=False, temperature=temperature)

        if last or not at:
            attend_prompts(attended)
            return None, attended
        # Image attention takes 20 µs and prompt attention 14 µs. They run concurrently, unless experts fill the GPU.
        beside = self._beside if len(prompts) and layer.experts is None else None
        if beside is not None:
            beside.wait_stream(torch.cuda.current_stream())
        # Images first, otherwise prompts occupy the GPU: an FP8 prefill of 8 images takes 16.5 instead of 16.8 ms.
        first = blocks.image_attention.attend(qkv[:at], whole := attended[:at])
        with torch.cuda.stream(beside):
            attend_prompts(attended[at:])
        if beside is not None:
            torch.cuda.current_stream().wait_stream(beside)
        return None if first is whole else first, attended

    def add(self, layer: PackedLayer, attended: _Seen, normed: _Prefilled) -> None:
        """Compute the attention projection plus the MLP or experts of a block. Store the sum in `before`."""
        assert normed.wide is not None
        blocks, out, (first, seen) = self._blocks, layer.out, attended
        fp8 = blocks.fp8_rows
        if first is not None and (not fp8 or self._adapters is not None):
            seen[: len(first)].copy_(first)
        gelu: torch.Tensor | None = None
        if layer.experts is None and self._adapters is not None:
            gelu = F.gelu(normed.wide[:, blocks.heads :], approximate="tanh")
        if layer.experts is not None:
            if normed.parts is None:
                assert normed.plain is not None
                normed.parts = self._experts(layer.experts, normed.normed, normed.plain[-len(seen) :])
            self.before = normed.parts
            out.linear(quantize_rows(seen, None, first) if fp8 else (seen, None), out=self.before[0])
        elif fp8:
            pre_gelu = normed.wide[:, blocks.heads :]
            if normed.prompts is not None:
                pre_gelu = layer.into.linear(normed.prompts, start=blocks.heads)
            self.before = out.linear(quantize_rows(seen, pre_gelu, first))
        else:
            if gelu is None:
                gelu = layer.into.linear_gelu(normed.normed[0], start=blocks.heads)
            assert out.half is not None
            both = F.linear(gelu, out.half[:, blocks.text.dim :], out.bias)
            self.before = both.addmm_(seen, out.half[:, : blocks.text.dim].t())
        if self._adapters is not None:
            self._adapters.add(layer.number, "attn.proj", seen, self.x)
            if gelu is not None:
                self._adapters.add(layer.number, "mlp.fc2", gelu, self.x)
        if self._forks(layer):
            torch.cuda.current_stream().wait_stream(self._beside)
