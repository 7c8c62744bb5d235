"""From a name, a device and a dtype to a model that is ready to run. Knows nothing of steps, results or threads."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from saccade.engine.backends.quantization import round_to_fp8
from saccade.engine.cpu.threads import one_thread
from saccade.engine.errors import EngineError
from saccade.engine.models import model_files, registry
from saccade.engine.models.protocol import LoadedModel, SizedEncoder
from saccade.engine.tasks import TASKS
from saccade.engine.vocabulary import Vocabulary

FP8 = "fp8"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, FP8: torch.bfloat16}
"""What a model computes in, by name; with 'fp8' the weights of its blocks are rounded to FP8, see `quantization`."""


@dataclass(slots=True, frozen=True)
class ModelInfo:
    """What an engine runs.

    Attributes:
        name, folder: of the model.
        parameters: how many.
        classes: names that it knows; None for any words.
        skills: tasks that it can do.
        device: where it runs.
        dtype: what it computes in: the name it was loaded by, or its own; 'float32 with bfloat16 products' of nano on a
            CPU that has these, unless a dtype was asked for.
        fallbacks: what runs slower than it could on this device, and why, each a line; none as a rule.
    """

    name: str
    folder: Path
    parameters: int
    classes: tuple[str, ...] | None
    skills: tuple[str, ...]
    device: str
    dtype: str
    fallbacks: tuple[str, ...] = ()

    @property
    def gpu(self) -> int | None:
        """Number of the GPU that it is on; None for a CPU."""
        device = torch.device(self.device)
        return device.index or 0 if device.type == "cuda" else None

    @classmethod
    def of(cls, loaded: LoadedModel, name: str, folder: Path, dtype: str | None) -> ModelInfo:
        """The description of a loaded model; `dtype` is the name it was loaded by, None for its own."""
        model = loaded.model
        return cls(
            name=name,
            folder=folder,
            parameters=model.n_parameters(),
            classes=loaded.classes,
            skills=tuple(skill for skill in TASKS if loaded.prompts.can(skill)),
            device=str(model.device),
            dtype=dtype or str(model.dtype).removeprefix("torch."),
        )


def open_model(
    name: str, device: str, dtype: str | None, imgsz: int | None = None
) -> tuple[LoadedModel, ModelInfo, Vocabulary | None]:
    """Load a model, its description, and its vocabulary if it is closed; see `Engine.load` for arguments and errors."""
    folder = model_files.find(name)
    place = choose_device(device)
    small = model_files.weights_bytes(folder) < 200 << 20
    default = torch.float32 if place.type == "cpu" else torch.float16 if small else torch.bfloat16
    try:
        with one_thread() if place.type == "cpu" else nullcontext():
            loaded = load_folder(folder, place, dtype, default)
    except torch.OutOfMemoryError as error:
        raise EngineError(f"{name} does not fit in the memory of {place}") from error
    if imgsz is not None:
        if not isinstance(loaded.model.vision, SizedEncoder):
            raise EngineError(f"{name} sees images at one size: leave out imgsz, which is for nano")
        loaded.model.vision.set_crop_size(imgsz)
    vocabulary = None if loaded.classes is None else Vocabulary(name, loaded.classes, loaded.synonyms)
    return loaded, ModelInfo.of(loaded, name, folder, dtype), vocabulary


def load_folder(folder: Path, place: torch.device, dtype: str | None, default: torch.dtype) -> LoadedModel:
    """Load a folder's model to compute in a dtype by its name, or in the default for None.

    Raises:
        EngineError: if there is no such dtype.
        ModelFilesError: if its files cannot be read or do not fit each other.
    """
    loaded = registry.load(folder, place, choose_dtype(dtype, default))
    if dtype == FP8:
        round_to_fp8(loaded.model)
    return loaded


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
