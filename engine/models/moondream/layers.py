"""Layers that several parts of the Moondream model share: the dense MLP and the mixture of experts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from saccade.engine.kernels import E4M3
from saccade.engine.models.moondream.config import ExpertsConfig

_ROWS_AT_ONCE = 512  # maximum rows that run through all experts; with 64 experts, their inner values take 130 MB


class Mlp(nn.Module):
    """Dense MLP: two linear layers with a tanh-approximated GELU between them."""

    def __init__(self, width: int, inner: int, out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the MLP to x (..., width). Return (..., out)."""
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))  # type: ignore[no-any-return]


class _Matrices(nn.Module):
    def __init__(self, n: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, outputs, inputs))


class Experts(nn.Module):
    """Mixture of experts: a router selects `experts_per_token` experts for each token.

    An expert computes fc2(gelu(h) · (g + 1)) with the exact GELU, where h is the first half of fc1(x) and g the second
    half. The router selects the experts with the highest logits. Their outputs are weighted by the softmax of these
    logits. The formulas are those of vLLM's moondream3.py (Apache-2.0).

    Attributes:
        scales: float32 scales (experts, outputs) of fc1 and fc2, or None if the weights do not have FP8 values.
    """

    def __init__(self, config: ExpertsConfig, width: int, gelu: str = "erf") -> None:
        super().__init__()
        self.config = config
        self.approximate = "none" if gelu == "erf" else gelu
        self.scales: tuple[torch.Tensor, torch.Tensor] | None = None
        self.router = nn.Linear(width, config.num_experts)
        self.fc1 = _Matrices(config.num_experts, width, 2 * config.expert_inner_dim)
        self.fc2 = _Matrices(config.num_experts, config.expert_inner_dim, width)

    @property
    def n_idle_weights(self) -> int:
        """Number of inactive parameters per token: those of the experts that the router does not select."""
        idle = self.config.num_experts - self.config.experts_per_token
        return idle * (self.fc1.weight[0].numel() + self.fc2.weight[0].numel())

    def router_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the router logits (..., experts) float32 of x (..., width).

        float32 is needed because the logits of two experts may be nearly equal.
        """
        return F.linear(x.float(), self.router.weight.float(), self.router.bias.float())

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Select the experts of each token. The expert with the highest logit comes first.

        Returns:
            Weights (..., experts_per_token) float32 and expert indices (..., experts_per_token) int64.
        """
        best, chosen = self.router_logits(x).topk(self.config.experts_per_token, dim=-1)
        return best.softmax(-1), chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the selected experts to each token. Input and output have the shape (..., width)."""
        flat = x.flatten(0, -2)
        weights, chosen = self.route(flat)
        mixed = self._one_by_one if x.device.type == "cpu" else self._all_at_once
        return mixed(flat, weights, chosen).to(x.dtype).view_as(x)

    def _one_by_one(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Apply each expert to the tokens that are routed to it, one expert at a time (on CPUs)."""
        order = chosen.flatten().argsort(stable=True)
        tokens = order // chosen.shape[1]
        counts = chosen.flatten().bincount(minlength=len(self.fc1.weight)).tolist()
        results = []
        for number, rows in enumerate(tokens.split(counts)):
            if len(rows):
                results.append(self._expert(x[rows], number, rows))
        weighted = torch.cat(results).float() * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x, dtype=torch.float32).index_add_(0, tokens, weighted)

    def _all_at_once(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Apply all experts to all tokens. The shapes are fixed, as CUDA graphs require."""
        share = torch.zeros(len(x), len(self.fc1.weight), device=x.device).scatter_(1, chosen, weights)
        sums = []
        for start in range(0, len(x), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            every = x[rows].expand(len(self.fc1.weight), -1, -1)
            sums.append(torch.einsum("erd,re->rd", self._expert(every, slice(None), rows).float(), share[rows]))
        return torch.cat(sums)

    def _expert(self, x: torch.Tensor, which: int | slice, rows: torch.Tensor | slice) -> torch.Tensor:
        """Apply the experts `which` (index or slice) to x (n, width). `rows` selects the adapter of each row of x."""
        h, g = self._product(0, x, which, rows).chunk(2, dim=-1)
        return self._product(1, F.gelu(h, approximate=self.approximate) * (g + 1), which, rows)

    def _product(self, second: int, x: torch.Tensor, which: int | slice, rows: torch.Tensor | slice) -> torch.Tensor:
        """Multiply x (rows, inputs) by fc1 (if `second` is 0) or fc2 (if `second` is 1) of the experts `which`."""
        weight = (self.fc1, self.fc2)[second].weight[which]
        if weight.dtype == E4M3:
            assert self.scales is not None
            weight = (weight.float() * self.scales[second][which].unsqueeze(-1)).to(x.dtype)
        return x @ weight.transpose(-1, -2)
