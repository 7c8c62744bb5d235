"""Inference engine for vision-language models: `from saccade.engine import Engine`.

Names are imported lazily (on first use), so that results, tasks and errors do not load PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from saccade.engine.process import limit_arenas, limit_spinning

if TYPE_CHECKING:
    from saccade.engine.api import EncodedImage, Engine
    from saccade.engine.config import EngineConfig
    from saccade.engine.core.admission import StreamSettings
    from saccade.engine.errors import (
        AdapterError,
        DeadlineError,
        EngineClosedError,
        EngineError,
        ModelFilesError,
        PromptError,
        RequestTooLargeError,
        SupersededError,
        UnknownClassError,
        UnknownModelError,
        UnsupportedTaskError,
    )
    from saccade.engine.image import Image
    from saccade.engine.model_loader import ModelInfo
    from saccade.engine.models.model_files import EMBEDDED, ModelEntry
    from saccade.engine.results import (
        Box,
        Detections,
        Grounding,
        Outline,
        Points,
        Reasoning,
        Result,
        Spot,
        Text,
        TextStream,
        Timings,
    )
    from saccade.engine.tasks import TASKS, Caption, Detect, Gaze, Point, Query, Segment, register_task
    from saccade.engine.tasks.task import Task, Window

limit_arenas()
limit_spinning()  # must run before torch is imported

_HOMES = {
    "api": "EncodedImage Engine",
    "config": "EngineConfig",
    "core.admission": "StreamSettings",
    "errors": "AdapterError DeadlineError EngineClosedError EngineError ModelFilesError PromptError "
    "RequestTooLargeError SupersededError UnknownClassError UnknownModelError UnsupportedTaskError",
    "image": "Image",
    "model_loader": "ModelInfo",
    "models.model_files": "EMBEDDED ModelEntry",
    "results": "Box Detections Grounding Outline Points Reasoning Result Spot Text TextStream Timings",
    "tasks": "TASKS Caption Detect Gaze Point Query Segment register_task",
    "tasks.task": "Task Window",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
__all__ = [
    "EMBEDDED",
    "TASKS",
    "AdapterError",
    "Box",
    "Caption",
    "DeadlineError",
    "Detect",
    "Detections",
    "EncodedImage",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineError",
    "Gaze",
    "Grounding",
    "Image",
    "ModelEntry",
    "ModelFilesError",
    "ModelInfo",
    "Outline",
    "Point",
    "Points",
    "PromptError",
    "Query",
    "Reasoning",
    "RequestTooLargeError",
    "Result",
    "Segment",
    "Spot",
    "StreamSettings",
    "SupersededError",
    "Task",
    "Text",
    "TextStream",
    "Timings",
    "UnknownClassError",
    "UnknownModelError",
    "UnsupportedTaskError",
    "Window",
    "register_task",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'saccade.engine' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
