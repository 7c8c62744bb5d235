"""The engine's face: pictures and tasks in, results out. One thread runs the steps; any thread may submit.

Knows nothing of sources, sinks or pipelines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from saccade.engine.backends.lora import load_adapter
from saccade.engine.backends.paged_cache import pages_for
from saccade.engine.errors import AdapterError, EngineClosedError, PromptError, UnsupportedTaskError
from saccade.engine.model_loader import SKILLS, ModelInfo, Progress, open_model
from saccade.engine.models.moondream.config import MoondreamConfig
from saccade.engine.models.moondream.model import Moondream
from saccade.engine.models.moondream.prompts import Prompts
from saccade.engine.results import Detections, Points, Result, Text
from saccade.engine.runtime.cpu_executor import Crops, Executor
from saccade.engine.runtime.monitor import Outcome
from saccade.engine.runtime.step_loop import StepLoop
from saccade.engine.runtime.trace import Trace
from saccade.engine.scheduling.adapter_slots import Adapter
from saccade.engine.scheduling.page_pool import PagePool
from saccade.engine.scheduling.request import Request
from saccade.engine.scheduling.scheduler import Scheduler
from saccade.engine.tasks import Caption, CaptionLength, Detect, Point, Query, Task
from saccade.engine.text_stream import TextStream
from saccade.engine.vocabulary import Vocabulary

Image = NDArray[np.uint8] | torch.Tensor
"""A picture: (height, width, 3) uint8 RGB, array or tensor."""

N_LANES = 64  # most prompts being answered at a time
PAGE_SIZE = 16  # tokens of a page of the cache


class Engine:
    """A loaded model and the thread that runs it. Use as a context manager, or call `close`."""

    def __init__(
        self,
        model: Moondream,
        prompts: Prompts,
        info: ModelInfo,
        vocabulary: Vocabulary | None,
        *,
        depth: int = 2,
        n_pages: int | None = None,
        adapter_slots: int = 4,
        adapter_rank: int = 32,
        progress: Progress | None = None,
    ) -> None:
        self.model = info
        self._config = model.config
        self._prompts = prompts
        self._vocabulary = vocabulary
        n_pages = n_pages or pages_for(model, PAGE_SIZE)
        executor: Any
        if model.device.type == "cuda":
            from saccade.engine.runtime.cuda_executor import GraphExecutor

            executor = GraphExecutor(
                model,
                depth,
                N_LANES,
                n_pages,
                PAGE_SIZE,
                adapter_slots,
                adapter_rank,
                texts=bool({"query", "caption"} & {*info.skills}),
                progress=progress,
            )
        else:
            executor = Executor(model, depth, N_LANES, n_pages, PAGE_SIZE, adapter_slots, adapter_rank)
        self._executor = executor
        self._prepare = executor.prepare
        pool = PagePool(n_pages)
        pool.take(1)  # page 0 is where the executor writes what nobody reads
        together = 8 if model.device.type == "cuda" else 1  # on a CPU a batch of pictures is no faster than one by one
        scheduler: Scheduler[Crops] = Scheduler(
            pool, PAGE_SIZE, model.config.text.prefix_attn, N_LANES, together, adapter_slots
        )
        self._text, self._adapter_rank = model.text, adapter_rank
        self._adapters: dict[str, Adapter] = {}
        self._loop = StepLoop(executor, scheduler, depth)
        self._loop.monitor.attach(executor.streams)

    @classmethod
    def load(
        cls,
        name: str = "nano",
        device: str = "auto",
        dtype: str | None = None,
        *,
        depth: int | None = None,
        adapter_slots: int = 4,
        adapter_rank: int = 32,
        progress: Progress | None = None,
    ) -> Engine:
        """Load a model.

        Args:
            name: 'nano', a model folder, or a hub id.
            device: 'auto' (CUDA where there is one), 'cpu', 'cuda' or 'cuda:N'.
            dtype: 'float32', 'bfloat16', 'float16', or 'fp8': bfloat16 with the blocks' weights in FP8, which on a GPU
                from Hopper on is faster and a little less exact. By default float32 on a CPU and for small models,
                else bfloat16.
            depth: 2 launches a step before the one before it is read, 1 does not; the answers are the same. By default
                2 on CUDA, and 1 on a CPU, which has no idle device to gain and pays for each step that goes to waste.
            adapter_slots: most adapters in use at the same moment; what needs one more waits.
            adapter_rank: largest rank of an adapter. The slots take no memory before the first adapter is used.
            progress: told (done, of how many) while a GPU is prepared, which takes some seconds.

        Raises:
            UnknownModelError: if the name leads to no model.
            ModelFilesError: if its files cannot be read or do not fit each other.
            EngineError: if there is no such device or dtype.
        """
        model, prompts, info, vocabulary = open_model(name, device, dtype)
        return cls(
            model,
            prompts,
            info,
            vocabulary,
            depth=depth or (2 if model.device.type == "cuda" else 1),
            adapter_slots=adapter_slots,
            adapter_rank=adapter_rank,
            progress=progress,
        )

    def resolve(self, labels: Iterable[str]) -> list[str]:
        """The names to ask this model for, given what a person typed ('people', 'truck or bus'); none twice.

        Raises:
            UnknownClassError: if the vocabulary is closed and a phrase means none of its names.
        """
        if self._vocabulary is None:
            return list(dict.fromkeys(label.strip() for label in labels))
        return self._vocabulary.resolve(labels)

    def load_adapter(self, name: str, path: Path | str) -> None:
        """Read a LoRA adapter, for `submit` and `stream` to name; what its file holds is said in `backends.lora`.

        Raises:
            AdapterError: if the file cannot be read or does not fit the model, or there is one of this name.
        """
        if name in self._adapters:
            raise AdapterError(f"there is an adapter '{name}' already: unload it first")
        self._adapters[name] = load_adapter(name, Path(path), self._text, self._adapter_rank)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; what was submitted with it is still answered with it.

        Raises:
            AdapterError: if there is none of this name.
        """
        del self._adapters[self._known_adapter(name).name]

    def submit(
        self,
        image: Image,
        tasks: Sequence[Task],
        tiles: int = 1,
        *,
        deadline_s: float | None = None,
        adapter: str | None = None,
    ) -> Future[Result]:
        """Queue tasks on a picture; all of them share one look at it.

        Args:
            image: (height, width, 3) uint8 RGB. It must not change until the future is done.
            tasks: what to ask; labels are understood as `resolve` does.
            tiles: with n > 1, `Detect` tasks look at n × n overlapping windows as well: more small objects, at
                1 + n² times the work.
            deadline_s: after so many seconds from now the work is dropped, and the future fails with DeadlineError.
            adapter: name of a loaded adapter to answer with; the picture is read with it, too.

        Returns:
            A future of the result. Cancelling it at any time before it is done drops the work.

        Raises:
            UnsupportedTaskError, UnknownClassError: if the model cannot do a task.
            AdapterError: if there is no such adapter.
            EngineClosedError: after `close`.
            ValueError: if the picture is not what it should be, `tiles` is not 1 or more, or `deadline_s` is no number.
        """
        return self._begin(image, tasks, tiles, deadline_s, adapter)

    def stream(
        self, image: Image, task: Query | Caption, *, deadline_s: float | None = None, adapter: str | None = None
    ) -> TextStream:
        """Queue a question or a caption, and get its text piece by piece while it is written.

        The pieces joined are the text that `submit` gives. `submit` says what else there is to know.

        Returns:
            An iterator of pieces, none of them empty. Closing it early, or letting go of it, drops the work; what goes
            wrong after `stream` has returned is raised by the iterator.
        """
        pieces: SimpleQueue[str | None] = SimpleQueue()
        return TextStream(self._begin(image, [task], 1, deadline_s, adapter, pieces.put), pieces)

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

    def counters(self) -> dict[str, float]:
        """How the engine is doing: steps, rows and requests so far, what waits, pages, lanes, bubble; at any time.

        Those that only ever grow end in `_total`. `bubble` is the share of the time with work that the compute stream
        had nothing to do; it is counted from the first call on.
        """
        return self._loop.counters()

    @property
    def config(self) -> MoondreamConfig:
        """The model's shape."""
        return self._config

    def time_step(self, rows: int, position: int, repeats: int = 100) -> list[float] | None:
        """Seconds of a GPU's clock of decode steps of `rows` sequences at `position`; None on a CPU, which has none.

        To be asked while there is no work.
        """
        timed = getattr(self._executor, "time_step", None)
        return None if timed is None else list(timed(rows, position, repeats))

    def time_sampling(self, rows: int) -> float | None:
        """See `StepLoop.time_sampling`."""
        return self._loop.time_sampling(rows)

    def tracing(self) -> AbstractContextManager[Trace]:
        """Trace what happens in the block: `with engine.tracing() as trace: …`, then `trace.save("trace.json")`.

        Raises:
            RuntimeError: if somebody else traces this engine.
        """
        return self._loop.monitor.tracing()

    def close(self) -> None:
        """Finish what has begun, fail what has not with EngineClosedError, and stop. Closing twice does nothing."""
        self._loop.close(EngineClosedError("the engine is closed"))

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(
        self,
        image: Image,
        tasks: Sequence[Task],
        tiles: int,
        deadline_s: float | None,
        adapter: str | None,
        on_text: Callable[[str], None] | None = None,
    ) -> Future[Result]:
        deadline = math.inf if deadline_s is None else time.monotonic() + deadline_s
        if tiles < 1:
            raise ValueError(f"tiles is 1 or more; got {tiles}")
        if math.isnan(deadline):
            raise ValueError("deadline_s is a number of seconds")
        chosen = None if adapter is None else self._known_adapter(adapter)
        array = _as_array(image)
        understood = [one for task in tasks for one in self._understand(task)]
        try:
            request = Request(
                array,
                understood,
                tiles,
                self._config,
                self._prompts,
                self._prepare,
                N_LANES,
                adapter=chosen,
                deadline=deadline,
                on_text=on_text,
            )
        except PromptError as error:
            failed: Future[Result] = Future()
            failed.set_exception(error)
            return failed
        for look in request.looks:
            self._loop.add(look)
        request.future.add_done_callback(lambda future: self._ended(request, future))
        return request.future

    def _known_adapter(self, name: str) -> Adapter:
        adapter = self._adapters.get(name)
        if adapter is None:
            known = ", ".join(self._adapters) or "none"
            raise AdapterError(f"there is no adapter '{name}'; loaded: {known}")
        return adapter

    def _understand(self, task: Task) -> list[Task]:
        """The task in the model's own names: one, or several for a label such as 'truck or bus'."""
        skill = SKILLS[type(task)]
        if skill not in self.model.skills:
            able = " and ".join(self.model.skills)
            raise UnsupportedTaskError(
                f"{self.model.name} can {able}, not {skill}; load a Moondream checkpoint for that"
            )
        if self._vocabulary is None or isinstance(task, Query | Caption):
            return [task]
        return [replace(task, label=name) for name in self._vocabulary.resolve([task.label])]

    def _ended(self, request: Request, future: Future[Result]) -> None:
        how: Outcome = "cancelled" if future.cancelled() else "failed" if future.exception() else "done"
        self._loop.monitor.ended(how)
        if how != "done":
            for look in request.looks:
                self._loop.cancel(look, CancelledError())


def _as_array(image: Image) -> NDArray[np.uint8]:
    if isinstance(image, torch.Tensor) and image.dtype != torch.uint8:
        raise ValueError(f"a picture is (height, width, 3) uint8 RGB; got {tuple(image.shape)} {image.dtype}")
    array = image.numpy(force=True) if isinstance(image, torch.Tensor) else np.asarray(image)
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or 0 in array.shape:
        raise ValueError(f"a picture is (height, width, 3) uint8 RGB; got {array.shape} {array.dtype}")
    return np.ascontiguousarray(array)
