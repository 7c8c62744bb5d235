"""The engine's face: pictures and tasks in, results out. One worker thread runs the model; any thread may submit.

Knows nothing of sources, sinks or pipelines.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import EngineClosedError, EngineError, ModelFilesError, UnsupportedTaskError
from .found import Found
from .generate import Generator
from .host import keep_freed_memory
from .models import registry
from .models.moondream.config import ConfigError
from .models.moondream.model import CheckpointError, Moondream, load
from .models.moondream.prompts import CodecError, Prompts, codec_of
from .models.moondream.text import KVCache
from .results import Box, Detections, Points, Result, Spot, Text, Timings
from .tasks import Caption, CaptionLength, Detect, Point, Query, Task
from .tiles import Window, merge, place, windows
from .vocabulary import Vocabulary

Image = NDArray[np.uint8] | torch.Tensor
"""A picture: (height, width, 3) uint8 RGB, array or tensor."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SKILLS: dict[type, str] = {Detect: "detect", Point: "point", Query: "query", Caption: "caption"}


@dataclass(slots=True, frozen=True)
class ModelInfo:
    """What an engine runs: name, folder, parameters, class names (None: any words), skills, device and dtype."""

    name: str
    folder: Path
    parameters: int
    classes: tuple[str, ...] | None
    skills: tuple[str, ...]
    device: str
    dtype: str


@dataclass(slots=True)
class _Request:
    image: NDArray[np.uint8]
    tasks: tuple[Task, ...]
    tiles: int
    future: Future[Result]
    submitted: float


class Engine:
    """A loaded model and the thread that runs it. Use as a context manager, or call `close`."""

    def __init__(self, model: Moondream, prompts: Prompts, info: ModelInfo, vocabulary: Vocabulary | None) -> None:
        self.model = info
        self._generator = Generator(model)
        self._prompts = prompts
        self._vocabulary = vocabulary
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="saccade-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(cls, name: str = "nano", device: str = "auto", dtype: str | None = None) -> Engine:
        """Load a model.

        Args:
            name: 'nano', a model folder, or a hub id.
            device: 'auto' (CUDA where there is one), 'cpu', 'cuda' or 'cuda:N'.
            dtype: 'float32', 'bfloat16' or 'float16'; by default float32 on a CPU and for small models, else bfloat16.

        Raises:
            UnknownModelError: if the name leads to no model.
            ModelFilesError: if its files cannot be read or do not fit each other.
            EngineError: if there is no such device or dtype.
        """
        folder = registry.find(name)
        place = choose_device(device)
        if dtype is not None and dtype not in DTYPES:
            raise EngineError(f"unknown dtype '{dtype}': give one of {', '.join(DTYPES)}")
        small = (folder / "model.safetensors").stat().st_size < 200 << 20
        kind = DTYPES[dtype] if dtype else torch.float32 if place.type == "cpu" or small else torch.bfloat16
        try:
            model = load(folder, place, kind)
            prompts = Prompts(model.config.tokenizer, codec_of(folder, model.config.text.vocab_size))
        except (ConfigError, CheckpointError, CodecError) as error:
            raise ModelFilesError(str(error)) from error
        except torch.OutOfMemoryError as error:
            raise EngineError(f"{name} does not fit in the memory of {place}") from error
        if place.type == "cpu":
            keep_freed_memory()
        classes = model.config.classes
        info = ModelInfo(
            name=name,
            folder=folder,
            parameters=sum(p.numel() for p in model.parameters()),
            classes=classes,
            skills=tuple(skill for skill in _SKILLS.values() if prompts.can(skill)),
            device=str(place),
            dtype=str(kind).removeprefix("torch."),
        )
        vocabulary = None if classes is None else Vocabulary(name, classes, _synonyms(folder))
        return cls(model, prompts, info, vocabulary)

    def resolve(self, labels: Iterable[str]) -> list[str]:
        """The names to ask this model for, given what a person typed ('people', 'truck or bus'); none twice.

        Raises:
            UnknownClassError: if the vocabulary is closed and a phrase means none of its names.
        """
        if self._vocabulary is None:
            return list(dict.fromkeys(label.strip() for label in labels))
        return self._vocabulary.resolve(labels)

    def submit(self, image: Image, tasks: Sequence[Task], tiles: int = 1) -> Future[Result]:
        """Queue tasks on a picture; all of them share one look at it.

        Args:
            image: (height, width, 3) uint8 RGB. It must not change until the future is done.
            tasks: what to ask; labels as `resolve` gives them.
            tiles: with n > 1, `Detect` tasks look at n × n overlapping windows as well: more small objects, at
                1 + n² times the work.

        Returns:
            A future of the result. Cancelling it before the work starts drops the work.

        Raises:
            UnsupportedTaskError, UnknownClassError: if the model cannot do a task.
            EngineClosedError: after `close`.
            ValueError: if the picture is not what it should be, or `tiles` is not 1 or more.
        """
        if tiles < 1:
            raise ValueError(f"tiles is 1 or more; got {tiles}")
        for task in tasks:
            self._check(task)
        request = _Request(_as_array(image), tuple(tasks), tiles, Future(), time.monotonic())
        with self._lock:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            self._requests.put(request)
        return request.future

    def detect(self, image: Image, label: str, max_objects: int = 50, conf: float = 0.5, tiles: int = 1) -> Detections:
        """Boxes of everything that `label` means ('person', 'people', 'truck or bus'). Waits for the answer."""
        names = self.resolve([label])
        return self.submit(image, [Detect(name, max_objects, conf) for name in names], tiles).result().detections

    def point(self, image: Image, label: str, max_objects: int = 50, conf: float = 0.5) -> Points:
        """Centre points of everything that `label` means. Waits for the answer."""
        names = self.resolve([label])
        return self.submit(image, [Point(name, max_objects, conf) for name in names]).result().points

    def query(self, image: Image, question: str, max_tokens: int = 768) -> Text:
        """The answer to a question. Waits for it."""
        return self.submit(image, [Query(question, max_tokens)]).result().texts[0]

    def caption(self, image: Image, length: CaptionLength = "normal", max_tokens: int = 768) -> Text:
        """A description. Waits for it."""
        return self.submit(image, [Caption(length, max_tokens)]).result().texts[0]

    def close(self) -> None:
        """Stop the worker; work that has not begun fails with EngineClosedError. Closing twice does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._requests.put(None)
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, task: Task) -> None:
        skill = _SKILLS[type(task)]
        if skill not in self.model.skills:
            able = " and ".join(self.model.skills)
            raise UnsupportedTaskError(
                f"{self.model.name} can {able}, not {skill}; load a Moondream checkpoint for that"
            )
        if isinstance(task, Detect | Point) and self._vocabulary is not None:
            self._vocabulary.resolve([task.label])

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            if not request.future.set_running_or_notify_cancel():
                continue
            try:
                result = self._run(request)
            except BaseException as error:  # whatever it is belongs to the one who asked, not to this thread
                request.future.set_exception(error)
            else:
                request.future.set_result(result)
        while not self._requests.empty():
            left = self._requests.get()
            if left is not None and left.future.set_running_or_notify_cancel():
                left.future.set_exception(EngineClosedError("the engine was closed before the task began"))

    def _run(self, request: _Request) -> Result:
        began = time.monotonic()
        height, width = request.image.shape[:2]
        whole, *closer = windows(width, height, request.tiles)
        prefix = self._look(request.image, whole)
        self._settle()
        prefilled = time.monotonic()
        detects = [task for task in request.tasks if isinstance(task, Detect)]
        points = [task for task in request.tasks if isinstance(task, Point)]
        found = self._objects(prefix, "detect", detects)
        spots = self._objects(prefix, "point", points)
        texts = tuple(self._answer(task, prefix) for task in request.tasks if isinstance(task, Query | Caption))
        if detects:
            for window in closer:
                seen = self._objects(self._look(request.image, window), "detect", detects)
                for mine, more in zip(found, seen, strict=True):
                    mine += [one for one in (place(one, window, width, height) for one in more) if one is not None]
        if closer:
            found = [merge(group)[: task.max_objects] for task, group in zip(detects, found, strict=True)]
        done = time.monotonic()
        return Result(
            detections=Detections(
                tuple(_box(task.label, one) for task, group in zip(detects, found, strict=True) for one in group),
                width,
                height,
            ),
            points=Points(
                tuple(
                    Spot(task.label, one.score, one.x, one.y)
                    for task, group in zip(points, spots, strict=True)
                    for one in group
                ),
                width,
                height,
            ),
            texts=texts,
            timings=Timings(
                queue_ms=(began - request.submitted) * 1e3,
                prefill_ms=(prefilled - began) * 1e3,
                decode_ms=(done - prefilled) * 1e3,
            ),
        )

    def _look(self, image: NDArray[np.uint8], window: Window) -> KVCache:
        """The image prefix of a part of a picture."""
        part = image[window.y : window.y + window.height, window.x : window.x + window.width]
        return self._generator.prefix(self._generator.image_tokens(np.ascontiguousarray(part)))

    def _objects(self, prefix: KVCache, skill: str, tasks: Sequence[Detect] | Sequence[Point]) -> list[list[Found]]:
        if not tasks:
            return []
        sized = skill == "detect"
        ids = [self._prompts.objects(skill, task.label) for task in tasks]
        limits = [task.max_objects for task in tasks]
        state = self._generator.prefill(prefix, ids, max(limits) * (3 if sized else 2))
        return self._generator.objects(state, sized, limits, [task.conf for task in tasks])

    def _answer(self, task: Query | Caption, prefix: KVCache) -> Text:
        if isinstance(task, Query):
            asked, ids = task.question, self._prompts.query(task.question)
        else:
            asked, ids = f"caption: {task.length}", self._prompts.caption(task.length)
        state = self._generator.prefill(prefix, [ids], task.max_tokens)
        tokens: list[int] = []
        for token in self._generator.tokens(state):
            if len(tokens) == task.max_tokens:
                break
            tokens.append(token)
        return Text(asked, self._prompts.text(tokens))

    def _settle(self) -> None:
        """Wait for the device, so that the two timings mean what they say."""
        if self._generator.model.device.type == "cuda":
            torch.cuda.synchronize(self._generator.model.device)


def choose_device(name: str) -> torch.device:
    """The device for 'auto', 'cpu', 'cuda' or 'cuda:N'.

    Raises:
        EngineError: if there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineError(f"unknown device '{name}': give auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise EngineError(f"unknown device '{name}': give auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise EngineError(f"there is no device '{name}' here; give cpu, or auto to take what there is")
    return device


def _synonyms(folder: Path) -> dict[str, list[str]]:
    path = folder / "synonyms.json"
    if not path.is_file():
        return {}
    values: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8"))
    return values


def _as_array(image: Image) -> NDArray[np.uint8]:
    array = image.numpy(force=True) if isinstance(image, torch.Tensor) else np.asarray(image)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or 0 in array.shape:
        raise ValueError(f"a picture is (height, width, 3) uint8 RGB; got {array.shape} {array.dtype}")
    return np.ascontiguousarray(array)


def _box(label: str, found: Found) -> Box:
    def clip(value: float) -> float:
        return min(1.0, max(0.0, value))

    half_w, half_h = found.width / 2, found.height / 2
    return Box(
        label,
        found.score,
        clip(found.x - half_w),
        clip(found.y - half_h),
        clip(found.x + half_w),
        clip(found.y + half_h),
    )
