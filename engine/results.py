"""Results of an image: boxes, points, texts and outlines. Coordinates are fractions; methods convert them to pixels.

A request returns a `ResultFuture`. Its callbacks run in a separate thread. A callback may therefore submit requests,
wait or raise without stopping the engine.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from saccade.distribution import install_command
from saccade.engine.outline import TOLERANCE, Mask, Polygon, coco_rle, fill, parse_path, placed

if TYPE_CHECKING:
    import supervision

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Box:
    """A detected object.

    Attributes:
        label: label of the task, in the spelling of the model.
        score: confidence, from 0 to 1: the probability p(coord) / (p(coord) + p(eos)) that the model lists this object
            instead of ending the answer. It is limited to the lowest score of the preceding objects.
        x1, y1, x2, y2: corners as fractions of the image's width and height, clipped to 0..1.
        track_id: ID of the track in the frames of a stream, set by a tracker; otherwise None.
        speed: speed of the centre in image sizes per second, set by a tracker.
        zones: names of the zones that contain the object, set by `pipeline.analytics`.
        predicted: True if the model did not detect the object in this frame, and the position is the prediction of a
            tracker.
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
        """Return the box corners (x1, y1, x2, y2) in pixels, for an image of `width` × `height` pixels."""
        return self.x1 * width, self.y1 * height, self.x2 * width, self.y2 * height


@dataclass(slots=True, frozen=True)
class Spot:
    """A point on an object. `x` and `y` are fractions of the image's width and height.

    All other fields have the same meaning as in `Box`.
    """

    label: str
    score: float
    x: float
    y: float
    track_id: int | None = None
    speed: float | None = None
    zones: tuple[str, ...] = ()
    predicted: bool = False

    def pixels(self, width: int, height: int) -> tuple[float, float]:
        """Return the point (x, y) in pixels of a `width` × `height` image."""
        return self.x * width, self.y * height


@dataclass(slots=True, frozen=True)
class Detections:
    """Boxes of one or more `Detect` tasks on an image of `width` × `height` pixels."""

    boxes: tuple[Box, ...]
    width: int
    height: int

    def __len__(self) -> int:
        return len(self.boxes)

    def to_supervision(self) -> supervision.Detections:
        """Return the boxes as `supervision.Detections`: `xyxy` in pixels, `confidence`, `class_id` and `data`.

        `data["class_name"]` contains the labels. `class_id` is the index of the label in alphabetical order.
        `tracker_id` is the track ID, or -1 for boxes without a track. `tracker_id` is None if no box has a track.
        Predicted boxes are omitted.

        Raises:
            ImportError: if supervision is not installed. The message contains the install command.
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
    """Points of one or more `Point` tasks on an image of `width` × `height` pixels."""

    points: tuple[Spot, ...]
    width: int
    height: int

    def __len__(self) -> int:
        return len(self.points)


@dataclass(slots=True, frozen=True)
class Grounding:
    """Points in the image to which a passage of a reasoning text refers.

    Attributes:
        start, end: range of the passage in the text, in characters; `end` is exclusive.
        points: points (x, y), as fractions of the image's width and height.
    """

    start: int
    end: int
    points: tuple[tuple[float, float], ...]


@dataclass(slots=True, frozen=True)
class Reasoning:
    """Reasoning text of a model before its answer, and the points in the image to which the text refers."""

    text: str
    grounding: tuple[Grounding, ...] = ()


@dataclass(slots=True, frozen=True)
class Text:
    """Text answer to a `Query` (question) or `Caption` task.

    Attributes:
        prompt: the question, or the caption length.
        text: the answer.
        tokens: number of generated tokens without the end token; 0 if unknown.
        cut: whether the text was cut off by the token limit.
        reasoning: the reasoning, if requested.
        probabilities: probability of each choice, in the order of the question's choices. The sum is 1. None without
            choices.
    """

    prompt: str
    text: str
    tokens: int = field(default=0, compare=False)
    cut: bool = field(default=False, compare=False)
    reasoning: Reasoning | None = None
    probabilities: Mapping[str, float] | None = field(default=None, compare=False)


@dataclass(slots=True, frozen=True)
class Timings:
    """Time that an image spent in the stages of the engine (queue, prefill and decode), in milliseconds.

    Attributes:
        crops_ms: time to split the image into crops. It is a part of `prefill_ms`.
    """

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    crops_ms: float = 0.0


class ExtraPart(Protocol):
    """Base class of results for tasks that are defined outside the engine, such as a mask.

    Attributes:
        key: key of the result in `Result.extras` and in records.
    """

    key: ClassVar[str]

    def to_record(self, width: int, height: int) -> Mapping[str, object]:
        """Return the result as plain values for JSON. `width` and `height` are the image size in pixels."""
        ...


@dataclass(slots=True, frozen=True)
class Outline:
    """Segmentation outline of one object, from a `Segment` task.

    Attributes:
        label: label of the task.
        path: SVG path data with M, L, C and Z. Coordinates are fractions of the box.
        box: (x1, y1, x2, y2) as fractions of the image.
        complete: whether the whole answer was a valid path. If False, `path` is the valid beginning.
        refined: whether the path was redrawn from a refined mask.
        tokens: number of path tokens.
        polygon: whether result records also contain the outline as polygons.
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
        """Return the outline as closed polygons, arrays (corners, 2), as fractions of the image.

        `tolerance` is the maximum error of a curve as a fraction of the box size.
        """
        return placed(parse_path(self.path, tolerance)[0], self.box)

    def mask(self, width: int, height: int) -> Mask:
        """Return the mask (height, width) of the outline for an image of `width` × `height` pixels."""
        return fill(self.polygons(), width, height)

    def to_record(self, width: int, height: int) -> Mapping[str, object]:
        """Return the outline as values for JSON, with a COCO run-length encoded mask and optional polygons."""
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
"""Contribution of one task to a result."""


@dataclass(slots=True, frozen=True)
class Result:
    """All results of one image, in the order of the tasks.

    Attributes:
        extras: results of tasks that are defined outside the engine, by key.
        drafts: answers by prompt, for use as drafts (speculative decoding). Only `Engine.submit(previous=…)` reads
            them.
    """

    detections: Detections
    points: Points
    texts: tuple[Text, ...] = ()
    timings: Timings = field(default_factory=Timings)
    extras: Mapping[str, tuple[ExtraPart, ...]] = field(default_factory=dict)
    drafts: Mapping[Hashable, object] = field(default_factory=dict, repr=False, compare=False)

    @property
    def segments(self) -> tuple[Outline, ...]:
        """All segmentation outlines, in the order of the tasks."""
        return tuple(part for part in self.extras.get(Outline.key, ()) if isinstance(part, Outline))

    def segments_to_supervision(self) -> supervision.Detections:
        """Return the outlines as `supervision.Detections` with masks in pixels.

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
        """Combine the results of all tasks on an image of `width` × `height` pixels."""
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


# ---- futures


class CallbackThread:
    """Daemon thread that runs callbacks in the order of submission. It starts with the first callback."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._lock = threading.RLock()  # reentrant: garbage collection may cancel a future in this thread
        self._started = False

    def call(self, callback: Callable[[], object]) -> None:
        """Queue a callback. If it raises, the exception is logged."""
        with self._lock:
            started, self._started = self._started, True
        if not started:
            threading.Thread(target=_run, args=(self._calls,), name="saccade-callbacks", daemon=True).start()
        self._calls.put(callback)

    def close(self) -> None:
        """Stop the thread after all queued callbacks. Returns without waiting for the thread."""
        self._calls.put(None)


def _run(calls: SimpleQueue[Callable[[], object] | None]) -> None:
    while (callback := calls.get()) is not None:
        try:
            callback()
        except BaseException:  # even sys.exit must not end the thread, which later callbacks need
            log.exception("a result callback raised an exception")
        del callback  # otherwise its future would stay alive until the next callback


class ResultFuture(Future[Result]):
    """Future of the result of a request.

    Attributes:
        begun: whether the engine has started to work on the request.

    Args:
        callbacks: thread that runs the done callbacks.
        require_other_thread: function that raises an error if the caller is the engine's thread. The engine's thread
            would deadlock if it waited for a result.
    """

    def __init__(self, callbacks: CallbackThread, require_other_thread: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._callbacks, self.require_other_thread = callbacks, require_other_thread
        self.begun = False
        self.on_cancel: Callable[[], None] | None = None
        self._settling = threading.RLock()  # reentrant, because garbage collection may cancel a future in this thread
        self._settled = False

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result and return it.

        Raises:
            EngineError: if the request failed, or if the caller is the engine's thread and the result is not ready.
            CancelledError: if the request was cancelled.
            TimeoutError: if the result is not ready within `timeout` seconds.
        """
        if not self.done():
            self.require_other_thread()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the request. Return its error, or None. Raise CancelledError or TimeoutError like `result`."""
        if not self.done():
            self.require_other_thread()
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[Result]], Any]) -> None:
        """Call `fn` with this future in the callback thread when the future is done.

        If the future is already done, call `fn` immediately in the calling thread.
        """
        if self.done():
            super().add_done_callback(fn)
        else:
            callbacks = self._callbacks  # the closure must not reference `self`, to avoid a reference cycle
            super().add_done_callback(lambda future: callbacks.call(lambda: fn(future)))

    def call_when_done(self, fn: Callable[[Future[Result]], Any]) -> None:
        """Call `fn` with this future in the thread that sets the result. `fn` must not wait or raise."""
        super().add_done_callback(fn)

    def set_running_or_notify_cancel(self) -> bool:
        """Mark the request as running. Return False if the request was cancelled. Repeated calls have no effect."""
        with self._settling:
            if self._settled:
                return not self.cancelled()
            self._settled = True
            return super().set_running_or_notify_cancel()

    def cancel(self) -> bool:
        """Cancel the request if it is not done. All threads that wait for its result are notified immediately.

        Return False if the request is already done.
        """
        if not super().cancel():
            return False
        self.set_running_or_notify_cancel()
        with self._settling:  # two threads may cancel at the same time
            drop, self.on_cancel = self.on_cancel, None
        if drop is not None:
            drop()
        return True


class TextStream(Iterator[str]):
    """Iterator over the pieces of a text answer while it is generated. Only one thread may read it.

    Closing the iterator, leaving a `with` block or dropping the iterator cancels the rest of the answer.

    Args:
        future: future of the whole answer.
        pieces: queue of pieces, read only by this object.
    """

    def __init__(self, future: ResultFuture, pieces: SimpleQueue[str | None]) -> None:
        self._future, self._pieces, self._over = future, pieces, False
        # Do not use the callback thread: if a callback reads this stream, it would wait for its own thread.
        future.call_when_done(lambda _: pieces.put(None))

    def __next__(self) -> str:
        """Wait for the next piece of text and return it.

        Raises:
            EngineError: if the answer failed, after all earlier pieces were returned; or if the caller is the engine's
                thread.
        """
        if not self._over and self._pieces.empty():
            self._future.require_other_thread()
        piece = None if self._over else self._pieces.get()
        if piece is not None:
            return piece
        over, self._over = self._over, True
        if not over and not self._future.cancelled():
            self._future.result()
        raise StopIteration

    @property
    def answer(self) -> Text:
        """The complete text answer. Blocks until the answer is complete.

        Raises:
            EngineError: if the answer failed.
            CancelledError: if the answer was cancelled.
        """
        return self.result.texts[0]

    @property
    def result(self) -> Result:
        """The complete result. Blocks until the answer is complete, and raises the same errors as `answer`."""
        return self._future.result()

    def close(self) -> None:
        """Cancel the rest of the text answer. Thread-safe. Repeated calls have no effect."""
        self._over = True
        self._future.cancel()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
