"""What a task is: it brings its prompt, the state machine of its answer, and its part of the result; and all there are.

A task is a plain value. It knows no more of a model than `Prompts`, and the names that it was trained on
(`Vocabulary`); it knows no devices and no threads.
"""

from __future__ import annotations

import difflib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from saccade.engine.errors import UnknownClassError
from saccade.engine.results import ResultPart
from saccade.engine.tasks.output_state import OutputState

if TYPE_CHECKING:
    from saccade.engine.models.protocol import ModelLimits, Prompts, Ref

_SEPARATORS = re.compile(r"\s*(?:,|;|/|&|\bor\b|\band\b)\s*", re.IGNORECASE)
_OVERLAP = 0.24  # of a window's side: an object up to that size is whole in some window
OnText = Callable[[str], None]
"""Called with each piece of a text as it comes."""


@dataclass(slots=True, frozen=True)
class Window:
    """A part of an image, in pixels: a tile of those that cover it, or one that the caller chooses.

    A model that sees a 1920-pixel street as 256 pixels sees a pedestrian as four of them. Overlapping windows show them
    larger (Akyon et al. 2022, arXiv:2202.06934); each costs as much as an image.

    Raises:
        ValueError: if it has no pixels, or begins outside of every image.
    """

    x: int
    y: int
    width: int
    height: int

    def __post_init__(self) -> None:
        if min(self.x, self.y) < 0 or min(self.width, self.height) < 1:
            raise ValueError(f"a window begins at 0 or more and has 1 pixel or more; got {self}")

    @property
    def pixels(self) -> int:
        """How many there are."""
        return self.width * self.height


Answers = Sequence[tuple[OutputState, Window]]
"""The complete answers of one task: one for each window of the image that it was asked of, the whole image first."""


def windows(width: int, height: int, tiles: int, chosen: Sequence[Window] = ()) -> list[Window]:
    """The whole image; with `tiles` > 1, as many overlapping windows a side that cover it, row by row; the chosen ones.

    Of a chosen window only what lies in the image counts; one outside of it becomes its nearest pixel.
    """
    found = [Window(0, 0, width, height)]
    if tiles > 1:
        side_x = min(width, math.ceil(width * (1 + _OVERLAP) / tiles))
        side_y = min(height, math.ceil(height * (1 + _OVERLAP) / tiles))
        for row in range(tiles):
            for column in range(tiles):
                x = round((width - side_x) * column / (tiles - 1))
                y = round((height - side_y) * row / (tiles - 1))
                found.append(Window(x, y, side_x, side_y))
    return found + [clip(window, width, height) for window in chosen]


def clip(window: Window, width: int, height: int) -> Window:
    """The part of a window that lies in a `width` × `height` image, at least one pixel."""
    x, y = min(window.x, width - 1), min(window.y, height - 1)
    return Window(x, y, min(window.width, width - x), min(window.height, height - y))


class Vocabulary:
    """The closed list of names of one model, with synonyms; a synonym may stand for several names ('vehicle')."""

    __slots__ = ("_known", "classes", "model")

    def __init__(self, model: str, classes: Iterable[str], synonyms: Mapping[str, Iterable[str]]) -> None:
        self.model = model
        self.classes = tuple(classes)
        self._known = {phrase.lower(): tuple(names) for phrase, names in synonyms.items()}
        self._known |= {name.lower(): (name,) for name in self.classes}

    def resolve(self, labels: Iterable[str]) -> list[str]:
        """Names of the model for phrases such as 'People', 'cars', 'truck or bus', in order, none twice.

        Raises:
            UnknownClassError: for the first phrase that means none of the names.
            ValueError: for what is no text.
        """
        found: dict[str, None] = {}
        for label in labels:
            if not isinstance(label, str):
                raise ValueError(f"a label is one text, such as 'person' or 'truck or bus'; got {label!r:.100}")
            phrases = [p for p in _SEPARATORS.split(label) if p.strip()]
            for phrase in [label] if self._lookup(label) or not phrases else phrases:
                names = self._lookup(phrase)
                if names is None:
                    close = difflib.get_close_matches(phrase.lower(), self._known, n=1, cutoff=0.75)
                    raise UnknownClassError(phrase, self.model, self.classes, close[0] if close else None)
                found |= dict.fromkeys(names)
        return list(found)

    def _lookup(self, phrase: str) -> tuple[str, ...] | None:
        words = re.sub(r"^(?:a|an|the|any|all|every)\s+", "", " ".join(phrase.lower().replace("_", " ").split()))
        for form in _singulars(words):
            if form in self._known:
                return self._known[form]
        return None


def _singulars(word: str) -> list[str]:
    """The word and what it may be the plural of."""
    forms = [word]
    if word.endswith("ies"):
        forms.append(word[:-3] + "y")
    if word.endswith("es"):
        forms.append(word[:-2])
    if word.endswith("s"):
        forms.append(word[:-1])
    return forms


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


TASKS: dict[str, type[Task]] = {}
"""Every task by its skill, in the order in which results and configurations list them."""


def register_task(task: type[Task]) -> type[Task]:
    """Make a task known by its skill.

    Raises:
        ValueError: if another task has the same skill.
    """
    if TASKS.setdefault(task.skill, task) is not task:
        raise ValueError(f"there is a task '{task.skill}' already")
    return task


def require_text(name: str, value: object) -> None:
    """Raise ValueError unless a value is a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is a string that is not empty; got {value!r}")


def require_count(name: str, value: object) -> None:
    """Raise ValueError unless a value is a whole number of 0 or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is a whole number of 0 or more; got {value!r}")


def is_number(value: object) -> bool:
    """Whether a value is a number, and not nan."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def require_conf(value: object) -> None:
    """Raise ValueError unless a value is a number from 0 to 1."""
    if not isinstance(value, int | float) or not is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"conf is a number from 0 to 1; got {value!r}")


def require_sampling(temperature: object, top_p: object, seed: object) -> None:
    """Raise ValueError unless tokens can be sampled so."""
    if not isinstance(temperature, int | float) or not is_number(temperature) or not 0 <= temperature < math.inf:
        raise ValueError(f"temperature is 0 or more; got {temperature!r}")
    if not isinstance(top_p, int | float) or not is_number(top_p) or not 0 < top_p <= 1:
        raise ValueError(f"top_p is above 0 and at most 1; got {top_p!r}")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise ValueError(f"seed is a whole number; got {seed!r}")


def require_refs(refs: Any) -> tuple[Ref, ...]:
    """Points (x, y) and boxes (x1, y1, x2, y2) as tuples; raise ValueError for anything else."""
    try:
        return tuple(_ref(one) for one in refs)
    except TypeError:
        raise ValueError(f"refs are several points or boxes; got {refs!r}") from None


def _ref(value: Any) -> Ref:
    numbers = tuple(value)
    if len(numbers) not in (2, 4) or not all(is_number(one) and 0 <= one <= 1 for one in numbers):
        raise ValueError(f"a ref is a point (x, y) or a box (x1, y1, x2, y2) of numbers from 0 to 1; got {value!r}")
    if len(numbers) == 4 and not (numbers[0] <= numbers[2] and numbers[1] <= numbers[3]):
        raise ValueError(f"a box is (x1, y1, x2, y2) with x1 <= x2 and y1 <= y2; got {value!r}")
    return numbers


def shorten(words: str) -> str:
    """Words as an error message shows them."""
    return words if len(words) <= 40 else words[:39] + "…"
