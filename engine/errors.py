"""Errors of the engine, and messages about slower fallback implementations. Each message is one line."""

from __future__ import annotations

import logging
from collections.abc import Iterable

log = logging.getLogger(__name__)


class EngineError(Exception):
    """Base class of the engine's errors. Its message is one line for the user."""


class UnknownModelError(EngineError):
    """Error: no model exists under this name, folder or Hugging Face Hub ID."""


class ModelFilesError(EngineError):
    """Error: the files of a model cannot be read or are inconsistent."""


class UnknownClassError(EngineError):
    """Error: a label matches no class of a model with a closed vocabulary.

    Attributes:
        label: the label that matches no class.
    """

    def __init__(self, label: str, model: str, classes: Iterable[str], hint: str | None = None) -> None:
        self.label = label
        meant = f"did you mean '{hint}'?" if hint else "other labels need a Moondream checkpoint."
        shown = " ".join(label.split())
        super().__init__(f"'{shown}' is not a class of {model}; {meant} Classes: {', '.join(classes)}")


class PromptError(EngineError):
    """Error: a prompt is too long, or it contains characters without tokens in the model's vocabulary."""


class RequestTooLargeError(EngineError):
    """Error: a request needs more KV cache pages, batch slots or adapter slots than the engine can provide."""


class UnsupportedTaskError(EngineError):
    """Error: the model does not support a task."""


class AdapterError(EngineError):
    """Error: a LoRA adapter does not exist, or its file does not match the model."""


class DeadlineError(EngineError):
    """Error: a request missed its deadline, or cannot meet it.

    Args:
        begun: whether the request had already been admitted from the queue. Also an attribute.
        cropping_s: minimum cropping time in seconds if it exceeds the time left, else None.
        answering_s: estimated time in seconds from admission to result if it exceeds the time left, else None.
    """

    def __init__(self, begun: bool, cropping_s: float | None = None, answering_s: float | None = None) -> None:
        self.begun = begun
        if cropping_s is not None:
            message = f"cropping this image takes {cropping_s:.2g} s, which exceeds the deadline; send smaller images"
        elif answering_s is not None:
            message = f"an answer takes {answering_s:.2g} s, which exceeds the time left; send fewer tasks"
        else:
            when = "during the answer; send fewer tasks" if begun else "before the prefill; send requests less often"
            message = f"the deadline passed {when}"
        super().__init__(f"{message}, or allow more time")


class SupersededError(EngineError):
    """Error: a newer frame of the same stream replaced this queued frame."""

    def __init__(self) -> None:
        super().__init__(
            "this frame was dropped, because a newer frame of its stream arrived before the engine processed it"
        )


class EngineClosedError(EngineError):
    """Error: the engine was closed before the task was done."""


class Fallbacks(list[str]):
    """Collects messages about features that use a slower fallback on this machine; see `ModelInfo.fallbacks`."""

    def note(self, what: str) -> None:
        """Add a message about a slower fallback, and log it. A message is added only once."""
        if what not in self:
            self.append(what)
            log.warning("%s", what)


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's message. PyTorch and drivers append advice in further lines."""
    return (str(error).strip().splitlines() or [""])[0]
