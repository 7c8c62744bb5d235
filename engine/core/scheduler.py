"""What becomes of requests, from waiting to their end, and which step runs next. Pure bookkeeping, no torch.

A request is one image (`core.request`); a window of it is prefilled as one unit with the prompts on it; their
sequences are then decoded in one batch with all others. Resources are allocated for the whole of an answer at
admission, so that no sequence waits in the middle of one.

    waiting (`admission`) → admitted: pages, batch slots → its image is prepared → prefilled → decoded → over

`admission` picks the next request; a large one that waits for room is not overtaken while it is the next, as small ones
would starve it. Admitted are at most as many windows as one prefill takes, and none while a prefill is in flight, but
for `admit_early`: what still waits when that one is done may be newer.

Behind a prefill come decode steps, as far as there is anything to decode: `decodes_quiet` of them, or `decodes_busy` as
soon as a whole prefill waits. No prefill begins before `prefill_ready` of the admitted images are prepared, unless
nothing can be decoded: one in 4K does not keep the others. Every sequence is in every decode step, so it waits for one
prefill at most, of at most `images_per_prefill` images, between two of its tokens. The n-th image that waits for its
turn, once there is room for it, is prefilled within (1 + `decodes_quiet`) · ⌈n / images_per_prefill⌉ steps, however
many are decoded. All numbers are in `EngineConfig`.

Simulated with the steps' times of Moondream 2 in bf16 on an H200 (`tests.support.engine.simulation`), answers of 10
steps: the p99 of the latency at 32 streams of 4 frames a second; images a second of 32 streams that always have one:

| decode steps a prefill | prefills of 1, 2, 4, 8 images | prefills of 1 to 8 images |
|---|---|---|
| 1 | 212 ms, 149 | 125 ms, 164 |
| 3 | 201 ms, 164 | 105 ms, 164 |
| 9 | 163 ms, 150 | 89 ms, 150 |
| 3 while 8 wait, else 9 | | 101 ms, 165 |

That is one start of the cameras; with others the last row's p99 is 110 to 125 ms, and an H200 had 66. A constant does
worse: with 3 always, the cameras' median is 72 ms instead of 59, in FP8 40 instead of 32. 2 for 3 while no answer is
about a frame gave .4 % more images a second of 32 streams on an H200, and is gone.
"""

from __future__ import annotations

import math
import time
from collections import abc, deque
from enum import Enum
from typing import Generic

from saccade.engine.config import MAX_PROMPT_TOKENS, EngineConfig
from saccade.engine.core.admission import Admission
from saccade.engine.core.request import (
    ImageT,
    KeptPrefix,
    PrefillWindow,
    Request,
    ScheduledSequence,
    Sequence,
    State,
    Step,
    StepKind,
)
from saccade.engine.core.resources import PagePool, Resources
from saccade.engine.core.speculative import Speculation
from saccade.engine.errors import DeadlineError
from saccade.engine.models.protocol import TEXT_PHASES
from saccade.engine.tasks.output_state import Sampled


class Scheduler(Generic[ImageT]):
    """Plans the steps. Not thread-safe: one thread schedules.

    Args:
        config: the engine's; its `images_per_prefill` is what one prefill takes.
        pool: pages of the cache.
        prefix_length: tokens of an image's prefix.
        clock: what deadlines are measured with, in seconds.
        from_images: whether the executor drafts answers about images.

    Attributes:
        admission: what waits, by streams.
        resources: what is held, and free.
        speculation: what drafts have done.
        zombies: steps of sequences that were over when these were committed.
        soonest: no deadline is before this.
    """

    def __init__(
        self,
        config: EngineConfig,
        pool: PagePool,
        prefix_length: int,
        clock: abc.Callable[[], float] = time.monotonic,
        *,
        from_images: bool = False,
    ) -> None:
        self._config, self._clock = config, clock
        self.resources = Resources(config, pool, prefix_length)
        self.admission: Admission[ImageT] = Admission(config, self.cancel)
        self.speculation = Speculation(config, from_images=from_images)
        self._admitted: list[PrefillWindow[ImageT]] = []  # and not prefilled, in order
        self._unprepared: list[PrefillWindow[ImageT]] = []  # admitted, and nobody prepares their images yet
        self._decoding: list[Sequence[ImageT]] = []  # between prefill and their end
        self._prefilling = 0  # prefills in flight
        self._decodes = config.decodes_quiet  # steps since the last prefill
        self._launched = 0
        self._timed: dict[Request[ImageT], None] = {}  # with a deadline and not over, in order of arrival
        self.soonest = math.inf
        self._complete: list[Request[ImageT]] = []  # whose `done` is to be called yet
        self.zombies = 0

    @property
    def waiting(self) -> int:
        """Windows that are not admitted yet."""
        return len(self.admission)

    @property
    def decoding(self) -> int:
        """Sequences between prefill and their end."""
        return len(self._decoding)

    @property
    def active(self) -> bool:
        """Whether anything waits, or is admitted and not over."""
        return bool(self._admitted or self._decoding or len(self.admission))

    @property
    def at_rest(self) -> bool:
        """Whether nothing is held, and no request waits, has a deadline, or is to be reported."""
        return self.resources.all_free and not (self.active or self._timed or self._complete)

    @property
    def prefill_room(self) -> int:
        """Windows that the next prefill has room for, beside those admitted."""
        return self._config.images_per_prefill - len(self._admitted)

    @property
    def unfilled(self) -> int:
        """The same without those that wait and that nothing newer supersedes."""
        return self.prefill_room - self.admission.kept

    def wake_at(self, now: float) -> float:
        """When a step may be possible, or a deadline passes, if nothing is possible at `now` and nothing happens."""
        return min(self.soonest, self.admission.wake_at(now))

    # ---- requests

    def submit(self, request: Request[ImageT], stream: abc.Hashable = None) -> None:
        """Let a request wait; one whose windows are made, and need more than there is in all, ends at once."""
        if request.windows and not self._measure(request):
            return
        self.admission.offer(request, stream, self._clock())
        if request.deadline < math.inf:
            self._timed[request] = None
            self.soonest = min(self.soonest, request.deadline)

    def cancel(self, request: Request[ImageT], error: BaseException) -> None:
        """End a request now: no more steps are launched for it; those in flight drain as zombies."""
        if request.state is State.OVER:
            return
        self._over(request, error)
        for window in request.windows:
            self._stop(window)
        request.done(request, error)

    def expire(self, now: float) -> None:
        """End requests whose deadline has passed; a single comparison while there are none."""
        if now < self.soonest:
            return
        for request in [one for one in self._timed if one.deadline <= now]:
            begun = request.state is State.ADMITTED
            self.admission.late += not begun
            self.cancel(request, DeadlineError(begun=begun))
        self.soonest = min((request.deadline for request in self._timed), default=math.inf)

    def cancel_waiting(self, error: BaseException) -> None:
        """End every request of which no window is admitted yet."""
        for request in self.admission.requests:
            if request.begun_at is None:
                self.cancel(request, error)

    def cancel_all(self, error: BaseException) -> None:
        """End every request there is."""
        self.report()
        windows = [*self._admitted, *(sequence.window for sequence in self._decoding)]
        for request in dict.fromkeys([*self.admission.requests, *(window.request for window in windows)]):
            self.cancel(request, error)

    def release_prefix(self, kept: KeptPrefix) -> None:
        """Release a kept prefix; requests that read it already go on. A second time it does nothing."""
        self.resources.release_prefix(kept)

    def report(self) -> None:
        """Call `done` of what is complete. To be called while the device is busy: results take a while to be made."""
        while self._complete:
            request = self._complete.pop(0)
            request.done(request, None)

    # ---- admission

    def admit(self, *, early: bool = False) -> None:
        """Admit what the next prefill takes, unless one is in flight; `early`, whatever is, see `AdmissionLead`."""
        if self._prefilling and not early:
            return
        now = self._clock()
        while self.prefill_room > 0 and (request := self.admission.next(now)) is not None:
            if request.state is State.WAITING:
                self._plan(request)
                continue
            if not self.resources.allocate(request.windows[request.n_admitted]):
                return
            self._take(self.admission.admit(request, now))

    def take_unprepared(self) -> list[PrefillWindow[ImageT]]:
        """Windows admitted since the last call whose image is to be prepared, and given to `prepared`."""
        taken, self._unprepared = self._unprepared, []
        return taken

    def prepared(self, window: PrefillWindow[ImageT], image: ImageT) -> None:
        """Take the image that was prepared for a window, unless it is over."""
        if window.state is not State.OVER:
            window.image, window.prepare = image, None

    def _plan(self, request: Request[ImageT]) -> None:
        """Make the windows of a request that waits."""
        try:
            request.windows = request.make_windows(request)
        except Exception as error:  # a task's mistake is its own request's
            self.cancel(request, error)
            return
        self.admission.planned(request)
        self._measure(request)

    def _measure(self, request: Request[ImageT]) -> bool:
        """Whether the windows of a request can be run at all; else it ends."""
        try:
            for window in request.windows:
                self.resources.measure(window)
        except Exception as error:  # there is not enough, or an output state's mistake is its own request's
            self.cancel(request, error)
            return False
        request.state = State.PLANNED
        return True

    def _take(self, window: PrefillWindow[ImageT]) -> None:
        """Let an admitted window be prefilled; nothing is left to do for one without prompts."""
        request = window.request
        if not window.sequences and request.keeps is None:
            window.drop_image()
            self.resources.drop(window)
            self._window_over(window)
            return
        if self._config.drafts and request.stream is not None:
            window.recall(self.admission.stream(request.stream).memory, self._config.remembered_prompts)
        self._admitted.append(window)
        if not window.prepared:
            self._unprepared.append(window)

    # ---- steps

    def next_step(self, *, early: bool = False) -> Step[ImageT] | None:
        """The next launch, with its resources allocated; None when there is nothing to launch now.

        Nothing is admitted before a decode step whose turn it is: call `admit` once that is launched. With `early`,
        while a prefill is in flight, there is no hurry: a prefill begins with most of its images, or not now.
        """
        step = None
        if self._decoding and not self._prefills_in_turn():
            step = self._choose(early=early)
        if step is None:
            self.admit()
            step = self._choose(early=early)
        if step is not None:
            self._decodes = 0 if step.kind is StepKind.PREFILL else self._decodes + 1
            self._prefilling += step.kind is StepKind.PREFILL
            for rows in step.groups:
                rows[0].sequence.inflight_refs += 1
        return step

    def _choose(self, *, early: bool) -> Step[ImageT] | None:
        step = (self._prefill_ready() if self._prefills_in_turn() else None) or self._decode()
        return step or (self._prefill_ready() if early else self._prefill())

    def finalize(self, step: Step[ImageT]) -> None:
        """Ask what each token may be. To be called once the step ahead is committed: it depends on that."""
        for scheduled in step.sequences:
            if scheduled.phase in TEXT_PHASES and not scheduled.sequence.finalized:
                try:
                    scheduled.rule = scheduled.sequence.output.rule()
                except Exception as error:  # an output state's mistake is its own request's
                    self.cancel(scheduled.sequence.window.request, error)

    def commit(self, step: Step[ImageT], sampled: abc.Sequence[Sampled]) -> None:
        """Hand a step's values (one tuple a row) to its sequences; those that are complete end, see `report`."""
        self._landed(step)
        at = 0
        for rows in step.groups:
            values = sampled[at : at + len(rows)]
            at += len(rows)
            sequence = rows[0].sequence
            sequence.inflight_refs -= 1
            if sequence.finalized:
                self.zombies += 1
                self.resources.release(sequence)
                continue
            try:
                complete = self.speculation.take(rows, values)
            except Exception as error:  # an output state's mistake is its own request's
                self.cancel(sequence.window.request, error)
                continue
            if complete:
                self._finish(sequence)
        self._keep_prefixes(step)

    def fail(self, step: Step[ImageT], error: BaseException) -> None:
        """End all requests of a step that failed; nothing of it may be running any more."""
        self._landed(step)
        for rows in step.groups:
            rows[0].sequence.inflight_refs -= 1
        windows = [*step.windows, *(rows[0].sequence.window for rows in step.groups)]
        for request in dict.fromkeys(window.request for window in windows):
            self.cancel(request, error)
        self._keep_prefixes(step)
        for rows in step.groups:
            self.resources.release(rows[0].sequence)

    def _landed(self, step: Step[ImageT]) -> None:
        self._prefilling -= step.kind is StepKind.PREFILL
        for window in step.windows:
            window.drop_image()

    def _prefills_in_turn(self) -> bool:
        config = self._config
        quiet = self.waiting + len(self._admitted) < config.images_per_prefill
        return self._decodes >= (config.decodes_quiet if quiet else config.decodes_busy)

    def _prefill_ready(self) -> Step[ImageT] | None:
        """A prefill of the images that are prepared, if most of those admitted are."""
        ready = sum(window.prepared for window in self._admitted)
        return self._prefill() if ready >= self._config.prefill_ready * len(self._admitted) else None

    def _prefill(self) -> Step[ImageT] | None:
        """A prefill of the images that are prepared."""
        ready = [window for window in self._admitted if window.prepared]
        windows: list[PrefillWindow[ImageT]] = []
        scheduled: list[ScheduledSequence[ImageT]] = []
        # What drafts may add: no more rows than there are batch slots, nor tokens than are nearly free.
        sequences = [sequence for window in ready for sequence in window.sequences]
        certain = sum(len(sequence.output.certain) for sequence in sequences)
        slots = self._config.max_sequences - len(sequences) - certain
        tokens = sum(len(sequence.prompt) for sequence in sequences) + certain
        fits = slots >= 0 and tokens <= MAX_PROMPT_TOKENS
        room = min(slots, self._config.drafted_tokens - tokens)
        share = max(0, room) // max(1, len(ready))
        for window in ready:
            if window.state is State.OVER:  # another window of its request has failed here
                continue
            try:
                rows = self.speculation.first_rows(window, share, certain=fits)
            except Exception as error:  # an output state's mistake is its own request's
                self.cancel(window.request, error)
                continue
            self._admitted.remove(window)
            windows.append(window)
            scheduled += rows
            self._decoding += window.sequences
        return self._numbered(StepKind.PREFILL, scheduled, windows) if windows else None

    def _decode(self) -> Step[ImageT] | None:
        scheduled: list[ScheduledSequence[ImageT]] = []
        failed: list[tuple[Request[ImageT], Exception]] = []
        left = self._config.max_sequences - len(self._decoding)
        for sequence in self._decoding:
            if sequence.verifying:
                continue
            try:
                rows = self.speculation.next_rows(sequence, left)
            except Exception as error:  # an output state's mistake is its own request's
                failed.append((sequence.window.request, error))
                continue
            left -= max(0, len(rows) - 1)
            scheduled += rows
        if failed:
            for request, mistake in failed:
                self.cancel(request, mistake)
            scheduled = [one for one in scheduled if not one.sequence.finalized]
        return self._numbered(StepKind.DECODE, scheduled) if scheduled else None

    def _numbered(
        self,
        kind: StepKind,
        scheduled: abc.Sequence[ScheduledSequence[ImageT]],
        windows: abc.Sequence[PrefillWindow[ImageT]] = (),
    ) -> Step[ImageT]:
        self._launched += 1
        return Step(kind, self._launched, tuple(scheduled), tuple(windows))

    # ---- ends

    def _finish(self, sequence: Sequence[ImageT]) -> None:
        sequence.finalized = True
        self._decoding.remove(sequence)
        self.resources.release(sequence)
        if all(one.finalized for one in sequence.window.sequences):
            self._window_over(sequence.window)

    def _window_over(self, window: PrefillWindow[ImageT]) -> None:
        window.state, request = State.OVER, window.request
        if request.state is not State.OVER and all(one.state is State.OVER for one in request.windows):
            self._over(request, None)
            self._complete.append(request)

    def _stop(self, window: PrefillWindow[ImageT]) -> None:
        """Plan no more steps for a window, and free what it holds, but for what steps in flight still use."""
        before, window.state = window.state, State.OVER
        launched = before is State.ADMITTED and window not in self._admitted
        if not launched:
            window.drop_image()
        if before is State.PLANNED:
            self.resources.drop(window)
        if before is not State.ADMITTED:
            return
        if not launched:
            self._admitted.remove(window)
            if window.request.keeps is not None:
                self._keep(window, window.request.keeps)
        for sequence in window.sequences:
            if sequence in self._decoding:
                self._decoding.remove(sequence)
            if not sequence.finalized:
                sequence.finalized = True
                self.resources.release(sequence)

    def _keep_prefixes(self, step: Step[ImageT]) -> None:
        for window in step.windows:
            if window.request.keeps is not None:
                self._keep(window, window.request.keeps)

    def _keep(self, window: PrefillWindow[ImageT], kept: KeptPrefix) -> None:
        """Hand over a prefix that no step prefills any more, or free it if it is not wanted any more."""
        self.resources.keep(window, kept)
        if window.state is State.OVER:
            self.resources.release_prefix(kept)
        else:
            self._window_over(window)

    def _over(self, request: Request[ImageT], error: BaseException | None) -> None:
        late = isinstance(error, DeadlineError) and request.state is State.ADMITTED
        request.state = State.OVER
        self._timed.pop(request, None)
        self.admission.over(request, self._clock(), learn=error is None or late)


# ---- the slots of steps


class SlotState(Enum):
    """Where a slot is in its round."""

    FREE = "free"
    LAUNCHED = "launched"
    FINALIZED = "finalized"


class StepSlots:
    """The step slots, used in turn: which may be launched, which must be committed next. A pure state machine.

    A slot is launched (its forward is on the stream), finalized (its sampling and its copy to the host are on theirs)
    and committed (the host has read it); only then may it be launched again. Steps are finalized and committed in the
    order of their launches. A step that cannot be launched or finalized is aborted: nothing of it will be read. Words
    after the public write-up 'Popping the GPU Bubble'.

    Args:
        depth: slots: 1 blocks after each step, 2 keeps one step ahead of the host.
    """

    __slots__ = ("_in_flight", "_next", "_states")

    def __init__(self, depth: int) -> None:
        if depth not in (1, 2):
            raise ValueError(f"depth is 1 or 2, not {depth}")
        self._states = [SlotState.FREE] * depth
        self._in_flight: deque[int] = deque()
        self._next = 0

    @property
    def depth(self) -> int:
        """Number of slots."""
        return len(self._states)

    @property
    def can_launch(self) -> bool:
        """Whether the next slot in turn is free."""
        return self._states[self._next] is SlotState.FREE

    @property
    def in_flight(self) -> int:
        """Slots launched and not yet committed."""
        return len(self._in_flight)

    def state(self, slot: int) -> SlotState:
        """State of a slot."""
        return self._states[slot]

    def launch(self) -> int:
        """Take the next slot in turn.

        Raises:
            RuntimeError: if it is not free.
        """
        slot = self._next
        self._move(slot, SlotState.FREE, SlotState.LAUNCHED)
        self._in_flight.append(slot)
        self._next = (slot + 1) % len(self._states)
        return slot

    def finalize(self, slot: int) -> None:
        """Note that the slot's sampling and copy are on their streams.

        Raises:
            RuntimeError: if it was not launched, or an older step is not finalized yet.
        """
        for older in self._in_flight:
            if older == slot:
                break
            if self._states[older] is not SlotState.FINALIZED:
                raise RuntimeError(f"slot {slot} is finalized before slot {older}, which is older")
        self._move(slot, SlotState.LAUNCHED, SlotState.FINALIZED)

    def commit(self, slot: int) -> None:
        """Note that the host has read the slot; it is free again.

        Raises:
            RuntimeError: if it was not finalized, or is not the oldest step.
        """
        if not self._in_flight or self._in_flight[0] != slot:
            raise RuntimeError(f"slot {slot} is not the oldest step")
        self._move(slot, SlotState.FINALIZED, SlotState.FREE)
        self._in_flight.popleft()

    def abort(self, slot: int) -> None:
        """Note that the slot's step has come to nothing; it is free, and next in turn again.

        Raises:
            RuntimeError: if it was not launched or is finalized already, or is not the newest step.
        """
        if not self._in_flight or self._in_flight[-1] != slot:
            raise RuntimeError(f"slot {slot} is not the newest step")
        self._move(slot, SlotState.LAUNCHED, SlotState.FREE)
        self._in_flight.pop()
        self._next = slot

    def _move(self, slot: int, old: SlotState, new: SlotState) -> None:
        if self._states[slot] is not old:
            raise RuntimeError(f"slot {slot} is {self._states[slot].value}, not {old.value}")
        self._states[slot] = new
