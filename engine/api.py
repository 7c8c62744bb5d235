"""Public API of the engine: submit images and tasks, get results. `submit` is thread-safe.

`Engine.submit` creates a `Request` (`core.request`); the loop (`runtime.loop`) runs it in its own thread and sets its
future.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from saccade.engine.config import EngineConfig
from saccade.engine.core.admission import StreamSettings
from saccade.engine.core.request import CropPace, KeptPrefix, Request, RequestMaker, remembered
from saccade.engine.errors import (
    AdapterError,
    DeadlineError,
    EngineClosedError,
    EngineError,
    PromptError,
    UnsupportedTaskError,
)
from saccade.engine.futures import CallbackThread, ResultFuture, TextStream
from saccade.engine.image import Image, LazyImage, Pixels, YuvImage, as_array, as_pixels
from saccade.engine.model_loader import ModelInfo, open_model, start
from saccade.engine.models.lora import load_adapter
from saccade.engine.models.model_files import find_refiner
from saccade.engine.models.protocol import Adapter, DeepEncoder, DraftingEncoder, LoadedModel, ModelLimits, Ref
from saccade.engine.results import Detections, Outline, Points, Result, Text
from saccade.engine.runtime.executor import Executor
from saccade.engine.runtime.graph_capture import Progress
from saccade.engine.runtime.loop import StepLoop
from saccade.engine.runtime.monitor import Trace
from saccade.engine.runtime.refine import RefineThread
from saccade.engine.tasks import Caption, CaptionLength, Detect, Point, Query, Segment
from saccade.engine.tasks.task import OnText, Task, Vocabulary, Window

T = TypeVar("T")
_NEWEST = StreamSettings()
_CPU_SECONDS_PER_PIXEL = 10e-9
"""Initial cropping time estimate; a 48-megapixel image takes 20 ns per pixel on an idle core, 40 on a busy one."""


class Engine:
    """A loaded model and the thread that runs it. Use as a context manager, or call `close`."""

    def __init__(
        self,
        loaded: LoadedModel,
        info: ModelInfo,
        vocabulary: Vocabulary | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
    ) -> None:
        self._info = info
        self.config = config = config or EngineConfig()
        self._loaded, self._vocabulary, model = loaded, vocabulary, loaded.model
        texts = bool({"query", "caption"} & {*info.skills})
        self._executor, self._loop = executor, loop = start(model, config, texts=texts, progress=progress)
        self._adapters: dict[str, Adapter] = {}
        self._refiner: RefineThread | None = None
        if config.refiner is not None:
            self._refiner = self._start_refiner(config.refiner)
        self._maker: RequestMaker[Any] = RequestMaker(
            config,
            model.limits,
            loaded.prompts,
            lambda image, whole: as_array(image) if whole else as_pixels(image),
            lambda image, window: executor.prepare(image if window is None else _part_of(image, window)),
            # On a GPU the resize is asynchronous.
            CropPace(config, _CPU_SECONDS_PER_PIXEL if model.device.type == "cpu" else 0.0),
            loop.monitor.ended,
            # A branch needs a batch slot and one to three pages; most are reserved for other requests.
            min(config.max_sequences, loop.n_pages // 16) // 4,
            lambda image: isinstance(image, YuvImage) and image.y.is_cuda,
            refine=None if self._refiner is None else self._refiner.put,
        )
        self._streams: dict[Hashable, StreamSettings] = {}
        self._expanded: dict[Task, tuple[Task, ...]] = {}  # cache, because the frames of a stream repeat their tasks
        self._callbacks = CallbackThread()
        self._process = os.getpid()
        # A garbage-collected engine ends its threads when no request references it.
        self._stop = weakref.finalize(self, _stop, loop, self._refiner, self._callbacks, self._process)

    @property
    def model(self) -> ModelInfo:
        """Description of the model and backend; executed steps may add fallbacks."""
        made, executor, info = self._loaded.model.dtype, self._executor, self._info
        dtype = info.dtype
        if executor.products != made:
            dtype = f"{dtype} with {str(executor.products).removeprefix('torch.')} products"
        return replace(info, dtype=dtype, fallbacks=tuple(executor.fallbacks))

    @classmethod
    def load(
        cls,
        name: str = "nano",
        device: str = "auto",
        dtype: str | None = None,
        *,
        revision: str | None = None,
        kv_dtype: str | None = None,
        imgsz: int | None = None,
        depth: int | None = None,
        adapter_slots: int = 4,
        adapter_rank: int = 32,
        drafts: bool = True,
        refiner: str | None = None,
        progress: Progress | None = None,
    ) -> Engine:
        """Load a model.

        Args:
            name: 'nano', a model folder, or a hub ID (`owner/name` or `owner/name@revision`).
            device: 'auto' (CUDA if available), 'cpu', 'cuda' or 'cuda:N'.
            dtype: 'float32', 'bfloat16', 'float16', or 'fp8' (bfloat16 with FP8 block weights: faster on Hopper or
                later, slightly less accurate). The default is float32 on a CPU; on a GPU float16 for small models, else
                bfloat16. On a CPU with bfloat16 instructions, nano's detector uses bfloat16, see `EngineConfig.exact`.
            revision: branch, tag or commit of a hub ID; the default is the newest.
            kv_dtype: 'fp8' stores the KV cache in FP8 (Ada or later), for more sequences and faster large batches; the
                default is the model's dtype.
            imgsz: longer side in pixels at which nano sees an image, a multiple of 32 from 128 to 1280, default 416.
                Larger values detect smaller objects and take longer. Other models have a fixed size.
            depth: 2 launches a step before the previous step is read, 1 does not; answers are equal. The default is 2
                on CUDA and 1 on a CPU.
            adapter_slots: maximum number of LoRA adapters in use at the same time; further requests wait.
            adapter_rank: maximum rank of an adapter. Slots take memory only after the first adapter is used.
            drafts: use speculative decoding with drafts from the detector or the stream's last frame, see
                `EngineConfig`.
            refiner: file or hub ID of a refiner for the outlines of `Segment`, such as 'moondream/SegHeadRefiner'.
            progress: called with (done, total) during GPU preparation, which takes seconds.

        Raises:
            UnknownModelError: if the model or refiner does not exist.
            ModelFilesError: if its files cannot be read or are inconsistent.
            EngineError: if the device, dtype or `kv_dtype` does not exist or is unsupported, or the model's `imgsz` is
                fixed.
            ValueError: if another argument is out of range, see `EngineConfig`.
        """
        config = EngineConfig(
            1 if depth is None else depth,
            kv_dtype=kv_dtype,
            adapter_slots=adapter_slots,
            adapter_rank=adapter_rank,
            drafts=drafts,
            exact=dtype is not None,
            refiner=refiner,
        )
        loaded, info, vocabulary = open_model(f"{name}@{revision}" if revision else name, device, dtype, imgsz)
        cuda = loaded.model.device.type == "cuda"
        if cuda and depth is None:
            config = replace(config, depth=2)
        if cuda and isinstance(loaded.model.vision, DraftingEncoder):
            config = replace(config, max_sequences=128, images_per_prefill=16, drafted_tokens=256)
        return cls(loaded, info, vocabulary, config, progress=progress)

    def resolve(self, labels: Iterable[str]) -> list[str]:
        """Return the model's labels for labels that a person typed ('people', 'truck or bus'), without duplicates.

        Raises:
            UnknownClassError: if the vocabulary is closed and a phrase matches no class.
        """
        if self._vocabulary is None:
            return list(dict.fromkeys(label.strip() for label in labels))
        return self._vocabulary.resolve(labels)

    def load_adapter(self, name: str, path: Path | str) -> None:
        """Load a LoRA adapter under a name for `submit` and `stream`; see `models.lora` for the format.

        Raises:
            AdapterError: if the file cannot be read or does not match the model, or the name is already in use.
        """
        if name in self._adapters:
            raise AdapterError(f"adapter '{name}' is already loaded; unload it first")
        self._adapters[name] = load_adapter(name, Path(path), self._loaded.model.text, self.config.adapter_rank)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter; requests submitted with it still use it.

        Raises:
            AdapterError: if no adapter has this name.
        """
        del self._adapters[self._adapter(name).name]

    def _adapter(self, name: str) -> Adapter:
        """Return the adapter of this name; raises AdapterError if there is none."""
        adapter = self._adapters.get(name)
        if adapter is None:
            raise AdapterError(f"unknown adapter '{name}'; loaded: {', '.join(self._adapters) or 'none'}")
        return adapter

    def submit(
        self,
        image: Image | LazyImage | EncodedImage | None,
        tasks: Sequence[Task],
        tiles: int = 1,
        *,
        deadline_s: float | None = None,
        adapter: str | None = None,
        stream: Hashable = None,
        previous: Result | None = None,
        windows: Sequence[Window] = (),
    ) -> ResultFuture:
        """Queue tasks on an image; all of them share its prefill.

        With a `stream`, the image is a frame: while it is queued, a newer frame of the stream supersedes it, and its
        future fails with SupersededError. No work is done for a frame before its turn. Streams share the engine by
        weight, see `configure_stream`.

        Args:
            image: (height, width, 3) uint8 RGB, or a function that returns it later; it must not change until the
                future is done. Or an encoded image, or None for questions without an image.
            tasks: the tasks; labels are resolved with `resolve`.
            tiles: with n > 1, `Detect` tasks also run on n × n overlapping windows: more small objects at 1 + n² times
                the cost.
            deadline_s: seconds from now after which the request is dropped and the future fails with DeadlineError; at
                once if cropping alone would take longer.
            adapter: name of a loaded adapter for image and answers.
            stream: hashable key that the frames of one camera share; None for a single image.
            previous: result of a similar earlier image by the same model, used as drafts for equal tasks instead of the
                stream's own. Answers are unchanged, see `core.speculative`.
            windows: additional image parts for `Detect` tasks, each at the cost of an image; detections are merged into
                one list.

        Returns:
            A future of the result. Cancelling it before it is done drops the work.

        Raises:
            UnsupportedTaskError, UnknownClassError: if the model does not support a task.
            AdapterError: if the adapter does not exist.
            EngineClosedError: after `close`.
            ValueError: if an argument is invalid, such as tiles of an encoded image.
            EngineError: in a forked child process.
        """
        return self._submit(image, tasks, tiles, deadline_s, adapter, stream, previous, windows=windows)

    def input_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the columns and rows at which the model sees a `width` × `height` image; smaller details are lost."""
        vision = self._loaded.model.vision
        rows, columns = vision.tiling_of(height, width)
        if rows * columns > 1:
            return columns * vision.crop_size, rows * vision.crop_size
        _, rows, columns, _ = vision.make_crops(np.zeros((height, width, 3), np.uint8)).pixels.shape
        return columns, rows

    def configure_stream(self, stream: Hashable, settings: StreamSettings) -> None:
        """Set a stream's share of the engine, such as weight and rate, at any time.

        Raises:
            ValueError: if `settings` is not a `StreamSettings`.
        """
        if not isinstance(settings, StreamSettings):  # an error in the loop's thread would end the engine
            raise ValueError(f"settings must be StreamSettings; got {settings!r}")
        self._streams[stream] = settings
        self._loop.configure(stream, settings)

    def forget_stream(self, stream: Hashable) -> None:
        """Remove a stream's settings and estimates; submitted requests still run."""
        self._streams.pop(stream, None)
        self._loop.configure(stream, None)

    def stream(
        self,
        image: Image | EncodedImage | None,
        task: Query | Caption | Segment,
        *,
        deadline_s: float | None = None,
        adapter: str | None = None,
    ) -> TextStream:
        """Queue a question, caption or outline and return its text piece by piece; see `submit` for arguments.

        The joined pieces equal the text of `submit`.

        Returns:
            An iterator of non-empty pieces. Closing or dropping it early cancels the request. Later errors are raised
            by the iterator.
        """
        pieces: SimpleQueue[str | None] = SimpleQueue()
        return TextStream(self._submit(image, [task], 1, deadline_s, adapter, on_text=pieces.put), pieces)

    def encode(self, image: Image, *, adapter: str | None = None) -> EncodedImage:
        """Prefill an image once for several later requests, and wait for it.

        Args:
            image: (height, width, 3) uint8 RGB.
            adapter: name of a loaded adapter for the image and all its requests.

        Returns:
            An encoded image for `submit` and other methods. It occupies KV cache pages until it is closed or dropped.

        Raises:
            RequestTooLargeError: if encoded images already use half of the cache.
            AdapterError, EngineClosedError, ValueError, EngineError: see `submit`.
        """
        array, kept = as_array(image), KeptPrefix()
        chosen = None if adapter is None else self._adapter(adapter)
        future = self._submit(array, [], adapter=adapter, keeps=kept)
        try:
            future.result()
        except BaseException:  # also an interrupt while it waits
            future.cancel()
            self._loop.release_prefix(kept)
            raise
        picture = None if self._refiner is None else array.copy()
        return EncodedImage(array.shape[1], array.shape[0], kept, chosen, self._loop, picture)

    def detect(
        self, image: Image | EncodedImage, label: str, max_objects: int = 50, conf: float = 0.5, tiles: int = 1
    ) -> Detections:
        """Return the boxes of all objects with a label ('person', 'people', 'truck or bus'). Blocks."""
        names = self.resolve([label])
        return self.submit(image, [Detect(name, max_objects, conf) for name in names], tiles).result().detections

    def point(
        self,
        image: Image | EncodedImage,
        label: str,
        max_objects: int = 50,
        conf: float = 0.5,
        refs: Sequence[Ref] = (),
    ) -> Points:
        """Return the centre points of all objects with a label, restricted to `refs` if given. Blocks."""
        tasks = [Point(name, max_objects, conf, tuple(refs)) for name in self.resolve([label])]
        return self.submit(image, tasks).result().points

    def segment(self, image: Image | EncodedImage, object: str, refs: Sequence[Ref] = (), **options: Any) -> Outline:
        """Return the outline of one object; `options` are those of `Segment`: grammar, max_tokens, … Blocks."""
        return self.submit(image, [Segment(object, tuple(refs), **options)]).result().segments[0]

    def query(self, image: Image | EncodedImage | None, question: str, max_tokens: int = 768, **options: Any) -> Text:
        """Return the answer to a question; `options` are those of `Query`: choices, reasoning, refs, … Blocks."""
        return self.submit(image, [Query(question, max_tokens, **options)]).result().texts[0]

    def caption(self, image: Image | EncodedImage, length: CaptionLength = "normal", max_tokens: int = 768) -> Text:
        """Return a description of the image. Blocks."""
        return self.submit(image, [Caption(length, max_tokens)]).result().texts[0]

    def counters(self) -> dict[str, float]:
        """Return the engine's counters: steps, sequences, requests, queue, pages, slots and bubble. Thread-safe.

        Names of monotonic counters end in `_total`. `bubble` is the fraction of time in which the GPU was idle despite
        work.
        """
        kept = {"tasks_known": len(self._expanded), "cuda_graphs": self._executor.n_graphs}
        return {**self._loop.counters(), **kept}

    @property
    def idle_s(self) -> float:
        """Seconds without work since loading; reading it does not start step timing, unlike `counters`."""
        return self._loop.monitor.idle_s

    def prompt_tokens(self, task: Task) -> int:
        """Return the number of tokens of a task's prompt including the image; raises UnsupportedTaskError."""
        self.expand(task)
        return self.limits.prefix_length + len(task.prompt(self._loaded.prompts))

    @property
    def limits(self) -> ModelLimits:
        """Sizes of the model."""
        return self._loaded.model.limits

    def run_idle(self, work: Callable[[Executor[Any]], T]) -> T:
        """Run a function with the executor while no step is in flight, for benchmarks, and return its result.

        Raises:
            EngineError: if the engine is busy or has encoded images.
        """
        self._require_process()
        return self._loop.run_idle(lambda: work(self._executor))

    def tracing(self) -> AbstractContextManager[Trace]:
        """Record a trace of the block: `with engine.tracing() as trace: …`, then `trace.save("trace.json")`.

        Raises:
            RuntimeError: if a trace is already being recorded.
        """
        return self._loop.monitor.tracing()

    def close(self) -> None:
        """Finish requests in flight, fail queued ones with EngineClosedError, and stop. Repeated calls are ignored."""
        if os.getpid() == self._process:  # else the threads are the parent's
            self._loop.close(EngineClosedError("the engine is closed"))
            if self._refiner is not None:
                self._refiner.close()
            self._stop()  # only now: what the loop still finishes has callbacks, too

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def expand(self, task: Task) -> Sequence[Task]:
        """Return the task for the model's classes: one, or several for a label such as 'truck or bus'.

        Raises:
            UnsupportedTaskError: if the model does not support the task.
            UnknownClassError: if the vocabulary is closed and has no matching class.
        """
        if not isinstance(task, Task):
            raise ValueError(f"a task must be Detect, Point, Gaze, Segment, Query or Caption; got {task!r}")
        if task.skill not in self._info.skills:
            able = f"{self._info.name} can {' and '.join(self._info.skills)}"
            raise UnsupportedTaskError(f"{able}, not {task.skill}; load a Moondream checkpoint for that")
        return remembered(
            self._expanded, task, lambda one: tuple(one.expand(self._vocabulary)), self.config.known_tasks
        )

    def _submit(
        self,
        image: Image | LazyImage | EncodedImage | None,
        tasks: Sequence[Task],
        tiles: int = 1,
        deadline_s: float | None = None,
        adapter: str | None = None,
        stream: Hashable = None,
        previous: Result | None = None,
        on_text: OnText | None = None,
        keeps: KeptPrefix | None = None,
        windows: Sequence[Window] = (),
    ) -> ResultFuture:
        """Create and queue a request; see `submit`, `stream` and `encode`."""
        self._require_process()
        self._loop.require_open()  # before the image is cut, which may take a second
        deadline = math.inf if deadline_s is None else time.monotonic() + deadline_s
        if math.isnan(deadline):
            raise ValueError("deadline_s must be a number of seconds")
        if previous is not None and not isinstance(previous, Result):
            raise ValueError(f"previous must be the Result of an earlier image; got {type(previous).__name__}")
        chosen = None if adapter is None else self._adapter(adapter)
        expanded = tuple([one for task in tasks for one in self.expand(task)])
        if not isinstance(tiles, int) or tiles < 1:
            raise ValueError(f"tiles must be an integer of at least 1; got {tiles!r}")
        reads: KeptPrefix | None = None
        pixels: Pixels | LazyImage | None = None
        size = 0, 0
        if isinstance(image, EncodedImage):
            if tiles != 1 or windows:
                raise ValueError("an encoded image cannot have tiles or windows; submit the original image")
            chosen, reads, size = image.adapter_for(self._loop, chosen), image.kept, (image.width, image.height)
        elif image is None:
            if lacking := next((task.asked for task in expanded if task.needs_image), None):
                raise ValueError(f"'{lacking}' needs an image")
        else:
            # Of an image of which nothing is asked the result still has the size.
            if callable(image) and all(task.empty for task in expanded):
                image = image()
            pixels = image if callable(image) else as_pixels(image)
        refine = self._refiner is not None and any(isinstance(task, Segment) for task in expanded)
        picture = image.picture if isinstance(image, EncodedImage) else None
        if refine and isinstance(pixels, np.ndarray):
            picture = pixels.copy()  # the caller's may change once it is cut
        future = ResultFuture(self._callbacks, self._loop.require_other_thread)
        request: Request[Any] = Request(
            self._maker.plan,
            self._maker.settle,
            deadline,
            chosen,
            reads,
            keeps,
            has_prefix=image is not None,
            frame=stream is not None and self._streams.get(stream, _NEWEST).newest,
            tasks=expanded,
            image=pixels,
            size=size,
            tiles=tiles,
            looks=tuple(windows),
            previous=None if previous is None else previous.drafts,
            on_text=on_text,
            future=future,
            refine=refine,
            picture=picture if refine else None,
        )
        # It holds the engine, which is dropped with the last of its requests at the earliest.
        future.on_cancel = lambda: self._cancel(request)
        if not request.frame:  # nothing supersedes it: what is wrong with it is found in the caller's thread
            try:
                self._maker.prepare(request)
            except (PromptError, DeadlineError) as error:
                self._maker.settle(request, error.with_traceback(None))  # whose frames would keep the image
                return future
        self._loop.submit(request, stream)
        return future

    def _start_refiner(self, name: str) -> RefineThread:
        """Start the thread of a refiner.

        Raises:
            EngineError: if the model does not support refiners.
            UnknownModelError, ModelFilesError: if the refiner does not exist or does not match the model.
        """
        loaded, encoder = self._loaded, self._executor.encoder
        try:
            if loaded.load_refiner is None or not isinstance(encoder, DeepEncoder):
                raise EngineError(f"{self._info.name} does not support a refiner; only Moondream 3 does")
            refiner = loaded.load_refiner(find_refiner(name))
            model = loaded.model
            return RefineThread(refiner, model.vision, encoder, model.device, self._executor.fallbacks)
        except BaseException:
            self._loop.close(EngineClosedError("the engine is closed"))
            raise

    def _cancel(self, request: Request[Any]) -> None:
        """Cancel a request for a caller."""
        if os.getpid() == self._process:  # else it is a stream that a forked child has inherited: see `_stop`
            self._loop.monitor.ended("cancelled")
            self._loop.cancel(request, CancelledError())

    def _require_process(self) -> None:
        """Check that this is the process that created the engine.

        Raises:
            EngineError: in a forked child, because threads and devices do not survive a fork.
        """
        if os.getpid() != self._process:
            raise EngineError("this engine was created before a fork; load an engine in the child process")


def _part_of(image: Pixels, window: Window) -> Pixels:
    """Return the pixels of a window: a copy, or for YUV a view that starts at even pixels."""
    if isinstance(image, YuvImage):
        return image.part(window.x, window.y, window.width, window.height)
    return image[window.y : window.y + window.height, window.x : window.x + window.width].copy()


def _stop(loop: StepLoop[Any], refiner: RefineThread | None, callbacks: CallbackThread, process: int) -> None:
    if os.getpid() == process:  # in a forked child another thread may have held the loop's lock for ever
        loop.stop(EngineClosedError("the engine is closed"))
        if refiner is not None:
            refiner.stop()
        callbacks.close()


class EncodedImage:
    """An image whose prefix stays in an engine's KV cache for several requests, see `Engine.encode`.

    It occupies cache pages until `close`, the end of a `with` block, or garbage collection. Submitted requests are
    still answered.

    Args:
        width, height: of the image in pixels.
        kept: its cached prefix.
        adapter: LoRA adapter of the prefix, or None.
        loop: the loop that owns the prefix.
        picture: pixels of the image for outline refinement, or None.

    Attributes:
        width, height, picture: as above.
    """

    __slots__ = ("__weakref__", "_adapter", "_closed", "_loop", "_process", "height", "kept", "picture", "width")

    def __init__(
        self,
        width: int,
        height: int,
        kept: KeptPrefix,
        adapter: Adapter | None,
        loop: StepLoop[Any],
        picture: Pixels | None = None,
    ) -> None:
        self._closed, self._process = False, os.getpid()
        self.width, self.height = width, height
        self.kept, self._adapter, self._loop, self.picture = kept, adapter, loop, picture

    def adapter_for(self, loop: StepLoop[Any], asked: Adapter | None) -> Adapter | None:
        """Return the adapter of the prefix, which answers must also use.

        Raises:
            ValueError: if the image belongs to another loop.
            AdapterError: if another adapter is requested.
        """
        if loop is not self._loop:
            raise ValueError("this image was encoded by another engine")
        if asked not in (None, self._adapter):
            raise AdapterError("an encoded image can only be used with the adapter that it was encoded with")
        return self._adapter

    def close(self) -> None:
        """Free its pages. Repeated calls are ignored."""
        closed, self._closed = self._closed, True
        if not closed and os.getpid() == self._process:  # in a forked child another thread may hold the loop's lock
            self._loop.release_prefix(self.kept)

    def __enter__(self) -> EncodedImage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
