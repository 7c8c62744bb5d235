"""What comes back for an image: boxes, points and texts, in pixels and normalized. Knows no models and no frames."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from saccade.distribution import install_command
from saccade.engine.outline import TOLERANCE, Mask, Polygon, coco_rle, fill, parse_path, placed

if TYPE_CHECKING:
    import supervision


@dataclass(slots=True, frozen=True)
class Box:
    """One object.

    Attributes:
        label: the name asked for, in the model's own spelling.
        score: p(coord) / (p(coord) + p(eos)) at the step that began the object, or at that of one before it in the
            same answer if that was less: the highest `conf` at which it is reported. 0 to 1.
        x1, y1, x2, y2: corners as fractions of the image's width and height, clipped to 0..1.
        track_id: number of the object over the frames of a stream, set by a tracker; None from the engine.
        speed: of its centre, in widths and heights of the image a second, set by a tracker.
        zones: the names of the zones that it is in, set by `pipeline.analytics`.
        predicted: whether it was not found on this image, but is expected there by a tracker.
    """

    label: str
    score: float
    x1: float
    y1: float
    x2: float
    y2: float
    track_id: int | None = None
    speed: float | None = None
    zones: tuple[str, ...] = ()
    predicted: bool = False

    def pixels(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Corners (x1, y1, x2, y2) in pixels of a `width` × `height` image."""
        return self.x1 * width, self.y1 * height, self.x2 * width, self.y2 * height


@dataclass(slots=True, frozen=True)
class Spot:
    """One point on an object; `x` and `y` are fractions of the image's width and height. The rest as in `Box`."""

    label: str
    score: float
    x: float
    y: float
    track_id: int | None = None
    speed: float | None = None
    zones: tuple[str, ...] = ()
    predicted: bool = False

    def pixels(self, width: int, height: int) -> tuple[float, float]:
        """The point (x, y) in pixels of a `width` × `height` image."""
        return self.x * width, self.y * height


@dataclass(slots=True, frozen=True)
class Detections:
    """Boxes found by one or more `Detect` tasks on an image of `width` × `height` pixels."""

    boxes: tuple[Box, ...]
    width: int
    height: int

    def __len__(self) -> int:
        return len(self.boxes)

    def to_supervision(self) -> supervision.Detections:
        """The boxes as `supervision.Detections`: xyxy in pixels, `confidence`, `class_id` and `data["class_name"]`.

        `class_id` numbers the labels of these detections in alphabetical order. `tracker_id` is the track's number,
        -1 for a box without one, and None if none of them has one. Boxes that are only predicted are left out; the
        others keep their order.

        Raises:
            ImportError: if supervision is not installed; its message is the command that does.
        """
        boxes = [box for box in self.boxes if not box.predicted]
        names = sorted({box.label for box in boxes})
        xyxy = np.array([box.pixels(self.width, self.height) for box in boxes], dtype=np.float32).reshape(-1, 4)
        return _supervision(
            xyxy=xyxy,
            confidence=np.array([box.score for box in boxes], dtype=np.float32),
            class_id=np.array([names.index(box.label) for box in boxes], dtype=int),
            tracker_id=_tracker_ids(boxes),
            data={"class_name": np.array([box.label for box in boxes], dtype=str)},
        )


def _supervision(**arrays: Any) -> supervision.Detections:
    try:
        import supervision
    except ImportError as error:
        raise ImportError(f"supervision is not installed: {install_command('supervision')}") from error
    return supervision.Detections(**arrays)


def _tracker_ids(boxes: Sequence[Box]) -> NDArray[np.int64] | None:
    ids = [-1 if box.track_id is None else box.track_id for box in boxes]
    return np.array(ids, dtype=np.int64) if any(number >= 0 for number in ids) else None


@dataclass(slots=True, frozen=True)
class Points:
    """Points found by one or more `Point` tasks on an image of `width` × `height` pixels."""

    points: tuple[Spot, ...]
    width: int
    height: int

    def __len__(self) -> int:
        return len(self.points)


@dataclass(slots=True, frozen=True)
class Grounding:
    """Where a part of a reasoning, from character `start` to before `end`, looks: points (x, y), as fractions."""

    start: int
    end: int
    points: tuple[tuple[float, float], ...]


@dataclass(slots=True, frozen=True)
class Reasoning:
    """What a model has reasoned before its answer, and where it has looked meanwhile."""

    text: str
    grounding: tuple[Grounding, ...] = ()


@dataclass(slots=True, frozen=True)
class Text:
    """The answer to a `Query` or `Caption`.

    Attributes:
        prompt: what was asked.
        text: the answer.
        tokens: how many were generated, the end token not among them; 0 where it is not known.
        cut: whether it ends because no more tokens were allowed.
        reasoning: what came before it, if that was asked for.
        probabilities: of each choice, in their order, 1 in all; None where none were given.
    """

    prompt: str
    text: str
    tokens: int = field(default=0, compare=False)
    cut: bool = field(default=False, compare=False)
    reasoning: Reasoning | None = None
    probabilities: Mapping[str, float] | None = field(default=None, compare=False)


@dataclass(slots=True, frozen=True)
class Timings:
    """Where the engine spent an image's time, in milliseconds: waiting, image and prompts, answer tokens.

    Attributes:
        crops_ms: the part of `prefill_ms` in which the image was cut into crops.
    """

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    crops_ms: float = 0.0


class ExtraPart(Protocol):
    """What a task outside this package finds, such as a mask.

    Attributes:
        key: under which `Result.extras` and records list it.
    """

    key: ClassVar[str]

    def to_record(self, width: int, height: int) -> Mapping[str, object]:
        """Plain values for JSON, on a `width` × `height` image."""
        ...


@dataclass(slots=True, frozen=True)
class Outline:
    """The outline of one object, found by a `Segment` task.

    Attributes:
        label: what was asked for.
        path: SVG path data with M, L, C and Z, whose coordinates are fractions of the box.
        box: (x1, y1, x2, y2) as fractions of the image.
        complete: whether all of the answer was a path; else `path` is what was good of it.
        refined: whether a refiner has redrawn the path.
        tokens: of the path.
        polygon: whether a record lists the polygons.
    """

    key: ClassVar[str] = "segments"
    label: str
    path: str
    box: tuple[float, float, float, float]
    complete: bool
    refined: bool = False
    tokens: int = field(default=0, compare=False)
    polygon: bool = field(default=False, compare=False)

    def polygons(self, tolerance: float = TOLERANCE) -> list[Polygon]:
        """Closed polygons (corners, 2) as fractions of the image; a curve is off by `tolerance` of the box at most."""
        return placed(parse_path(self.path, tolerance)[0], self.box)

    def mask(self, width: int, height: int) -> Mask:
        """The mask (height, width) on an image of that size."""
        return fill(self.polygons(), width, height)

    def to_record(self, width: int, height: int) -> Mapping[str, object]:
        """Path, box, COCO's run lengths of the mask, and the polygons if they are wanted."""
        names = ("x_min", "y_min", "x_max", "y_max")
        record: dict[str, object] = {
            "label": self.label,
            "path": self.path,
            "bbox": {name: round(value, 5) for name, value in zip(names, self.box, strict=True)},
            "complete": self.complete,
            "refined": self.refined,
            "rle": coco_rle(self.mask(width, height)),
        }
        if self.polygon:
            record["polygon"] = [corners.round(5).tolist() for corners in self.polygons()]
        return record


_NO_DRAFTS: Mapping[Hashable, object] = {}
ResultPart = Box | Spot | Text | ExtraPart
"""What one task contributes to a result."""


@dataclass(slots=True, frozen=True)
class Result:
    """Everything found on one image, over all its tasks, in the order of the tasks.

    Attributes:
        extras: parts of other tasks than those of this package, by their keys.
        drafts: what the same tasks on the next image are begun with, for `Engine.submit(previous=…)` alone to read.
    """

    detections: Detections
    points: Points
    texts: tuple[Text, ...] = ()
    timings: Timings = field(default_factory=Timings)
    extras: Mapping[str, tuple[ExtraPart, ...]] = field(default_factory=dict)
    drafts: Mapping[Hashable, object] = field(default_factory=dict, repr=False, compare=False)

    @property
    def segments(self) -> tuple[Outline, ...]:
        """Outlines in the order of the tasks."""
        return tuple(part for part in self.extras.get(Outline.key, ()) if isinstance(part, Outline))

    def segments_to_supervision(self) -> supervision.Detections:
        """The outlines as supervision's detections with masks, in pixels.

        Raises:
            ImportError: if supervision is not installed.
        """
        found, width, height = self.segments, self.detections.width, self.detections.height
        names = sorted({one.label for one in found})
        corners = np.array([one.box for one in found], dtype=np.float32).reshape(-1, 4)
        masks = [one.mask(width, height) for one in found]
        return _supervision(
            xyxy=corners * np.array([width, height, width, height], dtype=np.float32),
            mask=np.stack(masks) if masks else np.zeros((0, height, width), dtype=bool),
            class_id=np.array([names.index(one.label) for one in found], dtype=int),
            data={"class_name": np.array([one.label for one in found], dtype=str)},
        )

    @classmethod
    def of(
        cls,
        parts: Iterable[ResultPart],
        width: int,
        height: int,
        timings: Timings,
        drafts: Mapping[Hashable, object] = _NO_DRAFTS,
    ) -> Result:
        """The result that the parts make on a `width` × `height` image."""
        boxes: list[Box] = []
        spots: list[Spot] = []
        texts: list[Text] = []
        extras: dict[str, tuple[ExtraPart, ...]] = {}
        for part in parts:
            if isinstance(part, Box):
                boxes.append(part)
            elif isinstance(part, Spot):
                spots.append(part)
            elif isinstance(part, Text):
                texts.append(part)
            else:
                extras[part.key] = (*extras.get(part.key, ()), part)
        detections, points = Detections(tuple(boxes), width, height), Points(tuple(spots), width, height)
        return cls(detections, points, tuple(texts), timings, extras, drafts)
