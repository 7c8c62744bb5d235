"""A model of the family with random weights, to measure what its shape costs. Its answers mean nothing.

Knows how weights are drawn so that numbers stay in range and answers vary in length; knows nothing of measuring.
"""

from __future__ import annotations

import torch

from saccade.engine.models.moondream.config import MoondreamConfig
from saccade.engine.models.moondream.loader import refiner_loader
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.prompts import CodePointTokenizer, MoondreamPrompts
from saccade.engine.models.moondream.text import rotation_table
from saccade.engine.models.protocol import LoadedModel

_SHARPNESS = 3.0  # of attention's logits: at 1 it averages over an image, and all images give the same
_EMBEDDING = 0.1  # of tokens and of positions in an image, which all images have in common
MOONDREAM_3 = MoondreamConfig.from_dict({"text": {"moe": {}}, "region": {"reads": "ln"}})
"""The published dimensions of Moondream 3, with region heads that read `region.ln`."""
_FREQUENCY = 10.0  # of regions: at 1, most sizes are embedded alike, and the answer repeats itself


def random_moondream(
    device: torch.device, dtype: torch.dtype, config: MoondreamConfig | None = None, seed: int = 0
) -> LoadedModel:
    """A loaded model of some shape, by default Moondream 2's. Any name may be asked for; a character is a token."""
    config = config or MoondreamConfig()
    model = random_model(config, device, dtype, seed)
    prompts = MoondreamPrompts(config.tokenizer, CodePointTokenizer(), vocab_size=config.text.vocab_size)
    return LoadedModel(model, prompts, None, {}, load_refiner=refiner_loader(model))


def random_moondream_3(
    device: torch.device, dtype: torch.dtype, config: MoondreamConfig | None = None, seed: int = 0
) -> LoadedModel:
    """The same of Moondream 3's shape by default: 9.3 B numbers, 64 experts of which a token goes through 8."""
    return random_moondream(device, dtype, config or MOONDREAM_3, seed)


def random_model(config: MoondreamConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Moondream:
    """A model whose layers keep the scale of their inputs, as trained ones do.

    Its answers end, as trained ones' do: whether one more object is begun is a new toss each time, since every step
    depends on the image and on what was found. Otherwise all answers end at once, or repeat one thing for ever.
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
            elif last == "weight" and parameter.ndim == 1:  # of a norm
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
