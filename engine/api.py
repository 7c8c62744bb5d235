"""The engine: images and tasks in, results out. One thread runs the steps; any thread may submit.

Knows nothing of sources, sinks or pipelines.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from saccade.engine.config import EngineConfig
from saccade.engine.core.streams import StreamSettings
from saccade.engine.encoded_image import EncodedImage
from saccade.engine.futures import ResultFuture
from saccade.engine.image import Image, LazyImage
from saccade.engine.model_loader import ModelInfo, open_model
from saccade.engine.models.protocol import DraftingEncoder, LoadedModel, ModelCosts, ModelLimits
from saccade.engine.results import Detections, Points, Result, Text
from saccade.engine.runtime.executor import Progress
from saccade.engine.runtime.trace import Trace
from saccade.engine.start import start
from saccade.engine.submitter import Submitter
from saccade.engine.tasks import Caption, CaptionLength, Detect, Point, Query
from saccade.engine.tasks.task import Task
from saccade.engine.text_stream import TextStream
from saccade.engine.vocabulary import Vocabulary


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
        self._loaded, self._vocabulary = loaded, vocabulary
        texts = bool({"query", "caption"} & {*info.skills})
        self._executor, self._loop = start(loaded.model, config, texts=texts, progress=progress)
        # An engine that is dropped ends its threads: the submitter does, once requests in flight are done.
        self._submitter = Submitter(loaded, info, vocabulary, config, self._executor, self._loop)

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
            progress: called with (done, of how many) while a GPU is prepared, which takes some seconds.

        Raises:
            UnknownModelError: if the name leads to no model.
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
        """Read a LoRA adapter, for `submit` and `stream` to name; the format is described in `backends.lora`.

        Raises:
            AdapterError: if the file cannot be read or does not fit the model, or there is one of this name.
        """
        self._submitter.adapters.load(name, Path(path), self._loaded.model.text, self.config.adapter_rank)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; what was submitted with it is still answered with it.

        Raises:
            AdapterError: if there is none of this name.
        """
        self._submitter.adapters.unload(name)

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
            previous: the result of an image that is nearly this one, by the same model. Of the same tasks its answers
                are checked instead of being written again: they come out the same as without it, see `drafts`.
                It is used in place of what the stream remembers.

        Returns:
            A future of the result. Cancelling it at any time before it is done drops the work.

        Raises:
            UnsupportedTaskError, UnknownClassError: if the model cannot do a task.
            AdapterError: if there is no such adapter.
            EngineClosedError: after `close`.
            ValueError: if the image is not what it should be, a task needs one, `tiles` is not 1 or more, or not 1 with
                an encoded image, `deadline_s` is no number, or `previous` no result.
            EngineError: in a forked child: threads and devices do not survive a fork.
        """
        return self._submitter.submit(image, tasks, tiles, deadline_s, adapter, None, stream, previous)

    def configure_stream(self, stream: Hashable, settings: StreamSettings) -> None:
        """Set how a stream shares the engine with others: its weight, its rate. At any time, also while it runs.

        Raises:
            ValueError: if `settings` are no `StreamSettings`.
        """
        self._submitter.configure_stream(stream, settings)

    def forget_stream(self, stream: Hashable) -> None:
        """Forget a stream's settings, and what was learned from its frames; what has been submitted is still run."""
        self._submitter.forget_stream(stream)

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
        return TextStream(self._submitter.submit(image, [task], 1, deadline_s, adapter, pieces.put), pieces)

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
        return self._submitter.encode(image, adapter)

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
            EngineError: unless the engine is idle and keeps no encoded images: it overwrites their pages. Likewise for
                the two that follow.
        """
        self._submitter.require_process()
        return self._loop.run_idle(lambda: self._executor.time_step(rows, position, repeats))

    def time_sampling(self, rows: int) -> float | None:
        """Seconds on a GPU's clock of a step's sampling; None on a CPU."""
        self._submitter.require_process()
        return self._loop.run_idle(lambda: self._executor.time_sampling(rows))

    def experts_used(self, rows: int) -> float | None:
        """Experts that the latest `time_step` of so many rows used, the mean of layers; None if not known."""
        self._submitter.require_process()
        return self._loop.run_idle(lambda: self._executor.experts_used(rows))

    def tracing(self) -> AbstractContextManager[Trace]:
        """Trace what happens in the block: `with engine.tracing() as trace: …`, then `trace.save("trace.json")`.

        Raises:
            RuntimeError: if this engine is being traced already.
        """
        return self._loop.monitor.tracing()

    def close(self) -> None:
        """Finish what has begun, fail what has not with EngineClosedError, and stop. Closing twice does nothing."""
        self._submitter.close()

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
        return self._submitter.expand(task)
