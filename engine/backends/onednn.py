"""Layers as oneDNN runs them on a CPU: what follows a product is done in the same pass, weights are laid out once.

The operators are those that torch's own compiler makes of such layers. Where torch comes without oneDNN or is set not
to use it, or the numbers are not float32, the plain layers run.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.backends.packed_picodet import PackedPicoDet
from saccade.engine.models.moondream.layers import Mlp
from saccade.engine.models.moondream.picodet import PicoDet

_FEW = 16  # rows up to which a product takes less time than oneDNN's lookup of its kernel


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, add: torch.Tensor | None = None) -> torch.Tensor:
    """Product (..., out) of x (..., in), plus `add` if that is given."""
    if x.shape[:-1].numel() <= _FEW or not _usable(x):
        out = F.linear(x, weight, bias)
        return out if add is None else out + add
    if add is None:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return torch.ops.mkldnn._linear_pointwise.binary(x, add, weight, bias, "add")  # type: ignore[no-any-return]


def fuse(model: nn.Module, detector: torch.dtype = torch.float32) -> None:
    """Replace the layers of a model that is not trained any more. After its first image it cannot be copied.

    Args:
        model: in float32; another is left as it is.
        detector: what a `PicoDet` in it computes in.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, Mlp) and _usable(module.fc1.weight):
            model.set_submodule(name, FusedMlp(module))
        elif isinstance(module, PicoDet) and _usable(module.first.weight):
            model.set_submodule(name, PackedPicoDet(module, detector))


class FusedMlp(nn.Module):
    """An `Mlp`, its activation done with its first product."""

    def __init__(self, plain: Mlp) -> None:
        super().__init__()
        self.fc1, self.fc2 = plain.fc1, plain.fc2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `Mlp.forward`."""
        inner = torch.ops.mkldnn._linear_pointwise(x, self.fc1.weight, self.fc1.bias, "gelu", [], "tanh")
        return linear(inner, self.fc2.weight, self.fc2.bias)


def _usable(x: torch.Tensor) -> bool:
    there = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return bool(there) and x.dtype == torch.float32 and x.device.type == "cpu"
