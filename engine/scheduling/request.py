"""One submitted image on its way through the engine: windows and prompts in, one result out.

Knows results and tasks; knows nothing of devices or threads, except that it is completed in the step loop's.
"""

from __future__ import annotations

import math
import time
import traceback
from collections import abc
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Literal

import numpy as np
from numpy.typing import NDArray

from saccade.engine.errors import DeadlineError, PromptError
from saccade.engine.models.protocol import ModelLimits, Prompts
from saccade.engine.results import Result, ResultPart, Timings
from saccade.engine.scheduling.adapter_slots import Adapter
from saccade.engine.scheduling.crop_pace import CropPace
from saccade.engine.scheduling.slicing import Window, windows
from saccade.engine.scheduling.step import ImageRequest, ImageT, KeptPrefix, Sequence
from saccade.engine.scheduling.task import OnText, Task, shorten


@dataclass(slots=True, frozen=True)
class _Part(Generic[ImageT]):
    """An image request: which window, and which of the request's tasks, by number, its sequences answer."""

    window: Window
    tasks: tuple[int, ...]
    image_request: ImageRequest[ImageT]


class Request(Generic[ImageT]):
    """An image with its tasks.

    Args:
        image: (height, width, 3) uint8 RGB; None for a kept prefix, or for tasks that need no image.
        tasks: what to ask.
        tiles: tasks that are `tiled` are asked of `tiles` × `tiles` windows as well.
        limits: the model's.
        prompts: the model's.
        prepare: the executor's.
        pace: how long that takes.
        max_prompts: most prompts of an image request; more are asked in further ones.
        future: of the result.
        prefix: a kept prefix to ask about, of an image of `size`.
        size: width and height of that in pixels.
        adapter: what all answers are computed with besides the model.
        deadline: `time.monotonic()` at which it fails with DeadlineError if it is not done.
        on_text: called with each piece of its texts as it comes, in the step loop's thread.
        on_over: called once, when it is done or has failed, unless the future is cancelled.

    Raises:
        PromptError: if a prompt leaves no room for an answer, or has words that are no tokens.
        DeadlineError: if the image cannot be cut before the deadline.
    """

    def __init__(
        self,
        image: NDArray[np.uint8] | None,
        tasks: abc.Sequence[Task],
        tiles: int,
        limits: ModelLimits,
        prompts: Prompts,
        prepare: abc.Callable[[NDArray[np.uint8]], ImageT],
        pace: CropPace,
        max_prompts: int,
        future: Future[Result],
        *,
        prefix: KeptPrefix | None = None,
        size: tuple[int, int] = (0, 0),
        adapter: Adapter | None = None,
        deadline: float = math.inf,
        on_text: OnText | None = None,
        on_over: abc.Callable[[Literal["done", "failed"]], None] | None = None,
    ) -> None:
        self._future: Future[Result] | None = future
        self._on_over = on_over
        self._started = time.monotonic()
        self._tasks = tuple(tasks)
        self._width: int
        self._height: int
        self._width, self._height = size if image is None else (image.shape[1], image.shape[0])
        self._blank = image is None and prefix is None
        self._limits, self._prompts = limits, prompts
        self._on_text = on_text
        self._parts: list[_Part[ImageT]] = []
        asked = [i for i, task in enumerate(self._tasks) if not task.empty]
        tiled = [i for i in asked if self._tasks[i].tiled]
        whole = Window(0, 0, self._width, self._height)
        places = [whole] if image is None else windows(self._width, self._height, tiles if tiled else 1)
        left = sum(window.pixels for window in places)
        for number, window in enumerate(places):
            chosen = tiled if number else asked
            sequences = [self._sequence(i) for i in chosen]  # checks the prompts before the image is cut
            begun = time.monotonic()
            _require_time(left, deadline - begun, pace)
            prepared = None
            if image is not None:
                view = image[window.y : window.y + window.height, window.x : window.x + window.width]
                prepared = prepare(np.ascontiguousarray(view))
                pace.measured(window.pixels, time.monotonic() - begun)
            left -= window.pixels
            for start in range(0, max(1, len(chosen)), max_prompts):
                part = slice(start, start + max_prompts)
                image_request = ImageRequest(prepared, sequences[part], self._image_done, deadline, adapter, prefix)
                self._parts.append(_Part(window, tuple(chosen[part]), image_request))
        self._left = len(self._parts)
        self._crops_ms = (time.monotonic() - self._started) * 1e3

    @property
    def image_requests(self) -> list[ImageRequest[ImageT]]:
        """What the step loop has to run."""
        return [part.image_request for part in self._parts]

    def _sequence(self, number: int) -> Sequence[ImageT]:
        limits, prompts, task = self._limits, self._prompts, self._tasks[number]
        ids, values = task.prompt(prompts), task.values(prompts)
        if not ids:
            raise PromptError(f"'{shorten(task.asked)}' cannot be asked: it is no tokens")
        self._check_tokens(ids, task)
        if self._blank:
            ids = [limits.bos_id, *ids]
        # The last thing sampled is never fed back, hence one step more than there are positions.
        room = limits.max_context - (0 if self._blank else limits.prefix_length) - len(ids) + 1
        output = task.output(prompts, room, self._on_text)
        self._check_tokens(output.vocabulary(), task)
        if output.steps < 1:
            most = room + len(ids) - 1
            raise PromptError(f"a prompt of {len(ids)} tokens is too long: {most} are left behind the image")
        return Sequence(tuple(ids), output, values)

    def _check_tokens(self, ids: abc.Iterable[int], task: Task) -> None:
        # Checked here: on a GPU an id past the table would end the whole device context, not one request.
        if any(not 0 <= token < self._limits.vocab_size for token in ids):
            raise PromptError(f"the model has no token for a part of '{shorten(task.asked)}'")

    def _image_done(self, image_request: ImageRequest[ImageT], error: BaseException | None) -> None:
        """Called by the step loop, once for each image request."""
        self._left -= 1
        future, on_over = self._future, self._on_over
        if future is None or (error is None and self._left and not future.done()):
            return
        # A request and its image requests hold each other: what hangs on the future must not wait for the collector.
        self._future = self._on_over = None
        if future.done():
            return
        try:
            outcome = error or self._result()
        except (
            BaseException
        ) as mistake:  # in a tokenizer or a task, sys.exit included: it ends this request, not the loop
            outcome = mistake
        if not future.set_running_or_notify_cancel():
            return
        if on_over is not None:
            on_over("done" if isinstance(outcome, Result) else "failed")
        if isinstance(outcome, Result):
            future.set_result(outcome)
        else:
            traceback.clear_frames(outcome.__traceback__)  # a future that is kept would keep the crops in them
            future.set_exception(outcome)

    def _result(self) -> Result:
        answers: list[list[tuple[Sequence[ImageT], Window]]] = [[] for _ in self._tasks]
        for part in self._parts:
            for i, sequence in zip(part.tasks, part.image_request.sequences, strict=True):
                sequence.output.finish()
                answers[i].append((sequence, part.window))
        parts: list[ResultPart] = []
        for task, group in zip(self._tasks, answers, strict=True):
            outputs = [(sequence.output, window) for sequence, window in group]
            parts += task.collect(outputs, self._width, self._height, self._limits)
        return Result.of(parts, self._width, self._height, self._timings())

    def _timings(self) -> Timings:
        """Cropping and the first image request's prefill; the wait between them; and all that came after."""
        first = self._parts[0].image_request
        if not first.launched_at:  # nothing was asked
            return Timings(queue_ms=(time.monotonic() - self._started) * 1e3)
        prefill_ms = (first.prefilled_at - first.launched_at) * 1e3
        return Timings(
            queue_ms=(first.launched_at - self._started) * 1e3 - self._crops_ms,
            prefill_ms=self._crops_ms + prefill_ms,
            decode_ms=(time.monotonic() - first.prefilled_at) * 1e3,
        )


def _require_time(pixels: int, left_s: float, pace: CropPace) -> None:
    """Refuse at once what would only take time from others: a large image takes a second to be cut."""
    if left_s <= 0:
        raise DeadlineError(begun=False)
    needed_s = pace.seconds(pixels)
    if needed_s > left_s:
        pace.refused()
        raise DeadlineError(begun=False, cropping_s=needed_s)
