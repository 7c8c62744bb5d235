"""A vision-language model that finds, points and answers: `from engine import Engine`.

Names are imported when first used, so that results, tasks and errors can be had without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine, Image
    from .errors import (
        AdapterError,
        DeadlineError,
        EngineClosedError,
        EngineError,
        ModelFilesError,
        PromptError,
        UnknownClassError,
        UnknownModelError,
        UnsupportedTaskError,
    )
    from .loading import ModelInfo
    from .models.registry import EMBEDDED, ModelEntry
    from .results import Box, Detections, Points, Result, Spot, Text, Timings
    from .streaming import TextStream
    from .tasks import Caption, Detect, Point, Query, Task

_HOMES = {
    "engine": ("Engine", "Image"),
    "errors": (
        "AdapterError",
        "DeadlineError",
        "EngineClosedError",
        "EngineError",
        "ModelFilesError",
        "PromptError",
        "UnknownClassError",
        "UnknownModelError",
        "UnsupportedTaskError",
    ),
    "loading": ("ModelInfo",),
    "models.registry": ("EMBEDDED", "ModelEntry"),
    "results": ("Box", "Detections", "Points", "Result", "Spot", "Text", "Timings"),
    "streaming": ("TextStream",),
    "tasks": ("Caption", "Detect", "Point", "Query", "Task"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [
    "EMBEDDED",
    "AdapterError",
    "Box",
    "Caption",
    "DeadlineError",
    "Detect",
    "Detections",
    "Engine",
    "EngineClosedError",
    "EngineError",
    "Image",
    "ModelEntry",
    "ModelFilesError",
    "ModelInfo",
    "Point",
    "Points",
    "PromptError",
    "Query",
    "Result",
    "Spot",
    "Task",
    "Text",
    "TextStream",
    "Timings",
    "UnknownClassError",
    "UnknownModelError",
    "UnsupportedTaskError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'engine' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)
