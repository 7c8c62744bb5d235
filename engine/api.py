"""Public API of the engine: submit images and tasks, get results.

`Engine.submit` creates a `Request` (`core.request`). The step loop (`runtime.loop`) runs the request in its own thread
and sets the result of the request's future.
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
from numpy.typing import NDArray

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
from saccade.engine.image import Image, LazyImage, Pixels, YuvImage, as_array, as_pixels
from saccade.engine.model_loader import ModelInfo, open_model, start
from saccade.engine.models.lora import load_adapter
from saccade.engine.models.model_files import find_refiner
from saccade.engine.models.protocol import Adapter, DeepEncoder, DraftingEncoder, LoadedModel, ModelLimits, Ref
from saccade.engine.results import CallbackThread, Detections, Outline, Points, Result, ResultFuture, Text, TextStream
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
"""Initial estimate of the cropping time in seconds per pixel. A busy core needs 40 ns, an idle core 20 ns."""


class Engine:
    """A loaded model, and the thread that runs it. Use the engine in a `with` block, or call `close` at the end."""

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
            executor.prepare,
            # On a GPU, resizing is asynchronous, so the initial bound is 0.
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
        # When the engine is garbage-collected, end its threads. Requests in flight keep it alive.
        self._stop = weakref.finalize(self, _stop, loop, self._refiner, self._callbacks, self._process)

    @property
    def model(self) -> ModelInfo:
        """Description of the model and its device. The list `fallbacks` can grow while requests run."""
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
            name: 'nano', a model folder, or a Hugging Face Hub ID (`owner/name` or `owner/name@revision`).
            device: 'auto' (CUDA if available), 'cpu', 'cuda' or 'cuda:N'.
            dtype: 'float32', 'bfloat16', 'float16' or 'fp8'. 'fp8' is bfloat16 with FP8 weights: faster on Hopper or
                later GPUs, and slightly less accurate. The default on a CPU is float32. The default on a GPU is float16
                for small models and bfloat16 for other models. If a CPU has bfloat16 instructions, nano's detector uses
                bfloat16, see `EngineConfig.exact`.
            revision: branch, tag or commit of a hub ID. The default is the newest commit.
            kv_dtype: 'fp8' stores the KV cache in FP8 (Ada or later GPUs). This allows more sequences and makes large
                batches faster. The default is the model's dtype.
            imgsz: only for nano: length in pixels to which the longer side of an image is resized. It is a multiple of
                32 from 128 to 1280; the default is 416. Larger values detect smaller objects, but inference takes
                longer.
            depth: number of batch steps in flight. With 2, a step is launched before the host reads the results of the
                previous step. The answers do not depend on it. The default is 2 on CUDA and 1 on a CPU.
            adapter_slots: maximum number of LoRA adapters in use at the same time. Requests for further adapters wait.
            adapter_rank: maximum rank of an adapter. The slots use memory only after the first adapter is used.
            drafts: whether to use speculative decoding. Drafts come from the detector or from the last frame of the
                stream, see `EngineConfig`.
            refiner: file or hub ID of a network that refines the outlines of `Segment`, such as
                'moondream/SegHeadRefiner'.
            progress: callback (done, total) for the preparation of a GPU, which takes seconds.

        Raises:
            UnknownModelError: if the model or refiner does not exist.
            ModelFilesError: if its files cannot be read or are inconsistent.
            EngineError: if the device, `dtype` or `kv_dtype` does not exist or is unsupported, or if `imgsz` is given
                for another model than nano.
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
            config = replace(
                config,
                max_sequences=256,
                images_per_prefill=32,
                requests_per_prefill=16,
                drafted_tokens=320,
            )
        return cls(loaded, info, vocabulary, config, progress=progress)

    def resolve(self, labels: Iterable[str]) -> list[str]:
        """Convert labels to class names of the model. For example, 'truck or bus' gives two class names.

        The result has no duplicates. A model with an open vocabulary accepts every label unchanged.

        Raises:
            UnknownClassError: if the model has a closed vocabulary and a label matches no class.
        """
        if self._vocabulary is None:
            return list(dict.fromkeys(label.strip() for label in labels))
        return self._vocabulary.resolve(labels)

    def load_adapter(self, name: str, path: Path | str) -> None:
        """Load a LoRA adapter under a name, for use in `submit` and `stream`. See `models.lora` for the file format.

        Raises:
            AdapterError: if the file cannot be read or does not match the model, or if the name is already in use.
        """
        if name in self._adapters:
            raise AdapterError(f"adapter '{name}' is already loaded; unload it first")
        self._adapters[name] = load_adapter(name, Path(path), self._loaded.model.text, self.config.adapter_rank)

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Requests that were already submitted with it still use it.

        Raises:
            AdapterError: if no adapter has this name.
        """
        del self._adapters[self._adapter(name).name]

    def _adapter(self, name: str) -> Adapter:
        """Return the LoRA adapter with this name. Raise AdapterError if it is not loaded."""
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
        """Queue tasks on an image. All tasks share one prefill of the image.

        With a `stream`, the image is a frame of a video. A newer frame of the same stream replaces a queued frame, and
        the future of the old frame fails with SupersededError. Streams share the engine in proportion to their
        scheduling weights, see `configure_stream`.

        Args:
            image: (height, width, 3) uint8 RGB, or a function that returns it later. The pixels must not change until
                the future is done. An encoded image is also allowed, and None for questions without an image.
            tasks: tasks to answer. Their labels are resolved with `resolve`.
            tiles: with n > 1, `Detect` tasks also run on n × n overlapping tiles of the image. This finds more small
                objects at 1 + n² times the cost.
            deadline_s: seconds from now after which the request is dropped and the future fails with DeadlineError. The
                future fails immediately if the deadline cannot be met.
            adapter: name of a loaded LoRA adapter, used for the image and the answers.
            stream: hashable key that all frames of one camera have in common. None for a single image.
            previous: result of the same model for a similar image. Its answers are used as drafts for equal tasks
                (speculative decoding), instead of the stream's previous answers.
            windows: additional parts of the image for `Detect` tasks. Each part takes as long as a whole image. The
                detections of all parts are merged into one list.

        Returns:
            A future of the result. If it is cancelled before it is done, the work is dropped.

        Raises:
            UnsupportedTaskError: if the model does not support a task.
            UnknownClassError: if a label matches no class of the model.
            AdapterError: if the adapter does not exist.
            EngineClosedError: if the engine is closed.
            ValueError: if an argument is invalid, such as tiles of an encoded image.
            EngineError: if the caller is a forked child process.
        """
        return self._submit(image, tasks, tiles, deadline_s, adapter, stream, previous, windows=windows)

    def input_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the (width, height) in pixels to which the model resizes an image of `width` × `height` pixels."""
        vision = self._loaded.model.vision
        rows, columns = vision.tiling_of(height, width)
        if rows * columns > 1:
            return columns * vision.crop_size, rows * vision.crop_size
        _, rows, columns, _ = vision.make_crops(np.zeros((height, width, 3), np.uint8)).pixels.shape
        return columns, rows

    @property
    def has_looks(self) -> bool:
        """Whether the model can compute appearance embeddings of objects (`look`)."""
        return self._loaded.look is not None

    def look(self, image: NDArray[np.uint8], box: tuple[float, float, float, float]) -> NDArray[np.float32]:
        """Return the appearance embedding of an object, as a unit vector. Runs in the calling thread.

        The dot product of two embeddings is their cosine similarity.

        Args:
            image: (height, width, 3) uint8 RGB.
            box: (x1, y1, x2, y2) of the object, in normalized coordinates.

        Raises:
            EngineError: if the model does not support appearance embeddings.
        """
        if self._loaded.look is None:
            raise EngineError(f"{self._info.name} cannot compute appearance embeddings of objects; use the model nano")
        height, width = image.shape[:2]
        x1, y1 = (max(0, min(side - 1, int(at * side))) for at, side in zip(box[:2], (width, height), strict=True))
        x2, y2 = (math.ceil(at * side) for at, side in zip(box[2:], (width, height), strict=True))
        return self._loaded.look(np.ascontiguousarray(image[y1 : max(y1 + 1, y2), x1 : max(x1 + 1, x2)]))

    def configure_stream(self, stream: Hashable, settings: StreamSettings) -> None:
        """Set the scheduling weight and limits of a stream, such as its maximum frame rate. Can be called at any time.

        Raises:
            ValueError: if `settings` is not a `StreamSettings`.
        """
        # Check here, because an error in the loop's thread would end the engine.
        if not isinstance(settings, StreamSettings):
            raise ValueError(f"stream settings must be StreamSettings; got {settings!r}")
        self._streams[stream] = settings
        self._loop.configure(stream, settings)

    def forget_stream(self, stream: Hashable) -> None:
        """Delete the settings and statistics of a stream. Submitted requests still run."""
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
        """Submit a question, caption or segmentation task, and stream its output text.

        The concatenated pieces are equal to the text that `submit` would return.

        Args:
            image: (height, width, 3) uint8 RGB, an encoded image, or None for questions without an image.
            task: the task.
            deadline_s: seconds from now after which the request fails with DeadlineError.
            adapter: name of a loaded LoRA adapter.

        Returns:
            An iterator over non-empty pieces. Closing or dropping it early cancels the request. Errors that occur after
            this call are raised by the iterator.
        """
        pieces: SimpleQueue[str | None] = SimpleQueue()
        return TextStream(self._submit(image, [task], 1, deadline_s, adapter, on_text=pieces.put), pieces)

    def encode(self, image: Image, *, adapter: str | None = None) -> EncodedImage:
        """Prefill an image once for several later requests. The call waits for the prefill.

        Args:
            image: (height, width, 3) uint8 RGB.
            adapter: name of a loaded LoRA adapter for the image and all its requests.

        Returns:
            An encoded image, to be passed to `submit` and other methods. It occupies KV cache pages until it is closed
            or garbage-collected.

        Raises:
            RequestTooLargeError: if encoded images already occupy half of the KV cache.
            AdapterError: if the adapter does not exist.
            EngineClosedError: if the engine is closed.
            ValueError: if the image is invalid.
            EngineError: if the caller is a forked child process.
        """
        array, kept = as_array(image), KeptPrefix()
        chosen = None if adapter is None else self._adapter(adapter)
        future = self._submit(array, [], adapter=adapter, keeps=kept)
        try:
            future.result()
        except BaseException:  # includes a KeyboardInterrupt during the wait
            future.cancel()
            self._loop.release_prefix(kept)
            raise
        picture = None if self._refiner is None else array.copy()
        return EncodedImage(array.shape[1], array.shape[0], kept, chosen, self._loop, picture)

    def detect(
        self, image: Image | EncodedImage, label: str, max_objects: int = 50, conf: float = 0.5, tiles: int = 1
    ) -> Detections:
        """Return the boxes of all objects with a label, such as 'person', 'people' or 'truck or bus'.

        Blocks until the answer is complete.
        """
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
        """Return the centre points of all objects with a label. Blocks until the answer is complete.

        `refs` restrict the search to parts of the image: points (x, y) and boxes (x1, y1, x2, y2), in normalized
        coordinates.
        """
        tasks = [Point(name, max_objects, conf, tuple(refs)) for name in self.resolve([label])]
        return self.submit(image, tasks).result().points

    def segment(self, image: Image | EncodedImage, object: str, refs: Sequence[Ref] = (), **options: Any) -> Outline:
        """Segment one object, and return its contour. `options` are attributes of `Segment`, such as `max_tokens`.

        Blocks until the answer is complete.
        """
        return self.submit(image, [Segment(object, tuple(refs), **options)]).result().segments[0]

    def query(self, image: Image | EncodedImage | None, question: str, max_tokens: int = 768, **options: Any) -> Text:
        """Return the answer to a question. `options` are attributes of `Query`, such as `choices`.

        Blocks until the answer is complete.
        """
        return self.submit(image, [Query(question, max_tokens, **options)]).result().texts[0]

    def caption(self, image: Image | EncodedImage, length: CaptionLength = "normal", max_tokens: int = 768) -> Text:
        """Return a description of the image. Blocks until the answer is complete."""
        return self.submit(image, [Caption(length, max_tokens)]).result().texts[0]

    def counters(self) -> dict[str, float]:
        """Return metrics of the engine by name, such as steps, requests, queue length and used KV cache pages.

        Thread-safe. Names of counters that never decrease end in `_total`. `bubble` is the fraction of time in which
        the GPU was idle although the engine had requests.
        """
        kept = {"tasks_known": len(self._expanded), "cuda_graphs": self._executor.n_graphs}
        return {**self._loop.counters(), **kept}

    @property
    def idle_s(self) -> float:
        """Total time without requests since the engine was loaded, in seconds."""
        return self._loop.monitor.idle_s

    def prompt_tokens(self, task: Task) -> int:
        """Return the number of prompt tokens of a task, including those of the image. Raises UnsupportedTaskError."""
        self.expand(task)
        return self.limits.prefix_length + len(task.prompt(self._loaded.prompts))

    @property
    def limits(self) -> ModelLimits:
        """Size limits of the model, such as its context length."""
        return self._loaded.model.limits

    def run_idle(self, work: Callable[[Executor[Any]], T]) -> T:
        """Run `work(executor)` while the engine is idle, and return its result. For benchmarks.

        Raises:
            EngineError: if the engine is busy or has encoded images.
        """
        self._require_process()
        return self._loop.run_idle(lambda: work(self._executor))

    def tracing(self) -> AbstractContextManager[Trace]:
        """Record a trace of the `with` block: `with engine.tracing() as trace: …`, then `trace.save("trace.json")`.

        Raises:
            RuntimeError: if a trace is already being recorded.
        """
        return self._loop.monitor.tracing()

    def close(self) -> None:
        """Stop the engine. Running requests are finished; queued requests fail with EngineClosedError.

        Repeated calls have no effect.
        """
        if os.getpid() == self._process:  # in a forked child, the threads do not exist
            self._loop.close(EngineClosedError("the engine is closed"))
            if self._refiner is not None:
                self._refiner.close()
            self._stop()  # last, because requests that the loop finishes have callbacks

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def expand(self, task: Task) -> Sequence[Task]:
        """Split a task into one task per class of the model. For example, the label 'truck or bus' gives two tasks.

        Raises:
            ValueError: if `task` is not an instance of a task class.
            UnsupportedTaskError: if the model does not support the task.
            UnknownClassError: if the model has a closed vocabulary without a matching class.
        """
        if not isinstance(task, Task):
            raise ValueError(f"a task must be Detect, Point, Gaze, Segment, Query or Caption; got {task!r}")
        if task.skill not in self._info.skills:
            able = f"{self._info.name} can {' and '.join(self._info.skills)}"
            raise UnsupportedTaskError(f"{able}, not {task.skill}; load a Moondream checkpoint for {task.skill}")
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
        self._loop.require_open()  # check before the image is cropped, which may take a second
        deadline = math.inf if deadline_s is None else time.monotonic() + deadline_s
        if math.isnan(deadline):
            raise ValueError("deadline_s must be a number of seconds; got NaN")
        if previous is not None and not isinstance(previous, Result):
            raise ValueError(f"previous must be the Result for an earlier image; got {type(previous).__name__}")
        chosen = None if adapter is None else self._adapter(adapter)
        expanded = tuple([one for task in tasks for one in self.expand(task)])
        if not isinstance(tiles, int) or tiles < 1:
            raise ValueError(f"tiles (n, for n x n tiles of the image) must be an integer of at least 1; got {tiles!r}")
        reads: KeptPrefix | None = None
        pixels: Pixels | LazyImage | None = None
        size = 0, 0
        if isinstance(image, EncodedImage):
            if tiles != 1 or windows:
                raise ValueError(
                    "tiles and windows need the pixels; submit the image itself, not the result of `Engine.encode`"
                )
            chosen, reads, size = image.adapter_for(self._loop, chosen), image.kept, (image.width, image.height)
        elif image is None:
            if lacking := next((task.asked for task in expanded if task.needs_image), None):
                raise ValueError(f"the prompt '{lacking}' needs an image; submit it with an image")
        else:
            # The result contains the image size even if no task needs the image.
            if callable(image) and all(task.empty for task in expanded):
                image = image()
            pixels = image if callable(image) else as_pixels(image)
        refine = self._refiner is not None and any(isinstance(task, Segment) for task in expanded)
        picture = image.picture if isinstance(image, EncodedImage) else None
        if refine and isinstance(pixels, np.ndarray):
            picture = pixels.copy()  # the caller may change its pixels after cropping
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
        # The callback references the engine, which keeps it alive until its last request is done.
        future.on_cancel = lambda: self._cancel(request)
        if not request.frame:  # it cannot be superseded: prepare it in the caller's thread, which also gets its errors
            try:
                self._maker.prepare(request)
            except (PromptError, DeadlineError) as error:
                # Frames in the traceback would keep the image alive.
                self._maker.settle(request, error.with_traceback(None))
                return future
        self._loop.submit(request, stream)
        return future

    def _start_refiner(self, name: str) -> RefineThread:
        """Load a mask refiner and start its thread.

        Raises:
            EngineError: if the model does not support refiners.
            UnknownModelError: if the refiner does not exist.
            ModelFilesError: if the refiner does not match the model.
        """
        loaded, encoder = self._loaded, self._executor.encoder
        try:
            if loaded.load_refiner is None or not isinstance(encoder, DeepEncoder):
                raise EngineError(f"{self._info.name} does not support a mask refiner; use Moondream 3")
            refiner = loaded.load_refiner(find_refiner(name))
            model = loaded.model
            return RefineThread(refiner, model.vision, encoder, model.device, self._executor.fallbacks)
        except BaseException:
            self._loop.close(EngineClosedError("the engine is closed"))
            raise

    def _cancel(self, request: Request[Any]) -> None:
        """Cancel a request because its future was cancelled."""
        if os.getpid() == self._process:  # in a forked child, do nothing; see `_stop`
            self._loop.monitor.ended("cancelled")
            self._loop.cancel(request, CancelledError())

    def _require_process(self) -> None:
        """Check that this process created the engine. Its threads and GPU do not work after a fork.

        Raises:
            EngineError: if this is a forked child process.
        """
        if os.getpid() != self._process:
            raise EngineError("an engine cannot be used after a fork; load a new engine in the child process")


def _stop(loop: StepLoop[Any], refiner: RefineThread | None, callbacks: CallbackThread, process: int) -> None:
    if os.getpid() == process:  # in a forked child, the loop's lock may be locked forever
        loop.stop(EngineClosedError("the engine is closed"))
        if refiner is not None:
            refiner.stop()
        callbacks.close()


class EncodedImage:
    """An image whose prefill stays in the KV cache of an engine for several requests; see `Engine.encode`.

    It occupies KV cache pages until `close`, the end of a `with` block, or garbage collection. Requests that were
    already submitted are still answered.

    Args:
        width: width of the image in pixels.
        height: height of the image in pixels.
        kept: KV cache pages of the image.
        adapter: LoRA adapter with which the image was encoded, or None.
        loop: step loop of the engine that encoded the image.
        picture: pixels of the image, from which outlines are refined, or None.

    Attributes:
        width: width of the image in pixels.
        height: height of the image in pixels.
        picture: pixels of the image, from which outlines are refined, or None.
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
        """Return the LoRA adapter with which the image was encoded, or None. All requests on the image must use it.

        Raises:
            ValueError: if another engine encoded the image.
            AdapterError: if another adapter is requested.
        """
        if loop is not self._loop:
            raise ValueError("this image was encoded by another engine; encode it with this engine")
        if asked not in (None, self._adapter):
            raise AdapterError("this image was encoded with another adapter; encode it again with this adapter")
        return self._adapter

    def close(self) -> None:
        """Free the KV cache pages of the image. Repeated calls have no effect."""
        closed, self._closed = self._closed, True
        if not closed and os.getpid() == self._process:  # in a forked child, the loop's lock may be locked forever
            self._loop.release_prefix(self.kept)

    def __enter__(self) -> EncodedImage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
