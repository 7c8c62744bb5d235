"""The tasks that find objects: boxes, points, and what a person looks at. Knows no devices and no threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self, get_args

from saccade.engine.results import Box, ResultPart, Spot
from saccade.engine.tasks.output_state import (
    BoxesOutput,
    DecodedObject,
    ObjectsOutput,
    OutputState,
    PointsOutput,
)
from saccade.engine.tasks.table import is_number, register_task, require_conf, require_count, require_refs, require_text
from saccade.engine.tasks.task import Answers, OnText, Task
from saccade.engine.tasks.tiles import distinct, merge, place
from saccade.engine.vocabulary import Vocabulary

if TYPE_CHECKING:
    from saccade.engine.models.protocol import ModelLimits, Prompts, Ref

GazeForm = Literal["words", "reference"]


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
        require_text("label", self.label)
        require_count("max_objects", self.max_objects)
        require_conf(self.conf)

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
    """Find every `label` as its centre point.

    Attributes:
        refs: what it is about: points (x, y) and boxes (x1, y1, x2, y2), as fractions of the image.
    """

    skill = "point"

    refs: tuple[Ref, ...] = ()

    def __post_init__(self) -> None:
        ObjectsTask.__post_init__(self)
        object.__setattr__(self, "refs", require_refs(self.refs))

    def prompt(self, prompts: Prompts) -> list[int]:
        """Token ids that ask for it."""
        return prompts.objects(self.skill, self.label, self.refs)

    def values(self, prompts: Prompts) -> Mapping[int, tuple[float, ...]]:
        """What it is about."""
        return prompts.ref_values(self.skill, self.refs) if self.refs else {}

    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """Objects of x and y."""
        return PointsOutput(self.max_objects, self.conf, max_steps)

    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        """Points in the order of the answer."""
        return [Spot(self.label, one.score, one.x, one.y) for one in _placed(answers, width, height)]


@register_task
@dataclass(slots=True, frozen=True)
class Gaze(Task):
    """Find what the person looks at who has an eye at `eye`, as a point labelled 'gaze'; none if it is not in sight.

    Attributes:
        eye: (x, y) as fractions of the image's width and height.
        conf: as for `ObjectsTask`.
        form: how the model is asked: in `words` around the eye, as Moondream 2's reference does; or by a `reference`,
            the prompt of `Point` for the name 'gaze' with the eye as its reference, as one source has it.

    Raises:
        ValueError: if one of them is of another type or out of its range.
    """

    skill = "gaze"

    eye: tuple[float, float]
    conf: float = 0.5
    form: GazeForm = "words"

    def __post_init__(self) -> None:
        if self.form not in get_args(GazeForm):
            raise ValueError(f"form is one of {', '.join(get_args(GazeForm))}; got {self.form!r}")
        object.__setattr__(self, "eye", tuple(self.eye))
        if len(self.eye) != 2 or not all(is_number(value) and 0 <= value <= 1 for value in self.eye):
            raise ValueError(f"eye is a point (x, y) of numbers from 0 to 1; got {self.eye!r}")
        require_conf(self.conf)

    @classmethod
    def parse(cls, text: str, max_objects: int, conf: float) -> Self:
        """The task for 'x,y'."""
        try:
            x, y = map(float, text.split(","))
        except ValueError:
            raise ValueError(f"an eye is x,y as fractions of the image, such as 0.4,0.25; got '{text}'") from None
        return cls((x, y), conf)

    @property
    def asked(self) -> str:
        """The eye as 'x,y'."""
        return f"{self.eye[0]:g},{self.eye[1]:g}"

    @property
    def empty(self) -> bool:
        """Never."""
        return False

    def prompt(self, prompts: Prompts) -> list[int]:
        """Token ids that ask for it."""
        return prompts.gaze(self.eye)[0] if self.form == "words" else prompts.objects("point", self.skill, [self.eye])

    def values(self, prompts: Prompts) -> Mapping[int, tuple[float, ...]]:
        """The eye's coordinates."""
        return prompts.gaze(self.eye)[1] if self.form == "words" else prompts.ref_values("point", [self.eye])

    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """One object of x and y."""
        return PointsOutput(1, self.conf, max_steps)

    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        """The point, if there is one."""
        return [Spot(self.skill, one.score, one.x, one.y) for one in _placed(answers, width, height)]


def _placed(answers: Answers, width: int, height: int) -> list[DecodedObject]:
    found: list[DecodedObject] = []
    for output, window in answers:
        assert isinstance(output, ObjectsOutput)
        if (window.width, window.height) == (width, height):
            found += output.objects
            continue
        placed = (place(one, window, width, height) for one in output.objects)
        found += [one for one in placed if one is not None]
    return found


def _box(label: str, found: DecodedObject) -> Box:
    x, y, half_w, half_h = found.x, found.y, found.width / 2, found.height / 2
    x1, y1, x2, y2 = x - half_w, y - half_h, x + half_w, y + half_h
    if x1 < 0 or y1 < 0 or x2 > 1 or y2 > 1:
        x1, y1, x2, y2 = (min(1.0, max(0.0, value)) for value in (x1, y1, x2, y2))
    return Box(label, found.score, x1, y1, x2, y2)
