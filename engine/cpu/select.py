"""Which form of a model runs on a CPU: the fastest that supports it, else the model's own modules."""

from __future__ import annotations

import torch
from torch import nn

from saccade.engine.cpu.decoder import FusedDecoder
from saccade.engine.cpu.detector import fast_dtype
from saccade.engine.cpu.onednn import fuse
from saccade.engine.models.moondream.detector_tower import DetectorTower
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.protocol import Model, TextDecoder


def cpu_decoder(model: Model, exact: bool) -> FusedDecoder | TextDecoder:
    """The text decoder on a CPU, over a `CpuPagedCache`; the vision encoder's layers are fused in place.

    Args:
        model: the model.
        exact: see `EngineConfig.exact`.
    """
    prefixes: torch.dtype | None = None
    if isinstance(model.vision, nn.Module):
        fuse(model.vision, torch.float32 if exact else fast_dtype())
        if isinstance(model.vision, DetectorTower) and not exact:
            model.vision.quick_crops = True
            prefixes = fast_dtype()
    return FusedDecoder(model.text, prefixes) if isinstance(model, Moondream) else model.text
