"""Selects the CUDA implementation: the fastest one that supports the model, otherwise the PyTorch modules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from saccade.engine import kernels
from saccade.engine.cuda.paged_cache import PagedCache
from saccade.engine.errors import Fallbacks, reason_of
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.nano.detector_tower import DetectorTower
from saccade.engine.models.nano.picodet import PicoDet
from saccade.engine.models.protocol import Model, VisionEncoder
from saccade.engine.models.runner import Runner

if TYPE_CHECKING:
    from saccade.engine.cuda.vision import PackedVision


def cuda_runner(model: Model, cache: PagedCache, max_rows: int, fallbacks: Fallbacks) -> Runner:
    """Return the fastest runner (decoder implementation) that supports a model on CUDA."""
    why = _without_kernels(model)
    if why is None:
        from saccade.engine.cuda import decoder, layers

        assert isinstance(model, Moondream)
        if layers.supports(model):
            return decoder.PackedRunner(model, cache, max_rows, fallbacks)
        why = f"they do not support {model.dtype} or this decoder size".replace("torch.", "")
    fallbacks.note(f"decode steps are slower without the Triton kernels: {why}")
    return Runner(model, cache)


def cuda_vision(model: Model, fallbacks: Fallbacks) -> VisionEncoder | PackedVision:
    """Return the fastest vision encoder for a model on CUDA. The layers of a detector are replaced in place."""
    if _without_kernels(model) is None:
        assert isinstance(model, Moondream)
        if isinstance(model.vision, DetectorTower):
            _pack_detector(model.vision, model.dtype, fallbacks)
        from saccade.engine.cuda import vision

        if vision.supports(model):
            return vision.PackedVision(model, fallbacks)
    return model.vision


def _without_kernels(model: Model) -> str | None:
    """Return the reason if a model cannot use the Triton kernels, or None if it can."""
    if not isinstance(model, Moondream):
        return f"they do not support {type(model).__name__}"
    if not kernels.available(model.device):
        return "they need Triton and an Ampere or later GPU"
    return None


def _pack_detector(tower: DetectorTower, dtype: torch.dtype, fallbacks: Fallbacks) -> None:
    from saccade.engine.cuda.detector import packed

    if isinstance(tower.stem, PicoDet):
        try:
            tower.set_submodule("stem", packed(tower.stem, dtype))
        except Exception as error:  # Triton errors on untested versions or GPUs
            fallbacks.note(
                f"the detector is slower, because its Triton kernels do not run on this GPU: {reason_of(error)}"
            )
