"""Which form of a model runs on a device: the fastest that supports it, else the model's own modules."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import nn

from saccade.engine import kernels
from saccade.engine.backends.fused_decoder import FusedDecoder
from saccade.engine.backends.onednn import fuse
from saccade.engine.backends.packed_picodet import fast_dtype
from saccade.engine.backends.paged_cache import PagedCache
from saccade.engine.backends.plain_runner import PlainRunner, Runner
from saccade.engine.models.moondream.detector_tower import DetectorTower
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.picodet import PicoDet
from saccade.engine.models.protocol import Model, TextDecoder, VisionEncoder

if TYPE_CHECKING:
    from saccade.engine.backends.packed.vision import PackedVision

log = logging.getLogger(__name__)


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


def cuda_runner(model: Model, cache: PagedCache, max_rows: int) -> Runner:
    """The steps of a model on CUDA."""
    if isinstance(model, Moondream) and kernels.available(model.device):
        from saccade.engine.backends.packed import layers, runner

        if layers.supports(model):
            return runner.PackedRunner(model, cache, max_rows)
    return PlainRunner(model, cache)


def cuda_vision(model: Model) -> VisionEncoder | PackedVision:
    """What encodes and projects crops on CUDA; a detector's layers, and a projection's, are replaced in place."""
    if isinstance(model, Moondream) and kernels.available(model.device):
        if isinstance(model.vision, DetectorTower):
            _pack_detector(model.vision, model.dtype)
        from saccade.engine.backends.packed import vision

        if vision.supports(model):
            return vision.PackedVision(model)
    return model.vision


def _pack_detector(tower: DetectorTower, dtype: torch.dtype) -> None:
    from saccade.engine.backends.packed.picodet import packed

    if isinstance(tower.stem, PicoDet):
        try:
            tower.set_submodule("stem", packed(tower.stem, dtype))
        except Exception as error:  # Triton's own, of a version or a GPU that nobody has tried
            log.warning("the detector runs slower, as its own kernels do not run here: %s", error)
