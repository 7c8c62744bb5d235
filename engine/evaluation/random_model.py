"""Engines with random weights, to measure what a model's shape costs without having it. Their answers mean nothing.

Knows how weights are drawn so that numbers stay in range and answers vary in length; knows nothing of measuring.
"""

from __future__ import annotations

from pathlib import Path

import torch

from saccade.engine.backends.quantization import round_to_fp8
from saccade.engine.engine import Engine
from saccade.engine.model_loader import FP8, ModelInfo, choose_device, choose_dtype
from saccade.engine.models.moondream.config import MoondreamConfig
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.prompts import CodePointCodec, Prompts
from saccade.engine.models.moondream.text import rotation_table

MOONDREAM_2 = "moondream-2-random"
"""The published dimensions of Moondream 2."""
_SHARPNESS = 3.0  # of what attention compares: at 1 it is a mean over a picture, and no two pictures look different
_EMBEDDING = 0.1  # of tokens and of places in a picture, which all pictures have in common
_FREQUENCY = 10.0  # of what is found: at 1, most sizes are embedded alike, and what is said next is the same again
_SKILLS = ("detect", "point", "query", "caption")


def random_engine(
    device: str = "auto",
    dtype: str | None = None,
    depth: int = 2,
    config: MoondreamConfig | None = None,
    *,
    n_pages: int = 2560,
    seed: int = 0,
) -> Engine:
    """An engine over a model of some shape with random weights. Any name may be asked for; a character is a token.

    Args:
        device: 'auto', 'cpu', 'cuda' or 'cuda:N'.
        dtype: 'float32', 'bfloat16', 'float16' or 'fp8'; by default float32 on a CPU, else bfloat16.
        depth: step slots, 1 or 2.
        config: the shape, by default Moondream 2's.
        n_pages: pages of the cache; the default holds 32 pictures of Moondream 2, with 50 objects each.
        seed: of the weights.

    Raises:
        EngineError: if there is no such device or dtype.
    """
    config = config or MoondreamConfig()
    place = choose_device(device)
    kind = choose_dtype(dtype, torch.float32 if place.type == "cpu" else torch.bfloat16)
    model = random_model(config, place, kind, seed)
    if dtype == FP8:
        round_to_fp8(model)
    prompts = Prompts(config.tokenizer, CodePointCodec())
    info = ModelInfo(
        name=MOONDREAM_2 if config == MoondreamConfig() else "random",
        folder=Path(),
        parameters=sum(p.numel() for p in model.parameters()),
        classes=None,
        skills=tuple(skill for skill in _SKILLS if prompts.can(skill)),
        device=str(place),
        dtype=dtype or str(kind).removeprefix("torch."),
    )
    return Engine(model, prompts, info, None, depth=depth, n_pages=n_pages)


def random_model(config: MoondreamConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Moondream:
    """A model whose layers keep the scale of what they are given, as trained ones do.

    And its answers end, as trained ones' do: whether one more object is begun is a new toss each time, since every
    step depends on the picture and on what was found. Else all answers end at once, or all say one thing for ever.
    """
    with torch.device("meta"):
        model = Moondream(config)
    model = model.to(dtype).to_empty(device=device)
    dice = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        with torch.no_grad():
            if last == "bias":
                parameter.zero_()
            elif last == "weight" and parameter.ndim == 1:  # of a norm
                parameter.fill_(1.0)
            elif last == "weight":
                gain = _SHARPNESS if name.endswith("qkv.weight") else 1.0
                parameter.normal_(0, gain * parameter[0].numel() ** -0.5, generator=dice)
            else:  # embeddings and frequencies
                spread = _FREQUENCY if last.endswith("_features") else _EMBEDDING
                parameter.normal_(0, spread, generator=dice)
    model.text.cosine, model.text.sine = (table.to(device) for table in rotation_table(config.text))
    return model.eval().requires_grad_(False)
