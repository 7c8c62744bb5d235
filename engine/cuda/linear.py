"""Linear layers and region heads on CUDA with half-precision or FP8 weights. Triton is required."""

from __future__ import annotations

from enum import Enum, auto

import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.kernels import E4M3, gemv, region_sampling
from saccade.engine.kernels import skinny_gemm as gemm
from saccade.engine.kernels.norm_quantize import add_layernorm
from saccade.engine.kernels.skinny_gemm import MAX_ROWS, skinny_gemm, split_k_for
from saccade.engine.models.moondream.layers import Mlp
from saccade.engine.models.quantization import fp8_linear, quantize

# For the two layers of a head: 20 µs instead of 25 µs with `skinny_gemm`.
_ONE_ROW = gemv.Shape(4, 4, True), gemv.Shape(2, 4, True)


class Fp8(Enum):
    """How a linear layer uses FP8: not at all, for weights in GEMMs with few rows, or for weights and activations."""

    NONE = auto()
    WEIGHTS = auto()
    ROWS_TOO = auto()


Rows = tuple[torch.Tensor, torch.Tensor | None]
"""Activations (rows, inputs) and their scales: half precision and None, or e4m3 and float32 (rows,)."""


class PackedLinear:
    """A linear layer on CUDA with weights in half precision, FP8 or both.

    Args:
        weight: (outputs, inputs) in half precision.
        bias: (outputs,).
        fp8: use of FP8.

    Attributes:
        weight: (outputs, inputs), in e4m3 if `scale` is not None.
        bias: (outputs,).
        scale: (outputs,) float32 scales, or None.
        half: a copy of the weights in half precision, or None if no GEMM needs it.
    """

    __slots__ = ("bias", "half", "scale", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, fp8: Fp8) -> None:
        self.bias, self.scale = bias, None
        self.weight: torch.Tensor = weight
        self.half: torch.Tensor | None = weight
        if fp8 is not Fp8.NONE:
            self.weight, self.scale = quantize(weight)
        if fp8 is Fp8.ROWS_TOO:
            self.half = None

    def linear(self, x: Rows, start: int = 0, stop: int | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the output features `start` to `stop` (exclusive) in half precision, in `out` if given."""
        values, scales = x
        part = slice(start, stop)
        if scales is not None:
            assert self.scale is not None
            return fp8_linear(values, scales, self.weight[part], self.scale[part], self.bias[part], out)
        assert self.half is not None
        if out is None:
            return F.linear(values, self.half[part], self.bias[part])
        return torch.addmm(self.bias[part], values, self.half[part].t(), out=out)

    def few(self, x: torch.Tensor, out: torch.Tensor, *, pdl: bool = False, late: bool = False) -> torch.Tensor:
        """Compute the linear layer for few rows (`skinny_gemm`), and return `out`.

        If `out` is (split_k, rows, outputs), it receives the split-K partial sums, without bias.
        """
        bias = self.bias if out.ndim == 2 else None
        return skinny_gemm(x, self.weight, out, scale=self.scale, bias=bias, pdl=pdl, late=late)

    def linear_gelu(self, x: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Return the output features from index `start` after GELU (tanh approximation), in half precision."""
        assert self.half is not None
        # torch has no public function for cuBLASLt's epilogue.
        return torch._addmm_activation(self.bias[start:], x, self.half[start:].t(), use_gelu=True)


def add_layernorm_rows(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    norm: torch.nn.LayerNorm,
    fp8: bool,
    plain: torch.Tensor | None = None,
) -> Rows:
    """Add `delta` to x in place. Return the layer norm of the sum, in FP8 if `fp8` is True.

    If `plain` is given, the layer norm is also written to `plain` in half precision.
    """
    if not fp8:
        return add_layernorm(x, delta, norm, plain), None
    out, scales = torch.empty_like(x, dtype=E4M3), torch.empty(len(x), dtype=torch.float32, device=x.device)
    return add_layernorm(x, delta, norm, out, scales=scales, plain=plain), scales


class BinHead:
    """A region head: computes the logits of coordinate or size bins from hidden states.

    Steps with few rows use Triton kernels if these support the layer sizes. Other steps use PyTorch.

    Args:
        head: region head module of the model.
        width: number of bins.
        pdl: whether to use programmatic dependent launch (PDL).
    """

    __slots__ = ("_gelu", "_head", "_no_bias", "_one_row", "_pdl", "_skinny", "_split_k")

    def __init__(self, head: nn.Module, width: int, pdl: bool) -> None:
        self._head, self._pdl, self._skinny, self._one_row = head, pdl, False, False
        weight = next(head.parameters())
        self._no_bias = weight.new_zeros(width)  # zero bias, because the module adds its own bias later
        last = head.fc2 if isinstance(head, Mlp) else head
        if isinstance(last, nn.Linear):
            splits = split_k_for(last.in_features, False)
            self._skinny = splits > 1 and gemm.supports(*last.weight.shape)
            if isinstance(head, Mlp):
                self._skinny &= gemm.supports(*head.fc1.weight.shape)
                self._gelu = weight.new_zeros(MAX_ROWS, head.fc1.out_features)
                self._one_row = all(gemv.supports(*layer.weight.shape) for layer in (head.fc1, head.fc2))
            self._split_k = weight.new_zeros(splits * width * MAX_ROWS, dtype=torch.float32)

    def uses_pdl(self, rows: int) -> bool:
        """Return whether `scores` uses programmatic dependent launch (PDL) for this number of rows."""
        return self._pdl and self._skinny and rows <= MAX_ROWS

    def scores(self, hidden: torch.Tensor, wanted: bool) -> region_sampling.Scores:
        """Compute bin logits for hidden states (rows, dim). If `wanted` is False, the result may be uninitialized."""
        head, rows, width = self._head, len(hidden), len(self._no_bias)
        if not self._skinny or rows > MAX_ROWS:
            return (head(hidden) if wanted else hidden.new_empty(rows, width)).unsqueeze(0), self._no_bias
        split_k = self._split_k[: len(self._split_k) // MAX_ROWS * rows].view(-1, rows, width)
        last = head.fc2 if isinstance(head, Mlp) else head
        assert isinstance(last, nn.Linear)
        if rows == 1 and self._one_row:
            assert isinstance(head, Mlp)
            gelu, out, fc1, fc2 = self._gelu[:1], split_k[0], head.fc1, head.fc2
            if wanted:
                gemv.norm_gemv(hidden, None, fc1.weight, None, fc1.bias, gelu[:, :0], gelu, _ONE_ROW[0], pdl=self._pdl)
                gemv.norm_gemv(gelu, None, fc2.weight, None, fc2.bias, out, None, _ONE_ROW[1], pdl=self._pdl)
            return split_k[:1], self._no_bias
        if wanted and isinstance(head, Mlp):
            gelu = self._gelu[:rows]
            skinny_gemm(hidden, head.fc1.weight, gelu, bias=head.fc1.bias, apply_gelu=True, pdl=self._pdl)
            hidden = gelu
        if wanted:
            skinny_gemm(hidden, last.weight, split_k, pdl=self._pdl)
        return split_k, last.bias
