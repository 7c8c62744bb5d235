"""A linear layer on CUDA, its weights in half precision and FP8 if wanted, for inputs in either. Needs Triton."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from saccade.engine.backends.quantization import quantize
from saccade.engine.kernels import fp8_linear as kernels
from saccade.engine.kernels.add_layernorm import add_layernorm
from saccade.engine.kernels.fp8_format import E4M3

Rows = tuple[torch.Tensor, torch.Tensor | None]
"""(rows, inputs) in half precision and None, or in e4m3 with float32 scales (rows,)."""


class PackedLinear:
    """A linear layer.

    Attributes:
        weight: (outputs, inputs) in half precision.
        bias: (outputs,).
        packed: the weights as kernels read them, e4m3 if there is a scale.
        scale: (outputs,) float32, or None.
    """

    __slots__ = ("bias", "packed", "scale", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, fp8: bool) -> None:
        self.scale: torch.Tensor | None
        self.weight, self.bias = weight, bias
        self.packed, self.scale = quantize(weight) if fp8 else (weight, None)

    def linear(self, x: Rows, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Outputs (rows, stop - start) in half precision."""
        values, scales = x
        part = slice(start, stop)
        if self.scale is None or scales is None:
            return F.linear(values, self.weight[part], self.bias[part])
        return kernels.linear(values, scales, self.packed[part], self.scale[part], self.bias[part])

    def linear_gelu(self, x: torch.Tensor, start: int = 0) -> torch.Tensor:
        """The same in half precision from output `start` on, and tanh-approximated GELU, in one kernel."""
        # cuBLASLt's epilogue has no public name in torch.
        return torch._addmm_activation(self.bias[start:], x, self.weight[start:].t(), use_gelu=True)


def add_layernorm_rows(x: torch.Tensor, delta: torch.Tensor | None, norm: torch.nn.LayerNorm, fp8: bool) -> Rows:
    """`add_layernorm` whose result is in half precision or FP8, as `PackedLinear.linear` takes it."""
    if not fp8:
        return add_layernorm(x, delta, norm), None
    out, scales = torch.empty_like(x, dtype=E4M3), torch.empty(len(x), dtype=torch.float32, device=x.device)
    return add_layernorm(x, delta, norm, out, scales=scales), scales
