"""The engine: images and tasks in, results out. One thread runs the steps; any thread may submit.

`Engine.submit` makes a `Request` (`core.request`) of what is asked; the loop (`runtime.loop`) runs it, and settles its
future. Knows nothing of sources, sinks or pipelines.
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
"""Before any is measured. A 48-megapixel image takes 20 ns a pixel to cut on an idle server core, 40 on a busy one."""


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
            # On a GPU the resize is not waited for.
            CropPace(config, _CPU_SECONDS_PER_PIXEL if model.device.type == "cpu" else 0.0),
            loop.monitor.ended,
            # A branch takes a batch slot and one to three pages: most are left to other requests.
            min(config.max_sequences, loop.n_pages // 16) // 4,
            refine=None if self._refiner is None else self._refiner.put,
        )
        self._streams: dict[Hashable, StreamSettings] = {}
        self._expanded: dict[Task, tuple[Task, ...]] = {}  # as the frames of a stream ask the same again and again
        self._callbacks = CallbackThread()
        self._process = os.getpid()
        # An engine that is dropped ends its threads, once no request holds it any more.
        self._stop = weakref.finalize(self, _stop, loop, self._refiner, self._callbacks, self._process)

    @property
    def model(self) -> ModelInfo:
        """What runs, and how; steps that have run may have added to its fallbacks."""
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
            name: 'nano', a model folder, or a hub id (`owner/name`, or `owner/name@revision`).
            device: 'auto' (CUDA where there is one), 'cpu', 'cuda' or 'cuda:N'.
            dtype: 'float32', 'bfloat16', 'float16', or 'fp8': bfloat16 with the blocks' weights in FP8, which on a GPU
                from Hopper on is faster and a little less exact. By default float32 on a CPU; on a GPU float16 for
                small models, else bfloat16. On a CPU with products of bfloat16 nano's detector alone is in it, see
                `EngineConfig.exact`.
            revision: branch, tag or commit of a hub id; by default the newest.
            kv_dtype: 'fp8' keeps keys and values in FP8, on a GPU from Ada on, for more sequences and faster steps of
                many of them; by default as the model computes.
            imgsz: pixels of the longer side at which nano sees an image, a multiple of 32 from 128 to 1280; 416 by
                default. More finds what is smaller, in more time. For other models it is fixed.
            depth: 2 launches a step before the one ahead of it is read, 1 does not; the answers are the same. By
                default 2 on CUDA, and 1 on a CPU, where no device would be idle and each wasted step costs time.
            adapter_slots: most adapters in use at the same moment; what needs one more waits.
            adapter_rank: largest rank of an adapter. The slots take no memory before the first adapter is used.
            drafts: begin answers with what the model's detector finds, or those on a stream's last frame, see
                `EngineConfig`.
            refiner: file, or hub id, of a refiner that redraws the outlines of `Segment` from the image, such as
                'moondream/SegHeadRefiner'.
            progress: called with (done, of how many) while a GPU is prepared, which takes some seconds.

        Raises:
            UnknownModelError: if the name leads to no model, or `refiner` to no file.
            ModelFilesError: if its files cannot be read or do not fit each other.
            EngineError: if there is no such device, dtype or `kv_dtype`, if the device has none such, or if the model's
                `imgsz` is fixed.
            ValueError: if another argument is out of its range, see `EngineConfig`.
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
        """The names to ask this model for, given what a person typed ('people', 'truck or bus'); none twice.

        Raises:
            UnknownClassError: if the vocabulary is closed and a phrase means none of its names.
        """
        if self._vocabulary is None:
            return list(dict.fromkeys(label.strip() for label in labels))
        return self._vocabulary.resolve(labels)

    def load_adapter(self, name: str, path: Path | str) -> None:
        """Read a LoRA adapter, for `submit` and `stream` to name; the format is described in `models.lora`.

        Raises:
            AdapterError: if the file cannot be read or does not fit the model, or there is one of this name.
        """
        if name in self._adapters:
            raise AdapterError(f"there is an adapter '{name}' already: unload it first")
        self._adapters[name] = load_adapter(name, Path(path), self._loaded.model.text, self.config.adapter_rank)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; what was submitted with it is still answered with it.

        Raises:
            AdapterError: if there is none of this name.
        """
        del self._adapters[self._adapter(name).name]

    def _adapter(self, name: str) -> Adapter:
        """The adapter of a name; raises AdapterError if there is none."""
        adapter = self._adapters.get(name)
        if adapter is None:
            raise AdapterError(f"there is no adapter '{name}'; loaded: {', '.join(self._adapters) or 'none'}")
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

        With a `stream` the image is a frame, of which the newest counts: while it waits, the next one of the stream
        supersedes it, and its future fails with SupersededError. Nothing is done for a frame before its turn comes.
        Streams share the engine by their weights, see `configure_stream`.

        Args:
            image: (height, width, 3) uint8 RGB, or what gives it when its turn comes, which must not change until the
                future is done; or an encoded one; or None for questions that are about no image.
            tasks: what to ask; labels are resolved as by `resolve`.
            tiles: with n > 1, `Detect` tasks are asked of n × n overlapping windows as well: more small objects, at
                1 + n² times the work.
            deadline_s: after so many seconds from now the work is dropped, and the future fails with DeadlineError; at
                once if the image is so large that it cannot even be cut into crops until then.
            adapter: name of a loaded adapter to answer with; the image is prefilled with it, too.
            stream: what the frames of one camera have in common, anything hashable; None for an image by itself.
            previous: the result of an image that is nearly this one, by the same model. Of the same tasks its answers
                are checked instead of being written again: they come out the same, see `core.speculative`.
                It is used in place of what the stream remembers.
            windows: `Detect` tasks are asked of these parts of the image as well, each at the cost of an image; what is
                found there and in the whole image becomes one list. A GPU prefills them with the image in one step.

        Returns:
            A future of the result. Cancelling it at any time before it is done drops the work.

        Raises:
            UnsupportedTaskError, UnknownClassError: if the model cannot do a task.
            AdapterError: if there is no such adapter.
            EngineClosedError: after `close`.
            ValueError: if the image is not what it should be, a task needs one, `tiles` is not 1 or more, or there
                are tiles or windows of an encoded image, `deadline_s` is no number, or `previous` no result.
            EngineError: in a forked child: threads and devices do not survive a fork.
        """
        return self._submit(image, tasks, tiles, deadline_s, adapter, stream, previous, windows=windows)

    def input_size(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows of pixels in which the model sees a `width` × `height` image: smaller details are lost."""
        vision = self._loaded.model.vision
        rows, columns = vision.tiling_of(height, width)
        if rows * columns > 1:
            return columns * vision.crop_size, rows * vision.crop_size
        _, rows, columns, _ = vision.make_crops(np.zeros((height, width, 3), np.uint8)).pixels.shape
        return columns, rows

    def configure_stream(self, stream: Hashable, settings: StreamSettings) -> None:
        """Set how a stream shares the engine with others: its weight, its rate. At any time, also while it runs.

        Raises:
            ValueError: if `settings` are no `StreamSettings`.
        """
        if not isinstance(settings, StreamSettings):  # in the loop's thread they would end the engine for all
            raise ValueError(f"settings are StreamSettings; got {settings!r}")
        self._streams[stream] = settings
        self._loop.configure(stream, settings)

    def forget_stream(self, stream: Hashable) -> None:
        """Forget a stream's settings, and what was learned from its frames; what has been submitted is still run."""
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
        """Queue a question, a caption or an outline, and get it piece by piece while it is written; see `Segment`.

        The pieces joined are the text that `submit` gives. The rest is as for `submit`.

        Returns:
            An iterator of pieces, none of them empty. Closing or dropping it early drops the work; what goes
            wrong after `stream` has returned is raised by the iterator.
        """
        pieces: SimpleQueue[str | None] = SimpleQueue()
        return TextStream(self._submit(image, [task], 1, deadline_s, adapter, on_text=pieces.put), pieces)

    def encode(self, image: Image, *, adapter: str | None = None) -> EncodedImage:
        """Prefill an image once, to ask about it again and again without doing so each time. Waits for it.

        Args:
            image: (height, width, 3) uint8 RGB.
            adapter: name of a loaded adapter, with which it is prefilled and all that is asked of it is answered.

        Returns:
            What `submit` and the others take for an image. It holds pages of the cache until it is closed or dropped.

        Raises:
            RequestTooLargeError: if encoded images hold half of the cache already.
            AdapterError, EngineClosedError, ValueError, EngineError: as for `submit`.
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
        """Boxes of everything that `label` means ('person', 'people', 'truck or bus'). Waits for the answer."""
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
        """Centre points of everything that `label` means, among `refs` if there are any. Waits for the answer."""
        tasks = [Point(name, max_objects, conf, tuple(refs)) for name in self.resolve([label])]
        return self.submit(image, tasks).result().points

    def segment(self, image: Image | EncodedImage, object: str, refs: Sequence[Ref] = (), **options: Any) -> Outline:
        """The outline of one object; `options` are those of `Segment`: grammar, max_tokens, … Waits for it."""
        return self.submit(image, [Segment(object, tuple(refs), **options)]).result().segments[0]

    def query(self, image: Image | EncodedImage | None, question: str, max_tokens: int = 768, **options: Any) -> Text:
        """The answer to a question; `options` are those of `Query`: choices, reasoning, refs, … Waits for it."""
        return self.submit(image, [Query(question, max_tokens, **options)]).result().texts[0]

    def caption(self, image: Image | EncodedImage, length: CaptionLength = "normal", max_tokens: int = 768) -> Text:
        """A description. Waits for it."""
        return self.submit(image, [Caption(length, max_tokens)]).result().texts[0]

    def counters(self) -> dict[str, float]:
        """Counters of the engine, at any time: steps, sequences and requests, what waits, pages, slots, bubble.

        Those that only ever grow end in `_total`. `bubble` is the share of time in which work left the GPU idle.
        """
        kept = {"tasks_known": len(self._expanded), "cuda_graphs": self._executor.n_graphs}
        return {**self._loop.counters(), **kept}

    @property
    def idle_s(self) -> float:
        """Seconds in which it had no work, since it was loaded; `counters` would start the timing of steps."""
        return self._loop.monitor.idle_s

    def prompt_tokens(self, task: Task) -> int:
        """How many tokens a task's prompt has with the image before it; raises UnsupportedTaskError as `submit`."""
        self.expand(task)
        return self.limits.prefix_length + len(task.prompt(self._loaded.prompts))

    @property
    def limits(self) -> ModelLimits:
        """The model's sizes."""
        return self._loaded.model.limits

    def run_idle(self, work: Callable[[Executor[Any]], T]) -> T:
        """Run work with the executor while no step is in flight, for benchmarks; returns what it returns.

        Raises:
            EngineError: unless the engine is idle and keeps no encoded images, whose pages the work may write over.
        """
        self._require_process()
        return self._loop.run_idle(lambda: work(self._executor))

    def tracing(self) -> AbstractContextManager[Trace]:
        """Trace what happens in the block: `with engine.tracing() as trace: …`, then `trace.save("trace.json")`.

        Raises:
            RuntimeError: if this engine is being traced already.
        """
        return self._loop.monitor.tracing()

    def close(self) -> None:
        """Finish what has begun, fail what has not with EngineClosedError, and stop. Closing twice does nothing."""
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
        """The task in the model's own names: one, or several for a label such as 'truck or bus'.

        Raises:
            UnsupportedTaskError: if the model has not learned it.
            UnknownClassError: if the vocabulary is closed and has no such name.
        """
        if not isinstance(task, Task):
            raise ValueError(f"a task is one of Detect, Point, Gaze, Segment, Query, Caption; got {task!r}")
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
        """Make a request, and queue it; see `submit`, `stream` and `encode`."""
        self._require_process()
        self._loop.require_open()  # before the image is cut, which may take a second
        deadline = math.inf if deadline_s is None else time.monotonic() + deadline_s
        if math.isnan(deadline):
            raise ValueError("deadline_s is a number of seconds")
        if previous is not None and not isinstance(previous, Result):
            raise ValueError(f"previous is the result of an earlier image; got {type(previous).__name__}")
        chosen = None if adapter is None else self._adapter(adapter)
        expanded = tuple([one for task in tasks for one in self.expand(task)])
        if not isinstance(tiles, int) or tiles < 1:
            raise ValueError(f"tiles is a whole number of 1 or more; got {tiles!r}")
        reads: KeptPrefix | None = None
        pixels: Pixels | LazyImage | None = None
        size = 0, 0
        if isinstance(image, EncodedImage):
            if tiles != 1 or windows:
                raise ValueError("an encoded image has no tiles and no windows: submit the image itself")
            chosen, reads, size = image.adapter_for(self._loop, chosen), image.kept, (image.width, image.height)
        elif image is None:
            if lacking := next((task.asked for task in expanded if task.needs_image), None):
                raise ValueError(f"'{lacking}' can only be asked of an image")
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
        """The thread of a refiner.

        Raises:
            EngineError: if the model takes none.
            UnknownModelError, ModelFilesError: if there is none of this name, or it does not fit the model.
        """
        loaded, encoder = self._loaded, self._executor.encoder
        try:
            if loaded.load_refiner is None or not isinstance(encoder, DeepEncoder):
                raise EngineError(f"{self._info.name} takes no refiner, which is for Moondream 3")
            refiner = loaded.load_refiner(find_refiner(name))
            model = loaded.model
            return RefineThread(refiner, model.vision, encoder, model.device, self._executor.fallbacks)
        except BaseException:
            self._loop.close(EngineClosedError("the engine is closed"))
            raise

    def _cancel(self, request: Request[Any]) -> None:
        """A caller has cancelled a request."""
        if os.getpid() == self._process:  # else it is a stream that a forked child has inherited: see `_stop`
            self._loop.monitor.ended("cancelled")
            self._loop.cancel(request, CancelledError())

    def _require_process(self) -> None:
        """Do nothing in the process that has made this engine.

        Raises:
            EngineError: in a forked child: threads and devices do not survive a fork.
        """
        if os.getpid() != self._process:
            raise EngineError("this engine was made before a fork: load one in the child process")


def _part_of(image: Pixels, window: Window) -> Pixels:
    """What is in a window of an image: a copy; of a decoder's planes no copy, from even pixels on."""
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
    """An image whose prefix stays in an engine's cache, to be asked about again and again, see `Engine.encode`.

    It holds pages of the cache until it is closed: by `close`, by leaving a `with`, or when it is dropped. What is
    asked already is still answered then.

    Args:
        width, height: of the image in pixels.
        kept: its prefix.
        adapter: what that was computed with besides the model.
        loop: where it is kept.
        picture: its pixels, where outlines are refined.

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
        """The adapter that it was prefilled with, and is asked with.

        Raises:
            ValueError: if it is kept by another loop.
            AdapterError: if another adapter is asked for.
        """
        if loop is not self._loop:
            raise ValueError("this image was encoded by another engine")
        if asked not in (None, self._adapter):
            raise AdapterError("an encoded image is asked with the adapter that it was encoded with")
        return self._adapter

    def close(self) -> None:
        """Give its pages back. Closing twice does nothing."""
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
