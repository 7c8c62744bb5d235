"""Scheduler: plans the batch steps that take requests from the queue to their result.

A request (`core.request`) is divided into prefill windows. A prefill window is an image, or a tile of an image, with
its prompts. It is prefilled as one unit. Each prompt with its answer is a sequence. Decode steps batch the sequences of
all requests. Resources for the longest possible answer are allocated at admission, so no sequence is ever preempted.

    waiting (`admission`) → admitted: pages, batch slots → image prepared → prefilled → decoded → over

`admission` selects the next request. Later requests never overtake a large request that waits for resources, which
prevents starvation. Only the windows of the next prefill are admitted. Normally no window is admitted while a prefill
runs, so that newer frames can still supersede queued frames. `AdmissionLead` defines the exception.

After a prefill, `decodes_quiet` decode steps follow, or `decodes_busy` steps if the queued windows fill a prefill. A
prefill starts when a fraction `prefill_ready` of the admitted images is prepared, or when no sequence can be decoded.
Every decode step contains all sequences. Between two tokens, a sequence therefore waits for at most one prefill of
`images_per_prefill` images. The n-th queued image is prefilled within (1 + `decodes_quiet`) · ⌈n / images_per_prefill⌉
steps. `requests_per_prefill` limits the number of requests that begin in a prefill. The remaining capacity is used for
other windows of the same requests. The number of prompt tokens does not limit a prefill: with more than
`GRAPH_PROMPT_TOKENS`, it runs without a CUDA graph. All parameters are in `EngineConfig`.

The table compares numbers of decode steps per prefill, simulated with `tests.support.engine.simulation`. Conditions:
step times of Moondream 2 in bf16 on an H200, answers of 10 steps, prefills of 1 to 8 images. Latency is measured with
32 streams at 4 frames/s, throughput with 32 saturated streams.

| decode steps per prefill | p99 latency | throughput |
|---|---|---|
| 1 | 125 ms | 164 images/s |
| 3 | 105 ms | 164 images/s |
| 9 | 89 ms | 150 images/s |
| 3 if 8 images are queued, else 9 | 101 ms | 165 images/s |

The last row is the default. Its median latency is also lower than with 3 steps:

| decode steps per prefill | p50 latency, bf16 | p50 latency, FP8 |
|---|---|---|
| 3 | 72 ms | 40 ms |
| 3 if 8 images are queued, else 9 | 59 ms | 32 ms |
"""

from __future__ import annotations

import math
import time
from collections import abc, deque
from enum import Enum
from typing import Generic

from saccade.engine.config import GRAPH_PROMPT_TOKENS, EngineConfig
from saccade.engine.core.admission import Admission, PagePool, Resources
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
from saccade.engine.core.speculative import Speculation
from saccade.engine.errors import DeadlineError
from saccade.engine.models.protocol import TEXT_PHASES
from saccade.engine.tasks.task import Sampled


class Scheduler(Generic[ImageT]):
    """Admits requests and plans batch steps. Not thread-safe: only the step loop's thread may call it.

    Args:
        config: engine configuration; `images_per_prefill` and `requests_per_prefill` limit the size of a prefill.
        pool: pool of free KV cache pages.
        prefix_length: number of tokens of an image prefix (BOS and image tokens).
        clock: function that returns the current time in seconds, such as `time.monotonic`.
        from_images: whether to use the vision encoder's detections as drafts (speculative decoding).

    Attributes:
        admission: queued requests by stream.
        resources: allocator of pages and slots.
        speculation: speculative decoding and its statistics.
        zombies: number of times that a step computed a sequence that had already ended.
        soonest: lower bound of the earliest deadline, as a time in seconds.
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
        self._admitted: list[PrefillWindow[ImageT]] = []  # admitted and not prefilled, in order
        self._unprepared: list[PrefillWindow[ImageT]] = []  # admitted, image preparation not started
        self._decoding: list[Sequence[ImageT]] = []  # prefilled and not finished
        self._prefilling = 0  # prefills in flight
        self._decodes_since_prefill = config.decodes_quiet
        self._launched = 0
        self._timed: dict[Request[ImageT], None] = {}  # unfinished requests with a deadline
        self.soonest = math.inf
        self._complete: list[Request[ImageT]] = []  # finished requests whose `done` is not yet called
        self.zombies = 0

    @property
    def waiting(self) -> int:
        """Number of queued images and tiles."""
        return len(self.admission)

    @property
    def decoding(self) -> int:
        """Number of sequences that are decoding: prefilled and not finished."""
        return len(self._decoding)

    @property
    def active(self) -> bool:
        """Whether any request is queued or running."""
        return bool(self._admitted or self._decoding or len(self.admission))

    @property
    def at_rest(self) -> bool:
        """Whether all resources are free, no request is queued or running, and all results are reported."""
        return self.resources.all_free and not (self.active or self._timed or self._complete)

    @property
    def prefill_room(self) -> int:
        """Number of further requests that can be admitted to the next prefill."""
        begun = sum(not window.number for window in self._admitted)
        return min(self._window_room, self._config.requests_per_prefill - begun)

    @property
    def _window_room(self) -> int:
        return self._config.images_per_prefill - len(self._admitted)

    def wake_at(self, now: float) -> float:
        """Return the time in seconds at which the next deadline passes or `max_fps` permits a request."""
        return min(self.soonest, self.admission.wake_at(now))

    # ---- requests

    def submit(self, request: Request[ImageT], stream: abc.Hashable = None) -> None:
        """Queue a request. It ends with an error if it needs more resources than the engine has in total."""
        if request.windows and not self._measure(request):
            return
        self.admission.offer(request, stream, self._clock())
        if request.deadline < math.inf:
            self._timed[request] = None
            self.soonest = min(self.soonest, request.deadline)

    def cancel(self, request: Request[ImageT], error: BaseException) -> None:
        """End a request immediately with an error. The samples of its running steps are ignored."""
        if request.state is State.OVER:
            return
        self._over(request, error)
        for window in request.windows:
            self._stop(window)
        request.done(request, error)

    def expire(self, now: float) -> None:
        """End all requests whose deadline has passed. Their error is a `DeadlineError`."""
        if now < self.soonest:
            return
        for request in [one for one in self._timed if one.deadline <= now]:
            begun = request.state is State.ADMITTED
            self.admission.late += not begun
            self.cancel(request, DeadlineError(begun=begun))
        self.soonest = min((request.deadline for request in self._timed), default=math.inf)

    def cancel_waiting(self, error: BaseException) -> None:
        """End all queued requests with an error. Requests with an admitted image or tile continue."""
        for request in self.admission.requests:
            if request.begun_at is None:
                self.cancel(request, error)

    def cancel_all(self, error: BaseException) -> None:
        """End all requests with an error. Finished requests are reported first."""
        self.report()
        windows = [*self._admitted, *(sequence.window for sequence in self._decoding)]
        for request in dict.fromkeys([*self.admission.requests, *(window.request for window in windows)]):
            self.cancel(request, error)

    def release_prefix(self, kept: KeptPrefix) -> None:
        """Free the KV cache pages of an encoded image when no request uses them. Repeated calls have no effect."""
        self.resources.release_prefix(kept)

    def report(self) -> None:
        """Call the `done` callbacks of finished requests. Call this method while the device is busy, to save time."""
        while self._complete:
            request = self._complete.pop(0)
            request.done(request, None)

    # ---- admission

    def admit(self, *, early: bool = False) -> None:
        """Admit images and tiles for the next prefill. During a prefill, do so only if `early` is True."""
        if self._prefilling and not early:
            return
        now = self._clock()
        while self.prefill_room > 0 and (request := self.admission.next(now)) is not None:
            if request.state is State.WAITING:
                self._plan(request)
                continue
            # Admit the windows of a request together: this needs only one search over all streams.
            while self._window_room > 0 and request.n_waiting > 0:
                if not self.resources.allocate(request.windows[request.n_admitted]):
                    return
                self._take(self.admission.admit(request, now))

    def take_unprepared(self) -> list[PrefillWindow[ImageT]]:
        """Return the prefill windows to crop: the images and tiles that were admitted since the last call."""
        taken, self._unprepared = self._unprepared, []
        return taken

    def prepared(self, window: PrefillWindow[ImageT], image: ImageT) -> None:
        """Store the cropped image of a prefill window, or drop it if the request has ended."""
        if window.state is not State.OVER:
            window.image, window.prepare = image, None

    def _plan(self, request: Request[ImageT]) -> None:
        """Create the prefill windows of a queued request (its image and tiles). On failure, end it with an error."""
        try:
            request.windows = request.make_windows(request)
        except Exception as error:  # an error in a task fails only its request
            self.cancel(request, error)
            return
        self.admission.planned(request)
        self._measure(request)

    def _measure(self, request: Request[ImageT]) -> bool:
        """Compute the resources that a request needs. On an error, end the request and return False."""
        try:
            for window in request.windows:
                self.resources.measure(window)
        except Exception as error:  # too few resources, or an error in an output state, which fails only its request
            self.cancel(request, error)
            return False
        request.state = State.PLANNED
        return True

    def _take(self, window: PrefillWindow[ImageT]) -> None:
        """Add an admitted image or tile to the next prefill. If it has no prompts, it is finished immediately."""
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

    def next_step(self) -> Step[ImageT] | None:
        """Return the next batch step to launch, or None. Call `admit` after the launch."""
        # Before a decode step, no images are admitted, so that the step launches without delay.
        step = None
        if self._decoding and not self._prefills_in_turn():
            step = self._choose()
        if step is None:
            self.admit()
            step = self._choose()
        if step is not None:
            self._decodes_since_prefill = 0 if step.kind is StepKind.PREFILL else self._decodes_since_prefill + 1
            self._prefilling += step.kind is StepKind.PREFILL
            for rows in step.groups:
                rows[0].sequence.inflight_refs += 1
        return step

    def _choose(self) -> Step[ImageT] | None:
        return (self._prefill_ready() if self._prefills_in_turn() else None) or self._decode() or self._prefill()

    def finalize(self, step: Step[ImageT]) -> None:
        """Set the allowed tokens of each text row of a batch step. Call `commit` for the previous step first."""
        for scheduled in step.sequences:
            if scheduled.phase in TEXT_PHASES and not scheduled.sequence.finalized:
                try:
                    scheduled.rule = scheduled.sequence.output.rule()
                except Exception as error:  # an error in an output state fails only its request
                    self.cancel(scheduled.sequence.window.request, error)

    def commit(self, step: Step[ImageT], sampled: abc.Sequence[Sampled]) -> None:
        """Add the sampled values of a batch step to the answers of its sequences.

        Call `report` afterwards to deliver finished requests.

        Args:
            step: the step that has run.
            sampled: sampled values of each row; see `OutputState.commit`.
        """
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
            except Exception as error:  # an error in an output state fails only its request
                self.cancel(sequence.window.request, error)
                continue
            if complete:
                self._finish(sequence)
        self._keep_prefixes(step)

    def fail(self, step: Step[ImageT], error: BaseException) -> None:
        """End all requests of a failed batch step with an error. The device must no longer run the step."""
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
        quiet = self.waiting + len(self._admitted) < min(config.images_per_prefill, config.requests_per_prefill)
        return self._decodes_since_prefill >= (config.decodes_quiet if quiet else config.decodes_busy)

    def _prefill_ready(self) -> Step[ImageT] | None:
        """Return a prefill step of the cropped images, or None if too few admitted images are cropped."""
        ready = sum(window.prepared for window in self._admitted)
        return self._prefill() if ready >= self._config.prefill_ready * len(self._admitted) else None

    def _prefill(self) -> Step[ImageT] | None:
        """Return a prefill step of the cropped images, or None if no image is cropped."""
        ready = [window for window in self._admitted if window.prepared]
        windows: list[PrefillWindow[ImageT]] = []
        scheduled: list[ScheduledSequence[ImageT]] = []
        # Limit drafts by the batch slots, and by the number of tokens that add almost no time.
        sequences = [sequence for window in ready for sequence in window.sequences]
        certain = sum(len(sequence.output.certain) for sequence in sequences)
        slots = self._config.max_sequences - len(sequences) - certain
        tokens = sum(len(sequence.prompt) for sequence in sequences) + certain
        fits = slots >= 0 and tokens <= GRAPH_PROMPT_TOKENS
        room = min(slots, self._config.drafted_tokens - tokens)
        share = max(0, room) // max(1, len(ready))
        for window in ready:
            if window.state is State.OVER:  # another window of the request has failed
                continue
            try:
                rows = self.speculation.first_rows(window, share, certain=fits)
            except Exception as error:  # an error in an output state fails only its request
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
            except Exception as error:  # an error in an output state fails only its request
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
        """Cancel the sequences of an image or tile, and free the resources that no running step uses."""
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
        """Store the KV cache pages of an encoded image in `kept`, or free the pages if the request has ended."""
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


# ---- step slots


class SlotState(Enum):
    """State of a step slot (the buffers of one batch step)."""

    FREE = "free"
    LAUNCHED = "launched"
    FINALIZED = "finalized"


class StepSlots:
    """State machine of the step slots, which are used in round-robin order.

    A step slot has these states:

    1. Free.
    2. Launched: the forward pass is queued on the device.
    3. Finalized: sampling and the copy of the results are also queued.
    4. Committed: the host has read the results. The slot is free again.

    Steps are finalized and committed in launch order. If a launch or finalization fails, the step is aborted.

    Args:
        depth: number of slots. With 1, the host waits for each step. With 2, one step is queued ahead.
    """

    __slots__ = ("_in_flight", "_next", "_states")

    def __init__(self, depth: int) -> None:
        if depth not in (1, 2):
            raise ValueError(f"depth (batch steps in flight) must be 1 or 2; got {depth}")
        self._states = [SlotState.FREE] * depth
        self._in_flight: deque[int] = deque()
        self._next = 0

    @property
    def depth(self) -> int:
        """Number of step slots, which is the maximum number of steps in flight."""
        return len(self._states)

    @property
    def can_launch(self) -> bool:
        """Whether the next step slot is free."""
        return self._states[self._next] is SlotState.FREE

    @property
    def in_flight(self) -> int:
        """Number of batch steps in flight: launched, and their results not yet read by the host."""
        return len(self._in_flight)

    def state(self, slot: int) -> SlotState:
        """Return the state of a step slot."""
        return self._states[slot]

    def launch(self) -> int:
        """Mark the next step slot as launched and return its index.

        Raises:
            RuntimeError: if the slot is not free.
        """
        slot = self._next
        self._move(slot, SlotState.FREE, SlotState.LAUNCHED)
        self._in_flight.append(slot)
        self._next = (slot + 1) % len(self._states)
        return slot

    def finalize(self, slot: int) -> None:
        """Mark a launched step slot as finalized: sampling and the copy of the results are queued.

        Raises:
            RuntimeError: if the slot is not launched, or if an older slot is not finalized.
        """
        for older in self._in_flight:
            if older == slot:
                break
            if self._states[older] is not SlotState.FINALIZED:
                raise RuntimeError(f"step slot {slot} cannot be finalized before the older slot {older}")
        self._move(slot, SlotState.LAUNCHED, SlotState.FINALIZED)

    def commit(self, slot: int) -> None:
        """Mark a finalized step slot as committed: the host has read the results. This frees the slot.

        Raises:
            RuntimeError: if the slot is not finalized, or if an older slot is not yet committed.
        """
        if not self._in_flight or self._in_flight[0] != slot:
            raise RuntimeError(f"step slot {slot} cannot be committed: it is not the oldest step in flight")
        self._move(slot, SlotState.FINALIZED, SlotState.FREE)
        self._in_flight.popleft()

    def abort(self, slot: int) -> None:
        """Free the slot of a failed step. The next launch uses this slot.

        Raises:
            RuntimeError: if the slot is not launched, or is not the newest slot in flight.
        """
        if not self._in_flight or self._in_flight[-1] != slot:
            raise RuntimeError(f"the step in slot {slot} cannot be aborted: it is not the newest step in flight")
        self._move(slot, SlotState.LAUNCHED, SlotState.FREE)
        self._in_flight.pop()
        self._next = slot

    def _move(self, slot: int, old: SlotState, new: SlotState) -> None:
        if self._states[slot] is not old:
            raise RuntimeError(
                f"step slot {slot} must be in state {old.value}; it is in state {self._states[slot].value}"
            )
        self._states[slot] = new
