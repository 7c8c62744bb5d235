"""From what a caller asks to requests in the step loop, and from there to their futures. Any thread may submit.

Holds what requests need until they are over: the loop, the callbacks' thread, adapters and streams. Knows how a task
becomes a request; knows nothing of how the loop runs it.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections.abc import Hashable, Sequence
from concurrent.futures import CancelledError
from typing import Any

from saccade.engine.backends.lora import LoadedAdapters
from saccade.engine.config import EngineConfig
from saccade.engine.core.crop_pace import CPU_SECONDS_PER_PIXEL, CropPace
from saccade.engine.core.request import Request, RequestMaker
from saccade.engine.core.streams import StreamSettings
from saccade.engine.encoded_image import EncodedImage, source_of
from saccade.engine.errors import DeadlineError, EngineClosedError, EngineError, PromptError, UnsupportedTaskError
from saccade.engine.futures import CallbackThread, ResultFuture
from saccade.engine.image import Image, LazyImage, as_array
from saccade.engine.model_loader import ModelInfo
from saccade.engine.models.protocol import LoadedModel
from saccade.engine.results import Result
from saccade.engine.runtime.executor import Executor
from saccade.engine.runtime.loop import StepLoop
from saccade.engine.runtime.monitor import Outcome
from saccade.engine.tasks.task import OnText, Task
from saccade.engine.vocabulary import Vocabulary

_NEWEST = StreamSettings()
_MOST_KNOWN = 1024  # tasks whose names in the model's vocabulary are remembered


class Submitter:
    """Makes requests of tasks, and queues them.

    Once it is dropped, the loop ends: its owner holds it, and so does each request until it is over.

    Args:
        loaded: the model.
        info: its description.
        vocabulary: its names, if they are a closed list.
        config: the engine's sizes.
        executor: cuts images.
        loop: runs requests.

    Attributes:
        adapters: those that requests may name.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        info: ModelInfo,
        vocabulary: Vocabulary | None,
        config: EngineConfig,
        executor: Executor[Any],
        loop: StepLoop[Any],
    ) -> None:
        model = loaded.model
        self._info, self._vocabulary = info, vocabulary
        self._executor, self._loop = executor, loop
        self.adapters = LoadedAdapters()
        # On a GPU the resize is not waited for.
        pace = CropPace(CPU_SECONDS_PER_PIXEL if model.device.type == "cpu" else 0.0)
        self._maker: RequestMaker[Any] = RequestMaker(
            model.limits,
            loaded.prompts,
            lambda image: executor.prepare(image),
            pace,
            config.max_sequences,
            # A branch takes a batch slot and one to three pages: most are left to other requests.
            min(config.max_sequences, loop.n_pages // 16) // 4,
            config.drafts,
        )
        self._streams: dict[Hashable, StreamSettings] = {}
        self._expanded: dict[Task, Sequence[Task]] = {}  # as the frames of a stream ask the same again and again
        self._callbacks = CallbackThread()
        self._process = os.getpid()
        self._stop = weakref.finalize(self, _stop, loop, self._callbacks, self._process)

    def submit(
        self,
        image: Image | LazyImage | EncodedImage | None,
        tasks: Sequence[Task],
        tiles: int = 1,
        deadline_s: float | None = None,
        adapter: str | None = None,
        on_text: OnText | None = None,
        stream: Hashable = None,
        previous: Result | None = None,
    ) -> ResultFuture:
        """Queue tasks on an image, see `Engine.submit`; `on_text` is called with each piece of text as it comes."""
        self.require_process()
        self._loop.require_open()  # before the image is cut, which may take a second
        deadline = math.inf if deadline_s is None else time.monotonic() + deadline_s
        if math.isnan(deadline):
            raise ValueError("deadline_s is a number of seconds")
        if previous is not None and not isinstance(previous, Result):
            raise ValueError(f"previous is the result of an earlier image; got {type(previous).__name__}")
        chosen = None if adapter is None else self.adapters.find(adapter)
        expanded = [one for task in tasks for one in self.expand(task)]
        source = source_of(image, self._loop, chosen, expanded, tiles)
        future = ResultFuture(self._callbacks, self._loop.require_other_thread)
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
            previous=None if previous is None else previous.drafts,
            on_text=on_text,
            on_over=lambda outcome: self._over(request, future, outcome),
        )
        # As `on_over`, it holds the submitter, which is dropped with the last of its requests at the earliest.
        future.on_cancel = lambda: self._drop(request)
        if stream is not None and self._streams.get(stream, _NEWEST).newest:
            self._loop.submit(request, stream)
        else:
            self._add(request, future, stream)
        return future

    def encode(self, image: Image, adapter: str | None) -> EncodedImage:
        """Prefill an image to be asked about again and again, see `Engine.encode`."""
        self.require_process()
        array, chosen = as_array(image), None if adapter is None else self.adapters.find(adapter)
        kept = self._loop.keep_prefix(self._executor.prepare(array), chosen)
        return EncodedImage(array.shape[1], array.shape[0], kept, chosen, self._loop)

    def expand(self, task: Task) -> Sequence[Task]:
        """The task in the model's own names: one, or several for a label such as 'truck or bus'.

        Raises:
            UnsupportedTaskError: if the model has not learned it.
            UnknownClassError: if the vocabulary is closed and has no such name.
        """
        if not isinstance(task, Task):
            raise ValueError(f"a task is one of Detect, Point, Gaze, Query, Caption; got {task!r}")
        if task.skill not in self._info.skills:
            able = f"{self._info.name} can {' and '.join(self._info.skills)}"
            raise UnsupportedTaskError(f"{able}, not {task.skill}; load a Moondream checkpoint for that")
        try:
            expanded = self._expanded.get(task)
        except TypeError:  # a task with a value that cannot be hashed
            return task.expand(self._vocabulary)
        if expanded is None:
            if len(self._expanded) >= _MOST_KNOWN:
                self._expanded.clear()
            expanded = self._expanded[task] = tuple(task.expand(self._vocabulary))
        return expanded

    def configure_stream(self, stream: Hashable, settings: StreamSettings) -> None:
        """Set how a stream shares the engine with others.

        Raises:
            ValueError: if these are no settings: in the loop's thread they would end the engine for all.
        """
        if not isinstance(settings, StreamSettings):
            raise ValueError(f"settings are StreamSettings; got {settings!r}")
        self._streams[stream] = settings
        self._loop.configure(stream, settings)

    def forget_stream(self, stream: Hashable) -> None:
        """Forget a stream's settings, and what was learned from its frames."""
        self._streams.pop(stream, None)
        self._loop.configure(stream, None)

    def require_process(self) -> None:
        """Do nothing in the process that has made this.

        Raises:
            EngineError: in a forked child: threads and devices do not survive a fork.
        """
        if os.getpid() != self._process:
            raise EngineError("this engine was made before a fork: load one in the child process")

    def close(self) -> None:
        """Finish what has begun, fail what has not with EngineClosedError, and stop. Closing twice does nothing."""
        if os.getpid() == self._process:  # else the threads are the parent's
            self._loop.close(EngineClosedError("the engine is closed"))
            self._stop()  # only now: what the loop still finishes has callbacks, too

    def _add(self, request: Request[Any], future: ResultFuture, stream: Hashable) -> None:
        """Queue a request that nothing replaces; what is wrong with it is found in the caller's thread."""
        try:
            request.plan()
            request.prepare()
        except (PromptError, DeadlineError) as error:
            future.on_cancel = None
            self._loop.monitor.ended("failed")
            future.set_exception(error.with_traceback(None))  # whose frames would keep the image
            return
        # At once: when the first of them is refused, all of them are cancelled, and none may arrive after that.
        self._loop.add(*request.image_requests, stream=stream)

    def _over(self, request: Request[Any], future: ResultFuture, outcome: Outcome) -> None:
        """A request is done or has failed: forget it, and drop what is left of it."""
        future.on_cancel = None
        self._count(request, outcome)

    def _drop(self, request: Request[Any]) -> None:
        """A caller has cancelled a request."""
        if os.getpid() == self._process:  # else it is a stream that a forked child has inherited: see `_stop`
            self._count(request, "cancelled")

    def _count(self, request: Request[Any], outcome: Outcome) -> None:
        self._loop.monitor.ended(outcome)
        if outcome in ("failed", "cancelled"):
            self._loop.withdraw(request, CancelledError())
            for image_request in request.image_requests:
                self._loop.cancel(image_request, CancelledError())


def _stop(loop: StepLoop[Any], callbacks: CallbackThread, process: int) -> None:
    if os.getpid() == process:  # in a forked child another thread may have held the loop's lock for ever
        loop.stop(EngineClosedError("the engine is closed"))
        callbacks.close()
