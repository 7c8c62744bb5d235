"""Loads a folder with a Moondream model: weights, prompts, classes and synonyms."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from saccade.engine.errors import ModelFilesError
from saccade.engine.models.model_files import read_synonyms
from saccade.engine.models.moondream.model import Moondream, load
from saccade.engine.models.moondream.prompts import PUBLISHED, MoondreamPrompts, tokenizer_of
from saccade.engine.models.moondream.refiner import load_refiner
from saccade.engine.models.moondream.vision import VisionTower
from saccade.engine.models.nano.detector_tower import DetectorTower
from saccade.engine.models.protocol import LoadedModel, Refiner


def load_moondream(folder: Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Load a Moondream model folder: config.json, weights, tokenizer.json and the optional synonyms.json.

    Raises:
        ModelFilesError: if a file cannot be read, or the files are inconsistent.
    """
    _refuse_older_prompts(folder)
    model = load(folder, device, dtype)
    config = model.config
    tokenizer = tokenizer_of(folder, config)
    prompts = MoondreamPrompts(
        config.tokenizer, tokenizer, closed=config.classes is not None, vocab_size=config.text.vocab_size
    )
    look = None
    if isinstance(model.vision, DetectorTower):
        look = model.vision.make_look()  # now, because the engine replaces layers of the detector
        model.vision.asked = {
            tuple(prompts.objects(skill, name)): number
            for skill in ("detect", "point")
            if prompts.can(skill)
            for number, name in enumerate(config.classes or ())
        }
    synonyms, refiner = read_synonyms(folder), refiner_loader(model)
    return LoadedModel(model, prompts, config.classes, synonyms, model.family, refiner, look)


def refiner_loader(model: Moondream) -> Callable[[Path], Refiner] | None:
    """Return a function that reads a refiner file for the model.

    Return None if the model's vision encoder is a detector, because a refiner needs vision transformer features.
    """
    return partial(load_refiner, tower=model.vision) if isinstance(model.vision, VisionTower) else None


def _refuse_older_prompts(folder: Path) -> None:
    """Reject a published model revision with an old prompt format.

    A revision is old if its Python file does not contain the name of the current tokenizer. The Python file never runs.

    Raises:
        ModelFilesError: if the revision is old and its config.json has no prompt templates.
    """
    code = folder / "moondream.py"  # this file is searched, but never run
    if not code.is_file() or PUBLISHED in code.read_text(encoding="utf-8", errors="replace"):
        return
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        known = (values.get("config") or values).get("tokenizer")
    except (ValueError, AttributeError):
        return  # loading the file reports a better error
    if not known:
        raise ModelFilesError(
            f"{folder}: this revision is older than 2025-06, and config.json does not have its prompt templates; "
            "use a newer revision, such as vikhyatk/moondream2@2025-06-21"
        )
