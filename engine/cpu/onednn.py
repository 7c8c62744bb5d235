"""Layers as oneDNN runs them on a CPU: what follows a product is done in the same pass, weights are laid out once.

The operators are those that torch's own compiler makes of such layers. Where torch comes without oneDNN or is set not
to use it, or the numbers are not float32, the plain layers run.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.cpu.detector import Layers, PackedPicoDet
from saccade.engine.cpu.replay import linear
from saccade.engine.fallbacks import Fallbacks
from saccade.engine.models.moondream.layers import Mlp
from saccade.engine.models.nano.picodet import PicoDet

_FEW = 16  # rows up to which a product takes less time than oneDNN's lookup of its kernel
_FEW_PACKED = 1  # the same of a matrix that is laid out already
_LEAST_PACKED, _MOST_PACKED = 1 << 16, 1 << 22  # numbers: MKL is faster at fewer; more are not to be stored twice
_ROWS = 64  # that the layout is chosen for; from two on it is the same for all


class Linear:
    """A product with one matrix, which is laid out once as oneDNN reads it, if it is of a small model.

    With a matrix of nano (960, 192), six rows take 36 µs so, and 49 by MKL, 146 rows 490 and 530 (AMD EPYC).

    Args:
        weight: (out, in); not to be written to any more.
        bias: (out,).
        dtype: what rows are multiplied in, whatever they come in and are given back in; by default the weight's.
    """

    __slots__ = ("_dtype", "_packed", "_packs", "bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self._dtype = weight.dtype if dtype is None else dtype
        self.weight, self.bias = weight.to(self._dtype), bias.to(self._dtype)
        self._packs = _LEAST_PACKED <= weight.numel() <= _MOST_PACKED
        self._packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
        """Product (..., out) of x (..., in), plus `add` if that is given."""
        if self._dtype is not x.dtype:
            given = x.to(self._dtype)
            if _available():
                out = linear(given, self._weight(), self.bias, "none")
            else:
                out = F.linear(given, self.weight, self.bias)
            return out.to(x.dtype) if add is None else add + out
        rows = x.shape[:-1].numel()
        if rows <= (_FEW_PACKED if self._packs else _FEW) or not _usable(x):
            out = F.linear(x, self.weight, self.bias)
            return out if add is None else out + add
        if add is None:
            return linear(x, self._weight(), self.bias, "none")
        return torch.ops.mkldnn._linear_pointwise.binary(x, add, self._weight(), self.bias, "add")  # type: ignore[no-any-return]

    def _weight(self) -> torch.Tensor:
        if not self._packs:
            return self.weight
        if self._packed is None:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), _ROWS)
        return self._packed


def fuse(model: nn.Module, detector: torch.dtype = torch.float32, fallbacks: Fallbacks | None = None) -> None:
    """Replace the layers of a model that is not trained any more. After its first image it cannot be copied.

    Args:
        model: in float32; another is left as it is.
        detector: what a `PicoDet` in it computes in.
        fallbacks: told what does not run here.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, Mlp) and _usable(module.fc1.weight):
            model.set_submodule(name, FusedMlp(module))
        elif isinstance(module, PicoDet) and _usable(module.first.weight):
            model.set_submodule(name, PackedPicoDet(module, detector, Layers(detector, fallbacks)))


class FusedMlp(nn.Module):
    """An `Mlp`, its activation done with its first product."""

    def __init__(self, plain: Mlp) -> None:
        super().__init__()
        self.fc1, self.fc2 = plain.fc1, plain.fc2
        self._out = Linear(plain.fc2.weight, plain.fc2.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `Mlp.forward`."""
        inner = torch.ops.mkldnn._linear_pointwise(x, self.fc1.weight, self.fc1.bias, "gelu", [], "tanh")
        return self._out(inner)


class FusedLinear(nn.Module):
    """An `nn.Linear` as `Linear`."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self._product = Linear(plain.weight, plain.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `nn.Linear.forward`."""
        return self._product(x)


def _usable(x: torch.Tensor) -> bool:
    return _available() and x.dtype == torch.float32 and x.device.type == "cpu"


def _available() -> bool:
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)
