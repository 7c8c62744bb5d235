"""From a name, a device and a dtype to a model that is ready to run. Knows nothing of steps, results or threads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from saccade.engine.backends.quantization import round_to_fp8
from saccade.engine.errors import EngineError, ModelFilesError
from saccade.engine.models import model_files as registry
from saccade.engine.models.moondream.config import ConfigError
from saccade.engine.models.moondream.model import CheckpointError, Moondream, load
from saccade.engine.models.moondream.prompts import CodecError, Prompts, codec_of
from saccade.engine.runtime.cpu_settings import keep_freed_memory
from saccade.engine.tasks import Caption, Detect, Point, Query
from saccade.engine.vocabulary import Vocabulary

FP8 = "fp8"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, FP8: torch.bfloat16}
"""What a model computes in, by name; with 'fp8' the weights of its blocks are rounded to FP8, see `quantization`."""
Progress = Callable[[int, int], None]
"""Told how many parts of something are done, and of how many."""
SKILLS: dict[type, str] = {Detect: "detect", Point: "point", Query: "query", Caption: "caption"}


@dataclass(slots=True, frozen=True)
class ModelInfo:
    """What an engine runs: name, folder, parameters, class names (None: any words), skills, device and dtype."""

    name: str
    folder: Path
    parameters: int
    classes: tuple[str, ...] | None
    skills: tuple[str, ...]
    device: str
    dtype: str


def open_model(name: str, device: str, dtype: str | None) -> tuple[Moondream, Prompts, ModelInfo, Vocabulary | None]:
    """Load a model, its prompts, what is to be said of it, and its names if they are a closed list.

    `Engine.load` says what the arguments are and what is raised.
    """
    folder = registry.find(name)
    place = choose_device(device)
    small = (folder / "model.safetensors").stat().st_size < 200 << 20
    kind = torch.float32 if place.type == "cpu" or small else torch.bfloat16
    try:
        model = load_model(folder, place, dtype, kind)
        prompts = Prompts(model.config.tokenizer, codec_of(folder, model.config.text.vocab_size))
    except (ConfigError, CheckpointError, CodecError) as error:
        raise ModelFilesError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise EngineError(f"{name} does not fit in the memory of {place}") from error
    classes = model.config.classes
    vocabulary = None if classes is None else Vocabulary(name, classes, _synonyms(folder))
    if place.type == "cpu":
        keep_freed_memory()
    info = ModelInfo(
        name=name,
        folder=folder,
        parameters=sum(p.numel() for p in model.parameters()),
        classes=classes,
        skills=tuple(skill for skill in SKILLS.values() if prompts.can(skill)),
        device=str(place),
        dtype=dtype or str(model.dtype).removeprefix("torch."),
    )
    return model, prompts, info, vocabulary


def load_model(folder: Path, place: torch.device, dtype: str | None, default: torch.dtype) -> Moondream:
    """Load a folder's model to compute in a dtype by its name, or in the default for None.

    Raises:
        EngineError: if there is no such dtype.
        ConfigError, CheckpointError: as `models.moondream.model.load`.
    """
    model = load(folder, place, choose_dtype(dtype, default))
    if dtype == FP8:
        round_to_fp8(model)
    return model


def choose_device(name: str) -> torch.device:
    """The device for 'auto', 'cpu', 'cuda' or 'cuda:N'.

    Raises:
        EngineError: if there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineError(f"unknown device '{name}': give auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise EngineError(f"unknown device '{name}': give auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EngineError(f"there is no device '{name}' here; give cpu, or auto to take what there is")
    return device


def choose_dtype(name: str | None, default: torch.dtype) -> torch.dtype:
    """What a model computes in, for one of `DTYPES`, or for None the default.

    Raises:
        EngineError: if there is no such dtype.
    """
    if name is None:
        return default
    if name not in DTYPES:
        raise EngineError(f"unknown dtype '{name}': give one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _synonyms(folder: Path) -> dict[str, list[str]]:
    path = folder / "synonyms.json"
    if not path.is_file():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return {str(phrase): [str(name) for name in names] for phrase, names in values.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelFilesError(f"{path}: not an object of phrase: [names] ({error})") from error
