"""Which form of a model runs on CUDA: the fastest that supports it, else the model's own modules."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from saccade.engine import kernels
from saccade.engine.backends.paged_cache import PagedCache
from saccade.engine.backends.plain_runner import PlainRunner, Runner
from saccade.engine.models.moondream.detector_tower import DetectorTower
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.picodet import PicoDet
from saccade.engine.models.protocol import Model, VisionEncoder

if TYPE_CHECKING:
    from saccade.engine.cuda.vision import PackedVision

log = logging.getLogger(__name__)


def cuda_runner(model: Model, cache: PagedCache, max_rows: int) -> Runner:
    """The steps of a model on CUDA."""
    if isinstance(model, Moondream) and kernels.available(model.device):
        from saccade.engine.cuda import decoder, layers

        if layers.supports(model):
            return decoder.PackedRunner(model, cache, max_rows)
    return PlainRunner(model, cache)


def cuda_vision(model: Model) -> VisionEncoder | PackedVision:
    """What encodes and projects crops on CUDA; a detector's layers, and a projection's, are replaced in place."""
    if isinstance(model, Moondream) and kernels.available(model.device):
        if isinstance(model.vision, DetectorTower):
            _pack_detector(model.vision, model.dtype)
        from saccade.engine.cuda import vision

        if vision.supports(model):
            return vision.PackedVision(model)
    return model.vision


def _pack_detector(tower: DetectorTower, dtype: torch.dtype) -> None:
    from saccade.engine.cuda.detector import packed

    if isinstance(tower.stem, PicoDet):
        try:
            tower.set_submodule("stem", packed(tower.stem, dtype))
        except Exception as error:  # Triton's own, of a version or a GPU that nobody has tried
            log.warning("the detector runs slower, as its own kernels do not run here: %s", error)
