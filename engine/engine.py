"""The engine: images and tasks in, results out. One thread runs the steps; any thread may submit.

Knows nothing of sources, sinks or pipelines.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from saccade.engine.backends.lora import LoadedAdapters
from saccade.engine.config import EngineConfig
from saccade.engine.encoded_image import EncodedImage, source_of
from saccade.engine.errors import DeadlineError, EngineClosedError, EngineError, PromptError, UnsupportedTaskError
from saccade.engine.image import Image, LazyImage, as_array
from saccade.engine.model_loader import ModelInfo, open_model
from saccade.engine.models.protocol import LoadedModel, ModelCosts, ModelLimits
from saccade.engine.result_future import CallbackThread, ResultFuture
from saccade.engine.results import Detections, Points, Text
from saccade.engine.runtime.executor import Progress
from saccade.engine.runtime.monitor import Outcome
from saccade.engine.runtime.step_loop import StepLoop
from saccade.engine.runtime.trace import Trace
from saccade.engine.scheduling.admission import StreamSettings
from saccade.engine.scheduling.crop_pace import CPU_SECONDS_PER_PIXEL, CropPace
from saccade.engine.scheduling.request import Request, RequestMaker
from saccade.engine.scheduling.task import OnText, Task
from saccade.engine.start import start
from saccade.engine.tasks import Caption, CaptionLength, Detect, Point, Query
from saccade.engine.text_stream import TextStream
from saccade.engine.vocabulary import Vocabulary

_NEWEST = StreamSettings()


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
        model = loaded.model
        self.model = info
        self.config = config = config or EngineConfig()
        self._loaded, self._vocabulary = loaded, vocabulary
        texts = bool({"query", "caption"} & {*info.skills})
        executor, self._loop = start(model, config, texts=texts, progress=progress)
        self._executor = executor
        self._adapters = LoadedAdapters()
        # On a GPU the resize is not waited for.
        pace = CropPace(CPU_SECONDS_PER_PIXEL if model.device.type == "cpu" else 0.0)
        self._maker: RequestMaker[Any] = RequestMaker(
            model.limits, loaded.prompts, lambda image: executor.prepare(image), pace, config.max_sequences
        )
        self._streams: dict[Hashable, StreamSettings] = {}
        self._callbacks = CallbackThread()
        self._process = os.getpid()
        # An engine that is dropped ends its threads; requests in flight keep it until they are done.
        self._stop = weakref.finalize(self, _stop, self._loop, self._callbacks, self._process)

    @classmethod
    def load(
        cls,
        name: str = "nano",
        device: str = "auto",
        dtype: str | None = None,
        *,
        revision: str | None = None,
        depth: int | None = None,
        adapter_slots: int = 4,
        adapter_rank: int = 32,
        drafts: bool | None = None,
        progress: Progress | None = None,
    ) -> Engine:
        """Load a model.

        Args:
            name: 'nano', a model folder, or a hub id (`owner/name`, or `owner/name@revision`).
            device: 'auto' (CUDA where there is one), 'cpu', 'cuda' or 'cuda:N'.
            dtype: 'float32', 'bfloat16', 'float16', or 'fp8': bfloat16 with the blocks' weights in FP8, which on a GPU
                from Hopper on is faster and a little less exact. By default float32 on a CPU and for small models,
                else bfloat16; nano's detector alone is bfloat16 on a CPU with products of it, see `EngineConfig.exact`.
            revision: branch, tag or commit of a hub id; by default the newest.
            depth: 2 launches a step before the one ahead of it is read, 1 does not; the answers are the same. By
                default 2 on CUDA, and 1 on a CPU, where no device would be idle and each wasted step costs time.
            adapter_slots: most adapters in use at the same moment; what needs one more waits.
            adapter_rank: largest rank of an adapter. The slots take no memory before the first adapter is used.
            drafts: begin a stream's answers with those on its last frame; by default on a CPU only, see `EngineConfig`.
            progress: called with (done, of how many) while a GPU is prepared, which takes some seconds.

        Raises:
            UnknownModelError: if the name leads to no model.
            ModelFilesError: if its files cannot be read or do not fit each other.
            EngineError: if there is no such device or dtype.
            ValueError: if another argument is out of its range, see `EngineConfig`.
        """
        loaded, info, vocabulary = open_model(f"{name}@{revision}" if revision else name, device, dtype)
        cuda = loaded.model.device.type == "cuda"
        depth, drafts = (1 + cuda if depth is None else depth), (not cuda if drafts is None else drafts)
        config = EngineConfig(
            depth, adapter_slots=adapter_slots, adapter_rank=adapter_rank, drafts=drafts, exact=dtype is not None
        )
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
        """Read a LoRA adapter, for `submit` and `stream` to name; the format is described in `backends.lora`.

        Raises:
            AdapterError: if the file cannot be read or does not fit the model, or there is one of this name.
        """
        self._adapters.load(name, Path(path), self._loaded.model.text, self.config.adapter_rank)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; what was submitted with it is still answered with it.

        Raises:
            AdapterError: if there is none of this name.
        """
        self._adapters.unload(name)

    def submit(
        self,
        image: Image | LazyImage | EncodedImage | None,
        tasks: Sequence[Task],
        tiles: int = 1,
        *,
        deadline_s: float | None = None,
        adapter: str | None = None,
        stream: Hashable = None,
    ) -> ResultFuture:
        """Queue tasks on an image; all of them share its prefill.

        With a `stream` the image is a frame, of which the newest counts: while it waits, the next one of the stream
        takes its place, and its future fails with SupersededError. Nothing is done for a frame before its turn comes.
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

        Returns:
            A future of the result. Cancelling it at any time before it is done drops the work.

        Raises:
            UnsupportedTaskError, UnknownClassError: if the model cannot do a task.
            AdapterError: if there is no such adapter.
            EngineClosedError: after `close`.
            ValueError: if the image is not what it should be, a task needs one, `tiles` is not 1 or more, or not 1 with
                an encoded image, or `deadline_s` is no number.
            EngineError: in a forked child: threads and devices do not survive a fork.
        """
        return self._begin(image, tasks, tiles, deadline_s, adapter, stream=stream)

    def configure_stream(self, stream: Hashable, settings: StreamSettings) -> None:
        """Set how a stream shares the engine with others: its weight, its rate. At any time, also while it runs."""
        self._streams[stream] = settings
        self._loop.configure(stream, settings)

    def forget_stream(self, stream: Hashable) -> None:
        """Forget a stream's settings, and what was learned from its frames; what has been submitted is still run."""
        self._streams.pop(stream, None)
        self._loop.configure(stream, None)

    def stream(
        self,
        image: Image | EncodedImage | None,
        task: Query | Caption,
        *,
        deadline_s: float | None = None,
        adapter: str | None = None,
    ) -> TextStream:
        """Queue a question or a caption, and get its text piece by piece while it is written.

        The pieces joined are the text that `submit` gives. The rest is as for `submit`.

        Returns:
            An iterator of pieces, none of them empty. Closing or dropping it early drops the work; what goes
            wrong after `stream` has returned is raised by the iterator.
        """
        pieces: SimpleQueue[str | None] = SimpleQueue()
        return TextStream(self._begin(image, [task], 1, deadline_s, adapter, pieces.put), pieces)

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
        self._require_process()
        array, chosen = as_array(image), None if adapter is None else self._adapters.find(adapter)
        kept = self._loop.keep_prefix(self._executor.prepare(array), chosen)
        return EncodedImage(array.shape[1], array.shape[0], kept, chosen, self._loop)

    def detect(
        self, image: Image | EncodedImage, label: str, max_objects: int = 50, conf: float = 0.5, tiles: int = 1
    ) -> Detections:
        """Boxes of everything that `label` means ('person', 'people', 'truck or bus'). Waits for the answer."""
        names = self.resolve([label])
        return self.submit(image, [Detect(name, max_objects, conf) for name in names], tiles).result().detections

    def point(self, image: Image | EncodedImage, label: str, max_objects: int = 50, conf: float = 0.5) -> Points:
        """Centre points of everything that `label` means. Waits for the answer."""
        tasks = [Point(name, max_objects, conf) for name in self.resolve([label])]
        return self.submit(image, tasks).result().points

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
        return self._loop.counters()

    def prompt_tokens(self, task: Task) -> int:
        """How many tokens a task's prompt has with the image before it; raises UnsupportedTaskError as `submit`."""
        self.expand(task)
        return self.limits.prefix_length + len(task.prompt(self._loaded.prompts))

    @property
    def limits(self) -> ModelLimits:
        """The model's sizes."""
        return self._loaded.model.limits

    @property
    def costs(self) -> ModelCosts:
        """What the model's steps cost at least, for benchmarks."""
        return self._loaded.costs

    def time_step(self, rows: int, position: int, repeats: int = 100) -> list[float] | None:
        """Seconds on a GPU's clock of decode steps of `rows` sequences at `position`; None on a CPU, which has none.

        Raises:
            EngineError: unless the engine is idle: it overwrites page tables. Likewise for the two that follow.
        """
        self._require_process()
        return self._loop.run_idle(lambda: self._executor.time_step(rows, position, repeats))

    def time_sampling(self, rows: int) -> float | None:
        """Seconds on a GPU's clock of a step's sampling; None on a CPU."""
        self._require_process()
        return self._loop.run_idle(lambda: self._executor.time_sampling(rows))

    def experts_used(self, rows: int) -> float | None:
        """Experts that the latest `time_step` of so many rows used, the mean of layers; None if not known."""
        self._require_process()
        return self._loop.run_idle(lambda: self._executor.experts_used(rows))

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
            self._stop()  # only now: what the loop still finishes has callbacks, too

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(
        self,
        image: Image | LazyImage | EncodedImage | None,
        tasks: Sequence[Task],
        tiles: int,
        deadline_s: float | None,
        adapter: str | None,
        on_text: OnText | None = None,
        stream: Hashable = None,
    ) -> ResultFuture:
        self._require_process()
        self._loop.require_open()  # before the image is cut, which may take a second
        deadline = math.inf if deadline_s is None else time.monotonic() + deadline_s
        if math.isnan(deadline):
            raise ValueError("deadline_s is a number of seconds")
        chosen = None if adapter is None else self._adapters.find(adapter)
        expanded = [one for task in tasks for one in self.expand(task)]
        source = source_of(image, self._loop, chosen, expanded, tiles)
        future = ResultFuture(self._callbacks)
        request: Request[Any] = Request(
            source.image,
            expanded,
            tiles,
            self._maker,
            future,
            prefix=source.prefix,
            size=source.size,
            adapter=source.adapter,
            deadline=deadline,
            on_text=on_text,
            on_over=lambda outcome: self._over(request, future, outcome),
        )
        newest = stream is not None and self._streams.get(stream, _NEWEST).newest
        # As `on_over`, it holds the engine, which is dropped with the last of its requests at the earliest.
        future.on_cancel = lambda: self._drop(request, "cancelled")
        if newest:
            self._loop.submit(request, stream)
            return future
        try:
            request.plan()
            request.prepare()
        except (PromptError, DeadlineError) as error:
            future.on_cancel = None
            self._loop.monitor.ended("failed")
            future.set_exception(error.with_traceback(None))  # whose frames would keep the image
            return future
        # At once: when the first of them is refused, all of them are cancelled, and none may arrive after that.
        self._loop.add(*request.image_requests, stream=stream)
        return future

    def _require_process(self) -> None:
        if os.getpid() != self._process:
            raise EngineError("this engine was made before a fork: load one in the child process")

    def _over(self, request: Request[Any], future: ResultFuture, outcome: Outcome) -> None:
        """A request is done or has failed: forget it, and drop what is left of it."""
        future.on_cancel = None
        self._drop(request, outcome)

    def _drop(self, request: Request[Any], outcome: Outcome) -> None:
        if os.getpid() != self._process:  # a stream that a forked child has inherited: see `_stop`
            return
        self._loop.monitor.ended(outcome)
        if outcome in ("failed", "cancelled"):
            self._loop.withdraw(request, CancelledError())
            for image_request in request.image_requests:
                self._loop.cancel(image_request, CancelledError())

    def expand(self, task: Task) -> Sequence[Task]:
        """The task in the model's own names: one, or several for a label such as 'truck or bus'.

        Raises:
            UnsupportedTaskError: if the model has not learned it.
            UnknownClassError: if the vocabulary is closed and has no such name.
        """
        if not isinstance(task, Task):
            raise ValueError(f"a task is one of Detect, Point, Gaze, Query, Caption; got {task!r}")
        if task.skill not in self.model.skills:
            able = f"{self.model.name} can {' and '.join(self.model.skills)}"
            raise UnsupportedTaskError(f"{able}, not {task.skill}; load a Moondream checkpoint for that")
        return task.expand(self._vocabulary)


def _stop(loop: StepLoop[Any], callbacks: CallbackThread, process: int) -> None:
    if os.getpid() == process:  # in a forked child another thread may have held the loop's lock for ever
        loop.stop(EngineClosedError("the engine is closed"))
        callbacks.close()
