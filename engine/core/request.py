"""A request from its submission to its result, and what is scheduled of it. Plain values, no torch.

    Request          what one call of `submit` asks, in a `State`
      PrefillWindow  the image, or a tile of it, with the prompts on it: prefilled as one unit
        Sequence     a prompt and the answer that grows behind it
    Step             a launch: rows of sequences, and the windows of a prefill

`RequestMaker` makes the windows of a request and, once they are over, its result. What a request costs before it is
run, reading its prompts and cutting its image, is done for a frame that a newer one may supersede only once it is
admitted.
"""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections import abc
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from saccade.engine.config import EngineConfig
from saccade.engine.errors import DeadlineError, PromptError, SupersededError
from saccade.engine.models.protocol import TEXT_PHASES, Adapter, Phase
from saccade.engine.results import Result, ResultPart, Timings
from saccade.engine.tasks.output_state import ANY_TOKEN, DraftMemory, FedValue, OutputState, TokenRule
from saccade.engine.tasks.task import OnText, Task, Window, shorten, windows

if TYPE_CHECKING:
    from saccade.engine.futures import ResultFuture
    from saccade.engine.image import Image, LazyImage, Pixels
    from saccade.engine.models.protocol import ModelLimits, Prompts

T = TypeVar("T")
ImageT = TypeVar("ImageT")
"""An image as the executor takes it."""
Outcome = Literal["done", "failed", "cancelled", "superseded"]
"""How a request ends, as counters name it."""
NO_SLOT = 0
"""The adapter slot of sequences without an adapter; real slots are counted from 1."""


class State(Enum):
    """How far a request, or a window of it, has come."""

    WAITING = "waiting"  # nothing is done for it
    PLANNED = "planned"  # known to fit; it holds the kept prefix that it reads
    ADMITTED = "admitted"  # it has pages and batch slots; of a request, its first window has
    OVER = "over"


@dataclass(slots=True, eq=False)
class Sequence(Generic[ImageT]):
    """A prompt and the answer that grows behind it.

    Attributes:
        prompt: token ids.
        values: what stands in the prompt in place of the embeddings of some of its tokens, by their places: one number
            is a coordinate, two are a size.
        output: says what each step samples, and holds the answer.
        trunk: the sequence, ahead of it in the window, whose prompt its own begins with: they share whole pages of it.
        window: the image that it is about.
        n_pages: private pages that the whole answer may need; set once, when the request is planned.
        n_shared: pages of the trunk that it reads; their tokens are no part of its prompt any more. Likewise.
        batch_slot: its place in the executor's state; -1 while it holds none.
        pages: private pages, for prompt and answer.
        position: where the next token goes.
        inflight_refs: launched and uncommitted steps that it is part of.
        finalized: no more steps are wanted; those in flight are zombies.
        memory: what is known of earlier answers to this prompt, for a draft; None where nothing is kept.
        found: objects that the executor expects the answer to say, from its image: (any, x, y, width, height) of each.
        feed: what its next step feeds: the last value, and a draft behind it; empty where the device has the last one.
        verifying: a step with a draft of it is in flight: the next one depends on it.
        started: its prompt has been read.
        decodes: decode steps so far; of them, `misses` in a row whose draft was wrong at once.
        drafted, committed: values of drafts that were fed, and values of the answer.
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
    """An image's prefix that outlives the request that has prefilled it; see `Scheduler.release_prefix`.

    Attributes:
        pages: held once for it; none before its prefill is committed, and once it is released.
    """

    pages: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class PrefillWindow(Generic[ImageT]):
    """The image of a request, or a tile of it, and the prompts on it; or a kept prefix, or no image, and prompts.

    Attributes:
        request: the request that it is part of.
        sequences: one for each prompt, and behind them branches.
        image: for the executor; None before it is prepared, and once its prefill is committed or the request is over
            before that, so that a future that is kept does not keep 0.4 to 5.6 MB of crops on the device.
        prepare: cuts the image, where `image` is not there yet; called once, after the window is admitted, by a thread
            that is not the scheduler's.
        number: of the tile; the whole image is 0.
        tasks: which of the request's tasks its first sequences answer, by number.
        pages: pages of the image's prefix, held once by each sequence.
        adapter_slot: where its adapter is on the device, held likewise.
        admitted_at, launched_at, prefilled_at: `time.monotonic()` when it was admitted, and when its prefill was
            launched and committed.
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
        """Whether it has an image of its own, now or once that is prepared."""
        return self.request.has_prefix and self.request.reads is None

    @property
    def prepared(self) -> bool:
        """Whether it can be prefilled as far as its image goes."""
        return self.image is not None or not self.encodes

    def drop_image(self) -> None:
        """Give up the image, and what it would be cut from."""
        self.image = self.prepare = None

    def recall(self, memory: dict[abc.Hashable, DraftMemory], most: int) -> None:
        """Give its sequences what a stream's earlier answers to their prompts have left, unless their caller has.

        Args:
            memory: of the stream, by what was asked.
            most: prompts that it keeps.
        """
        for sequence in self.sequences:
            if sequence.memory is None and sequence.output.draftable:
                if len(memory) >= most:
                    memory.clear()
                sequence.memory = memory.setdefault(self._draft_key(sequence), DraftMemory())

    def recall_from(self, drafts: abc.Mapping[abc.Hashable, object]) -> None:
        """Give its sequences what `drafts` has kept of an earlier result."""
        for sequence in self.sequences:
            if sequence.output.draftable:
                kept = drafts.get(self._draft_key(sequence))
                sequence.memory = replace(kept) if isinstance(kept, DraftMemory) else DraftMemory()

    def drafts(self) -> dict[abc.Hashable, DraftMemory]:
        """What its complete answers leave for those of the next image: plain values, which hold nothing else."""
        kept: dict[abc.Hashable, DraftMemory] = {}
        for one in self.sequences:
            if one.output.draftable:
                last = DraftMemory(tuple(one.output.values())) if one.memory is None else replace(one.memory)
                kept[self._draft_key(one)] = last
        return kept

    def _draft_key(self, sequence: Sequence[ImageT]) -> abc.Hashable:
        # By the adapter's name: a draft is verified, whatever it comes from, and a memory must not keep weights.
        adapter = self.request.adapter
        return self.number, sequence.prompt, type(sequence.output).__name__, None if adapter is None else adapter.name


@dataclass(slots=True, eq=False)
class Request(Generic[ImageT]):
    """What one call of `submit` asks: tasks on an image, on a kept prefix, or on none.

    Attributes:
        make_windows: gives its windows, at least one; called once, by the scheduler where `frame`.
        done: called once in the loop's thread when every window is over, or with the error that has ended it.
        deadline: `time.monotonic()` at which it ends if it is not over.
        adapter: what its prefixes and its answers are computed with besides the model.
        reads: a prefix that is there already, in place of an image.
        keeps: what its image's prefix is kept as; it has no prompts then.
        has_prefix: whether the prompts stand behind an image's prefix.
        frame: while it waits, a newer frame of its stream supersedes it; nothing is done for it before its turn.
        tasks: what is asked.
        image: its pixels, or what gives them: called once, when it is to be cut.
        size: width and height of the image in pixels, once it is read.
        tiles: tasks that are `tiled` are asked of `tiles` × `tiles` windows as well,
        looks: and of these windows.
        previous: `PrefillWindow.drafts` of an earlier result; None for nothing.
        on_text: called with each piece of its texts as it comes, in the loop's thread.
        future: of the result.
        submitted_at: `time.monotonic()`.
        crops_s: seconds that threads have taken to cut its image.
        refine: whether its outlines are redrawn from `picture`,
        picture: the whole image, kept for that once it is read.
        stream: what the requests of one camera have in common; None for a request by itself.
        number, arrived: in order of arrival, and when, in seconds.
        n_admitted: of its windows; those behind them are still to be admitted.
        begun_at: when the first was; None before that.
    """

    make_windows: abc.Callable[[Request[ImageT]], list[PrefillWindow[ImageT]]]
    done: abc.Callable[[Request[ImageT], BaseException | None], None]
    deadline: float = math.inf
    adapter: Adapter | None = None
    reads: KeptPrefix | None = None
    keeps: KeptPrefix | None = None
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
        """Windows that are not admitted yet, as far as they are known."""
        return max(1, len(self.windows)) - self.n_admitted


class StepKind(StrEnum):
    """What a step runs."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)  # not frozen, which takes four times as long: each step makes one a sequence
class ScheduledSequence(Generic[ImageT]):
    """A row of a step: what a sequence feeds at a position, and samples behind it. With a draft it has several.

    Attributes:
        sequence: whose.
        phase: what is sampled.
        position: of the token that is fed (decode), or of the prompt's first one (prefill).
        rule: what a token may be; set by `Scheduler.finalize`.
        value: what is fed; None for what the sequence has sampled last, or for its prompt. In place of `FROM_IMAGE` the
            executor puts what it finds.
        alone: it is the only row of its sequence in the step, so that what it samples may be fed by the next one.
    """

    sequence: Sequence[ImageT]
    phase: Phase
    position: int
    rule: TokenRule = ANY_TOKEN
    value: FedValue | None = None
    alone: bool = True


@dataclass(slots=True, frozen=True)
class Step(Generic[ImageT]):
    """A launch: its rows, those of a sequence behind each other, and the windows of a prefill, in the same order.

    Attributes:
        kind: prefill or decode.
        number: from 1.
        sequences: its rows.
        windows: of a prefill.
        groups: the rows by sequence.
        drafted: whether any row feeds what the host says.
        writes_text: whether any row samples a token: what it may be depends on the step ahead.
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
        """The windows with an image to encode; to be asked before the step is committed."""
        return [window for window in self.windows if window.image is not None]

    @property
    def images(self) -> list[ImageT]:
        """Their images."""
        return [window.image for window in self.windows if window.image is not None]


def remembered(known: dict[Task, T], task: Task, make: abc.Callable[[Task], T], most: int) -> T:
    """What `make` gives for a task, from `known`, which keeps so many, if it is there."""
    try:
        found = known.get(task)
    except TypeError:  # a task with a value that cannot be hashed
        return make(task)
    if found is None:
        if len(known) >= most:
            known.clear()
        found = known[task] = make(task)
    return found


class CropPace:
    """A lower bound of seconds to cut a source pixel, learned: a deadline that leaves less is refused at once.

    Any thread may call it.

    Args:
        config: the engine's.
        seconds_per_pixel: what holds until a large image has been measured.
    """

    __slots__ = ("_config", "_doubted", "_rate")

    def __init__(self, config: EngineConfig, seconds_per_pixel: float) -> None:
        self._config, self._rate, self._doubted = config, seconds_per_pixel, True

    def measured(self, pixels: int, seconds: float) -> None:
        """Learn from an image that was cut."""
        if pixels >= self._config.crop_large:
            rate = self._config.crop_bound * seconds / pixels
            self._rate = rate if self._doubted else min(self._rate, rate)
            self._doubted = False

    def require_time(self, pixels: int, left_s: float) -> None:
        """Refuse at once what would only take time from others: a large image takes a second to be cut.

        Raises:
            DeadlineError: if that takes longer than is left; the bound is trusted a little less from then on.
        """
        if left_s <= 0:
            raise DeadlineError(begun=False)
        needed_s = self._rate * pixels
        if needed_s > left_s:
            self._rate *= self._config.crop_doubt
            self._doubted = True
            raise DeadlineError(begun=False, cropping_s=needed_s)


@dataclass(slots=True, frozen=True)
class RequestMaker(Generic[ImageT]):
    """Makes the windows of requests, and their results.

    Attributes:
        config: the engine's.
        limits, prompts: the model's.
        read: checks an image; with True, as an array, where tiles are cut from it.
        cut: the executor's `prepare` of a window, or of the whole.
        pace: how long that takes.
        count: is told how a request ends, but for cancelled ones.
        max_branches: most prompts and branches of a window that has branches, see `OutputState.branches`.
        known: token ids of the last tasks.
        refine: redraws a result's outlines from its image, and hands it to what it is given last, in another thread.
    """

    config: EngineConfig
    limits: ModelLimits
    prompts: Prompts
    read: abc.Callable[[Image, bool], Pixels]
    cut: abc.Callable[[Pixels, Window | None], ImageT]
    pace: CropPace
    count: abc.Callable[[Outcome], None]
    max_branches: int = 0
    known: dict[Task, tuple[int, ...]] = field(default_factory=dict)
    refine: abc.Callable[[Result, Pixels, abc.Callable[[Result], None]], None] | None = None

    # ---- windows

    def plan(self, request: Request[ImageT]) -> list[PrefillWindow[ImageT]]:
        """Read the prompts, and make the windows, whose images `PrefillWindow.prepare` cuts. Reads no image.

        Raises:
            PromptError: if a prompt leaves no room for an answer, or has words that are no tokens.
        """
        asked = [i for i, task in enumerate(request.tasks) if not task.empty]
        closer = (request.tiles**2 if request.tiles > 1 else 0) + len(request.looks)
        tiled = [i for i in asked if request.tasks[i].tiled] if closer and request.image is not None else []
        source = None if request.image is None else _Source(request, self, as_array=bool(tiled) and request.tiles > 1)
        made: list[PrefillWindow[ImageT]] = []
        most = self.config.max_sequences
        for number in range(1 + closer if tiled else 1):
            chosen = tiled if number else asked
            sequences = [self._sequence(request, i) for i in chosen]
            crops = source.crops(number) if source is not None and (chosen or request.keeps is not None) else None
            for start in range(0, max(1, len(chosen)), most):
                part = slice(start, start + most)
                window: PrefillWindow[ImageT] = PrefillWindow(  # with its parameter it takes 3 µs more
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
        """Plan a request and cut the images of all its windows now, in the caller's thread.

        Raises:
            PromptError: as `plan`.
            DeadlineError: if that takes longer than there is time.
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
        """Token ids that ask a task; remembered, as the frames of a stream ask the same again and again.

        Raises:
            PromptError: if the model has no tokens for it.
        """
        return remembered(self.known, task, self._prompt, self.config.known_tasks)

    def _prompt(self, task: Task) -> tuple[int, ...]:
        ids = tuple(task.prompt(self.prompts))
        if not ids:
            raise PromptError(f"'{shorten(task.asked)}' cannot be asked: it is no tokens")
        self._check_tokens(ids, task)
        return ids

    def _check_tokens(self, ids: abc.Iterable[int], task: Task) -> None:
        """Refuse ids that are no tokens: on a GPU one past the table would end the device context, not a request."""
        if any(not 0 <= token < self.limits.vocab_size for token in ids):
            raise PromptError(f"the model has no token for a part of '{shorten(task.asked)}'")

    def _sequence(self, request: Request[ImageT], number: int) -> Sequence[ImageT]:
        limits, prompts, task = self.limits, self.prompts, request.tasks[number]
        ids, values = self.prompt(task), task.values(prompts)
        if not request.has_prefix:
            ids = (limits.bos_id, *ids)
        # The last thing sampled is never fed back, hence one step more than there are positions.
        room = limits.max_context - (limits.prefix_length if request.has_prefix else 0) - len(ids) + 1
        output = task.output(prompts, room, request.on_text)
        self._check_tokens(output.vocabulary(), task)
        if output.steps < 1:
            most = room + len(ids) - 1
            raise PromptError(f"a prompt of {len(ids)} tokens is too long: {most} are left behind the image")
        return Sequence(ids, output, values)

    def _branches(self, sequences: abc.Sequence[Sequence[ImageT]]) -> list[Sequence[ImageT]]:
        """Sequences that do a part of the others' work beside them."""
        beside: list[Sequence[ImageT]] = []
        for one in sequences:
            for tokens, output in one.output.branches(self.max_branches - len(sequences) - len(beside)):
                beside.append(Sequence((*one.prompt, *tokens), output, one.values, trunk=one))
        return beside

    # ---- the result

    def settle(self, request: Request[ImageT], error: BaseException | None) -> None:
        """Give a request's future its result, or the error, unless it was cancelled."""
        future, request.future = request.future, None
        outcome: Result | BaseException | None = None
        if future is not None and not future.done():
            try:
                outcome = error or self._result(request)
            except BaseException as mistake:  # also sys.exit in a tokenizer or a task: it ends this request alone
                outcome = mistake
        # What hangs on the future, and 17 objects a request, must not wait for the collector.
        for window in request.windows:
            window.drop_image()
            window.sequences = []
        picture, request.picture = request.picture, None
        request.image, request.windows = None, []
        if future is None or outcome is None:
            return
        kept = request.keeps is not None
        if picture is not None and self.refine is not None and isinstance(outcome, Result) and not future.cancelled():
            self.refine(outcome, picture, lambda result: self._answer(future, kept, result))
        else:
            self._answer(future, kept, outcome)

    def _answer(self, future: ResultFuture, kept: bool, outcome: Result | BaseException) -> None:
        """Give a future its outcome, unless it was cancelled; `kept` is not counted."""
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
            traceback.clear_frames(outcome.__traceback__)  # a future that is kept would keep the crops in them
            future.set_exception(outcome)

    def _result(self, request: Request[ImageT]) -> Result:
        width, height = request.size
        answers: list[list[tuple[OutputState, Window]]] = [[] for _ in request.tasks]
        # Without an image, nobody reads the window.
        places = windows(max(1, width), max(1, height), request.tiles, request.looks)
        for window in request.windows:
            for i, sequence in zip(window.tasks, window.sequences, strict=False):  # behind them branches
                sequence.output.finish()
                answers[i].append((sequence.output, places[window.number]))
        parts: list[ResultPart] = []
        for task, group in zip(request.tasks, answers, strict=True):
            parts += task.collect(group, width, height, self.limits)
        drafts = {key: last for window in request.windows for key, last in window.drafts().items()}
        return Result.of(parts, width, height, _timings(request), drafts if self.config.drafts else {})


class _Source(Generic[ImageT]):
    """A request's image, read once for however many windows; any thread may ask."""

    def __init__(self, request: Request[ImageT], maker: RequestMaker[ImageT], *, as_array: bool) -> None:
        self._request, self._maker, self._as_array = request, maker, as_array
        self._lock, self._uncut = threading.Lock(), 0
        if not callable(request.image):
            assert request.image is not None
            request.size = request.image.shape[1], request.image.shape[0]

    def cut(self, number: int) -> ImageT:
        """The crops of a window, or of the whole image for 0.

        Raises:
            DeadlineError: if they cannot be cut before the deadline.
        """
        request, maker, begun = self._request, self._maker, time.monotonic()
        if request.future is not None:
            request.future.begun = True
        with self._lock:
            image = request.image
            assert image is not None, "the request is over"
            request.image = pixels = maker.read(image() if callable(image) else image, self._as_array)
            request.size = width, height = pixels.shape[1], pixels.shape[0]
            if request.refine and request.picture is None:
                request.picture = pixels
        window = windows(width, height, request.tiles, request.looks)[number] if number else None
        area = width * height if window is None else window.pixels
        read = time.monotonic()
        maker.pace.require_time(area, request.deadline - read)
        made = maker.cut(pixels, window)
        now = time.monotonic()
        maker.pace.measured(area, now - read)
        with self._lock:
            request.crops_s += now - begun
            self._uncut -= 1
            if not self._uncut:
                request.image = None
        return made

    def crops(self, number: int) -> abc.Callable[[], ImageT]:
        """What gives a window's crops: they are cut once for however many parts."""
        self._uncut += 1
        lock, made = threading.Lock(), list[ImageT]()

        def once() -> ImageT:
            with lock:
                if not made:
                    made.append(self.cut(number))
                return made[0]

        return once


def _timings(request: Request[ImageT]) -> Timings:
    """Cropping and the first window's prefill; the wait between them; and all that came after."""
    first = request.windows[0]
    if not first.launched_at:  # nothing was asked
        return Timings(queue_ms=(time.monotonic() - request.submitted_at) * 1e3)
    return Timings(
        # Later windows are cut while the first is run.
        queue_ms=max(0.0, first.launched_at - request.submitted_at - request.crops_s) * 1e3,
        prefill_ms=(request.crops_s + first.prefilled_at - first.launched_at) * 1e3,
        decode_ms=(time.monotonic() - first.prefilled_at) * 1e3,
        crops_ms=request.crops_s * 1e3,
    )
