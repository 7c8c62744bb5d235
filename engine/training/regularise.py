"""Noise inside the model while it trains, put on from outside: the model's own code stays what runs.

Without it nano learned its 14,000 pictures by heart within 100 passes (engine/training/README.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from saccade.engine.models.moondream.model import Moondream


def add_drops(model: Moondream, chance: float) -> None:
    """Leave out attention and MLP branches of single samples (stochastic depth, Huang et al. 2016, arXiv:1603.09382),
    and single tokens that leave the stem, each with `chance`; nothing in evaluation mode.
    """  # noqa: D205
    for block in [*model.vision.blocks, *model.text.blocks]:
        assert isinstance(block.attn, nn.Module)
        assert isinstance(block.mlp, nn.Module)
        block.attn.register_forward_hook(_dropper(chance, by_token=False))
        block.mlp.register_forward_hook(_dropper(chance, by_token=False))
    model.vision.stem.register_forward_hook(_dropper(chance, by_token=True))


def _dropper(chance: float, by_token: bool) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor | None]:
    def drop(module: nn.Module, _: Any, out: torch.Tensor) -> torch.Tensor | None:
        if not module.training:
            return None
        shape = (*out.shape[:2], 1) if by_token else (len(out), 1, 1)
        kept = torch.rand(shape, device=out.device) >= chance
        return out * kept if by_token else out * kept / (1 - chance)

    return drop
