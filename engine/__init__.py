"""A vision-language model that finds, points and answers: `from saccade.engine import Engine`.

Names are imported when first used, so that results, tasks and errors can be had without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.engine.engine import Engine, Image
    from saccade.engine.errors import (
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
    from saccade.engine.model_loader import ModelInfo
    from saccade.engine.models.model_files import EMBEDDED, ModelEntry
    from saccade.engine.results import Box, Detections, Points, Result, Spot, Text, Timings
    from saccade.engine.tasks import Caption, Detect, Point, Query, Task
    from saccade.engine.text_stream import TextStream

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
    "model_loader": ("ModelInfo",),
    "models.model_files": ("EMBEDDED", "ModelEntry"),
    "results": ("Box", "Detections", "Points", "Result", "Spot", "Text", "Timings"),
    "text_stream": ("TextStream",),
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
        raise AttributeError(f"module 'saccade.engine' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
