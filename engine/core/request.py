"""One submitted image on its way through the engine: windows and prompts in, one result out.

What a request costs before it is run, reading its prompts and cutting its image, is done by `plan` and `prepare`: for a
frame that a newer one may replace, not before it is admitted.

Knows results and tasks; knows nothing of devices or threads, except that it is completed in the step loop's.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import abc
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Literal

import numpy as np
from numpy.typing import NDArray

from saccade.engine.core.adapters import Adapter
from saccade.engine.core.crop_pace import CropPace
from saccade.engine.core.speculative import recall_from, remember
from saccade.engine.core.step import ImageRequest, ImageT, KeptPrefix, Sequence
from saccade.engine.errors import DeadlineError, PromptError, SupersededError
from saccade.engine.futures import ResultFuture
from saccade.engine.image import LazyImage, Pixels, as_array, as_pixels
from saccade.engine.models.protocol import ModelLimits, Prompts
from saccade.engine.results import Result, ResultPart, Timings
from saccade.engine.tasks.task import OnText, Task, shorten
from saccade.engine.tasks.tiles import Window, windows

_MOST_KNOWN = 1024  # tasks whose token ids are remembered


@dataclass(slots=True, frozen=True)
class _Part(Generic[ImageT]):
    """An image request: its window, None for the whole, and which of the tasks, by number, its sequences answer."""

    window: Window | None
    tasks: tuple[int, ...]
    image_request: ImageRequest[ImageT]


@dataclass(slots=True, frozen=True)
class RequestMaker(Generic[ImageT]):
    """What all requests of an engine are made with.

    Attributes:
        limits, prompts: the model's.
        cut: the executor's `prepare`.
        pace: how long that takes.
        max_prompts: most prompts of an image request; more are asked in further ones.
        max_branches: most prompts and branches of one that has branches, see `OutputState.branches`.
        drafts: whether answers are begun with earlier ones.
        known: token ids of the last tasks.
    """

    limits: ModelLimits
    prompts: Prompts
    cut: abc.Callable[[Pixels], ImageT]
    pace: CropPace
    max_prompts: int
    max_branches: int = 0
    drafts: bool = False
    known: dict[Task, tuple[int, ...]] = field(default_factory=dict)

    def prompt(self, task: Task) -> tuple[int, ...]:
        """Token ids that ask a task; remembered, as the frames of a stream ask the same again and again.

        Raises:
            PromptError: if the model has no tokens for it.
        """
        try:
            ids = self.known.get(task)
        except TypeError:  # a task with a value that cannot be hashed
            return self._prompt(task)
        if ids is None:
            ids = self._prompt(task)
            if len(self.known) >= _MOST_KNOWN:
                self.known.clear()
            self.known[task] = ids
        return ids

    def _prompt(self, task: Task) -> tuple[int, ...]:
        ids = tuple(task.prompt(self.prompts))
        if not ids:
            raise PromptError(f"'{shorten(task.asked)}' cannot be asked: it is no tokens")
        self.check_tokens(ids, task)
        return ids

    def check_tokens(self, ids: abc.Iterable[int], task: Task) -> None:
        """Refuse ids that are no tokens: on a GPU one past the table would end the whole device context, not a request.

        Raises:
            PromptError: if there is one.
        """
        if any(not 0 <= token < self.limits.vocab_size for token in ids):
            raise PromptError(f"the model has no token for a part of '{shorten(task.asked)}'")


class _Crops(Generic[ImageT]):
    """A window of an image, cut once for however many parts; any thread may ask."""

    __slots__ = ("_deadline", "_lock", "_made", "_maker", "_read", "_window")

    def __init__(
        self,
        read: abc.Callable[[], Pixels],
        window: Window | None,
        deadline: float,
        maker: RequestMaker[ImageT],
    ) -> None:
        self._read, self._window, self._deadline, self._maker = read, window, deadline, maker
        self._made: ImageT | None = None
        self._lock = threading.Lock()

    def cut(self) -> ImageT:
        """The crops of the window, or of the whole image.

        Raises:
            DeadlineError: if they cannot be cut before the deadline.
        """
        with self._lock:
            if self._made is None:
                image, window, pace = self._read(), self._window, self._maker.pace
                whole = image.shape[0] * image.shape[1]
                pixels = whole if window is None else window.pixels
                begun = time.monotonic()
                _require_time(pixels, self._deadline - begun, pace)
                part = image if window is None or pixels == whole else _part_of(as_array(image), window)
                self._made = self._maker.cut(part)
                pace.measured(pixels, time.monotonic() - begun)
            return self._made


class Request(Generic[ImageT]):
    """An image with its tasks.

    Args:
        image: its pixels, or what gives it: called once, when it is to be cut; None for a kept
            prefix, or for tasks that need no image.
        tasks: what to ask.
        tiles: tasks that are `tiled` are asked of `tiles` × `tiles` windows as well.
        maker: what its parts are made with.
        future: of the result.
        prefix: a kept prefix to ask about, of an image of `size`.
        size: width and height of that in pixels.
        adapter: what all answers are computed with besides the model.
        deadline: `time.monotonic()` at which it fails with DeadlineError if it is not done.
        previous: what an earlier result has left for its answers, see `drafts.remember`; None for nothing.
        on_text: called with each piece of its texts as it comes, in the step loop's thread.
        on_over: called once, when it is over, unless the future is cancelled.

    Attributes:
        image_requests: what the step loop has to run, once it is planned.
    """

    def __init__(
        self,
        image: Pixels | LazyImage | None,
        tasks: abc.Sequence[Task],
        tiles: int,
        maker: RequestMaker[ImageT],
        future: ResultFuture,
        *,
        prefix: KeptPrefix | None = None,
        size: tuple[int, int] = (0, 0),
        adapter: Adapter | None = None,
        deadline: float = math.inf,
        previous: abc.Mapping[abc.Hashable, object] | None = None,
        on_text: OnText | None = None,
        on_over: abc.Callable[[Literal["done", "failed", "superseded"]], None] | None = None,
    ) -> None:
        self._future: ResultFuture | None = future
        self._on_over = on_over
        self._started = time.monotonic()
        self._tasks, self._tiles = tuple(tasks), tiles
        self._image: Pixels | LazyImage | None = image
        self._prefix, self._blank = prefix, image is None and prefix is None
        self._width, self._height = size  # of an image, once it is read
        self._maker, self._adapter = maker, adapter
        self.deadline = deadline
        self._previous, self._on_text = previous, on_text
        self._parts: list[_Part[ImageT]] = []
        self.image_requests: list[ImageRequest[ImageT]] = []
        self._left = self._uncut = 0
        self._crops_s = 0.0
        self._lock = threading.Lock()  # several threads may cut the parts of one image

    def plan(self) -> list[ImageRequest[ImageT]]:
        """Read the prompts, and make the parts, whose images `ImageRequest.prepare` cuts.

        Raises:
            PromptError: if a prompt leaves no room for an answer, or has words that are no tokens.
        """
        asked = [i for i, task in enumerate(self._tasks) if not task.empty]
        tiled = [i for i in asked if self._tasks[i].tiled] if self._tiles > 1 and self._image is not None else []
        # The whole of an image that is not read yet is cut without knowing its size.
        if self._image is not None and (tiled or not callable(self._image) or not asked):
            self._read()
        places: abc.Sequence[Window | None] = windows(self._width, self._height, self._tiles) if tiled else [None]
        most = self._maker.max_prompts
        for number, window in enumerate(places):
            chosen = tiled if number else asked
            sequences = [self._sequence(i) for i in chosen]
            crops = None if self._image is None else _Crops(self._read, window, self.deadline, self._maker)
            for start in range(0, max(1, len(chosen)), most):
                part = slice(start, start + most)
                image_request: ImageRequest[ImageT] = ImageRequest(  # with its parameter it takes 3 µs more
                    None,
                    [*sequences[part], *self._branches(sequences[part])],
                    self._image_done,
                    self.deadline,
                    self._adapter,
                    self._prefix,
                    has_prefix=not self._blank,
                    window=number,
                    prepare=partial(self._prepare, crops) if chosen and crops else None,
                )
                self._parts.append(_Part(window, tuple(chosen[part]), image_request))
                self.image_requests.append(image_request)
        self._left = self._uncut = len(self._parts)
        if self._previous is not None and self._maker.drafts:
            for request in self.image_requests:
                recall_from(request, self._previous)
        return self.image_requests

    def _read(self) -> Pixels:
        """The image, which is made now if that was left for later."""
        image = self._image
        assert image is not None
        if callable(image):
            image = self._image = as_pixels(image())
        self._height, self._width, _ = image.shape
        return image

    def prepare(self) -> None:
        """Cut the image of every part now.

        Raises:
            DeadlineError: if that takes longer than there is time.
        """
        if self.deadline < math.inf:
            whole = {part.window: part.window.pixels for part in self._parts if part.window is not None}
            _require_time(sum(whole.values()), self.deadline - time.monotonic(), self._maker.pace)
        for request in self.image_requests:
            if request.prepare is not None:
                request.image, request.prepare = request.prepare(), None
        self._image = None

    def _prepare(self, crops: _Crops[ImageT]) -> ImageT:
        if self._future is not None:
            self._future.begun = True
        begun = time.monotonic()
        image = crops.cut()
        with self._lock:
            self._crops_s += time.monotonic() - begun
            self._uncut -= 1
            if not self._uncut:
                self._image = None
        return image

    def end(self, error: BaseException) -> None:
        """It is over before any part was run."""
        self._image = None
        for request in self.image_requests:
            request.drop_image()
        self._settle(error)

    def _sequence(self, number: int) -> Sequence[ImageT]:
        limits, prompts, task = self._maker.limits, self._maker.prompts, self._tasks[number]
        ids, values = self._maker.prompt(task), task.values(prompts)
        if self._blank:
            ids = (limits.bos_id, *ids)
        # The last thing sampled is never fed back, hence one step more than there are positions.
        room = limits.max_context - (0 if self._blank else limits.prefix_length) - len(ids) + 1
        output = task.output(prompts, room, self._on_text)
        self._maker.check_tokens(output.vocabulary(), task)
        if output.steps < 1:
            most = room + len(ids) - 1
            raise PromptError(f"a prompt of {len(ids)} tokens is too long: {most} are left behind the image")
        return Sequence(ids, output, values)

    def _branches(self, sequences: abc.Sequence[Sequence[ImageT]]) -> list[Sequence[ImageT]]:
        """Sequences that do a part of the others' work beside them."""
        beside: list[Sequence[ImageT]] = []
        for one in sequences:
            for tokens, output in one.output.branches(self._maker.max_branches - len(sequences) - len(beside)):
                beside.append(Sequence((*one.prompt, *tokens), output, one.values, trunk=one))
        return beside

    def _image_done(self, image_request: ImageRequest[ImageT], error: BaseException | None) -> None:
        """Called by the step loop, once for each image request."""
        self._left -= 1
        if self._future is not None and (error is not None or not self._left or self._future.done()):
            self._settle(error)
        if error is None and not self._left:
            self._forget_parts()

    def _forget_parts(self) -> None:
        """Let go of what holds this, and of what holds that: else 17 objects a request wait for the collector."""
        for request in self.image_requests:
            request.sequences = []
        self._parts, self.image_requests = [], []

    def _settle(self, error: BaseException | None) -> None:
        """Give the future its result, or the error."""
        future, on_over = self._future, self._on_over
        if future is None:
            return
        # A request and its image requests hold each other: what hangs on the future must not wait for the collector.
        self._future = self._on_over = None
        if future.done():
            return
        try:
            outcome = error or self._result()
        except BaseException as mistake:  # also sys.exit in a tokenizer or a task: it ends this request, not the loop
            outcome = mistake
        if not future.set_running_or_notify_cancel():
            return
        if on_over is not None:
            superseded = isinstance(outcome, SupersededError)
            on_over("done" if isinstance(outcome, Result) else "superseded" if superseded else "failed")
        if isinstance(outcome, Result):
            future.set_result(outcome)
        else:
            traceback.clear_frames(outcome.__traceback__)  # a future that is kept would keep the crops in them
            future.set_exception(outcome)

    def _result(self) -> Result:
        answers: list[list[tuple[Sequence[ImageT], Window]]] = [[] for _ in self._tasks]
        for part in self._parts:
            for i, sequence in zip(part.tasks, part.image_request.sequences, strict=False):  # behind them branches
                sequence.output.finish()
                answers[i].append((sequence, part.window or Window(0, 0, self._width, self._height)))
        parts: list[ResultPart] = []
        for task, group in zip(self._tasks, answers, strict=True):
            outputs = [(sequence.output, window) for sequence, window in group]
            parts += task.collect(outputs, self._width, self._height, self._maker.limits)
        drafts = remember(self.image_requests) if self._maker.drafts else {}
        return Result.of(parts, self._width, self._height, self._timings(), drafts)

    def _timings(self) -> Timings:
        """Cropping and the first image request's prefill; the wait between them; and all that came after."""
        first = self._parts[0].image_request
        if not first.launched_at:  # nothing was asked
            return Timings(queue_ms=(time.monotonic() - self._started) * 1e3)
        prefill_ms = (first.prefilled_at - first.launched_at) * 1e3
        return Timings(
            queue_ms=(first.launched_at - self._started - self._crops_s) * 1e3,
            prefill_ms=self._crops_s * 1e3 + prefill_ms,
            decode_ms=(time.monotonic() - first.prefilled_at) * 1e3,
            crops_ms=self._crops_s * 1e3,
        )


def _part_of(image: NDArray[np.uint8], window: Window) -> NDArray[np.uint8]:
    """A copy of what is in the window."""
    return image[window.y : window.y + window.height, window.x : window.x + window.width].copy()


def _require_time(pixels: int, left_s: float, pace: CropPace) -> None:
    """Refuse at once what would only take time from others: a large image takes a second to be cut."""
    if left_s <= 0:
        raise DeadlineError(begun=False)
    needed_s = pace.seconds(pixels)
    if needed_s > left_s:
        pace.refused()
        raise DeadlineError(begun=False, cropping_s=needed_s)
