"""What can be asked of an image: detect, point, query, caption, and the table of all tasks.

A new task subclasses `Task` in a file of its own and is made known with `register_task`. Knows no devices and no
threads.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from saccade.engine.errors import PromptError
from saccade.engine.results import Box, ResultPart, Spot, Text
from saccade.engine.scheduling.detokenizer import Detokenizer
from saccade.engine.scheduling.output_state import (
    BoxesOutput,
    ChoiceOutput,
    DecodedObject,
    ObjectsOutput,
    OutputState,
    PointsOutput,
    Sampling,
    TextOutput,
)
from saccade.engine.scheduling.slicing import distinct, merge, place
from saccade.engine.scheduling.task import Answers, OnText, Task, shorten
from saccade.engine.vocabulary import Vocabulary

if TYPE_CHECKING:
    from saccade.engine.models.protocol import ModelLimits, Prompts

CaptionLength = Literal["short", "normal", "long"]

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


@dataclass(slots=True, frozen=True)
class ObjectsTask(Task):
    """Find every `label`: what `Detect` and `Point` share.

    Attributes:
        label: what to find, one name or phrase.
        max_objects: stop after this many; 0 finds none.
        conf: an object is begun while its score, p(coord) / (p(coord) + p(eos)), is above this, 0 to 1. 0.5 is the
            model's own greedy choice; lower values trade precision for recall.

    Raises:
        ValueError: if one of them is of another type or out of its range.
    """

    label: str
    max_objects: int = 50
    conf: float = 0.5

    def __post_init__(self) -> None:
        _require_text("label", self.label)
        _require_count("max_objects", self.max_objects)
        if not _is_number(self.conf) or not 0 <= self.conf <= 1:
            raise ValueError(f"conf is a number from 0 to 1; got {self.conf!r}")

    @classmethod
    def parse(cls, text: str, max_objects: int, conf: float) -> Self:
        """The task for a label."""
        return cls(text, max_objects, conf)

    @property
    def asked(self) -> str:
        """The label."""
        return self.label

    @property
    def empty(self) -> bool:
        """Whether no object is wanted."""
        return self.max_objects == 0

    def expand(self, vocabulary: Vocabulary | None) -> Sequence[Task]:
        """One task for each of the model's names that the label stands for."""
        if vocabulary is None:
            return [self]
        return [replace(self, label=name) for name in vocabulary.resolve([self.label])]

    def prompt(self, prompts: Prompts) -> list[int]:
        """Token ids that ask for all objects of the label."""
        return prompts.objects(self.skill, self.label)


@register_task
@dataclass(slots=True, frozen=True)
class Detect(ObjectsTask):
    """Find every `label` as a box."""

    skill = "detect"
    tiled = True

    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """Objects of x, y and size."""
        return BoxesOutput(self.max_objects, self.conf, max_steps)

    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        """Boxes: those of one answer, without repetitions where the model has a limit; those of all windows merged."""
        found = _placed(answers, width, height)
        if len(answers) > 1:
            found = merge(found)[: self.max_objects]
        elif limits.repeat_iou is not None:
            found = distinct(found, limits.repeat_iou)
        return [_box(self.label, one) for one in found]


@register_task
@dataclass(slots=True, frozen=True)
class Point(ObjectsTask):
    """Find every `label` as its centre point."""

    skill = "point"

    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """Objects of x and y."""
        return PointsOutput(self.max_objects, self.conf, max_steps)

    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        """Points in the order of the answer."""
        return [Spot(self.label, one.score, one.x, one.y) for one in _placed(answers, width, height)]


@dataclass(slots=True, frozen=True, kw_only=True)
class TextTask(Task):
    """How free text is generated: what `Query` and `Caption` share. Given by name only.

    Attributes:
        temperature: 0 takes the most likely token each time; 1 samples from the model's own distribution.
        top_p: sample from the fewest most likely tokens whose probabilities reach this; above 0, to 1 for all.
        stop: strings that end the text; it is cut before the first of them. One may be given as it is.
        seed: the same seed gives the same answer to the same request; None is another one each time.

    Raises:
        ValueError: if one of them is of another type or out of its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    stop: str | tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is 0 or more; got {self.temperature!r}")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is above 0 and at most 1; got {self.top_p!r}")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        for one in self.stop:
            _require_text("a stop string", one)
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise ValueError(f"seed is a whole number; got {self.seed!r}")

    def sampling(self) -> Sampling:
        """How its tokens are sampled, with a seed of its own if none was given."""
        seed = secrets.randbits(63) if self.seed is None else self.seed % (1 << 63)
        return Sampling(self.temperature, self.top_p, seed)

    def text_output(self, prompts: Prompts, max_tokens: int, max_steps: int, on_text: OnText | None) -> OutputState:
        """Free text."""
        return _FreeText(prompts, max_tokens, max_steps, self.sampling(), tuple(self.stop), on_text)

    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        """The text, empty if nothing was wanted."""
        text, tokens, cut = "", 0, False
        for output, _ in answers:
            if isinstance(output, ChoiceOutput):
                text, tokens = output.choice, len(output.tokens)
            else:
                assert isinstance(output, _FreeText)
                text, tokens = output.detokenizer.text, len(output.tokens)
                cut = tokens == output.steps
        return [Text(self.title, text, tokens, cut)]

    @property
    def title(self) -> str:
        """What was asked, as the result lists it."""
        return self.asked


@register_task
@dataclass(slots=True, frozen=True)
class Query(TextTask):
    """Answer `question` in free text of at most `max_tokens` tokens, or with one of `choices`.

    Attributes:
        choices: if any, the answer is one of these strings; `max_tokens` and `stop` mean nothing then.
    """

    skill = "query"

    question: str
    max_tokens: int = 768
    choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        TextTask.__post_init__(self)
        _require_text("question", self.question)
        _require_count("max_tokens", self.max_tokens)
        if isinstance(self.choices, str):
            raise ValueError(f"choices are several strings; got one, '{self.choices}'")
        object.__setattr__(self, "choices", tuple(self.choices))
        for choice in self.choices:
            _require_text("a choice", choice)

    @classmethod
    def parse(cls, text: str, max_objects: int, conf: float) -> Self:
        """The task for a question."""
        return cls(text)

    @property
    def asked(self) -> str:
        """The question."""
        return self.question

    @property
    def empty(self) -> bool:
        """Whether no token is wanted."""
        return self.max_tokens == 0 and not self.choices

    def prompt(self, prompts: Prompts) -> list[int]:
        """Token ids that ask the question."""
        return prompts.query(self.question)

    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """Free text, or one of the choices in whichever spelling the model prefers."""
        if not self.choices:
            return self.text_output(prompts, self.max_tokens, max_steps, on_text)
        options: dict[tuple[int, ...], str] = {}
        for choice in self.choices:
            for words in (choice, f" {choice}"):
                ids = tuple(prompts.ids(words))
                if not ids or prompts.eos_id in ids:
                    raise PromptError(f"'{shorten(choice)}' cannot be a choice: the model would end before or in it")
                options[ids] = choice
        return ChoiceOutput(prompts.eos_id, options, max_steps, self.sampling(), on_text)


@register_task
@dataclass(slots=True, frozen=True)
class Caption(TextTask):
    """Describe the image in free text of at most `max_tokens` tokens."""

    skill = "caption"

    length: CaptionLength = "normal"
    max_tokens: int = 768

    def __post_init__(self) -> None:
        TextTask.__post_init__(self)
        if self.length not in get_args(CaptionLength):
            raise ValueError(f"length is one of {', '.join(get_args(CaptionLength))}; got {self.length!r}")
        _require_count("max_tokens", self.max_tokens)

    @classmethod
    def parse(cls, text: str, max_objects: int, conf: float) -> Self:
        """The task for a length."""
        length: Any = text
        return cls(length)

    @property
    def asked(self) -> str:
        """The length."""
        return self.length

    @property
    def title(self) -> str:
        """The length, named as one of a caption."""
        return f"caption: {self.length}"

    @property
    def empty(self) -> bool:
        """Whether no token is wanted."""
        return self.max_tokens == 0

    def prompt(self, prompts: Prompts) -> list[int]:
        """Token ids that ask for a description."""
        return prompts.caption(self.length)

    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """Free text."""
        return self.text_output(prompts, self.max_tokens, max_steps, on_text)


class _FreeText(TextOutput):
    """Free text, detokenized while its tokens come."""

    __slots__ = ("detokenizer",)

    def __init__(
        self,
        prompts: Prompts,
        max_tokens: int,
        max_steps: int,
        sampling: Sampling,
        stop: tuple[str, ...],
        on_text: OnText | None,
    ) -> None:
        self.detokenizer = Detokenizer(prompts.text, stop, on_text)
        super().__init__(prompts.eos_id, max_tokens, max_steps, sampling, self.detokenizer.add, self.detokenizer.end)


def _placed(answers: Answers, width: int, height: int) -> list[DecodedObject]:
    found: list[DecodedObject] = []
    for output, window in answers:
        assert isinstance(output, ObjectsOutput)
        placed = (place(one, window, width, height) for one in output.objects)
        found += [one for one in placed if one is not None]
    return found


def _box(label: str, found: DecodedObject) -> Box:
    def clip(value: float) -> float:
        return min(1.0, max(0.0, value))

    half_w, half_h = found.width / 2, found.height / 2
    x1, y1, x2, y2 = map(clip, (found.x - half_w, found.y - half_h, found.x + half_w, found.y + half_h))
    return Box(label, found.score, x1, y1, x2, y2)


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} is a string that is not empty; got {value!r}")


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is a whole number of 0 or more; got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
