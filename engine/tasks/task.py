"""Base class and registry of tasks; a task supplies its prompt, its answer's state machine and its part of the result.

A task is a plain value. It depends on a model only through `Prompts` and the classes of the model (`Vocabulary`).
"""

from __future__ import annotations

import difflib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from saccade.engine.errors import UnknownClassError
from saccade.engine.models.protocol import TEXT_PHASES, Phase
from saccade.engine.results import ResultPart

if TYPE_CHECKING:
    from saccade.engine.models.protocol import ModelLimits, Prompts, Ref

_SEPARATORS = re.compile(r"\s*(?:,|;|/|&|\bor\b|\band\b)\s*", re.IGNORECASE)
_OVERLAP = 0.24  # overlap of windows as a fraction of their side; objects up to this size are whole in some window
OnText = Callable[[str], None]
"""Callback for each new piece of a text."""


# ---- an answer


@dataclass(slots=True, frozen=True)
class Sampling:
    """Sampling parameters: `temperature` 0 is greedy; `seed` is a signed 64-bit integer."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()

FedValue = tuple[Phase, float, float]
"""Input of a step: (Phase.Y, coordinate, 0), (Phase.SIZE, width, height) or (Phase.TOKEN, token ID, 0)."""

FROM_IMAGE: FedValue = (Phase.TOKEN, -1.0, 0.0)
"""Placeholder of a draft value that the executor reads from the image."""

Sampled = tuple[float, ...]
"""Samples of a row: three numbers by phase, then the log probabilities of `TokenRule.scored`."""


class TokenRule(NamedTuple):
    """Constraints on the token of a step.

    Attributes:
        allowed: allowed token IDs, at least one, or None for all.
        forbidden: forbidden token IDs.
        grounded: a sampled coordinate token comes with a coordinate, whose embedding is fed next.
        scored: at most `MAX_SCORED` token IDs whose log probabilities over all tokens are returned.
        lasting: whether many steps share `allowed`, so that its mask is cached on the device.
    """

    allowed: Sequence[int] | None = None
    forbidden: Sequence[int] = ()
    grounded: bool = False
    scored: Sequence[int] = ()
    lasting: bool = False


ANY_TOKEN = TokenRule()
MAX_SCORED = 128
"""Maximum number of log probabilities per row and step."""


class OutputState(ABC):
    """State machine of one answer, whose steps cycle through `phases`.

    Launching and reading of steps overlap: `next_phase` is called when a step is launched, and `commit` when its
    samples are read, up to one step later. The sequence of phases does not depend on samples, except for the end, so a
    step can launch before the previous one is read. Allowed tokens may depend on samples, so `rule` is called when the
    step is finalized.

    Attributes:
        steps: maximum number of steps; 0 if the context is too short.
        sampling: sampling parameters.
        back: number of positions that the step of the last `next_phase` goes back; later entries are overwritten.
    """

    __slots__ = ("_launched", "back", "sampling", "steps")

    phases: ClassVar[tuple[Phase, ...]]

    def __init__(self, steps: int, sampling: Sampling = GREEDY) -> None:
        self.steps, self.sampling, self.back = steps, sampling, 0
        self._launched = 0

    @property
    def positions(self) -> int:
        """Maximum number of positions fed after the prompt; the last sample is never fed."""
        return max(0, self.steps - 1)

    def next_phase(self) -> Phase | None:
        """Return the phase of the next step to launch, or None if no more steps are needed."""
        if self._launched == self.steps:
            return None
        phase = self.phases[self._launched % len(self.phases)]
        self._launched += 1
        return phase

    def vocabulary(self) -> Iterable[int]:
        """Return all token IDs that `rule` may return, for validation."""
        return ()

    def rule(self) -> TokenRule:
        """Return the constraints on the next token; called once per text step in order."""
        return ANY_TOKEN

    @abstractmethod
    def commit(self, sampled: Sampled) -> bool:
        """Take the samples of the oldest uncommitted step; return True when the answer is complete.

        Args:
            sampled: values by phase: X_OR_EOS (coord logit − eos logit, x, –), Y (y, –, –), SIZE (width, height, –),
                text (token ID, coordinate if grounded, –, requested log probabilities…).
        """

    @property
    def draftable(self) -> bool:
        """Whether the values of this answer may be drafts of the next answer, see `core.speculative`."""
        return False

    @property
    def certain(self) -> Sequence[FedValue]:
        """Inputs of the next steps that do not depend on samples, so that these steps can run with the prompt."""
        return ()

    def branches(self, most: int) -> Sequence[tuple[tuple[int, ...], OutputState]]:
        """Return parts of the work for parallel sequences, each with its tokens after the prompt and its state machine.

        The parts share this object's state, which is complete when all parts are. Call once, before the first step.

        Args:
            most: maximum number of parts; if more are needed, the result is empty.
        """
        return ()

    @property
    def visible(self) -> bool:
        """Whether detections in the image can draft the answer; see `FROM_IMAGE`."""
        return False

    def retract(self, steps: int) -> None:
        """Take back the newest `steps` launched steps, which will be launched again."""
        self._launched -= steps

    def fed(self, phase: Phase, sampled: Sampled) -> FedValue | None:
        """Return the input of the next step after a sample or draft value, or None if the answer ends."""
        if phase is Phase.SIZE:
            return Phase.SIZE, sampled[0], sampled[1]
        return (Phase.TOKEN if phase in TEXT_PHASES else Phase.Y), sampled[0], 0.0

    def values(self) -> list[FedValue]:
        """Return all values fed for the answer so far, in order, if it is `draftable`."""
        return []

    def finish(self) -> None:  # noqa: B027 - most answers hold nothing back
        """Finish the answer; called once before its task collects it."""


@dataclass(slots=True, eq=False)
class DraftMemory:
    """The last answer to a prompt of a stream, and statistics of its drafts.

    Attributes:
        values: values of the last answer.
        pause: number of answers without drafts.
        failures: number of consecutive answers whose drafts saved too little.
    """

    values: tuple[FedValue, ...] = ()
    pause: int = 0
    failures: int = 0

    def draft(self) -> tuple[FedValue, ...]:
        """Return the draft for the next answer."""
        if self.pause:
            self.pause -= 1
            return ()
        return self.values

    def learn(self, values: Sequence[FedValue], paid: bool | None, longest_pause: int) -> None:
        """Store a complete answer, and whether its draft paid off (None without a draft)."""
        self.values = tuple(values)
        if paid is not None:
            self.failures = 0 if paid else self.failures + 1
            self.pause = min(longest_pause, 2**self.failures) if self.failures > 1 else 0


# ---- a task


@dataclass(slots=True, frozen=True)
class Window:
    """A part of an image in pixels: a tile, or a window chosen by the caller.

    Overlapping windows enlarge small objects (Akyon et al. 2022, arXiv:2202.06934); each window costs as much as an
    image. A model that sees a 1920-pixel street in 256 pixels sees a pedestrian as four pixels.

    Raises:
        ValueError: if it has no pixels, or starts at negative coordinates.
    """

    x: int
    y: int
    width: int
    height: int

    def __post_init__(self) -> None:
        if min(self.x, self.y) < 0 or min(self.width, self.height) < 1:
            raise ValueError(f"a window must start at 0 or more and have at least 1 pixel; got {self}")

    @property
    def pixels(self) -> int:
        """Number of pixels."""
        return self.width * self.height


Answers = Sequence[tuple[OutputState, Window]]
"""Complete answers of one task with their windows; the whole image comes first."""


def windows(width: int, height: int, tiles: int, chosen: Sequence[Window] = ()) -> list[Window]:
    """Return the whole image, then `tiles` × `tiles` overlapping windows if `tiles` > 1, then the chosen windows.

    Chosen windows are clipped to the image; a window outside of it becomes the nearest pixel.
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
    """Return the part of a window inside a `width` × `height` image, at least one pixel."""
    x, y = min(window.x, width - 1), min(window.y, height - 1)
    return Window(x, y, min(window.width, width - x), min(window.height, height - y))


class Vocabulary:
    """The classes of a closed-vocabulary model with synonyms; a synonym may stand for several classes ('vehicle')."""

    __slots__ = ("_known", "classes", "model")

    def __init__(self, model: str, classes: Iterable[str], synonyms: Mapping[str, Iterable[str]]) -> None:
        self.model = model
        self.classes = tuple(classes)
        self._known = {phrase.lower(): tuple(names) for phrase, names in synonyms.items()}
        self._known |= {name.lower(): (name,) for name in self.classes}

    def resolve(self, labels: Iterable[str]) -> list[str]:
        """Return the model's classes for phrases such as 'People', 'cars', 'truck or bus', in order without duplicates.

        Raises:
            UnknownClassError: names the first phrase that matches no class.
            ValueError: if a label is not a string.
        """
        found: dict[str, None] = {}
        for label in labels:
            if not isinstance(label, str):
                raise ValueError(f"a label must be a string, such as 'person' or 'truck or bus'; got {label!r:.100}")
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
    """Return a word and its possible singular forms."""
    forms = [word]
    if word.endswith("ies"):
        forms.append(word[:-3] + "y")
    if word.endswith("es"):
        forms.append(word[:-2])
    if word.endswith("s"):
        forms.append(word[:-1])
    return forms


class Task(ABC):
    """A question about an image. Subclasses are frozen dataclasses that validate their arguments.

    Attributes:
        skill: skill that the model needs; also the name in configurations and records.
        tiled: whether the task also runs on the tiles of an image.
    """

    __slots__ = ()
    skill: ClassVar[str]
    tiled: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def parse(cls, text: str, max_objects: int, conf: float) -> Self:
        """Create the task from text that a person typed; `max_objects` and `conf` apply to object tasks."""

    @property
    @abstractmethod
    def asked(self) -> str:
        """Text of the task as a person would type it."""

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Whether nothing is requested, so that the model is not called."""

    def expand(self, vocabulary: Vocabulary | None) -> Sequence[Task]:
        """Return the tasks for the model's classes; `vocabulary` is None for open-vocabulary models.

        Raises:
            UnknownClassError: if the vocabulary has no matching class.
        """
        return [self]

    @property
    def needs_image(self) -> bool:
        """Whether the task requires an image."""
        return True

    @abstractmethod
    def prompt(self, prompts: Prompts) -> list[int]:
        """Return the prompt's token IDs."""

    def values(self, prompts: Prompts) -> Mapping[int, tuple[float, ...]]:
        """Return values that replace token embeddings of the prompt, see `Sequence.values`."""
        return {}

    @abstractmethod
    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """Return the state machine of an answer of at most `max_steps`; new text is passed to `on_text`.

        Raises:
            PromptError: if the model does not support this kind of answer.
        """

    @abstractmethod
    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        """Return the task's part of the result for a `width` × `height` image; no `answers` if the task is `empty`."""


TASKS: dict[str, type[Task]] = {}
"""All tasks by skill, in the order of results and configurations."""


def register_task(task: type[Task]) -> type[Task]:
    """Register a task by its skill.

    Raises:
        ValueError: if another task has the same skill.
    """
    if TASKS.setdefault(task.skill, task) is not task:
        raise ValueError(f"task '{task.skill}' is already registered")
    return task


def require_text(name: str, value: object) -> None:
    """Check that a value is a non-empty string; raise ValueError otherwise."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a non-empty string; got {value!r}")


def require_count(name: str, value: object) -> None:
    """Check that a value is an integer of at least 0; raise ValueError otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be an integer of at least 0; got {value!r}")


def is_number(value: object) -> bool:
    """Return whether a value is a number other than NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def require_conf(value: object) -> None:
    """Check that a value is a number from 0 to 1; raise ValueError otherwise."""
    if not isinstance(value, int | float) or not is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"conf must be a number from 0 to 1; got {value!r}")


def require_sampling(temperature: object, top_p: object, seed: object) -> None:
    """Check sampling parameters; raise ValueError if one is invalid."""
    if not isinstance(temperature, int | float) or not is_number(temperature) or not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be a number of at least 0; got {temperature!r}")
    if not isinstance(top_p, int | float) or not is_number(top_p) or not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1; got {top_p!r}")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise ValueError(f"seed must be an integer; got {seed!r}")


def require_refs(refs: Any) -> tuple[Ref, ...]:
    """Return points (x, y) and boxes (x1, y1, x2, y2) as tuples; raise ValueError for anything else."""
    try:
        return tuple(_ref(one) for one in refs)
    except TypeError:
        raise ValueError(f"refs must be a list of points or boxes; got {refs!r}") from None


def _ref(value: Any) -> Ref:
    numbers = tuple(value)
    if len(numbers) not in (2, 4) or not all(is_number(one) and 0 <= one <= 1 for one in numbers):
        raise ValueError(
            f"a ref must be a point (x, y) or a box (x1, y1, x2, y2) of numbers from 0 to 1; got {value!r}"
        )
    if len(numbers) == 4 and not (numbers[0] <= numbers[2] and numbers[1] <= numbers[3]):
        raise ValueError(f"a box must be (x1, y1, x2, y2) with x1 <= x2 and y1 <= y2; got {value!r}")
    return numbers


def shorten(words: str) -> str:
    """Return text shortened to 40 characters for an error message."""
    return words if len(words) <= 40 else words[:39] + "…"
