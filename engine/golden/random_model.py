"""Engines with random weights, to measure what a model's shape costs without having it. Their answers mean nothing."""

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
"""The published dimensions of Moondream 2."""


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
    """An engine over a model of some shape with random weights. Any name may be asked for; a character is a token.

    Args:
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        dtype: 'float32', 'bfloat16', 'float16' or 'fp8'; by default float32 on a CPU, else bfloat16.
        depth: step slots, 1 or 2.
        config: the architecture's own configuration, by default that of the name.
        name: one of `registry.RANDOM`.
        n_pages: pages of the cache; the default holds 32 images of Moondream 2, with 50 objects each.
        seed: of the weights.
        kv_dtype: as in `Engine.load`.
        drafts: as in `Engine.load`; off by default, as an answer of random weights has nothing of the one before.

    Raises:
        EngineError: if there is no such device or dtype, or the device has no such `kv_dtype`.
    """
    place = choose_device(device)
    kind = choose_dtype(dtype, torch.float32 if place.type == "cpu" else torch.bfloat16)
    loaded = registry.load_random(name, place, kind, config, seed)
    if dtype == FP8:
        round_to_fp8(loaded.model)
    info = ModelInfo.of(loaded, name if config is None else "random", Path(), dtype)
    return Engine(loaded, info, None, EngineConfig(depth=depth, n_pages=n_pages, kv_dtype=kv_dtype, drafts=drafts))
