"""Weights of decoder blocks in the format of the CUDA kernels: half precision or FP8, with concatenated matrices."""

from __future__ import annotations

import os

import torch
from torch import nn

from saccade.engine.cuda.image_attention import ImageAttention
from saccade.engine.cuda.linear import Fp8, PackedLinear, Rows
from saccade.engine.cuda.paged_cache import LayerCache, PagedCache
from saccade.engine.errors import Fallbacks
from saccade.engine.kernels import E4M3, region_sampling, supports_fp8, temperature
from saccade.engine.kernels import skinny_gemm as gemm
from saccade.engine.kernels.moe import few_experts as few
from saccade.engine.kernels.moe.many_experts import SortedRows, grouped_product
from saccade.engine.kernels.norm_quantize import quantize_rows
from saccade.engine.kernels.paged_attention import PagedAttention
from saccade.engine.models.moondream.layers import Experts
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.text import Block, join, share
from saccade.engine.models.quantization import quantize, supports_fp8_gemm


def supports(model: Moondream) -> bool:
    """Return whether the CUDA kernels support the text decoder of this model."""
    text, region = model.config.text, model.config.region
    inner = (text.n_heads + 2 * text.n_kv_heads) * text.head_dim
    return (
        model.dtype in (torch.bfloat16, torch.float16)
        and text.head_dim % 8 == 0
        and text.head_dim >= 16
        and bool(text.tau) == (text.moe is not None)
        and text.gelu == "erf"
        and (not text.tau or temperature.supports(inner, 2 * text.n_heads))
        and (
            text.moe is None
            or (
                few.supports(text.dim, text.moe.expert_inner_dim, text.moe.num_experts)
                and gemm.supports(inner, text.dim)
                and gemm.supports(text.dim, text.dim, gemm.split_k_for(text.dim, False))
            )
        )
        and region_sampling.supports(
            region.coord_out_dim, region.size_out_dim // 2, region.coord_feat_dim, region.size_feat_dim, text.dim
        )
    )


class PackedExperts:
    """Mixture of experts of one layer, in the format of the CUDA kernels.

    Args:
        experts: PyTorch module of the layer, which then shares the packed weights.
        fp8: whether to quantize the weights to FP8.

    Attributes:
        router: linear layer from a row to the logits of the experts.
        top: number of experts per row.
        fc1, fc2: weights of the experts, in the layout of `kernels.moe`.
        scales: FP8 scales of fc1 and fc2, or None.
    """

    __slots__ = ("_width", "fc1", "fc2", "router", "scales", "top")

    def __init__(self, experts: Experts, fp8: bool) -> None:
        self.router, self.top = experts.router, experts.config.experts_per_token
        self.fc1, self.fc2 = experts.fc1.weight.detach(), experts.fc2.weight.detach()
        self._width = experts.config.expert_inner_dim
        self.scales: tuple[torch.Tensor, torch.Tensor] | None = None
        if self.fc1.dtype == E4M3:
            self.scales = experts.scales
        elif fp8:
            given = experts.scales or (None, None)
            self.fc1, first = _quantize(self.fc1, given[0])
            experts.fc1.weight.data = self.fc1  # frees the memory of fc1's original weights, for fc2
            self.fc2, second = _quantize(self.fc2, given[1])
            experts.fc2.weight.data = self.fc2
            self.scales = experts.scales = first, second

    def many(self, x: Rows, plain: torch.Tensor, parts: torch.Tensor) -> None:
        """Compute the mixture of experts for many rows (prefill).

        Args:
            x: (rows, dim) input of the experts, in half precision or FP8.
            plain: (rows, dim) input of the router, in half precision.
            parts: (top, rows, dim) output: weighted result of each selected expert, best expert first.
        """
        (values, of_rows), rows = x, SortedRows(plain, self.router, self.top)
        fc1, fc2 = self.scales or (None, None)
        inner = torch.empty(len(values) * self.top, self._width, dtype=parts.dtype, device=parts.device)
        grouped_product(values, rows, self.fc1, inner, x_scales=of_rows, scale=fc1)
        if of_rows is None:
            grouped_product(inner, rows, self.fc2, parts, scale=fc2)
        else:
            quantized, scales = quantize_rows(inner, None)
            grouped_product(quantized, rows, self.fc2, parts, x_scales=scales, scale=fc2)


class PackedLayer:
    """Weights of one decoder block in the format of the CUDA kernels.

    In a dense block, QKV and fc1 form one matrix. The attention projection and fc2 form another matrix. In a block with
    experts, the two matrices contain only QKV and the attention projection.
    """

    __slots__ = ("experts", "into", "norm", "number", "out", "temperature")

    def __init__(self, block: Block, number: int, fp8: Fp8) -> None:
        joined = join(block)
        self.norm: nn.LayerNorm = block.ln
        self.number = number
        self.into = PackedLinear(joined.into, joined.into_bias, fp8)
        self.out = PackedLinear(joined.out, joined.out_bias, fp8)
        if fp8 is Fp8.ROWS_TOO:
            share(block, self.into.weight, self.out.weight)
        self.experts = None if joined.experts is None else PackedExperts(joined.experts, fp8 is not Fp8.NONE)
        tau = block.temperature
        # The stacked weights of queries and values, and alpha.
        self.temperature = None if tau is None else (torch.cat([tau.wq, tau.wv]).detach(), tau.alpha.detach())


class PackedBlocks:
    """All decoder blocks in the format of the CUDA kernels, with their KV cache and attention kernels.

    Args:
        model: a model that `supports` accepts. Its modules share the packed weights. With FP8 weights, its modules
            become unusable, to save memory.
        cache: the paged KV cache.
        fallbacks: collects messages about slower implementations that are used.

    Attributes:
        layers, caches: weights and KV cache of each block.
        prefix_length: number of positions of an image prefix (BOS and image tokens).
        attention: attention over the KV cache.
        image_attention: attention inside images.
        text: configuration of the decoder.
        heads: width of queries, keys and values together.
        top: number of experts per token; 0 without experts.
        out_splits: split-K factor of the output GEMM of attention in layers with experts.
        tau_parts: number of partial sums of the products for the attention temperature; 0 without a temperature.
        splits: split-K factor of the GEMM that computes the output of attention and MLP.
        skinny: whether `skinny_gemm` supports these shapes.
        fp8: whether the weights are FP8.
        fp8_rows: whether GEMMs with many rows also use FP8. Half-precision weights are then not stored.
    """

    def __init__(self, model: Moondream, cache: PagedCache, fallbacks: Fallbacks) -> None:
        # torch reads this variable at the first cuBLASLt call of a process; a value set by the user is kept. A
        # workspace is cleared before many GEMMs: FP8 prefills of 1 / 8 images take 2.78 / 16.96 ms with it and 2.71 /
        # 16.70 without.
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")
        text = self.text = model.config.text
        self.heads = (text.n_heads + 2 * text.n_kv_heads) * text.head_dim
        self.top = 0 if text.moe is None else text.moe.experts_per_token
        self.out_splits = gemm.split_k_for(text.dim, False)
        self.tau_parts = temperature.temperature_parts(self.heads) if text.tau else 0
        wide = text.dim + text.ff_dim
        self.fp8 = model.fp8 and supports_fp8(model.device)
        widths = text.dim, self.heads, text.ff_dim
        self.fp8_rows = self.fp8 and supports_fp8_gemm(model.device, fallbacks, cache.prefix_length, *widths)
        kept = Fp8.ROWS_TOO if self.fp8_rows else Fp8.WEIGHTS if self.fp8 else Fp8.NONE
        self.splits = gemm.split_k_for(wide, self.fp8)
        self.skinny = gemm.supports(self.heads + text.ff_dim, text.dim) and gemm.supports(text.dim, wide, self.splits)
        blocks = [block for block in model.text.blocks if isinstance(block, Block)]
        with torch.no_grad():
            self.layers = [PackedLayer(block, number, kept) for number, block in enumerate(blocks)]
        self.caches: list[LayerCache] = cache.layers
        self.prefix_length = cache.prefix_length
        self.attention = PagedAttention(
            text.n_heads,
            text.n_kv_heads,
            text.head_dim,
            cache.page_size,
            cache.prefix_length,
            cache.gap,
            model.text.cosine,
            model.text.sine,
        )
        self.image_attention = ImageAttention(
            model.device, model.dtype, text.n_heads, text.n_kv_heads, text.head_dim, cache.prefix_length, fallbacks
        )


def _quantize(weight: torch.Tensor, given: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize weights (experts, outputs, inputs) to FP8, one expert at a time to save memory."""
    packed, scale = torch.empty_like(weight, dtype=E4M3), weight.new_empty(weight.shape[:2], dtype=torch.float32)
    for number, one in enumerate(weight):
        packed[number], scale[number] = quantize(one, None if given is None else given[number])
    return packed, scale
