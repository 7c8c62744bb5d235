"""Tasks that detect objects as bounding boxes or points, and the state machines that decode the model's answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self, get_args

from saccade.engine.models.protocol import Phase
from saccade.engine.results import Box, ResultPart, Spot
from saccade.engine.tasks.task import (
    Answers,
    FedValue,
    OnText,
    OutputState,
    Sampled,
    Task,
    Vocabulary,
    Window,
    is_number,
    register_task,
    require_conf,
    require_count,
    require_refs,
    require_text,
)

if TYPE_CHECKING:
    from saccade.engine.models.protocol import ModelLimits, Prompts, Ref

GazeForm = Literal["words", "reference"]

_EDGE = 0.02  # an object within this fraction of an inner window edge is cut off; another window contains all of it
_MERGE_IOU = 0.5  # IoU above which objects of two windows are duplicates
_INSIDE = 0.8  # or if this fraction of a possibly cut object is inside the other object
_NEAR_EDGE = 0.08  # an object within this fraction of an inner window edge may be cut off


# ---- state machines of answers


@dataclass(slots=True, frozen=True)
class DecodedObject:
    """An object decoded from the model's output.

    Attributes:
        score: confidence from 0 to 1: p(coordinate token) / (p(coordinate token) + p(end token)), but at most the score
            of the previous object in the same answer.
        x, y: normalized centre of the object: 0 to 1 inside the model's input image; not clipped.
        width, height: normalized size of the object; 0 for a point.
    """

    score: float
    x: float
    y: float
    width: float = 0.0
    height: float = 0.0


class ObjectsOutput(OutputState):
    """State machine that decodes an answer with boxes or points.

    The answer is complete when the model samples the end token.

    Args:
        max_objects: maximum number of objects.
        conf: minimum score of an object, from 0 to 1.
        max_steps: maximum number of decoding steps that fit into the context.
    """

    __slots__ = ("_committed", "_height", "_logit_limit", "_score", "_width", "_x", "_y", "objects")

    def __init__(self, max_objects: int, conf: float, max_steps: int) -> None:
        super().__init__(min(max_objects, max_steps // len(self.phases)) * len(self.phases))
        self._logit_limit = logit(conf)
        self._committed = 0
        self._score = 1.0
        self._x = self._y = self._width = self._height = 0.0
        self.objects: list[DecodedObject] = []

    def begins(self, margin: float) -> bool:
        """Return whether the score of the next object is above `conf`. Otherwise the answer ends.

        Args:
            margin: logit of the coordinate token minus logit of the end token.
        """
        return margin > self._logit_limit

    def commit(self, sampled: Sampled) -> bool:
        """Add the sampled values of one decoding step. Return True after the last object."""
        phase = self.phases[self._committed % len(self.phases)]
        self._committed += 1
        if phase is Phase.X_OR_EOS:
            margin, self._x, *_ = sampled
            if not self.begins(margin):
                return True
            # An object exists only if all earlier objects exist, so its score is at most their lowest score.
            self._score = min(self._score, 1 / (1 + math.exp(-margin)) if margin > -700 else 0.0)
        elif phase is Phase.Y:
            self._y = sampled[0]
        else:
            self._width, self._height, *_ = sampled
        if phase is self.phases[-1]:
            self.objects.append(DecodedObject(self._score, self._x, self._y, self._width, self._height))
        return self._committed == self.steps

    @property
    def draftable(self) -> bool:
        """Always True: a list of objects can be the draft of the next answer (speculative decoding)."""
        return True

    @property
    def visible(self) -> bool:
        """Whether speculative decoding can use detections of the vision encoder as the draft. Always True."""
        return True

    def fed(self, phase: Phase, sampled: Sampled) -> FedValue | None:
        """Return the sampled coordinate or size as the next input of the decoder. Return None if the answer ends."""
        if phase is Phase.X_OR_EOS:
            return (Phase.Y, sampled[1], 0.0) if self.begins(sampled[0]) else None
        return super().fed(phase, sampled)

    def values(self) -> list[FedValue]:
        """Return the coordinates and sizes of all decoded objects, in the order in which the model generated them."""
        values: list[FedValue] = []
        for one in self.objects:
            values += [(Phase.Y, one.x, 0.0), (Phase.Y, one.y, 0.0)]
            if Phase.SIZE in self.phases:
                values.append((Phase.SIZE, one.width, one.height))
        return values


class BoxesOutput(ObjectsOutput):
    """State machine that decodes an answer with boxes: the centre (x, y) and the size of each object."""

    __slots__ = ()
    phases = (Phase.X_OR_EOS, Phase.Y, Phase.SIZE)


class PointsOutput(ObjectsOutput):
    """State machine that decodes an answer with points: the centre (x, y) of each object."""

    __slots__ = ()
    phases = (Phase.X_OR_EOS, Phase.Y)


def logit(p: float) -> float:
    """Return the logit log(p / (1 - p)) of a probability: -inf at 0 and inf at 1."""
    return -math.inf if p <= 0 else math.inf if p >= 1 else math.log(p / (1 - p))


# ---- tasks


@dataclass(slots=True, frozen=True)
class ObjectsTask(Task):
    """Base class of the tasks `Detect` and `Point`, which find all objects that match `label`.

    Attributes:
        label: name or phrase that describes the objects.
        max_objects: maximum number of objects. 0 skips the task.
        conf: minimum score of an object, from 0 to 1; see `DecodedObject.score`. The default 0.5 equals greedy
            decoding. Lower values give more objects and more false positives.

    Raises:
        ValueError: if a value has a wrong type or is out of range.
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
        """Create the task from the label of the objects."""
        return cls(text, max_objects, conf)

    @property
    def asked(self) -> str:
        """Label of the objects, as text that `parse` accepts."""
        return self.label

    @property
    def empty(self) -> bool:
        """Whether `max_objects` is 0. The task then needs no inference."""
        return self.max_objects == 0

    def expand(self, vocabulary: Vocabulary | None) -> Sequence[Task]:
        """Return one task per matching class of the model, or only this task for an open-vocabulary model."""
        if vocabulary is None:
            return [self]
        return [replace(self, label=name) for name in vocabulary.resolve([self.label])]

    def prompt(self, prompts: Prompts) -> list[int]:
        """Return the token IDs of the prompt to detect all objects with the label."""
        return prompts.objects(self.skill, self.label)


@register_task
@dataclass(slots=True, frozen=True)
class Detect(ObjectsTask):
    """Task that detects all objects that match `label`, as bounding boxes."""

    skill = "detect"
    tiled = True

    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """Return the state machine that decodes the boxes."""
        return BoxesOutput(self.max_objects, self.conf, max_steps)

    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        """Return the boxes without duplicates. Boxes of the same object in several image windows are merged.

        `limits.repeat_iou` is the maximum IoU of two boxes in one answer, or None for no limit.
        """
        views = [(window, _objects(output, limits.repeat_iou)) for output, window in answers]
        found = views[0][1] if len(views) == 1 else fuse(views, width, height)[: self.max_objects]
        return [_box(self.label, one) for one in found]


@register_task
@dataclass(slots=True, frozen=True)
class Point(ObjectsTask):
    """Task that detects all objects that match `label`, as centre points.

    Attributes:
        refs: parts of the image to search: points (x, y) and boxes (x1, y1, x2, y2), normalized to 0 to 1.
    """

    skill = "point"

    refs: tuple[Ref, ...] = ()

    def __post_init__(self) -> None:
        ObjectsTask.__post_init__(self)
        object.__setattr__(self, "refs", require_refs(self.refs))

    def prompt(self, prompts: Prompts) -> list[int]:
        """Return the token IDs of the prompt to point at all objects with the label."""
        return prompts.objects(self.skill, self.label, self.refs)

    def values(self, prompts: Prompts) -> Mapping[int, tuple[float, ...]]:
        """Return the coordinates and sizes of reference points and boxes, keyed by token position in the prompt."""
        return prompts.ref_values(self.skill, self.refs) if self.refs else {}

    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """Return the state machine that decodes the points."""
        return PointsOutput(self.max_objects, self.conf, max_steps)

    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        """Return the detected points, in the order in which the model generated them."""
        return [Spot(self.label, one.score, one.x, one.y) for one in _points(answers)]


@register_task
@dataclass(slots=True, frozen=True)
class Gaze(Task):
    """Task that predicts the gaze target: the point in the image at which a person looks.

    The result has the label 'gaze'. It is empty if the gaze target is not visible.

    Attributes:
        eye: position (x, y) of an eye of the person, normalized to 0 to 1.
        conf: minimum score of the point, from 0 to 1.
        form: prompt format: 'words' for the gaze prompt of Moondream 2, or 'reference' for a `Point` prompt with the
            eye as reference point.

    Raises:
        ValueError: if a value has a wrong type or is out of range.
    """

    skill = "gaze"

    eye: tuple[float, float]
    conf: float = 0.5
    form: GazeForm = "words"

    def __post_init__(self) -> None:
        if self.form not in get_args(GazeForm):
            raise ValueError(f"the gaze form must be one of {', '.join(get_args(GazeForm))}; got {self.form!r}")
        object.__setattr__(self, "eye", tuple(self.eye))
        if len(self.eye) != 2 or not all(is_number(value) and 0 <= value <= 1 for value in self.eye):
            raise ValueError(f"eye must be a point (x, y) in normalized coordinates from 0 to 1; got {self.eye!r}")
        require_conf(self.conf)

    @classmethod
    def parse(cls, text: str, max_objects: int, conf: float) -> Self:
        """Create the task from the normalized position (0 to 1) of the person's eye, as text 'x,y'.

        Raises:
            ValueError: if the text is not a normalized position.
        """
        try:
            x, y = map(float, text.split(","))
        except ValueError:
            raise ValueError(f"eye must be x,y in normalized coordinates, such as 0.4,0.25; got '{text}'") from None
        return cls((x, y), conf)

    @property
    def asked(self) -> str:
        """Normalized position of the person's eye, as text 'x,y'."""
        return f"{self.eye[0]:g},{self.eye[1]:g}"

    @property
    def empty(self) -> bool:
        """Whether the task needs no inference. Always False."""
        return False

    def prompt(self, prompts: Prompts) -> list[int]:
        """Return the token IDs of the prompt to predict the gaze target."""
        return prompts.gaze(self.eye)[0] if self.form == "words" else prompts.objects("point", self.skill, [self.eye])

    def values(self, prompts: Prompts) -> Mapping[int, tuple[float, ...]]:
        """Return the coordinates (x and y) of the person's eye, keyed by token position in the prompt."""
        return prompts.gaze(self.eye)[1] if self.form == "words" else prompts.ref_values("point", [self.eye])

    def output(self, prompts: Prompts, max_steps: int, on_text: OnText | None) -> OutputState:
        """Return the state machine that decodes the gaze target."""
        return PointsOutput(1, self.conf, max_steps)

    def collect(self, answers: Answers, width: int, height: int, limits: ModelLimits) -> Sequence[ResultPart]:
        """Return the gaze target as a list of one point, or an empty list if the model found none."""
        return [Spot(self.skill, one.score, one.x, one.y) for one in _points(answers)]


def _objects(output: OutputState, repeat_iou: float | None) -> list[DecodedObject]:
    assert isinstance(output, ObjectsOutput)
    return list(output.objects) if repeat_iou is None else distinct(output.objects, repeat_iou)


def _points(answers: Answers) -> list[DecodedObject]:
    return [one for output, _ in answers for one in _objects(output, None)]


def _box(label: str, found: DecodedObject) -> Box:
    x, y, half_w, half_h = found.x, found.y, found.width / 2, found.height / 2
    x1, y1, x2, y2 = x - half_w, y - half_h, x + half_w, y + half_h
    if x1 < 0 or y1 < 0 or x2 > 1 or y2 > 1:
        x1, y1, x2, y2 = (min(1.0, max(0.0, value)) for value in (x1, y1, x2, y2))
    return Box(label, found.score, x1, y1, x2, y2)


def fuse(found: Iterable[tuple[Window, Sequence[DecodedObject]]], width: int, height: int) -> list[DecodedObject]:
    """Merge the detections of overlapping image windows, so that each object appears once.

    Two boxes from different windows with a high IoU are duplicates. The box with the lower score is dropped. A window
    edge inside the image can cut an object. A box close to such an edge is therefore dropped if a box from another
    window covers most of its area. Boxes from the same window are never merged.

    Args:
        found: objects of each window, in coordinates normalized to the window.
        width: width of the image in pixels.
        height: height of the image in pixels.

    Returns:
        Objects in coordinates normalized to the image, sorted by score, highest first.
    """
    views = [
        _View(placed, window, number, _near_edge(one, window, width, height))
        for number, (window, objects) in enumerate(found)
        for one in objects
        if (placed := place(one, window, width, height)) is not None
    ]
    views.sort(key=lambda view: (view.cut, -view.object.score))
    kept: list[_View] = []
    for view in views:
        if not any(view.repeats(other) for other in kept):
            kept.append(view)
    return sorted((view.object for view in kept), key=lambda one: -one.score)


@dataclass(slots=True, frozen=True)
class _View:
    """A detection in one window of an image.

    Attributes:
        object: the object, in coordinates normalized to the image.
        window: the window.
        number: index of the window.
        cut: whether the window may cut the object, because the object is close to a window edge inside the image.
    """

    object: DecodedObject
    window: Window
    number: int
    cut: bool

    def repeats(self, other: _View) -> bool:
        """Return whether this detection and a detection in a different window are the same object."""
        if self.number == other.number:
            return False
        shared = _intersection(self.object, other.object)
        if shared <= 0:
            return False
        if _iou(self.object, other.object) > _MERGE_IOU:
            return True
        return self.cut and shared > _INSIDE * self.object.width * self.object.height


def _near_edge(found: DecodedObject, window: Window, width: int, height: int) -> bool:
    """Return whether an object is close to a window edge that is not an edge of the image."""
    return (
        (found.x - found.width / 2 < _NEAR_EDGE and window.x > 0)
        or (found.x + found.width / 2 > 1 - _NEAR_EDGE and window.x + window.width < width)
        or (found.y - found.height / 2 < _NEAR_EDGE and window.y > 0)
        or (found.y + found.height / 2 > 1 - _NEAR_EDGE and window.y + window.height < height)
    )


def place(found: DecodedObject, window: Window, width: int, height: int) -> DecodedObject | None:
    """Convert an object from window coordinates to image coordinates. Both are normalized to 0 to 1.

    Return None if the object touches a window edge inside the image, because the window may cut the object. An
    overlapping window contains the whole object.
    """
    left, right = found.x - found.width / 2, found.x + found.width / 2
    top, bottom = found.y - found.height / 2, found.y + found.height / 2
    if (
        (left < _EDGE and window.x > 0)
        or (right > 1 - _EDGE and window.x + window.width < width)
        or (top < _EDGE and window.y > 0)
        or (bottom > 1 - _EDGE and window.y + window.height < height)
    ):
        return None
    return DecodedObject(
        found.score,
        (window.x + found.x * window.width) / width,
        (window.y + found.y * window.height) / height,
        found.width * window.width / width,
        found.height * window.height / height,
    )


def distinct(objects: Iterable[DecodedObject], limit: float) -> list[DecodedObject]:
    """Remove duplicates: drop each object whose IoU with an earlier object is above `limit`."""
    return _first_of(objects, lambda a, b: _iou(a, b) > limit)


def _first_of(
    objects: Iterable[DecodedObject], same: Callable[[DecodedObject, DecodedObject], bool]
) -> list[DecodedObject]:
    """Remove duplicates: drop each object for which `same(object, earlier object)` is True."""
    kept: list[DecodedObject] = []
    for found in objects:
        if not any(same(found, other) for other in kept):
            kept.append(found)
    return kept


def _iou(a: DecodedObject, b: DecodedObject) -> float:
    """Return the intersection over union (IoU) of two boxes, or 0 for points."""
    # Quick test first: most pairs are disjoint, and 50 boxes have 1225 pairs.
    if 2 * abs(a.x - b.x) >= a.width + b.width or 2 * abs(a.y - b.y) >= a.height + b.height:
        return 0.0
    shared = _intersection(a, b)
    return shared / (a.width * a.height + b.width * b.height - shared) if shared > 0 else 0.0


def _intersection(a: DecodedObject, b: DecodedObject) -> float:
    across = min(a.x + a.width / 2, b.x + b.width / 2) - max(a.x - a.width / 2, b.x - b.width / 2)
    down = min(a.y + a.height / 2, b.y + b.height / 2) - max(a.y - a.height / 2, b.y - b.height / 2)
    return max(0.0, across) * max(0.0, down)
