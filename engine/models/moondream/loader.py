"""From a folder of the Moondream family to a loaded model: weights, prompts, classes and their synonyms."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from saccade.engine.errors import ModelFilesError
from saccade.engine.models.moondream.costs import MoondreamCosts
from saccade.engine.models.moondream.model import load
from saccade.engine.models.moondream.prompts import MoondreamPrompts, tokenizer_of
from saccade.engine.models.protocol import LoadedModel


def load_moondream(folder: Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Load config.json, model.safetensors, tokenizer.json and, if there is one, synonyms.json.

    Raises:
        ModelFilesError: if one of them cannot be read, or they do not fit each other.
    """
    model = load(folder, device, dtype)
    config = model.config
    tokenizer = tokenizer_of(folder, config.text.vocab_size)
    prompts = MoondreamPrompts(config.tokenizer, tokenizer, closed=config.classes is not None)
    return LoadedModel(model, prompts, config.classes, _synonyms(folder), MoondreamCosts(config))


def _synonyms(folder: Path) -> dict[str, list[str]]:
    path = folder / "synonyms.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {str(phrase): [str(name) for name in names] for phrase, names in values.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelFilesError(f"{path}: not an object of phrase: [names] ({error})") from error
