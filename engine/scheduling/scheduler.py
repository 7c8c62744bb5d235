"""Which step comes next, and who still needs what: looks, sequences, lanes and pages. Pure bookkeeping, no torch.

A *look* is one picture (or a part of one) with the prompts on it; each prompt is a sequence, its *answer*. A look is
prefilled as one unit; its answers are then decoded together with everybody else's. Resources are taken for the whole of
an answer when a look is admitted, so none waits in the middle.

Who is next: prefill and decode take turns while both can go on. Every sequence is in every decode step, so it waits for
at most one prefill, of at most `looks_per_prefill` pictures, between two of its tokens. The n-th picture in line, once
there is room for it, is prefilled within 2 · ⌈n / looks_per_prefill⌉ steps, however many sequences are being decoded.
Pictures are admitted in the order of their arrival: one that waits for room lets none pass, or the small ones would
starve the large.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

from saccade.engine.errors import DeadlineError
from saccade.engine.scheduling.adapter_slots import NO_SLOT, Adapter, AdapterSlots
from saccade.engine.scheduling.output_state import Phase, Skill
from saccade.engine.scheduling.page_pool import PagePool

Picture = TypeVar("Picture")
"""Whatever the executor takes for one."""


class NeverFitsError(ValueError):
    """A look that is larger than the whole cache."""


@dataclass(slots=True, eq=False)
class Answer(Generic[Picture]):
    """One sequence: a prompt and the answer that grows behind it.

    Attributes:
        prompt: token ids.
        skill: says what each step samples, and holds the answer.
        lane: its place in the executor's state.
        pages: private pages, for prompt and answer.
        position: where the next token goes.
        inflight_refs: launched and uncommitted steps that it is part of.
        finalized: nothing more is wanted of it; what is in flight is a zombie.
    """

    prompt: tuple[int, ...]
    skill: Skill
    look: Look[Picture] = field(init=False)
    lane: int = -1
    pages: tuple[int, ...] = ()
    position: int = 0
    inflight_refs: int = 0
    finalized: bool = False


@dataclass(slots=True, eq=False)
class Look(Generic[Picture]):
    """A picture and the prompts on it.

    Attributes:
        image: the picture, for the executor.
        answers: its sequences.
        done: called once when every answer is complete, or with the error that ended it.
        adapter: what its prefix and its answers are computed with besides the model.
        deadline: `time.monotonic()` at which it is ended if it is not over.
        pages: pages of the image's prefix, held once by each answer.
        adapter_slot: where its adapter is on the device, held likewise.
        admitted: its prefill has been launched.
        over: `done` has been called.
        launched_at, prefilled_at: `time.monotonic()` when its prefill was launched and committed.
    """

    image: Picture
    answers: list[Answer[Picture]]
    done: Callable[[Look[Picture], BaseException | None], None]
    deadline: float = math.inf
    adapter: Adapter | None = None
    pages: tuple[int, ...] = ()
    adapter_slot: int = NO_SLOT
    admitted: bool = False
    over: bool = False
    launched_at: float = 0.0
    prefilled_at: float = 0.0

    def __post_init__(self) -> None:
        for answer in self.answers:
            answer.look = self


class StepKind(StrEnum):
    """What a step runs."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True, eq=False)  # not frozen, which takes four times as long: each step makes one a sequence
class Row(Generic[Picture]):
    """One sequence's part of a step: what is sampled, and the position of the token that is fed (decode)."""

    answer: Answer[Picture]
    phase: Phase
    position: int


@dataclass(slots=True, frozen=True)
class Step(Generic[Picture]):
    """A launch: the rows, and for a prefill the looks that they belong to, in the same order; `number` is from 1."""

    kind: StepKind
    number: int
    rows: tuple[Row[Picture], ...]
    looks: tuple[Look[Picture], ...] = ()


class Scheduler(Generic[Picture]):
    """Decides the steps. Not thread-safe: one thread schedules.

    Args:
        pool: pages of the cache.
        page_size: tokens of a page.
        prefix_length: tokens of a picture's prefix.
        n_lanes: most sequences at a time.
        looks_per_prefill: most pictures in one prefill.
        n_adapters: most adapters on the device at a time; looks that want one more wait.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        prefix_length: int,
        n_lanes: int,
        looks_per_prefill: int,
        n_adapters: int = 0,
    ) -> None:
        self.pool = pool
        self._page_size = page_size
        self._prefix_length = prefix_length
        self._prefix_pages = -(-prefix_length // page_size)
        self._n_lanes = n_lanes
        self._lanes = list(range(n_lanes - 1, -1, -1))
        self._looks_per_prefill = looks_per_prefill
        self._capacity = pool.n_free
        self._adapters, self._n_adapters = AdapterSlots(n_adapters), n_adapters
        self._waiting: deque[Look[Picture]] = deque()
        self._decoding: list[Answer[Picture]] = []
        self._timed: dict[Look[Picture], None] = {}  # those with a deadline that are not over, in order of arrival
        self._soonest = math.inf  # no deadline is before this
        self._prefill_next = True
        self._launched = 0
        self.zombies = 0

    @property
    def waiting(self) -> int:
        """Looks that are not admitted yet."""
        return len(self._waiting)

    @property
    def decoding(self) -> int:
        """Sequences between prefill and their end."""
        return len(self._decoding)

    @property
    def lanes_used(self) -> int:
        """Sequences that hold resources, the finalized ones in flight among them."""
        return self._n_lanes - len(self._lanes)

    @property
    def pages_used(self) -> int:
        """Pages that somebody holds."""
        return self._capacity - self.pool.n_free

    @property
    def pages_total(self) -> int:
        """Pages that there are to hold."""
        return self._capacity

    @property
    def busy(self) -> bool:
        """Whether anything waits or is being answered."""
        return bool(self._waiting or self._decoding)

    @property
    def at_rest(self) -> bool:
        """Whether all pages, lanes and adapter slots are free and nothing waits, for its turn or its deadline."""
        pages, lanes = self.pool.n_free == self._capacity, len(self._lanes) == self._n_lanes
        idle = not (self._waiting or self._decoding or self._timed)
        return pages and lanes and self._adapters.n_free == self._n_adapters and idle

    def add(self, look: Look[Picture]) -> None:
        """Queue a look; one that needs more than there is in all ends at once, with NeverFitsError."""
        pages = self._pages_of(look)
        if pages > self._capacity or len(look.answers) > self._n_lanes:
            told = (
                f"{len(look.answers)} prompts on one picture need {pages} cache pages of {self._page_size} tokens; "
                f"there are {self._capacity}, for {self._n_lanes} prompts at most: ask less at a time"
            )
            self._end(look, NeverFitsError(told))
        elif look.adapter is not None and not self._n_adapters:
            self._end(look, NeverFitsError("there is no place for an adapter"))
        else:
            self._waiting.append(look)
            if look.deadline < math.inf:
                self._timed[look] = None
                self._soonest = min(self._soonest, look.deadline)

    def expire(self, now: float) -> None:
        """End looks whose deadline has passed; a single comparison while there are none."""
        if now < self._soonest:
            return
        for look in [look for look in self._timed if look.deadline <= now]:
            self.cancel(look, DeadlineError(begun=look.admitted))
        self._soonest = min((look.deadline for look in self._timed), default=math.inf)

    def next_step(self) -> Step[Picture] | None:
        """The next launch, with its resources taken; None when there is nothing to launch now."""
        first, second = (self._prefill, self._decode) if self._prefill_next else (self._decode, self._prefill)
        step = first() or second()
        if step is not None:
            self._prefill_next = step.kind is StepKind.DECODE
            for row in step.rows:
                row.answer.inflight_refs += 1
        return step

    def commit(self, step: Step[Picture], sampled: Sequence[tuple[float, float, float]]) -> None:
        """Hand a step's values (one triple a row) to its sequences; end those that are complete."""
        for row, values in zip(step.rows, sampled, strict=True):
            answer = row.answer
            answer.inflight_refs -= 1
            if answer.finalized:
                self.zombies += 1
                self._let_go(answer)
                continue
            try:
                complete = answer.skill.commit(values)
            except Exception as error:  # it belongs to its own look
                self.cancel(answer.look, error)
                continue
            if complete:
                self._finish(answer)

    def fail(self, step: Step[Picture], error: BaseException) -> None:
        """A step came to nothing: end all looks that it was for."""
        for row in step.rows:
            row.answer.inflight_refs -= 1
        for look in dict.fromkeys(row.answer.look for row in step.rows):
            self.cancel(look, error)
        for row in step.rows:
            self._let_go(row.answer)

    def cancel(self, look: Look[Picture], error: BaseException) -> None:
        """End a look now: nothing more is launched for it; what is in flight drains as zombies."""
        if look.over:
            return
        if not look.admitted:
            self._waiting.remove(look)
        self._end(look, error)
        for answer in look.answers:
            if not answer.finalized:
                answer.finalized = True
                if answer in self._decoding:
                    self._decoding.remove(answer)
                if look.admitted:
                    self._let_go(answer)

    def turn_away(self, error: BaseException) -> None:
        """End every look that is not admitted yet."""
        for look in list(self._waiting):
            self.cancel(look, error)

    def end_all(self, error: BaseException) -> None:
        """End every look there is."""
        self.turn_away(error)
        for look in dict.fromkeys(answer.look for answer in self._decoding):
            self.cancel(look, error)

    def _prefill(self) -> Step[Picture] | None:
        looks: list[Look[Picture]] = []
        while self._waiting and len(looks) < self._looks_per_prefill:
            look = self._waiting[0]
            slot = self._adapters.find(look.adapter)
            if self._pages_of(look) > self.pool.n_free or len(look.answers) > len(self._lanes) or slot is None:
                break
            self._waiting.popleft()
            if not look.answers:
                look.admitted = True
                self._end(look, None)
                continue
            looks.append(look)
            self._admit(look, slot)
        if not looks:
            return None
        rows: list[Row[Picture]] = []
        for look in looks:
            for answer in look.answers:
                phase = answer.skill.next_phase()
                assert phase is not None  # admitted answers have at least one step
                rows.append(Row(answer, phase, answer.position))
                answer.position += len(answer.prompt)
                self._decoding.append(answer)
        return self._numbered(StepKind.PREFILL, rows, looks)

    def _decode(self) -> Step[Picture] | None:
        rows: list[Row[Picture]] = []
        for answer in self._decoding:
            phase = answer.skill.next_phase()
            if phase is not None:
                rows.append(Row(answer, phase, answer.position))
                answer.position += 1
        return self._numbered(StepKind.DECODE, rows) if rows else None

    def _numbered(
        self, kind: StepKind, rows: Sequence[Row[Picture]], looks: Sequence[Look[Picture]] = ()
    ) -> Step[Picture]:
        self._launched += 1
        return Step(kind, self._launched, tuple(rows), tuple(looks))

    def _admit(self, look: Look[Picture], adapter_slot: int) -> None:
        look.admitted = True
        look.adapter_slot = adapter_slot
        look.pages = self.pool.take(self._prefix_pages)
        for number, answer in enumerate(look.answers):
            if number:
                self.pool.share(look.pages)
            self._adapters.hold(adapter_slot, look.adapter)
            answer.lane = self._lanes.pop()
            answer.pages = self.pool.take(self._private_pages(answer))
            answer.position = self._prefix_length

    def _finish(self, answer: Answer[Picture]) -> None:
        answer.finalized = True
        self._decoding.remove(answer)
        self._let_go(answer)
        if all(one.finalized for one in answer.look.answers):
            self._end(answer.look, None)

    def _let_go(self, answer: Answer[Picture]) -> None:
        """Release what a finalized answer holds, unless a step in flight still writes there."""
        if answer.finalized and not answer.inflight_refs and answer.lane >= 0:
            self.pool.give_back(answer.look.pages)
            self.pool.give_back(answer.pages)
            self._adapters.give_back(answer.look.adapter_slot)
            self._lanes.append(answer.lane)
            answer.lane, answer.pages = -1, ()

    def _end(self, look: Look[Picture], error: BaseException | None) -> None:
        look.over = True
        self._timed.pop(look, None)
        look.done(look, error)

    def _private_pages(self, answer: Answer[Picture]) -> int:
        # The last value sampled is never fed back, hence one position fewer than steps.
        return -(-(len(answer.prompt) + max(0, answer.skill.steps - 1)) // self._page_size)

    def _pages_of(self, look: Look[Picture]) -> int:
        return self._prefix_pages + sum(self._private_pages(answer) for answer in look.answers)
