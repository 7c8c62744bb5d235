"""Layers that more than one part of the model uses."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Mlp(nn.Module):
    """Two linear layers with a tanh-approximated GELU between them."""

    def __init__(self, width: int, inner: int, out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (..., width) to (..., out)."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))  # type: ignore[no-any-return]
