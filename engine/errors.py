"""Errors of the engine, and messages about slow fallbacks. Each message is one line that says what to do."""

from __future__ import annotations

import logging
from collections.abc import Iterable

log = logging.getLogger(__name__)


class EngineError(Exception):
    """Base class of the engine's errors. `str(error)` is one line for the user."""


class UnknownModelError(EngineError):
    """A model does not exist under this name, folder or hub ID."""


class ModelFilesError(EngineError):
    """The files of a model cannot be read or are inconsistent."""


class UnknownClassError(EngineError):
    """A label matches no class of a model with a closed vocabulary.

    Attributes:
        label: the unknown label.
    """

    def __init__(self, label: str, model: str, classes: Iterable[str], hint: str | None = None) -> None:
        self.label = label
        meant = f"; did you mean '{hint}'?" if hint else "."
        shown = " ".join(label.split())
        super().__init__(f"'{shown}' is not a class that {model} knows{meant} It knows: {', '.join(classes)}")


class PromptError(EngineError):
    """A prompt is too long, or the model has no tokens for a part of it."""


class RequestTooLargeError(EngineError):
    """The prompts on one image need more space than the whole KV cache has."""


class UnsupportedTaskError(EngineError):
    """The model does not support a task."""


class AdapterError(EngineError):
    """An adapter does not exist, or its file does not match the model."""


class DeadlineError(EngineError):
    """A deadline passed before the answer was complete, or cannot be met.

    Attributes:
        begun: whether the image was already prefilled.

    Args:
        begun: whether the image was already prefilled.
        cropping_s: time in seconds that cropping the image would take at least, if this is the reason.
        answering_s: estimated time in seconds from admission to result, if this is the reason.
    """

    def __init__(self, begun: bool, cropping_s: float | None = None, answering_s: float | None = None) -> None:
        self.begun = begun
        if cropping_s is not None:
            message = f"to cut this image takes {cropping_s:.2g} s, longer than the deadline: send smaller ones"
        elif answering_s is not None:
            message = f"an answer takes {answering_s:.2g} s, longer than what is left to the deadline: ask for less"
        else:
            when = "while it was answered: ask for less" if begun else "before it was begun: ask less often"
            message = f"the deadline passed {when}"
        super().__init__(f"{message}, or allow more time")


class SupersededError(EngineError):
    """While this frame was queued, a newer frame of the same stream superseded it."""

    def __init__(self) -> None:
        super().__init__("a newer frame of the stream superseded this frame before processing")


class EngineClosedError(EngineError):
    """The engine was closed before the task was done."""


class Fallbacks(list[str]):
    """Messages about features that are slower than possible on this machine; see `ModelInfo.fallbacks`."""

    def note(self, what: str) -> None:
        """Add a message and log it, unless it was added before."""
        if what not in self:
            self.append(what)
            log.warning("%s", what)


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's message. torch and drivers append advice in further lines."""
    return (str(error).strip().splitlines() or [""])[0]
