"""An adapter of a model's decoder. Knows no torch."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, frozen=True, eq=False, weakref_slot=True)
class Adapter:
    """Low-rank additions to the text decoder (LoRA, Hu et al. 2021, arXiv:2106.09685); compared by identity.

    Attributes:
        name: shown in messages.
        weights: by layer and part (3, 'attn.qkv'), A (rank, in) and B (out, rank), which is scaled already; of experts
            (experts, rank, in) and (experts, out, rank).
    """

    name: str
    weights: abc.Mapping[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]
