"""A decoder's blocks on CUDA as kernels read them: joined matrices, experts, temperatures, FP8 if wanted.

Needs Triton. Knows nothing of what a step consists of: `decoder` and `prefill` run them.
"""

from __future__ import annotations

import os

import torch
from torch import nn

from saccade.engine.cuda.image_attention import ImageAttention
from saccade.engine.cuda.linear import Fp8, PackedLinear, Rows
from saccade.engine.cuda.paged_cache import LayerCache, PagedCache
from saccade.engine.errors import Fallbacks
from saccade.engine.kernels import region_sampling, temperature
from saccade.engine.kernels import skinny_gemm as gemm
from saccade.engine.kernels.fp8_format import E4M3, supports_fp8
from saccade.engine.kernels.moe import few_experts as few
from saccade.engine.kernels.moe import one_row, router
from saccade.engine.kernels.moe.many_experts import SortedRows, grouped_product
from saccade.engine.kernels.norm_quantize import quantize_rows
from saccade.engine.kernels.paged_attention import PagedAttention
from saccade.engine.models.moondream.layers import Experts
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.text import Block, join, share
from saccade.engine.models.quantization import quantize, supports_fp8_gemm


def supports(model: Moondream) -> bool:
    """Whether the kernels take this model."""
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
                and router.supports(text.dim)
                and gemm.supports(inner, text.dim)
                and gemm.supports(text.dim, text.dim, gemm.split_k_for(text.dim, False))
            )
        )
        and region_sampling.supports(
            region.coord_out_dim, region.size_out_dim // 2, region.coord_feat_dim, region.size_feat_dim, text.dim
        )
    )


class PackedExperts:
    """One layer's experts.

    Args:
        experts: the layer's; it goes on to share what is kept of its weights.
        fp8: whether that is FP8, which products of any number of rows read, also where they are not in FP8 yet.

    Attributes:
        router: from a row to the logits of the experts.
        top: experts a row.
    """

    __slots__ = ("_fc1", "_fc2", "_scales", "_width", "router", "top")

    def __init__(self, experts: Experts, fp8: bool) -> None:
        self.router, self.top = experts.router, experts.config.experts_per_token
        self._fc1, self._fc2 = experts.fc1.weight.detach(), experts.fc2.weight.detach()
        self._width = experts.config.expert_inner_dim
        self._scales: tuple[torch.Tensor, torch.Tensor] | None = None
        if self._fc1.dtype == E4M3:
            self._scales = experts.scales
        elif fp8:
            given = experts.scales or (None, None)
            self._fc1, first = _quantize(self._fc1, given[0])
            experts.fc1.weight.data = self._fc1  # what was there is free for those of the second product
            self._fc2, second = _quantize(self._fc2, given[1])
            experts.fc2.weight.data = self._fc2
            self._scales = experts.scales = first, second

    @property
    def fp8(self) -> bool:
        """Whether their weights are in FP8."""
        return self._scales is not None

    def few(
        self,
        x: torch.Tensor,
        routes: router.Routes,
        inner: torch.Tensor,
        parts: torch.Tensor,
        *,
        pdl: bool,
    ) -> None:
        """Results of at most `few_experts.MAX_ROWS` rows; the arguments are those of `few_experts.few_experts`."""
        few.few_experts(routes, x, self._fc1, self._fc2, inner, parts, scales=self._scales, pdl=pdl)

    def one(
        self,
        chosen: one_row.Chosen,
        inner: torch.Tensor,
        seen: torch.Tensor,
        out: PackedLinear,
        delta: torch.Tensor,
        into: torch.Tensor,
        shape: one_row.Shape,
        *,
        pdl: bool,
    ) -> None:
        """Add one row's results to `into`, and what attention saw through `out`; see `one_row.add_experts`."""
        one_row.add_experts(
            chosen,
            self._fc1,
            self._fc2,
            self._scales,
            inner,
            seen,
            out.weight,
            out.scale,
            out.bias,
            delta,
            into,
            shape,
            pdl=pdl,
        )

    def sort(self, x: torch.Tensor) -> SortedRows:
        """Which of any number of rows (rows, dim) in half precision go through which expert."""
        return SortedRows(x, self.router, self.top)

    def many(self, x: Rows, rows: SortedRows, parts: torch.Tensor) -> None:
        """Results of sorted rows, to `parts` (top, rows, dim)."""
        values, of_rows = x
        fc1, fc2 = self._scales or (None, None)
        inner = torch.empty(len(values) * self.top, self._width, dtype=parts.dtype, device=parts.device)
        grouped_product(values, rows, self._fc1, inner, x_scales=of_rows, scale=fc1)
        if of_rows is None:
            grouped_product(inner, rows, self._fc2, parts, scale=fc2)
        else:
            quantized, scales = quantize_rows(inner, None)
            grouped_product(quantized, rows, self._fc2, parts, x_scales=scales, scale=fc2)


class PackedLayer:
    """One block's weights: into heads and MLP, and out of both; or of attention alone, and the experts'."""

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
        # The weights of queries and of values, one below the other, and alpha.
        self.temperature = None if tau is None else (torch.cat([tau.wq, tau.wv]).detach(), tau.alpha.detach())


class PackedBlocks:
    """A decoder's blocks as steps of all kinds read them, their cache, and the kernels of its attention.

    Args:
        model: one that `supports` accepts. Its weights are packed a layer at a time, and it goes on to share them: in
            FP8 its modules have numbers of no use without their scales, and half the memory is free.
        cache: where keys and values go.
        fallbacks: told what does not run here.

    Attributes:
        layers, caches: one for each block.
        prefix_length: positions of an image.
        attention: over the cache.
        image_attention: of images' tokens to each other.
        text: the decoder's shape.
        heads: width of queries, keys and values.
        top: experts a token; 0 without.
        out_splits: parts of the inputs of the product out of attention alone, beside experts.
        tau_parts: parts that a temperature's products come in; 0 without.
        splits: parts of the inputs of the product out of attention and MLP.
        skinny: whether products of few rows take these shapes.
        fp8: whether weights are in FP8.
        fp8_rows: whether many rows are, too; then no weights are kept in half precision.
    """

    def __init__(self, model: Moondream, cache: PagedCache, fallbacks: Fallbacks) -> None:
        # torch reads it once, at a process's first product by cuBLASLt; what a user has set stays. With a workspace it
        # is cleared before many products: prefills of 1 / 8 images in FP8 take 2.78 / 16.96 ms, without 2.71 / 16.70.
        # In bf16 32 streams are answered 190.5 times a second and without 192.3: that is worth the 0.3 ms of 18.2 that
        # a frame alone takes longer.
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
    """`quantize` of weights (experts, outputs, inputs), an expert at a time: all at once they take 8 bytes a weight."""
    packed, scale = torch.empty_like(weight, dtype=E4M3), weight.new_empty(weight.shape[:2], dtype=torch.float32)
    for number, one in enumerate(weight):
        packed[number], scale[number] = quantize(one, None if given is None else given[number])
    return packed, scale
