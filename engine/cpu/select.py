"""Which form of a model's layers runs on a CPU: the fastest that supports them, else the model's own modules."""

from __future__ import annotations

import torch
from torch import nn

from saccade.engine.cpu.detector import Layers, PackedPicoDet, fast_dtype
from saccade.engine.cpu.onednn import FusedLinear, FusedMlp, usable
from saccade.engine.errors import Fallbacks
from saccade.engine.models.moondream.layers import Mlp
from saccade.engine.models.nano.detector_tower import DetectorTower
from saccade.engine.models.nano.picodet import PicoDet
from saccade.engine.models.protocol import Model


def product_dtype(model: Model, exact: bool) -> torch.dtype:
    """What most products of a model are computed in on a CPU; `exact` as in `EngineConfig`."""
    return model.dtype if exact or not isinstance(model.vision, DetectorTower) else fast_dtype()


def fuse_model(model: Model, exact: bool, fallbacks: Fallbacks) -> None:
    """Fuse, in place, the layers of a model beside its text decoder.

    Args:
        model: the model.
        exact: see `EngineConfig.exact`.
        fallbacks: told what does not run here.
    """
    if isinstance(model.vision, nn.Module):
        fuse(model.vision, product_dtype(model, exact), fallbacks)
        if isinstance(model.vision, DetectorTower) and not exact:
            model.vision.quick_crops = True
    if isinstance(model.region, nn.Module):
        for name, decoder in list(model.region.named_children()):
            if isinstance(decoder, nn.Linear):
                model.region.set_submodule(name, FusedLinear(decoder))


def fuse(model: nn.Module, detector: torch.dtype = torch.float32, fallbacks: Fallbacks | None = None) -> None:
    """Replace the layers of a model that is not trained any more. After its first image it cannot be copied.

    Args:
        model: in float32; another is left as it is.
        detector: what a `PicoDet` in it computes in.
        fallbacks: told what does not run here.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, Mlp) and usable(module.fc1.weight):
            model.set_submodule(name, FusedMlp(module))
        elif isinstance(module, PicoDet) and usable(module.first.weight):
            model.set_submodule(name, PackedPicoDet(module, detector, Layers(detector, fallbacks)))
