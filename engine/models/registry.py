"""Architectures by name: which class loads a model folder. Knows no torch until a model is loaded.

A new architecture is a module with a loader, and one line here or one call of `register_architecture`.
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
"""Loads a folder's weights onto a device in a dtype; raises ModelFilesError if its files do not fit each other."""

DEFAULT = "moondream"
_LOADERS: dict[str, Loader | str] = {DEFAULT: "saccade.engine.models.moondream.loader:load_moondream"}
_NAMES = {"moondream1": DEFAULT, "moondream3": DEFAULT, "HfMoondream": DEFAULT, "Moondream": DEFAULT}
"""What published configurations call an architecture."""


def register_architecture(name: str, loader: Loader | str) -> None:
    """Make an architecture known by the `model_type` of its config.json.

    Args:
        name: the `model_type`.
        loader: a function, or "module:function", which is imported when it is first needed.

    Raises:
        ValueError: if there is another one of this name.
    """
    if _LOADERS.setdefault(name, loader) != loader:
        raise ValueError(f"there is an architecture '{name}' already")


RANDOM = {
    "moondream-2-random": "saccade.engine.models.moondream.random_weights:random_moondream",
    "moondream-3-random": "saccade.engine.models.moondream.random_weights:random_moondream_3",
}
"""Models with published dimensions and random weights, for benchmarks."""


def architecture_of(config: dict[str, Any]) -> str:
    """The architecture that a parsed config.json names; Moondream where it names none, as our own do.

    Raises:
        ModelFilesError: if it names one that is not known.
    """
    names = [config.get("model_type"), *(config.get("architectures") or [])]
    named = [str(name) for name in names if name]
    known = next((_NAMES.get(name, name) for name in named if _NAMES.get(name, name) in _LOADERS), None)
    if known is None and named:
        raise ModelFilesError(f"no architecture '{named[0]}': known are {', '.join(_LOADERS)}")
    return known or DEFAULT


def load(folder: Path, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Load a model folder by its architecture.

    Raises:
        ModelFilesError: if a file cannot be read, or they do not fit each other.
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
    """A model of `RANDOM` with weights drawn by a seed; `config` is the architecture's own, for another shape."""
    model: LoadedModel = _imported(RANDOM[name])(device, dtype, config, seed)
    return model


def _imported(path: str) -> Any:
    module, _, function = path.partition(":")
    return getattr(import_module(module), function)
