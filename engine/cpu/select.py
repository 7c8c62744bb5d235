"""Which form of a model runs on a CPU: the fastest that supports it, else the model's own modules."""

from __future__ import annotations

import torch
from torch import nn

from saccade.engine.cpu.decoder import FusedDecoder
from saccade.engine.cpu.detector import fast_dtype
from saccade.engine.cpu.onednn import FusedLinear, fuse
from saccade.engine.fallbacks import Fallbacks
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.nano.detector_tower import DetectorTower
from saccade.engine.models.protocol import Model, TextDecoder


def product_dtype(model: Model, exact: bool) -> torch.dtype:
    """What most products of a model are computed in on a CPU; `exact` as in `EngineConfig`."""
    return model.dtype if exact or not isinstance(model.vision, DetectorTower) else fast_dtype()


def cpu_decoder(model: Model, exact: bool, fallbacks: Fallbacks) -> FusedDecoder | TextDecoder:
    """The text decoder on a CPU, over a `CpuPagedCache`; layers beside it are fused in place.

    Args:
        model: the model.
        exact: see `EngineConfig.exact`.
        fallbacks: told what does not run here.
    """
    products = product_dtype(model, exact)
    if isinstance(model.vision, nn.Module):
        fuse(model.vision, products, fallbacks)
        if isinstance(model.vision, DetectorTower) and not exact:
            model.vision.quick_crops = True
    if isinstance(model.region, nn.Module):
        for name, decoder in list(model.region.named_children()):
            if isinstance(decoder, nn.Linear):
                model.region.set_submodule(name, FusedLinear(decoder))
    return FusedDecoder(model.text, products) if isinstance(model, Moondream) else model.text
