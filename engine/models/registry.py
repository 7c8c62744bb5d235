"""Registry of model architectures: maps the name of an architecture to the function that loads its model folders.

To add an architecture, write a module with a loader function, and call `register_architecture`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.engine.errors import ModelFilesError
from saccade.engine.models.protocol import LoadedModel

if TYPE_CHECKING:
    import torch

Loader = Callable[[Path, "torch.device", "torch.dtype"], LoadedModel]
"""Function that loads a folder onto a device in a dtype; raises ModelFilesError if the files are inconsistent."""

DEFAULT = "moondream"
_LOADERS: dict[str, Loader | str] = {DEFAULT: "saccade.engine.models.moondream.loader:load_moondream"}
_NAMES = {"moondream1": DEFAULT, "moondream3": DEFAULT, "HfMoondream": DEFAULT, "Moondream": DEFAULT}
"""Names of architectures in published config.json files."""


def register_architecture(name: str, loader: Loader | str) -> None:
    """Register an architecture under its name, which is the `model_type` in config.json.

    Args:
        name: name of the architecture.
        loader: loader function, or a string "module:function" that is imported on first use.

    Raises:
        ValueError: if the name is already registered.
    """
    if _LOADERS.setdefault(name, loader) != loader:
        raise ValueError(f"architecture '{name}' is already registered")


RANDOM = {
    "moondream-2-random": "saccade.engine.models.moondream.random_weights:random_moondream",
    "moondream-3-random": "saccade.engine.models.moondream.random_weights:random_moondream_3",
}
"""Models with published dimensions and random weights, for benchmarks."""


def architecture_of(config: dict[str, Any]) -> str:
    """Return the name of the architecture in a parsed config.json. The default is Moondream.

    Raises:
        ModelFilesError: if the architecture is unknown.
    """
    names = [config.get("model_type"), *(config.get("architectures") or [])]
    named = [str(name) for name in names if name]
    known = next((_NAMES.get(name, name) for name in named if _NAMES.get(name, name) in _LOADERS), None)
    if known is None and named:
        raise ModelFilesError(f"unknown architecture '{named[0]}'; known: {', '.join(_LOADERS)}")
    return known or DEFAULT


def load(folder: Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Load a model folder with the loader of its architecture.

    Raises:
        ModelFilesError: if a file cannot be read, or the files are inconsistent.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelFilesError(f"{path}: {error}") from error
    loader = _LOADERS[architecture_of(config if isinstance(config, dict) else {})]
    if isinstance(loader, str):
        loader = _imported(loader)
    return loader(folder, device, dtype)


def load_random(name: str, device: torch.device, dtype: torch.dtype, config: Any = None, seed: int = 0) -> LoadedModel:
    """Return a model with random weights, to measure speed without a checkpoint.

    Args:
        name: key of `RANDOM`, which selects the model shape.
        device: device of the weights.
        dtype: floating-point dtype of the weights.
        config: configuration that replaces the default shape, or None.
        seed: seed of the random weights.
    """
    model: LoadedModel = _imported(RANDOM[name])(device, dtype, config, seed)
    return model


def _imported(path: str) -> Any:
    module, _, function = path.partition(":")
    return getattr(import_module(module), function)
