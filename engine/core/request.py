"""Requests from submission to result, and their scheduled parts. The classes are plain data without PyTorch.

    Request          one call of `Engine.submit`, with a `State`
      PrefillWindow  the image or a tile of it, with its prompts; prefilled as one unit
        Sequence     a prompt and its growing answer
    Step             one launch: rows of sequences, and the prefill windows if it is a prefill

`RequestMaker` creates the prefill windows of a request, and finally its result. For live video, tokenizing and cropping
start only after admission, because a newer frame may replace a queued frame.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import abc
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, cast

from saccade.engine.config import EngineConfig
from saccade.engine.errors import DeadlineError, PromptError, SupersededError
from saccade.engine.models.protocol import TEXT_PHASES, Adapter, Phase
from saccade.engine.results import Result, ResultPart, Timings
from saccade.engine.tasks.task import (
    ANY_TOKEN,
    DraftMemory,
    FedValue,
    OnText,
    OutputState,
    Task,
    TokenRule,
    Window,
    shorten,
    windows,
)

if TYPE_CHECKING:
    from saccade.engine.image import Image, LazyImage, Pixels
    from saccade.engine.models.protocol import ModelLimits, Prompts
    from saccade.engine.results import ResultFuture

T = TypeVar("T")
ImageT = TypeVar("ImageT")
"""A prepared (cropped) image in the executor's format."""
Outcome = Literal["done", "failed", "cancelled", "superseded"]
"""Outcome of a request, as named in counters."""
NO_SLOT = 0
"""Adapter slot of sequences without an adapter. Slots of adapters start at 1."""


class State(Enum):
    """Scheduling state of a request, or of a prefill window (one image or tile with its prompts)."""

    WAITING = "waiting"  # queued; no work is done
    PLANNED = "planned"  # its pages are computed; it has a reference to its cached prefix, if any
    ADMITTED = "admitted"  # has pages and batch slots; a request: as soon as its first window has them
    OVER = "over"


@dataclass(slots=True, eq=False)
class Sequence(Generic[ImageT]):
    """A prompt and its growing answer.

    Attributes:
        prompt: token IDs of the prompt.
        values: reference coordinates (coordinate,) and sizes (width, height), keyed by position in the prompt. Their
            embeddings replace the token embeddings at these positions.
        output: state machine that decodes the answer.
        trunk: for a branch (see `OutputState.branches`), the earlier sequence whose prompt it continues; otherwise
            None. The branch shares the completely filled KV cache pages of that prompt.
        window: prefill window that contains the sequence.
        n_pages: number of private KV cache pages for the longest possible answer.
        n_shared: number of pages shared with the trunk. `prompt` no longer contains their tokens.
        batch_slot: index of the sequence in the executor's state, or -1 before admission.
        pages: KV cache pages for prompt and answer, the shared pages first.
        position: position of the next token in the context.
        inflight_refs: number of running steps that contain the sequence.
        finalized: whether the sequence needs no more steps. Samples of its steps that are still running are ignored.
        memory: earlier answers to this prompt, used as drafts (speculative decoding), or None.
        found: detections from which the executor drafts the answer, each (unused, x, y, width, height).
        feed: decoder inputs of the next step that the host supplies: the last sampled value, then draft values. Empty
            if there is no draft; the device then uses the last sampled value, which it stores.
        verifying: whether a step with a draft is running.
        started: whether the prompt is prefilled.
        decodes: number of decode steps.
        misses: number of consecutive steps in which the first draft value differed from the sample.
        drafted: number of draft values that were verified.
        committed: number of sampled values in the answer so far.
    """

    prompt: tuple[int, ...]
    output: OutputState
    values: abc.Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    trunk: Sequence[ImageT] | None = None
    window: PrefillWindow[ImageT] = field(init=False)
    n_pages: int = 0
    n_shared: int = 0
    batch_slot: int = -1
    pages: tuple[int, ...] = ()
    position: int = 0
    inflight_refs: int = 0
    finalized: bool = False
    memory: DraftMemory | None = None
    found: abc.Sequence[abc.Sequence[float]] = ()
    feed: tuple[FedValue, ...] = ()
    verifying: bool = False
    started: bool = False
    decodes: int = 0
    misses: int = 0
    drafted: int = 0
    committed: int = 0


@dataclass(slots=True, eq=False)
class KeptPrefix:
    """KV cache of an encoded image that later requests on the same image share (`Engine.encode`).

    `Scheduler.release_prefix` frees it.

    Attributes:
        pages: KV cache pages; empty until the prefill has ended, and after release.
    """

    pages: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class PrefillWindow(Generic[ImageT]):
    """One unit of prefill: an image, an image tile or an encoded image, with its prompts.

    Prompts without an image also form a prefill window.

    Attributes:
        request: request that contains the window.
        sequences: one sequence per prompt, followed by their branches (see `OutputState.branches`).
        image: cropped image. None before cropping, after the prefill and after the end of the request.
        prepare: function that crops the image. A preparer thread calls it once, after admission.
        number: index of the tile; 0 is the whole image.
        tasks: index of the request's task for each sequence that is not a branch.
        state: state of the window.
        pages: KV cache pages of the image prefix. Each sequence has a reference to them.
        adapter_slot: slot of the LoRA adapter. Each sequence has a reference to it.
        admitted_at, launched_at, prefilled_at: `time.monotonic()` of admission, of the launch of the prefill, and of
            reading its results.
    """

    request: Request[ImageT]
    sequences: list[Sequence[ImageT]]
    image: ImageT | None = None
    prepare: abc.Callable[[], ImageT] | None = None
    number: int = 0
    tasks: tuple[int, ...] = ()
    state: State = State.WAITING
    pages: tuple[int, ...] = ()
    adapter_slot: int = NO_SLOT
    admitted_at: float = 0.0
    launched_at: float = 0.0
    prefilled_at: float = 0.0

    def __post_init__(self) -> None:
        for sequence in self.sequences:
            sequence.window = self

    @property
    def encodes(self) -> bool:
        """Whether the prefill of this window includes the encoding of an image."""
        return self.request.has_prefix and self.request.reads is None

    @property
    def prepared(self) -> bool:
        """Whether the prefill can start: the image is cropped, or there is no image to encode."""
        return self.image is not None or not self.encodes

    def drop_image(self) -> None:
        """Drop the references to the cropped image and to its source."""
        self.image = self.prepare = None

    def recall(self, memory: dict[abc.Hashable, DraftMemory], most: int) -> None:
        """Use earlier answers of the stream as drafts (speculative decoding), unless the caller supplied drafts.

        Args:
            memory: earlier answers of the stream, keyed by prompt. The method adds an entry for each new prompt.
            most: maximum number of prompts in `memory`.
        """
        for sequence in self.sequences:
            if sequence.memory is None and sequence.output.draftable:
                key = self._draft_key(sequence)
                known = memory.get(key)
                if known is None:
                    if len(memory) >= most:
                        memory.clear()
                    known = memory[key] = DraftMemory()
                sequence.memory = known

    def recall_from(self, drafts: abc.Mapping[abc.Hashable, object]) -> None:
        """Draft the answers (speculative decoding) from `drafts`, the finished answers of an earlier window."""
        for sequence in self.sequences:
            if sequence.output.draftable:
                kept = drafts.get(self._draft_key(sequence))
                sequence.memory = replace(kept) if isinstance(kept, DraftMemory) else DraftMemory()

    def drafts(self) -> dict[abc.Hashable, DraftMemory]:
        """Return the finished answers, keyed by prompt, for use as drafts on the next image (speculative decoding)."""
        kept: dict[abc.Hashable, DraftMemory] = {}
        for one in self.sequences:
            if one.output.draftable:
                known = one.memory  # `replace` would take 2 µs
                kept[self._draft_key(one)] = (
                    DraftMemory(tuple(one.output.values()))
                    if known is None
                    else DraftMemory(known.values, known.pause, known.failures)
                )
        return kept

    def _draft_key(self, sequence: Sequence[ImageT]) -> abc.Hashable:
        # The key contains the adapter's name and not the adapter, to allow its weights to be freed.
        adapter = self.request.adapter
        return self.number, sequence.prompt, type(sequence.output).__name__, None if adapter is None else adapter.name


@dataclass(slots=True, eq=False)
class Request(Generic[ImageT]):
    """One call of `Engine.submit`: tasks on an image, on an encoded image, or without an image.

    Attributes:
        make_windows: function that creates the prefill windows: the image and its tiles. For a frame, the scheduler
            calls it once. For other requests, the windows are created before submission.
        done: callback (request, error or None) that the step loop's thread calls once, at the end of the request.
        deadline: `time.monotonic()` at which the request ends with an error.
        adapter: LoRA adapter, or None.
        reads: KV cache of an encoded image (`Engine.encode`) to use instead of an image, or None.
        keeps: object that receives the KV cache pages of the image (`Engine.encode`), or None. If set, the request has
            no prompts.
        on_device: function that reads the image and returns whether the pixels are on the device, where cropping is
            fast. None without an image and before the windows are created.
        has_prefix: whether the prompts follow an image.
        frame: whether a newer frame of the stream supersedes the request while it is queued.
        tasks: tasks to answer.
        image: pixels, or a function that returns them and is called once.
        size: width and height of the image in pixels; set when the image is read.
        tiles: number of tiles along each side. Tiled tasks also run on each tile.
        looks: regions of the image, in pixels, on which tiled tasks run in addition to the tiles.
        previous: drafts from an earlier result, see `PrefillWindow.drafts`, or None.
        on_text: callback that the step loop's thread calls with each new piece of text.
        future: future of the result.
        submitted_at: `time.monotonic()` of submission.
        crops_s: total time spent on cropping, in seconds.
        refine: whether the segmentation outlines in the result are refined.
        picture: pixels of the whole image, from which outlines are refined; set when the image is read.
        state: state of the request.
        windows: prefill windows; empty before they are created.
        stream: stream key, or None.
        number: position in the order of arrival, from 1.
        arrived: time of arrival in seconds.
        n_admitted: number of admitted prefill windows.
        begun_at: time of the first admission in seconds, or None.
    """

    make_windows: abc.Callable[[Request[ImageT]], list[PrefillWindow[ImageT]]]
    done: abc.Callable[[Request[ImageT], BaseException | None], None]
    deadline: float = math.inf
    adapter: Adapter | None = None
    reads: KeptPrefix | None = None
    keeps: KeptPrefix | None = None
    on_device: abc.Callable[[], bool] | None = None
    has_prefix: bool = True
    frame: bool = False
    tasks: tuple[Task, ...] = ()
    image: Pixels | LazyImage | None = None
    size: tuple[int, int] = (0, 0)
    tiles: int = 1
    looks: tuple[Window, ...] = ()
    previous: abc.Mapping[abc.Hashable, object] | None = None
    on_text: OnText | None = None
    future: ResultFuture | None = None
    submitted_at: float = field(default_factory=time.monotonic)
    crops_s: float = 0.0
    refine: bool = False
    picture: Pixels | None = None
    state: State = State.WAITING
    windows: list[PrefillWindow[ImageT]] = field(default_factory=list)
    stream: abc.Hashable = None
    number: int = 0
    arrived: float = 0.0
    n_admitted: int = 0
    begun_at: float | None = None

    @property
    def n_waiting(self) -> int:
        """Number of images and tiles of the request that are not admitted yet.

        An undivided request counts as one.
        """
        return max(1, len(self.windows)) - self.n_admitted


class StepKind(StrEnum):
    """Kind of a batch step: prefill or decode."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)  # not frozen, which makes it four times as fast: one is created per sequence and step
class ScheduledSequence(Generic[ImageT]):
    """One row of a batch step: a decoder input of a sequence, its position, and the kind of value to sample.

    A sequence has one row in a step, or several if the step verifies a draft (speculative decoding).

    Attributes:
        sequence: the prompt and its growing answer.
        phase: kind of value to sample, for example a coordinate or a token.
        position: position of the input token (decode), or of the first token of the prompt (prefill).
        rule: constraints on the sampled token, set by `Scheduler.finalize`.
        value: decoder input that the host supplies, such as a draft value. None if the input is the prompt, or the last
            sample, which the device stores. The executor replaces `FROM_IMAGE` by a detection.
        alone: whether this is the only row of its sequence in the step.
    """

    sequence: Sequence[ImageT]
    phase: Phase
    position: int
    rule: TokenRule = ANY_TOKEN
    value: FedValue | None = None
    alone: bool = True


@dataclass(slots=True, frozen=True)
class Step(Generic[ImageT]):
    """One batch step (prefill or decode) on the device.

    Attributes:
        kind: prefill or decode.
        number: number of the step, from 1.
        sequences: batch rows of all sequences. The rows of one sequence are consecutive.
        windows: images and tiles of a prefill, in the order of their rows. Empty in a decode step.
        groups: batch rows grouped by sequence.
        drafted: whether the host supplies an input value for any row.
        writes_text: whether any row samples a text token. The samples of the previous step determine which tokens are
            allowed.
    """

    kind: StepKind
    number: int
    sequences: tuple[ScheduledSequence[ImageT], ...]
    windows: tuple[PrefillWindow[ImageT], ...] = ()
    groups: abc.Sequence[list[ScheduledSequence[ImageT]]] = field(init=False)
    drafted: bool = field(init=False)
    writes_text: bool = field(init=False)

    def __post_init__(self) -> None:
        groups: list[list[ScheduledSequence[ImageT]]] = []
        last: object = None
        for row in self.sequences:
            if row.sequence is last:
                groups[-1].append(row)
            else:
                groups.append([row])
                last = row.sequence
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "drafted", any(row.value is not None for row in self.sequences))
        object.__setattr__(self, "writes_text", any(row.phase in TEXT_PHASES for row in self.sequences))

    @property
    def imaged(self) -> list[PrefillWindow[ImageT]]:
        """Prefill windows of this step with an image to encode. The list is valid only until the step has ended."""
        return [window for window in self.windows if window.image is not None]

    @property
    def images(self) -> list[ImageT]:
        """Cropped images that the step encodes, in batch order."""
        return [window.image for window in self.windows if window.image is not None]


def remembered(known: dict[Task, T], task: Task, make: abc.Callable[[Task], T], most: int) -> T:
    """Return the cached value of a task, or compute it with `make(task)`.

    `known` is the cache. It is cleared when it contains `most` values. Tasks that are not hashable are not cached.
    """
    try:
        found = known.get(task)
    except TypeError:  # the task is not hashable
        return make(task)
    if found is None:
        if len(known) >= most:
            known.clear()
        found = known[task] = make(task)
    return found


class CropPace:
    """Rejects requests whose image cannot be cropped before the deadline. Thread-safe.

    The class estimates a lower bound of the cropping time per pixel from measurements.

    Args:
        config: engine configuration.
        seconds_per_pixel: lower bound before the first measurement.
    """

    __slots__ = ("_config", "_doubted", "_rate")

    def __init__(self, config: EngineConfig, seconds_per_pixel: float) -> None:
        self._config, self._rate, self._doubted = config, seconds_per_pixel, True

    def measured(self, pixels: int, seconds: float) -> None:
        """Update the estimated cropping time per pixel with a measurement. Small images are ignored.

        Args:
            pixels: number of pixels of the cropped image.
            seconds: cropping time of the image.
        """
        if pixels >= self._config.crop_large:
            rate = self._config.crop_bound * seconds / pixels
            self._rate = rate if self._doubted else min(self._rate, rate)
            self._doubted = False

    def require_time(self, pixels: int, left_s: float) -> None:
        """Check that an image of `pixels` pixels can be cropped within `left_s` seconds.

        Raises:
            DeadlineError: if the time is too short.
        """
        if left_s <= 0:
            raise DeadlineError(begun=False)
        needed_s = self._rate * pixels
        if needed_s > left_s:
            self._rate *= self._config.crop_doubt  # the estimate may be too high
            self._doubted = True
            raise DeadlineError(begun=False, cropping_s=needed_s)


@dataclass(slots=True, frozen=True)
class RequestMaker(Generic[ImageT]):
    """Creates the prefill windows of requests, and their results.

    Attributes:
        config: engine configuration.
        limits: size limits of the model, such as its context length.
        prompts: converter from tasks to token IDs.
        read: function (image, as_array) that returns the pixels of an image, as a NumPy array if `as_array` is True.
        cut: function (pixels, region) that crops and prepares an image for the executor. The region None is the whole
            image.
        pace: estimate of the cropping time.
        count: callback that receives the outcome of each request that was not cancelled.
        max_branches: maximum number of sequences in a window with branches (see `OutputState.branches`); 0 disables
            branches.
        on_device: function that returns whether pixels are already on the device.
        known: cached token IDs of recent tasks.
        refine: function (result, pixels, callback) that refines the outlines of a result in another thread, then calls
            the callback with the refined result. None disables refinement.
    """

    config: EngineConfig
    limits: ModelLimits
    prompts: Prompts
    read: abc.Callable[[Image, bool], Pixels]
    cut: abc.Callable[[Pixels, Window | None], ImageT]
    pace: CropPace
    count: abc.Callable[[Outcome], None]
    max_branches: int = 0
    on_device: abc.Callable[[Pixels], bool] = lambda _: False
    known: dict[Task, tuple[int, ...]] = field(default_factory=dict)
    refine: abc.Callable[[Result, Pixels, abc.Callable[[Result], None]], None] | None = None

    # ---- prefill windows

    def plan(self, request: Request[ImageT]) -> list[PrefillWindow[ImageT]]:
        """Tokenize the prompts of a request and divide it into images and tiles. The image is not read yet.

        Raises:
            PromptError: if a prompt is too long, or if the model has no token for a part of it.
        """
        asked = [i for i, task in enumerate(request.tasks) if not task.empty]
        closer = (request.tiles**2 if request.tiles > 1 else 0) + len(request.looks)
        tiled = [i for i in asked if request.tasks[i].tiled] if closer and request.image is not None else []
        source = None if request.image is None else _Source(request, self, as_array=bool(tiled) and request.tiles > 1)
        request.on_device = None if source is None else source.on_device
        made: list[PrefillWindow[ImageT]] = []
        most = self.config.max_sequences
        for number in range(1 + closer if tiled else 1):
            chosen = tiled if number else asked
            sequences = [self._sequence(request, i) for i in chosen]
            crops = source.crops(number) if source is not None and (chosen or request.keeps is not None) else None
            for start in range(0, max(1, len(chosen)), most):
                part = slice(start, start + most)
                window: PrefillWindow[ImageT] = PrefillWindow(  # the type parameter would cost 3 µs
                    request,
                    [*sequences[part], *self._branches(sequences[part])],
                    prepare=crops,
                    number=number,
                    tasks=tuple(chosen[part]),
                )
                if request.previous is not None and self.config.drafts:
                    window.recall_from(request.previous)
                made.append(window)
        return made

    def prepare(self, request: Request[ImageT]) -> None:
        """Divide a request into images and tiles, and crop them, in the caller's thread.

        Raises:
            PromptError: if a prompt is too long, or if the model has no token for a part of it.
            DeadlineError: if there is not enough time to crop the images.
        """
        made = self.plan(request)
        if request.deadline < math.inf:
            pixels = 0
            if made[-1].number:
                assert request.image is not None
                whole = self.read(request.image() if callable(request.image) else request.image, True)
                request.image, (height, width, _) = whole, whole.shape
                pixels = sum(one.pixels for one in windows(width, height, request.tiles, request.looks))
            self.pace.require_time(pixels, request.deadline - time.monotonic())
        for window in made:
            if window.prepare is not None:
                window.image, window.prepare = window.prepare(), None
        request.windows, request.image = made, None

    def prompt(self, task: Task) -> tuple[int, ...]:
        """Return the token IDs of a task's prompt. The token IDs of recent tasks are cached.

        Raises:
            PromptError: if the model has no tokens for the task.
        """
        return remembered(self.known, task, self._prompt, self.config.known_tasks)

    def _prompt(self, task: Task) -> tuple[int, ...]:
        ids = tuple(task.prompt(self.prompts))
        if not ids:
            raise PromptError(f"the prompt '{shorten(task.asked)}' is invalid: it contains no tokens")
        self._check_tokens(ids, task)
        return ids

    def _check_tokens(self, ids: abc.Iterable[int], task: Task) -> None:
        """Raise `PromptError` if a token ID is outside the vocabulary.

        On a GPU, an invalid ID would make the CUDA context unusable.
        """
        if any(not 0 <= token < self.limits.vocab_size for token in ids):
            raise PromptError(f"the model has no token for some characters of the prompt '{shorten(task.asked)}'")

    def _sequence(self, request: Request[ImageT], number: int) -> Sequence[ImageT]:
        limits, prompts, task = self.limits, self.prompts, request.tasks[number]
        ids, values = self.prompt(task), task.values(prompts)
        if not request.has_prefix:
            ids = (limits.bos_id, *ids)
        # The last sample is never fed back, so there is one more step than positions.
        room = limits.max_context - (limits.prefix_length if request.has_prefix else 0) - len(ids) + 1
        output = task.output(prompts, room, request.on_text)
        self._check_tokens(output.vocabulary(), task)
        if output.steps < 1:
            most = room + len(ids) - 1
            raise PromptError(f"the prompt is too long: {len(ids)} tokens, at most {most} fit after the image")
        return Sequence(ids, output, values)

    def _branches(self, sequences: abc.Sequence[Sequence[ImageT]]) -> list[Sequence[ImageT]]:
        """Return branches of the sequences, to decode parts of an answer in parallel (`OutputState.branches`)."""
        beside: list[Sequence[ImageT]] = []
        for one in sequences:
            for tokens, output in one.output.branches(self.max_branches - len(sequences) - len(beside)):
                beside.append(Sequence((*one.prompt, *tokens), output, one.values, trunk=one))
        return beside

    # ---- the result

    def settle(self, request: Request[ImageT], error: BaseException | None) -> None:
        """Set the result or error of a request's future unless it was cancelled. Free the request's data."""
        future, request.future = request.future, None
        outcome: Result | BaseException | None = None
        if future is not None and not future.done():
            try:
                outcome = error or self._result(request)
            except BaseException as mistake:  # even sys.exit in a tokenizer or task fails only this request
                outcome = mistake
        # Drop references now, so that memory is freed without garbage collection.
        for window in request.windows:
            window.drop_image()
            window.sequences = []
        picture, request.picture = request.picture, None
        request.image, request.windows, request.on_device = None, [], None
        if future is None or outcome is None:
            return
        kept = request.keeps is not None
        if picture is not None and self.refine is not None and isinstance(outcome, Result) and not future.cancelled():
            self.refine(outcome, picture, lambda result: self._answer(future, kept, result))
        else:
            self._answer(future, kept, outcome)

    def _answer(self, future: ResultFuture, kept: bool, outcome: Result | BaseException) -> None:
        """Set the result or error of a future unless it was cancelled. Count the outcome if `kept` is False."""
        if not future.set_running_or_notify_cancel():
            return
        future.on_cancel = None
        if isinstance(outcome, Result):
            if not kept:
                self.count("done")
            future.set_result(outcome)
        else:
            if not kept:
                self.count("superseded" if isinstance(outcome, SupersededError) else "failed")
            traceback.clear_frames(outcome.__traceback__)  # frames in the traceback would keep crops alive
            future.set_exception(outcome)

    def _result(self, request: Request[ImageT]) -> Result:
        width, height = request.size
        answers: list[list[tuple[OutputState, Window]]] = [[] for _ in request.tasks]
        # Without an image, the size is unused.
        places = windows(max(1, width), max(1, height), request.tiles, request.looks)
        for window in request.windows:
            for i, sequence in zip(window.tasks, window.sequences, strict=False):  # branches follow and are skipped
                sequence.output.finish()
                answers[i].append((sequence.output, places[window.number]))
        parts: list[ResultPart] = []
        for task, group in zip(request.tasks, answers, strict=True):
            parts += task.collect(group, width, height, self.limits)
        drafts = {key: last for window in request.windows for key, last in window.drafts().items()}
        return Result.of(parts, width, height, _timings(request), drafts if self.config.drafts else {})


class _Source(Generic[ImageT]):
    """The image of a request. It is read once, and then cropped for each tile. Thread-safe."""

    def __init__(self, request: Request[ImageT], maker: RequestMaker[ImageT], *, as_array: bool) -> None:
        self._request, self._maker, self._as_array = request, maker, as_array
        self._lock, self._uncut = threading.Lock(), 0
        self._is_read = False
        self._windows: list[Window] = []  # all windows, once the image is read
        if not callable(request.image):
            assert request.image is not None
            request.size = request.image.shape[1], request.image.shape[0]

    def on_device(self) -> bool:
        """Read the image, and return whether its pixels are already on the device."""
        begun = time.monotonic()
        pixels = self._read()
        with self._lock:
            self._request.crops_s += time.monotonic() - begun
        return self._maker.on_device(pixels)

    def cut(self, number: int) -> ImageT:
        """Crop and prepare the whole image if `number` is 0, otherwise the tile with the index `number`.

        Raises:
            DeadlineError: if too little time is left before the deadline.
        """
        request, maker, begun = self._request, self._maker, time.monotonic()
        pixels = self._read()
        window = self._windows[number]
        area = window.width * window.height
        read = time.monotonic()
        maker.pace.require_time(area, request.deadline - read)
        made = maker.cut(pixels, window if number else None)
        now = time.monotonic()
        maker.pace.measured(area, now - read)
        with self._lock:
            request.crops_s += now - begun
            self._uncut -= 1
            if not self._uncut:
                request.image = None
        return made

    def _read(self) -> Pixels:
        request = self._request
        with self._lock:
            image = request.image
            assert image is not None, "the request has already ended"
            if not self._is_read:
                if request.future is not None:
                    request.future.begun = True
                image = self._maker.read(image() if callable(image) else image, self._as_array)
                height, width, _ = image.shape
                request.size = width, height
                self._windows = windows(width, height, request.tiles, request.looks)
                if request.refine:
                    request.picture = image
                request.image, self._is_read = image, True
        return cast("Pixels", image)

    def crops(self, number: int) -> abc.Callable[[], ImageT]:
        """Return a function that crops the whole image (if `number` is 0) or a tile once, and caches the result."""
        self._uncut += 1
        lock, made = threading.Lock(), list[ImageT]()

        def once() -> ImageT:
            with lock:
                if not made:
                    made.append(self.cut(number))
                return made[0]

        return once


def _timings(request: Request[ImageT]) -> Timings:
    """Return the durations of the stages of a finished request."""
    first = request.windows[0]
    if not first.launched_at:  # there was nothing to run
        return Timings(queue_ms=(time.monotonic() - request.submitted_at) * 1e3)
    return Timings(
        # Later windows are cropped while the first window runs.
        queue_ms=max(0.0, first.launched_at - request.submitted_at - request.crops_s) * 1e3,
        prefill_ms=(request.crops_s + first.prefilled_at - first.launched_at) * 1e3,
        decode_ms=(time.monotonic() - first.prefilled_at) * 1e3,
        crops_ms=request.crops_s * 1e3,
    )
