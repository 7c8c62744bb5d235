"""The engine's errors, each with one line that says what to do; and what runs slower than it could. Knows no torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable

log = logging.getLogger(__name__)


class EngineError(Exception):
    """Base of the engine's errors; `str(error)` is one line for the user."""


class UnknownModelError(EngineError):
    """A model name, folder or hub id that leads to no model."""


class ModelFilesError(EngineError):
    """A model's files cannot be read or do not fit each other."""


class UnknownClassError(EngineError):
    """A closed-vocabulary model was asked for a name it does not know.

    Attributes:
        label: the name asked for.
    """

    def __init__(self, label: str, model: str, classes: Iterable[str], hint: str | None = None) -> None:
        self.label = label
        meant = f"; did you mean '{hint}'?" if hint else "."
        shown = " ".join(label.split())
        super().__init__(f"'{shown}' is not a class that {model} knows{meant} It knows: {', '.join(classes)}")


class PromptError(EngineError):
    """A question or name that the model cannot be asked: too long for an answer to fit behind it, or of no tokens."""


class RequestTooLargeError(EngineError):
    """More prompts on one image, or longer ones, than the whole cache holds."""


class UnsupportedTaskError(EngineError):
    """The model has no such skill."""


class AdapterError(EngineError):
    """An adapter that is not there, or whose file does not fit the model."""


class DeadlineError(EngineError):
    """The deadline given with a task passed before its answer was complete, or could not be met.

    Attributes:
        begun: whether the image had been prefilled.

    Args:
        begun: as above.
        cropping_s: seconds that it takes at least to cut the image into crops, where that alone is too long.
        answering_s: seconds that requests like it take, where that is too long.
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
    """A newer frame of the same stream superseded this one before it was begun."""

    def __init__(self) -> None:
        super().__init__("a newer frame of the stream came before this one was begun: it was not looked at")


class EngineClosedError(EngineError):
    """The engine was closed before the task was done."""


class Fallbacks(list[str]):
    """What runs slower than it could on this machine, and why: a line each, for people; see `ModelInfo.fallbacks`."""

    def note(self, what: str) -> None:
        """Add one, and log it, unless it is there already."""
        if what not in self:
            self.append(what)
            log.warning("%s", what)


def reason_of(error: BaseException) -> str:
    """The first line of an error's message: what torch and drivers put behind it is advice."""
    return (str(error).strip().splitlines() or [""])[0]
