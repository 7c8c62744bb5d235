"""What becomes of requests, from waiting to their end, and which sequence holds what. Pure bookkeeping, no torch.

An `ImageRequest` is one image (or a part of one) with the prompts on it; each prompt and the answer behind it is a
`Sequence`. A request is prefilled as one unit; its sequences are then decoded in one batch with all others. Resources
are allocated for the whole of an answer at admission, so that no sequence waits in the middle of one.

    waiting (`admission`) → admitted: pages, batch slots → its image is prepared → prefilled, decoded (`step_planner`)

Which request is admitted next says `admission`; a large one that waits for room is not overtaken while it is the next,
as small ones would starve it. Admitted are at most as many as one prefill takes, and none while a prefill is in flight,
but for `admit_early`: what still waits when that one is done may be newer.
"""

from __future__ import annotations

import math
import time
from collections import abc
from typing import Generic

from saccade.engine.core.admission import Admission
from saccade.engine.core.kv_pages import PagePool, Resources
from saccade.engine.core.speculative import DraftCounts, recall, take
from saccade.engine.core.step import ImageRequest, ImageT, KeptPrefix, Sequence, Step
from saccade.engine.core.step_planner import StepPlanner
from saccade.engine.core.streams import Submission
from saccade.engine.errors import DeadlineError, RequestTooLargeError
from saccade.engine.phase import TEXT_PHASES
from saccade.engine.tasks.output_state import Sampled


class Scheduler(Generic[ImageT]):
    """Plans the steps. Not thread-safe: one thread schedules.

    Args:
        pool: pages of the cache.
        page_size: tokens of a page.
        prefix_length: tokens of an image's prefix.
        n_batch_slots: most sequences at a time.
        images_per_prefill: most images in one prefill.
        n_adapters: most adapters on the device at a time; requests that need one more wait.
        clock: what deadlines are measured with, in seconds.
        drafts: whether a stream's answers are begun with earlier ones.
        from_images: whether the executor drafts answers about images.
        drafted_tokens: see `EngineConfig`.

    Attributes:
        admission: what waits, by streams.
        resources: what is held, and free.
        drafts: what drafts have done.
        zombies: steps of sequences that were over when these were committed.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        prefix_length: int,
        n_batch_slots: int,
        images_per_prefill: int,
        n_adapters: int = 0,
        clock: abc.Callable[[], float] = time.monotonic,
        drafts: bool = True,
        from_images: bool = False,
        drafted_tokens: int = 128,
    ) -> None:
        self.resources = Resources(pool, page_size, prefix_length, n_batch_slots, n_adapters)
        self._clock, self._drafts = clock, drafts
        self.admission: Admission[ImageT] = Admission(self.cancel)
        self.drafts = DraftCounts()
        self._planner: StepPlanner[ImageT] = StepPlanner(
            n_batch_slots, images_per_prefill, self.drafts, self.cancel, from_images, drafted_tokens
        )
        self._unprepared: list[ImageRequest[ImageT]] = []  # admitted, and nobody prepares their images yet
        self._timed: dict[ImageRequest[ImageT], None] = {}  # with a deadline and not over, in order of arrival
        self._soonest = math.inf  # no deadline is before this
        self._complete: list[ImageRequest[ImageT]] = []  # whose `done` is to be called yet
        self.zombies = 0

    @property
    def waiting(self) -> int:
        """Requests that are not admitted yet."""
        return len(self.admission)

    @property
    def decoding(self) -> int:
        """Sequences between prefill and their end."""
        return len(self._planner.decoding)

    @property
    def busy(self) -> bool:
        """Whether anything is admitted and not over."""
        return bool(self._planner.admitted or self._planner.decoding)

    @property
    def active(self) -> bool:
        """Whether anything waits, or is admitted and not over."""
        return self.busy or bool(len(self.admission))

    @property
    def lacking(self) -> int:
        """Requests that the next prefill has room for, beside those admitted, and those that nothing newer replaces."""
        return self._planner.missing - self.admission.kept

    def wake_at(self, now: float) -> float:
        """When a step may be possible, or a deadline passes, if nothing is possible at `now` and nothing happens."""
        return min(self._soonest, self.admission.wake_at(now))

    @property
    def at_rest(self) -> bool:
        """Whether nothing is held, and no request waits, has a deadline, or is to be reported."""
        return self.resources.all_free and not (self.active or self._timed or self._complete)

    def add(self, request: ImageRequest[ImageT], stream: abc.Hashable = None) -> None:
        """Queue a request; one that needs more than there is in all ends at once, with RequestTooLargeError."""
        if self._measure(request):
            self.admission.add(request, stream)
            self._watch(request)

    def submit(self, submission: Submission[ImageT], stream: abc.Hashable) -> None:
        """Let a request wait in its stream's place, of which nothing is done before it is admitted."""
        self.admission.offer(submission, stream, self._clock())
        self._soonest = min(self._soonest, submission.deadline)

    def _measure(self, request: ImageRequest[ImageT]) -> bool:
        """Whether a request can be run at all; else it ends."""
        try:
            complaint = self.resources.measure(request)
        except Exception as error:  # an output state's mistake is its own request's
            self._refuse(request, error)
        else:
            if complaint is not None:
                self._refuse(request, RequestTooLargeError(complaint))
            else:
                request.measured = True
        return not request.over

    def release_prefix(self, kept: KeptPrefix) -> None:
        """Release a kept prefix; requests that read it already go on. A second time it does nothing."""
        self.resources.release_prefix(kept)

    def _watch(self, request: ImageRequest[ImageT]) -> None:
        if request.deadline < math.inf:
            self._timed[request] = None
            self._soonest = min(self._soonest, request.deadline)

    def _refuse(self, request: ImageRequest[ImageT], error: BaseException) -> None:
        request.drop_image()
        self._end(request, error)

    def expire(self, now: float) -> None:
        """End requests whose deadline has passed; a single comparison while there are none."""
        if now < self._soonest:
            return
        late = dict.fromkeys([*self.admission.expire(now), *(one for one in self._timed if one.deadline <= now)])
        for request in late:
            self.cancel(request, DeadlineError(begun=request.admitted))
        self._soonest = min(
            min((request.deadline for request in self._timed), default=math.inf), self.admission.soonest()
        )

    def take_unprepared(self) -> list[ImageRequest[ImageT]]:
        """Requests admitted since the last call whose image is to be prepared, and given to `prepared`."""
        taken, self._unprepared = self._unprepared, []
        return taken

    def prepared(self, request: ImageRequest[ImageT], image: ImageT) -> None:
        """Take the image that was prepared for a request, unless it is over."""
        if not request.over:
            request.image, request.prepare = image, None

    def next_step(self, *, early: bool = False) -> Step[ImageT] | None:
        """The next launch, with its resources allocated; None when there is nothing to launch now.

        Nothing is admitted before a decode step whose turn it is: call `admit` once that is launched. With `early`,
        while a prefill is in flight, see `StepPlanner.next_step`.
        """
        step = None
        if self._planner.decodes_next(self.waiting):
            step = self._planner.next_step(self.waiting, early=early)
        if step is None:
            self.admit()
            step = self._planner.next_step(self.waiting, early=early)
        return step

    def admit(self) -> None:
        """Admit what the next prefill takes, unless one is in flight."""
        if not self._planner.prefilling:
            self._admit_waiting()

    def admit_early(self) -> None:
        """Admit what the next prefill takes, whatever is in flight, see `admission.lead`."""
        self._admit_waiting()

    def finalize(self, step: Step[ImageT]) -> None:
        """Ask what each token may be. To be called once the step ahead is committed: it depends on that."""
        for scheduled in step.sequences:
            if scheduled.phase in TEXT_PHASES and not scheduled.sequence.finalized:
                try:
                    scheduled.rule = scheduled.sequence.output.rule()
                except Exception as error:  # an output state's mistake is its own request's
                    self.cancel(scheduled.sequence.request, error)

    def commit(self, step: Step[ImageT], sampled: abc.Sequence[Sampled]) -> None:
        """Hand a step's values (one tuple a row) to its sequences; those that are complete end, see `report`."""
        self._planner.landed(step)
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
                complete = take(rows, values, self.drafts)
            except Exception as error:  # an output state's mistake is its own request's
                self.cancel(sequence.request, error)
                continue
            if complete:
                self._finish(sequence)
        for request in step.requests:
            if request.keeps is not None:
                self._keep(request, request.keeps)

    def report(self) -> None:
        """Call `done` of what is complete. To be called while the device is busy: results take a while to be made."""
        while self._complete:
            request = self._complete.pop(0)
            request.done(request, None)

    def _keep(self, request: ImageRequest[ImageT], kept: KeptPrefix) -> None:
        """Hand over a prefix that no step prefills any more, or free it if it is not wanted any more."""
        self.resources.keep(request, kept)
        if request.over:
            self.resources.release_prefix(kept)
        else:
            self._end(request, None)

    def fail(self, step: Step[ImageT], error: BaseException) -> None:
        """End all requests of a step that failed; nothing of it may be running any more."""
        self._planner.landed(step)
        for rows in step.groups:
            rows[0].sequence.inflight_refs -= 1
        for request in dict.fromkeys([*step.requests, *(scheduled.sequence.request for scheduled in step.sequences)]):
            self.cancel(request, error)
            if request.keeps is not None:
                self._keep(request, request.keeps)
        for scheduled in step.sequences:
            self.resources.release(scheduled.sequence)

    def cancel(self, request: ImageRequest[ImageT], error: BaseException) -> None:
        """End a request now: no more steps are launched for it; those in flight drain as zombies."""
        if request.over:
            return
        launched = self._planner.remove(request)
        if not launched:
            request.drop_image()
        if not request.admitted and request.measured:
            self.resources.drop(request)
        self._end(request, error)
        if request.keeps is not None and request.admitted and not launched:
            self._keep(request, request.keeps)
        for sequence in request.sequences:
            if not sequence.finalized:
                sequence.finalized = True
                if request.admitted:
                    self.resources.release(sequence)

    def withdraw(self, submission: Submission[ImageT], error: BaseException) -> None:
        """End a request that waits in its stream's place; does nothing once a part of it is admitted."""
        self.admission.withdraw(submission, error)

    def cancel_waiting(self, error: BaseException) -> None:
        """End every request that is not admitted yet."""
        for waiting in self.admission.requests:
            if waiting.submission is not None and waiting.begun_at is None:
                self.admission.end(waiting, error)
            for request in list(waiting.parts or ()):
                self.cancel(request, error)

    def cancel_all(self, error: BaseException) -> None:
        """End every request there is."""
        self.report()
        self.cancel_waiting(error)
        planner = self._planner
        for request in dict.fromkeys([*planner.admitted, *(sequence.request for sequence in planner.decoding)]):
            self.cancel(request, error)

    def _admit_waiting(self) -> None:
        now = self._clock()
        while self._planner.takes_more:
            waiting = self.admission.next(now)
            if waiting is None:
                return
            assert waiting.parts
            if not waiting.measured:
                waiting.measured = True
                for part in list(waiting.parts):
                    self._measure(part)
                continue
            request = waiting.parts[0]
            if not self.resources.allocate(request):
                return
            if waiting.begun_at is None:
                for part in waiting.parts:
                    self._watch(part)
            self.admission.admit(waiting, now)
            if not request.sequences and request.keeps is None:
                request.drop_image()
                self.resources.drop(request)
                self._end(request, None)
                continue
            if self._drafts and waiting.stream.key is not None:
                recall(request, waiting.stream.memory)
            self._planner.admitted.append(request)
            if not request.prepared:
                self._unprepared.append(request)

    def _finish(self, sequence: Sequence[ImageT]) -> None:
        sequence.finalized = True
        self._planner.decoding.remove(sequence)
        self.resources.release(sequence)
        if all(one.finalized for one in sequence.request.sequences):
            self._over(sequence.request, None)
            self._complete.append(sequence.request)

    def _end(self, request: ImageRequest[ImageT], error: BaseException | None) -> None:
        self._over(request, error)
        request.done(request, error)

    def _over(self, request: ImageRequest[ImageT], error: BaseException | None) -> None:
        request.over = True
        self._timed.pop(request, None)
        late = isinstance(error, DeadlineError) and request.admitted
        self.admission.over(request, self._clock(), learn=error is None or late)
