"""What a task is: it brings its prompt, the state machine of its answer, and its part of the result.

A task is a plain value. It knows no more of a model than `Prompts`; it knows no devices and no threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from saccade.engine.results import ResultPart
from saccade.engine.tasks.output_state import OutputState
from saccade.engine.tasks.tiles import Window
from saccade.engine.vocabulary import Vocabulary

if TYPE_CHECKING:
    from saccade.engine.models.protocol import ModelLimits, Prompts

OnText = Callable[[str], None]
"""Called with each piece of a text as it comes."""
Answers = Sequence[tuple[OutputState, Window]]
"""The complete answers of one task: one for each window of the image that it was asked of, the whole image first."""


class Task(ABC):
    """A question about an image. Subclasses are frozen dataclasses that check their arguments when they are made.

    Attributes:
        skill: what a model must have learned for it; also its name in configurations and records.
        tiled: whether it is also asked of the tiles of an image.
    """

    __slots__ = ()
    skill: ClassVar[str]
    tiled: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def parse(cls, text: str, max_objects: int, conf: float) -> Self:
        """The task for what a person typed; the limits of objects apply where it finds objects."""

    @property
    @abstractmethod
    def asked(self) -> str:
        """What was asked, as a person would type it."""

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Whether nothing is wanted of it, so that the model need not be asked."""

    def expand(self, vocabulary: Vocabulary | None) -> Sequence[Task]:
        """The tasks in the model's own names; `vocabulary` is None where any words may be asked for.

        Raises:
            UnknownClassError: if the vocabulary is closed and has no such name.
        """
        return [self]

    @property
    def needs_image(self) -> bool:
        """Whether it can only be asked of an image."""
        return True

    @abstractmethod
    def prompt(self, prompts: Prompts) -> list[int]:
        """Token ids that ask it."""

    def values(self, prompts: Prompts) -> Mapping[int, tuple[float, ...]]:
        """What stands in the prompt in place of the embeddings of some tokens, see `Sequence.values`."""
        return {}

    @abstractmethod
    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """The state machine of an answer that may take `max_steps`; text is reported to `on_text` as it comes.

        Raises:
            PromptError: if the model cannot answer so.
        """

    @abstractmethod
    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        """Its part of the result on a `width` × `height` image; without answers if it is `empty`."""


def shorten(words: str) -> str:
    """Words as an error message shows them."""
    return words if len(words) <= 40 else words[:39] + "…"
