"""Which step runs next, and which sequence holds what: requests, batch slots, pages. Pure bookkeeping, no torch.

An `ImageRequest` is one image (or a part of one) with the prompts on it; each prompt and the answer behind it is a
`Sequence`. A request is prefilled as one unit; its sequences are then decoded in one batch with all others. Resources
are allocated for the whole of an answer at admission, so that no sequence waits in the middle of one.

Order: prefill and decode alternate while both can go on. Every sequence is in every decode step, so it waits for at
most one prefill, of at most `images_per_prefill` images, between two of its tokens. The n-th image in the queue, once
there is room for it, is prefilled within 2 · ⌈n / images_per_prefill⌉ steps, however many sequences are being decoded.
Images are admitted in order of arrival: a large one that waits for room is not overtaken, as small ones would starve
it.
"""

from __future__ import annotations

import math
from collections import abc, deque
from typing import Generic

from saccade.engine.errors import DeadlineError, EngineError, RequestTooLargeError
from saccade.engine.phase import TEXT_PHASES, Phase
from saccade.engine.scheduling.adapter_slots import AdapterSlots
from saccade.engine.scheduling.output_state import Sampled
from saccade.engine.scheduling.page_pool import PagePool
from saccade.engine.scheduling.step import (
    ImageRequest,
    ImageT,
    KeptPrefix,
    ScheduledSequence,
    Sequence,
    Step,
    StepKind,
)


class Scheduler(Generic[ImageT]):
    """Plans the steps. Not thread-safe: one thread schedules.

    Args:
        pool: pages of the cache.
        page_size: tokens of a page.
        prefix_length: tokens of an image's prefix.
        n_batch_slots: most sequences at a time.
        images_per_prefill: most images in one prefill.
        n_adapters: most adapters on the device at a time; requests that need one more wait.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        prefix_length: int,
        n_batch_slots: int,
        images_per_prefill: int,
        n_adapters: int = 0,
    ) -> None:
        self.pool = pool
        self._page_size = page_size
        self._prefix_length = prefix_length
        self._prefix_pages = -(-prefix_length // page_size)
        self._n_batch_slots = n_batch_slots
        self._batch_slots = list(range(n_batch_slots - 1, -1, -1))
        self._images_per_prefill = images_per_prefill
        self._capacity = pool.n_free
        self._kept_pages = 0
        self._adapters, self._n_adapters = AdapterSlots(n_adapters), n_adapters
        self._waiting: deque[ImageRequest[ImageT]] = deque()
        self._decoding: list[Sequence[ImageT]] = []
        self._timed: dict[ImageRequest[ImageT], None] = {}  # with a deadline and not over, in order of arrival
        self._soonest = math.inf  # no deadline is before this
        self._prefill_next = True
        self._launched = 0
        self.zombies = 0

    @property
    def waiting(self) -> int:
        """Requests that are not admitted yet."""
        return len(self._waiting)

    @property
    def decoding(self) -> int:
        """Sequences between prefill and their end."""
        return len(self._decoding)

    @property
    def batch_slots_used(self) -> int:
        """Sequences that hold resources, including finalized ones in flight."""
        return self._n_batch_slots - len(self._batch_slots)

    @property
    def pages_used(self) -> int:
        """Pages in use."""
        return self._capacity - self.pool.n_free

    @property
    def pages_total(self) -> int:
        """Pages that can be allocated."""
        return self._capacity

    @property
    def busy(self) -> bool:
        """Whether anything waits or is being decoded."""
        return bool(self._waiting or self._decoding)

    @property
    def at_rest(self) -> bool:
        """Whether all pages, batch slots and adapter slots are free, and no request waits or has a deadline."""
        pages, slots = self.pool.n_free == self._capacity, len(self._batch_slots) == self._n_batch_slots
        idle = not (self._waiting or self._decoding or self._timed)
        return pages and slots and self._adapters.n_free == self._n_adapters and idle

    def add(self, request: ImageRequest[ImageT]) -> None:
        """Queue a request; one that needs more than there is in all ends at once, with RequestTooLargeError."""
        try:
            for sequence in request.sequences:
                sequence.n_pages = self._private_pages(sequence)
            pages = self._pages_of(request)
        except Exception as error:  # an output state's mistake is its own request's
            self._refuse(request, error)
            return
        if request.reads is not None:
            if not request.reads.pages:
                self._refuse(request, EngineError("this encoded image is closed"))
                return
            self.pool.share(request.reads.pages)
            request.pages = request.reads.pages
        left = self._capacity - self._kept_pages
        if pages > left or len(request.sequences) > self._n_batch_slots:
            message = (
                f"{len(request.sequences)} prompts on one image need {pages} cache pages of {self._page_size} tokens; "
                f"there are {left}, for {self._n_batch_slots} prompts at most: ask less at a time"
            )
            self._refuse(request, RequestTooLargeError(message))
        elif request.keeps is not None and self._kept_pages + self._prefix_pages > self._capacity // 2:
            message = "encoded images hold half of the cache's pages already: close some of them"
            self._refuse(request, RequestTooLargeError(message))
        elif request.adapter is not None and not self._n_adapters:
            message = "there is no slot for an adapter: load with adapter_slots=1 or more"
            self._refuse(request, RequestTooLargeError(message))
        else:
            self._waiting.append(request)
            self._kept_pages += self._prefix_pages if request.keeps is not None else 0
            if request.deadline < math.inf:
                self._timed[request] = None
                self._soonest = min(self._soonest, request.deadline)

    def _refuse(self, request: ImageRequest[ImageT], error: BaseException) -> None:
        self._drop_waiting(request)
        self._end(request, error)

    def _drop_waiting(self, request: ImageRequest[ImageT]) -> None:
        """Free what a request holds that is not admitted: its image, and a kept prefix that it reads."""
        request.image = None
        self.pool.release(request.pages)
        request.pages = ()

    def release_prefix(self, kept: KeptPrefix) -> None:
        """Release a kept prefix; requests that read it already go on. A second time it does nothing."""
        self.pool.release(kept.pages)
        self._kept_pages -= len(kept.pages)
        kept.pages = ()

    def expire(self, now: float) -> None:
        """End requests whose deadline has passed; a single comparison while there are none."""
        if now < self._soonest:
            return
        for request in [request for request in self._timed if request.deadline <= now]:
            self.cancel(request, DeadlineError(begun=request.admitted))
        self._soonest = min((request.deadline for request in self._timed), default=math.inf)

    def next_step(self) -> Step[ImageT] | None:
        """The next launch, with its resources allocated; None when there is nothing to launch now."""
        first, second = (self._prefill, self._decode) if self._prefill_next else (self._decode, self._prefill)
        step = first() or second()
        if step is not None:
            self._prefill_next = step.kind is StepKind.DECODE
            for scheduled in step.sequences:
                scheduled.sequence.inflight_refs += 1
        return step

    def finalize(self, step: Step[ImageT]) -> None:
        """Ask what each token may be. To be called once the step ahead is committed: it depends on that."""
        for scheduled in step.sequences:
            if scheduled.phase in TEXT_PHASES and not scheduled.sequence.finalized:
                try:
                    scheduled.rule = scheduled.sequence.output.rule()
                except Exception as error:  # an output state's mistake is its own request's
                    self.cancel(scheduled.sequence.request, error)

    def commit(self, step: Step[ImageT], sampled: abc.Sequence[Sampled]) -> None:
        """Hand a step's values (one tuple a sequence) to its sequences; end those that are complete."""
        _drop_images(step)
        for scheduled, values in zip(step.sequences, sampled, strict=True):
            sequence = scheduled.sequence
            sequence.inflight_refs -= 1
            if sequence.finalized:
                self.zombies += 1
                self._release(sequence)
                continue
            try:
                complete = sequence.output.commit(values)
            except Exception as error:  # an output state's mistake is its own request's
                self.cancel(sequence.request, error)
                continue
            if complete:
                self._finish(sequence)
        for request in step.requests:
            if request.keeps is not None:
                self._keep(request, request.keeps)

    def _keep(self, request: ImageRequest[ImageT], kept: KeptPrefix) -> None:
        """Hand over a prefix that has been prefilled, or free it if nobody wants it any more."""
        self._adapters.release(request.adapter_slot)
        kept.pages = request.pages
        if request.over:
            self.release_prefix(kept)
        else:
            self._end(request, None)

    def fail(self, step: Step[ImageT], error: BaseException) -> None:
        """End all requests of a step that failed; nothing of it may be running any more."""
        _drop_images(step)
        for scheduled in step.sequences:
            scheduled.sequence.inflight_refs -= 1
        for request in dict.fromkeys([*step.requests, *(scheduled.sequence.request for scheduled in step.sequences)]):
            self.cancel(request, error)
            if request.keeps is not None:
                self._keep(request, request.keeps)
        for scheduled in step.sequences:
            self._release(scheduled.sequence)

    def cancel(self, request: ImageRequest[ImageT], error: BaseException) -> None:
        """End a request now: no more steps are launched for it; those in flight drain as zombies."""
        if request.over:
            return
        if not request.admitted:
            self._waiting.remove(request)
            self._drop_waiting(request)
            self._kept_pages -= self._prefix_pages if request.keeps is not None else 0
        self._end(request, error)
        for sequence in request.sequences:
            if not sequence.finalized:
                sequence.finalized = True
                if sequence in self._decoding:
                    self._decoding.remove(sequence)
                if request.admitted:
                    self._release(sequence)

    def cancel_waiting(self, error: BaseException) -> None:
        """End every request that is not admitted yet."""
        for request in list(self._waiting):
            self.cancel(request, error)

    def cancel_all(self, error: BaseException) -> None:
        """End every request there is."""
        self.cancel_waiting(error)
        for request in dict.fromkeys(sequence.request for sequence in self._decoding):
            self.cancel(request, error)

    def _prefill(self) -> Step[ImageT] | None:
        requests: list[ImageRequest[ImageT]] = []
        scheduled: list[ScheduledSequence[ImageT]] = []
        while self._waiting and len(requests) < self._images_per_prefill:
            request = self._waiting[0]
            slot = self._adapters.find(request.adapter)
            short = self._pages_of(request) > self.pool.n_free or len(request.sequences) > len(self._batch_slots)
            if short or slot is None:
                break
            self._waiting.popleft()
            if not request.sequences and request.keeps is None:
                request.admitted = True
                self._drop_waiting(request)
                self._end(request, None)
                continue
            self._admit(request, slot)
            try:
                phases = [_first_phase(sequence) for sequence in request.sequences]
            except Exception as error:  # an output state's mistake is its own request's
                self.cancel(request, error)
                request.image = None
                continue
            requests.append(request)
            for sequence, phase in zip(request.sequences, phases, strict=True):
                scheduled.append(ScheduledSequence(sequence, phase, sequence.position))
                sequence.position += len(sequence.prompt)
                self._decoding.append(sequence)
        return self._numbered(StepKind.PREFILL, scheduled, requests) if requests else None

    def _decode(self) -> Step[ImageT] | None:
        scheduled: list[ScheduledSequence[ImageT]] = []
        failed: list[tuple[ImageRequest[ImageT], Exception]] = []
        for sequence in self._decoding:
            try:
                phase = sequence.output.next_phase()
            except Exception as error:  # an output state's mistake is its own request's
                failed.append((sequence.request, error))
                continue
            if phase is not None:
                sequence.position -= sequence.output.back
                scheduled.append(ScheduledSequence(sequence, phase, sequence.position))
                sequence.position += 1
        if failed:
            for request, mistake in failed:
                self.cancel(request, mistake)
            scheduled = [one for one in scheduled if not one.sequence.finalized]
        return self._numbered(StepKind.DECODE, scheduled) if scheduled else None

    def _numbered(
        self,
        kind: StepKind,
        scheduled: abc.Sequence[ScheduledSequence[ImageT]],
        requests: abc.Sequence[ImageRequest[ImageT]] = (),
    ) -> Step[ImageT]:
        self._launched += 1
        return Step(kind, self._launched, tuple(scheduled), tuple(requests))

    def _admit(self, request: ImageRequest[ImageT], adapter_slot: int) -> None:
        request.admitted = True
        request.adapter_slot = adapter_slot
        if request.image is not None:
            request.pages = self.pool.allocate(self._prefix_pages)
        if request.keeps is not None:
            self._adapters.acquire(adapter_slot, request.adapter)
        for number, sequence in enumerate(request.sequences):
            if number:
                self.pool.share(request.pages)
            self._adapters.acquire(adapter_slot, request.adapter)
            sequence.batch_slot = self._batch_slots.pop()
            sequence.pages = self.pool.allocate(sequence.n_pages)
            sequence.position = self._prefix_length if request.has_prefix else 0

    def _finish(self, sequence: Sequence[ImageT]) -> None:
        sequence.finalized = True
        self._decoding.remove(sequence)
        self._release(sequence)
        if all(one.finalized for one in sequence.request.sequences):
            self._end(sequence.request, None)

    def _release(self, sequence: Sequence[ImageT]) -> None:
        """Free what a finalized sequence holds, unless a step in flight still writes there."""
        if sequence.finalized and not sequence.inflight_refs and sequence.batch_slot >= 0:
            self.pool.release(sequence.request.pages)
            self.pool.release(sequence.pages)
            self._adapters.release(sequence.request.adapter_slot)
            self._batch_slots.append(sequence.batch_slot)
            sequence.batch_slot, sequence.pages = -1, ()

    def _end(self, request: ImageRequest[ImageT], error: BaseException | None) -> None:
        request.over = True
        self._timed.pop(request, None)
        request.done(request, error)

    def _private_pages(self, sequence: Sequence[ImageT]) -> int:
        length = len(sequence.prompt) + sequence.output.positions
        if not sequence.request.has_prefix and length > self._prefix_length:
            length += self._prefix_pages * self._page_size - self._prefix_length  # which nothing uses
        return -(-length // self._page_size)

    def _pages_of(self, request: ImageRequest[ImageT]) -> int:
        prefix = self._prefix_pages if request.image is not None else 0
        return prefix + sum(sequence.n_pages for sequence in request.sequences)


def _drop_images(step: Step[ImageT]) -> None:
    for request in step.requests:
        request.image = None


def _first_phase(sequence: Sequence[ImageT]) -> Phase:
    phase = sequence.output.next_phase()
    if phase is None:
        raise ValueError("an output state that wants no step was scheduled")
    return phase
