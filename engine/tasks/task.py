"""Base class of the tasks (such as detection or captioning), and the task registry.

A task creates its prompt and the state machine that decodes the answer, and converts the answer to results. Tasks are
immutable. They depend on a model only through its prompts (`Prompts`) and its class names (`Vocabulary`).
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
_OVERLAP = 0.24  # overlap of tiles as a fraction of their side; smaller objects are complete in at least one tile
OnText = Callable[[str], None]
"""Callback for each new piece of a text."""


# ---- answers


@dataclass(slots=True, frozen=True)
class Sampling:
    """Sampling parameters of text generation.

    Attributes:
        temperature: softmax temperature. 0 selects greedy decoding.
        top_p: nucleus sampling: sample only from the smallest set of most likely tokens with this total probability.
        seed: signed 64-bit seed of the random numbers.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


GREEDY = Sampling()

FedValue = tuple[Phase, float, float]
"""Decoder input: (Phase.Y, coordinate, 0), (Phase.SIZE, width, height) or (Phase.TOKEN, token ID, 0)."""

FROM_IMAGE: FedValue = (Phase.TOKEN, -1.0, 0.0)
"""Placeholder for a draft value that the executor replaces by a detection of the vision encoder."""

Sampled = tuple[float, ...]
"""Samples of a row: three numbers (see `OutputState.commit`), then the log probabilities of `TokenRule.scored`."""


class TokenRule(NamedTuple):
    """Constraints on the token that the next decoding step samples.

    Attributes:
        allowed: allowed token IDs, at least one; None allows all.
        forbidden: forbidden token IDs.
        grounded: whether the step also samples a coordinate after the coordinate token. The coordinate is then the next
            input of the decoder.
        scored: at most `MAX_SCORED` token IDs. The step returns their log probabilities over the whole vocabulary.
        lasting: whether many steps have the same `allowed` tokens. The device then caches the mask of these tokens.
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
    """State machine that decodes one answer. Each decoding step has a phase: the kind of value that the step samples.

    The phases repeat in the order of the class attribute `phases`. The engine can launch a step before it reads the
    samples of the previous step. It calls `next_phase` at launch, and `commit` when the samples arrive. Samples can
    therefore end the answer, but cannot change the order of phases. `rule` can depend on all earlier samples, because
    it is called shortly before sampling.

    Attributes:
        steps: maximum number of decoding steps; 0 if the context is too short.
        sampling: sampling parameters.
        back: number of positions to go back in the KV cache before the next step. The step then overwrites KV cache
            entries.
    """

    __slots__ = ("_launched", "back", "sampling", "steps")

    phases: ClassVar[tuple[Phase, ...]]

    def __init__(self, steps: int, sampling: Sampling = GREEDY) -> None:
        self.steps, self.sampling, self.back = steps, sampling, 0
        self._launched = 0

    @property
    def positions(self) -> int:
        """Maximum number of KV cache positions that the answer needs, without the prompt."""
        return max(0, self.steps - 1)  # the model does not process the last sampled value

    def next_phase(self) -> Phase | None:
        """Return the phase (kind of value to sample) of the next decoding step, or None if no more steps are needed."""
        if self._launched == self.steps:
            return None
        phase = self.phases[self._launched % len(self.phases)]
        self._launched += 1
        return phase

    def vocabulary(self) -> Iterable[int]:
        """Return all token IDs that the token rules of this answer use. The engine rejects unknown token IDs."""
        return ()

    def rule(self) -> TokenRule:
        """Return the constraints on the next token. The engine calls this method once per text token."""
        return ANY_TOKEN

    @abstractmethod
    def commit(self, sampled: Sampled) -> bool:
        """Add the samples of the next decoding step. Return True if the answer is complete.

        Args:
            sampled: three numbers. The phase (the kind of sampled value) determines their meaning:

                - X_OR_EOS: coordinate logit − end logit, x, unused
                - Y: y, unused, unused
                - SIZE: width, height, unused
                - text: token ID, coordinate if `TokenRule.grounded`, unused. The log probabilities of
                  `TokenRule.scored` follow.
        """

    @property
    def draftable(self) -> bool:
        """Whether this answer can be the draft of the next answer to the same prompt (speculative decoding)."""
        return False

    @property
    def certain(self) -> Sequence[FedValue]:
        """Decoder inputs that do not depend on samples. The prefill processes these inputs together with the prompt."""
        return ()

    def branches(self, most: int) -> Sequence[tuple[tuple[int, ...], OutputState]]:
        """Split the answer into parts that are decoded in parallel, each as a separate sequence.

        The answer is complete when all parts are complete. Call this method once, before the first step.

        Args:
            most: maximum number of parts. If the answer needs more parts, it is not split.

        Returns:
            For each part, the token IDs to append to the prompt, and its state machine.
        """
        return ()

    @property
    def visible(self) -> bool:
        """Whether detections of the vision encoder can be the draft of this answer (speculative decoding)."""
        return False

    def retract(self, steps: int) -> None:
        """Undo the last `steps` calls of `next_phase`, because the engine will repeat these decoding steps."""
        self._launched -= steps

    def fed(self, phase: Phase, sampled: Sampled) -> FedValue | None:
        """Return the decoder input for a sampled or drafted value. Return None if the value ends the answer."""
        if phase is Phase.SIZE:
            return Phase.SIZE, sampled[0], sampled[1]
        return (Phase.TOKEN if phase in TEXT_PHASES else Phase.Y), sampled[0], 0.0

    def values(self) -> list[FedValue]:
        """Return the decoder inputs of the answer so far. Call this only if `draftable` is True."""
        return []

    def finish(self) -> None:  # noqa: B027 - most answers need no finish
        """Compute final values, such as the probabilities of choices. Called once, after the last step."""


@dataclass(slots=True, eq=False)
class DraftMemory:
    """Stores the last answer to a prompt in a video stream, as the draft of the next answer (speculative decoding).

    Attributes:
        values: decoder inputs of the last answer.
        pause: number of answers to decode without a draft.
        failures: number of consecutive drafts that saved too few decoding steps.
    """

    values: tuple[FedValue, ...] = ()
    pause: int = 0
    failures: int = 0

    def draft(self) -> tuple[FedValue, ...]:
        """Return the draft of the next answer. The draft is empty while speculative decoding is paused."""
        if self.pause:
            self.pause -= 1
            return ()
        return self.values

    def learn(self, values: Sequence[FedValue], paid: bool | None, longest_pause: int) -> None:
        """Store a complete answer as the next draft. If drafts save too few decoding steps, pause speculative decoding.

        Args:
            values: decoder inputs of the answer.
            paid: whether the draft of this answer saved enough decoding steps. None if the answer had no draft.
            longest_pause: maximum number of consecutive answers without a draft.
        """
        self.values = tuple(values)
        if paid is not None:
            self.failures = 0 if paid else self.failures + 1
            self.pause = min(longest_pause, 2**self.failures) if self.failures > 1 else 0


# ---- tasks


@dataclass(slots=True, frozen=True)
class Window:
    """Rectangular part of an image, in pixels: a tile, or a region chosen by the caller.

    Each window is scaled to the model's input size, so that small objects appear larger. A window takes as much time
    as a whole image.

    Raises:
        ValueError: if the window is empty or has negative coordinates.
    """

    x: int
    y: int
    width: int
    height: int

    def __post_init__(self) -> None:
        if min(self.x, self.y) < 0 or min(self.width, self.height) < 1:
            raise ValueError(
                f"an image window needs x and y of at least 0, and width and height of at least 1 pixel; got {self}"
            )

    @property
    def pixels(self) -> int:
        """Area of the window in pixels."""
        return self.width * self.height


Answers = Sequence[tuple[OutputState, Window]]
"""Complete answers of one task with their windows; the whole image comes first."""


def windows(width: int, height: int, tiles: int, chosen: Sequence[Window] = ()) -> list[Window]:
    """Return the windows of an image: the whole image, `tiles` × `tiles` overlapping tiles, and `chosen`.

    If `tiles` is 1, there are no tiles. Chosen windows are clipped to the image.
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
    """Clip a window to an image of `width` × `height` pixels. The result has at least one pixel."""
    if window.x + window.width <= width and window.y + window.height <= height:
        return window
    x, y = min(window.x, width - 1), min(window.y, height - 1)
    return Window(x, y, min(window.width, width - x), min(window.height, height - y))


class Vocabulary:
    """Class names of a model that detects only a fixed set of classes, with synonyms.

    A synonym such as 'vehicle' can stand for several classes.
    """

    __slots__ = ("_known", "classes", "model")

    def __init__(self, model: str, classes: Iterable[str], synonyms: Mapping[str, Iterable[str]]) -> None:
        self.model = model
        self.classes = tuple(classes)
        self._known = {phrase.lower(): tuple(names) for phrase, names in synonyms.items()}
        self._known |= {name.lower(): (name,) for name in self.classes}

    def resolve(self, labels: Iterable[str]) -> list[str]:
        """Return the classes of the model that match the labels, in the order of the labels and without duplicates.

        A label can be in the plural, and can list alternatives, such as 'truck or bus'.

        Raises:
            UnknownClassError: if a label, or an alternative in a label, matches no class.
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
    """Return the possible singular forms of an English word, and the word itself."""
    forms = [word]
    if word.endswith("ies"):
        forms.append(word[:-3] + "y")
    if word.endswith("es"):
        forms.append(word[:-2])
    if word.endswith("s"):
        forms.append(word[:-1])
    return forms


class Task(ABC):
    """Base class of tasks: questions about an image. Subclasses are frozen dataclasses that validate their arguments.

    Attributes:
        skill: name of the task in configurations and records. The model must support a skill with this name.
        tiled: whether the task also runs on the tiles of an image.
    """

    __slots__ = ()
    skill: ClassVar[str]
    tiled: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def parse(cls, text: str, max_objects: int, conf: float) -> Self:
        """Create the task from text typed by a user.

        `max_objects` and `conf` (minimum score, 0 to 1) apply only to tasks that return objects.

        Raises:
            ValueError: if the task is invalid.
        """

    @property
    @abstractmethod
    def asked(self) -> str:
        """The user's text for the task, such as a question or a label. `parse` accepts this text."""

    @property
    @abstractmethod
    def empty(self) -> bool:
        """Whether the task needs no inference, for example because `max_objects` is 0."""

    def expand(self, vocabulary: Vocabulary | None) -> Sequence[Task]:
        """Return one copy of the task for each class of the model that matches the label of the task.

        Args:
            vocabulary: classes of a closed-vocabulary model, or None for open-vocabulary models.

        Raises:
            UnknownClassError: if no class matches.
        """
        return [self]

    @property
    def needs_image(self) -> bool:
        """Whether the model needs an image to answer the task."""
        return True

    @abstractmethod
    def prompt(self, prompts: Prompts) -> list[int]:
        """Return the token IDs of the prompt."""

    def values(self, prompts: Prompts) -> Mapping[int, tuple[float, ...]]:
        """Return the normalized coordinates and sizes in the prompt, keyed by token position.

        Each value is (coordinate,) or (width, height). Its embedding replaces the embedding of the token.
        """
        return {}

    @abstractmethod
    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """Return the state machine that decodes one answer.

        Args:
            prompts: prompts of the model.
            max_steps: maximum number of decoding steps that fit into the context.
            on_text: callback that receives each new piece of text, or None.

        Raises:
            PromptError: if the model does not support the task, for example segmentation.
        """

    @abstractmethod
    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        """Convert the decoded answers of the model to the results of the task.

        Args:
            answers: pairs of an answer's state machine and image window. There is no pair if the task is `empty`.
            width: width of the image in pixels.
            height: height of the image in pixels.
            limits: sizes and token IDs of the model.
        """


TASKS: dict[str, type[Task]] = {}
"""All tasks by skill, in the order of results and configurations."""


def register_task(task: type[Task]) -> type[Task]:
    """Register a task class under its skill.

    Raises:
        ValueError: if another task has the same skill.
    """
    if TASKS.setdefault(task.skill, task) is not task:
        raise ValueError(f"task '{task.skill}' is already registered")
    return task


def require_text(name: str, value: object) -> None:
    """Raise ValueError if a value is not a non-empty string."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a non-empty string; got {value!r}")


def require_count(name: str, value: object) -> None:
    """Raise ValueError if a value is not an integer of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be an integer of at least 0; got {value!r}")


def is_number(value: object) -> bool:
    """Return whether a value is a number and not NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def require_conf(value: object) -> None:
    """Raise ValueError if a value is not a number from 0 to 1."""
    if not isinstance(value, int | float) or not is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"conf must be a number from 0 to 1; got {value!r}")


def require_sampling(temperature: object, top_p: object, seed: object) -> None:
    """Raise ValueError if a sampling parameter is invalid."""
    if not isinstance(temperature, int | float) or not is_number(temperature) or not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be a number of at least 0; got {temperature!r}")
    if not isinstance(top_p, int | float) or not is_number(top_p) or not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1; got {top_p!r}")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise ValueError(f"seed must be an integer; got {seed!r}")


def require_refs(refs: Any) -> tuple[Ref, ...]:
    """Return the reference points (x, y) and boxes (x1, y1, x2, y2) of a task as tuples.

    Raises:
        ValueError: if a reference is neither a point nor a box, or is outside the image.
    """
    try:
        return tuple(_ref(one) for one in refs)
    except TypeError:
        raise ValueError(f"refs must be a list of points or boxes; got {refs!r}") from None


def _ref(value: Any) -> Ref:
    numbers = tuple(value)
    if len(numbers) not in (2, 4) or not all(is_number(one) and 0 <= one <= 1 for one in numbers):
        raise ValueError(
            f"a ref must be a point (x, y) or a box (x1, y1, x2, y2) in normalized coordinates; got {value!r}"
        )
    if len(numbers) == 4 and not (numbers[0] <= numbers[2] and numbers[1] <= numbers[3]):
        raise ValueError(f"a box must be (x1, y1, x2, y2) with x1 <= x2 and y1 <= y2; got {value!r}")
    return numbers


def shorten(words: str) -> str:
    """Shorten text to 40 characters for an error message."""
    return words if len(words) <= 40 else words[:39] + "…"
