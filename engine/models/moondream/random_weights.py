"""Moondream models with random weights, to measure speed without a checkpoint."""

from __future__ import annotations

import torch

from saccade.engine.models.moondream.config import MoondreamConfig
from saccade.engine.models.moondream.loader import refiner_loader
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.prompts import CodePointTokenizer, MoondreamPrompts
from saccade.engine.models.moondream.text import rotation_table
from saccade.engine.models.protocol import LoadedModel

# Scale of attention logits; at 1, attention averages over the image, and all images give the same answer.
_SHARPNESS = 3.0
_EMBEDDING = 0.1  # scale of embeddings of tokens and image positions, which are the same for all images
MOONDREAM_3 = MoondreamConfig.from_dict({"text": {"moe": {}}, "region": {"reads": "ln"}})
"""Published dimensions of Moondream 3 with region heads that read `region.ln`."""
# Scale of region frequencies; at 1, most sizes have similar embeddings, and answers repeat themselves.
_FREQUENCY = 10.0


def random_moondream(
    device: torch.device, dtype: torch.dtype, config: MoondreamConfig | None = None, seed: int = 0
) -> LoadedModel:
    """Return a model with random weights and, by default, the shape of Moondream 2. Each character is one token."""
    config = config or MoondreamConfig()
    model = random_model(config, device, dtype, seed)
    prompts = MoondreamPrompts(config.tokenizer, CodePointTokenizer(), vocab_size=config.text.vocab_size)
    return LoadedModel(model, prompts, None, {}, load_refiner=refiner_loader(model))


def random_moondream_3(
    device: torch.device, dtype: torch.dtype, config: MoondreamConfig | None = None, seed: int = 0
) -> LoadedModel:
    """Return a model with random weights and, by default, the shape of Moondream 3.

    Moondream 3 has 9.3 billion parameters, and uses 8 of its 64 experts per token.
    """
    return random_moondream(device, dtype, config or MOONDREAM_3, seed)


def random_model(config: MoondreamConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Moondream:
    """Return a model with random weights. Their scale keeps activations from growing or shrinking with depth.

    Different images get different numbers of objects, as with a trained model.
    """
    with torch.device("meta"):
        model = Moondream(config)
    model = model.to(dtype).to_empty(device=device)
    dice = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        with torch.no_grad():
            if last in ("bias", "alpha"):
                parameter.zero_()
            elif last == "weight" and parameter.ndim == 1:  # weight of a norm
                parameter.fill_(1.0)
            elif last in ("weight", "wq", "wv"):
                gain = _SHARPNESS if name.endswith("qkv.weight") else 1.0
                inputs = parameter.shape[-1] if parameter.ndim == 3 else parameter[0].numel()
                parameter.normal_(0, gain * inputs**-0.5, generator=dice)
            else:  # embeddings and frequencies
                spread = _FREQUENCY if last.endswith("_features") else _EMBEDDING
                parameter.normal_(0, spread, generator=dice)
    model.text.cosine, model.text.sine = (table.to(device) for table in rotation_table(config.text))
    return model.eval().requires_grad_(False)
