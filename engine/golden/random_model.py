"""Engines with random weights, for measurements of speed without a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from saccade.engine.api import Engine
from saccade.engine.config import EngineConfig
from saccade.engine.model_loader import FP8, ModelInfo, choose_device, choose_dtype
from saccade.engine.models import registry
from saccade.engine.models.quantization import round_to_fp8

MOONDREAM_2 = "moondream-2-random"
"""Registry name of the Moondream 2 dimensions with random weights."""


def random_engine(
    device: str = "auto",
    dtype: str | None = None,
    depth: int = 2,
    config: Any = None,
    *,
    name: str = MOONDREAM_2,
    n_pages: int = 2560,
    seed: int = 0,
    drafts: bool = False,
    kv_dtype: str | None = None,
) -> Engine:
    """Return an engine for a model with random weights. Every label is valid, and each character is one token.

    Args:
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        dtype: 'float32', 'bfloat16', 'float16' or 'fp8'. The default is float32 on a CPU, else bfloat16.
        depth: maximum number of batch steps in flight, 1 or 2.
        config: configuration of the model. None uses the default of the architecture `name`.
        name: name of the architecture, one of `registry.RANDOM`.
        n_pages: number of KV cache pages. The default is enough for 32 images of Moondream 2 with 50 objects each.
        seed: seed of the random weights.
        kv_dtype: 'fp8' stores the KV cache in FP8; None uses the model's dtype.
        drafts: whether to use speculative decoding. The default is off, because drafts never match with random weights.

    Raises:
        EngineError: if the device or dtype does not exist, or if the device does not support `kv_dtype`.
    """
    place = choose_device(device)
    kind = choose_dtype(dtype, torch.float32 if place.type == "cpu" else torch.bfloat16)
    loaded = registry.load_random(name, place, kind, config, seed)
    if dtype == FP8:
        round_to_fp8(loaded.model)
    info = ModelInfo.of(loaded, name if config is None else "random", Path(), dtype)
    return Engine(loaded, info, None, EngineConfig(depth=depth, n_pages=n_pages, kv_dtype=kv_dtype, drafts=drafts))
