"""Which step runs next, of what is admitted: a prefill or a decode step, and their rows. Pure bookkeeping, no torch.

Order: behind a prefill come decode steps, as far as there is anything to decode: `_DECODES_QUIET`, or as soon as a
whole prefill waits `DECODES_BUSY`; or `_DECODES_KEPT` while no answer is about a frame that newer ones replace. Such an
answer is the fresher the fewer prefills come between its steps; others gain by steps of more sequences, each of which
costs less. No prefill begins before `_READY` of the admitted images are prepared, unless nothing can be decoded: one in
4K does not keep the others. Every sequence is in every decode step, so it waits for one prefill at most, of at most
`images_per_prefill` images, between two of its tokens. The n-th image that waits for its turn, once there is room for
it, is prefilled within (1 + `_DECODES_QUIET`) · ⌈n / images_per_prefill⌉ steps, however many are decoded.

Simulated with the steps' times of Moondream 2 in bf16 on an H200 (`tests.support.engine.simulation`), answers of 10
steps: the p99 of the latency at 32 streams of 4 frames a second; images a second of 32 streams that always have one:

| decode steps a prefill | prefills of 1, 2, 4, 8 images | prefills of 1 to 8 images |
|---|---|---|
| 1 | 212 ms, 149 | 125 ms, 164 |
| 3 | 201 ms, 164 | 105 ms, 164 |
| 9 | 163 ms, 150 | 89 ms, 150 |
| 3 while 8 wait, else 9 | | 101 ms, 165 |

That is one start of the cameras; with others the last row's p99 is 110 to 125 ms, and an H200 had 66. With 2 for 3, 32
streams that wait for each answer get 194.0 images a second for 193.2 on one H200, 269.4 for 268.0 in FP8; for 64
cameras that offer twice what it can, an answer would come 210 ms after its frame instead of 179 (simulated; 171 and 135
in FP8).
"""

from __future__ import annotations

from collections import abc
from typing import Generic

from saccade.engine.config import MAX_PROMPT_TOKENS
from saccade.engine.core.speculative import DraftCounts, first_rows, next_rows
from saccade.engine.core.step import ImageRequest, ImageT, ScheduledSequence, Sequence, Step, StepKind

DECODES_BUSY = 3
_DECODES_KEPT = 2
_DECODES_QUIET = 9
_READY = 0.75

Cancel = abc.Callable[[ImageRequest[ImageT], BaseException], None]


class StepPlanner(Generic[ImageT]):
    """Admitted requests on their way through prefill and decode steps.

    Args:
        n_batch_slots: most sequences at a time.
        images_per_prefill: most images in one prefill.
        drafts: what drafts do is counted there.
        cancel: ends a request whose output state raises while a step is planned.
        from_images: whether the executor drafts answers, see `drafts.first_rows`.
        drafted_tokens: see `EngineConfig`.

    Attributes:
        admitted: requests that are not prefilled yet, in order.
        decoding: sequences between prefill and their end.
        prefilling: prefills in flight.
    """

    def __init__(
        self,
        n_batch_slots: int,
        images_per_prefill: int,
        drafts: DraftCounts,
        cancel: Cancel[ImageT],
        from_images: bool = False,
        drafted_tokens: int = 128,
    ) -> None:
        self._n_batch_slots, self._images_per_prefill = n_batch_slots, images_per_prefill
        self._drafts, self._cancel, self._from_images = drafts, cancel, from_images
        self._drafted_tokens = drafted_tokens
        self.admitted: list[ImageRequest[ImageT]] = []
        self.decoding: list[Sequence[ImageT]] = []
        self.prefilling = 0
        self._decodes = _DECODES_QUIET  # steps since the last prefill
        self._launched = 0

    @property
    def takes_more(self) -> bool:
        """Whether another request may be admitted: as many as one prefill takes."""
        return self.missing > 0

    @property
    def missing(self) -> int:
        """How many more that is."""
        return self._images_per_prefill - len(self.admitted)

    def decodes_next(self, waiting: int) -> bool:
        """Whether the next step is a decode step, whatever is admitted before it of the requests that wait."""
        return bool(self.decoding) and not self._prefills_in_turn(waiting)

    def next_step(self, waiting: int, *, early: bool = False) -> Step[ImageT] | None:
        """The next launch, while so many requests wait for admission; None when there is nothing to launch now.

        With `early` there is no hurry: a prefill begins with most of the images that it may have, or not now.
        """
        turn = self._prefills_in_turn(waiting)
        step = (self._prefill(hasty=False) if turn else None) or self._decode() or self._prefill(hasty=not early)
        if step is not None:
            self._decodes = 0 if step.kind is StepKind.PREFILL else self._decodes + 1
            self.prefilling += step.kind is StepKind.PREFILL
            for rows in step.groups:
                rows[0].sequence.inflight_refs += 1
        return step

    def landed(self, step: Step[ImageT]) -> None:
        """Note that a step is no longer in flight."""
        self.prefilling -= step.kind is StepKind.PREFILL
        for request in step.requests:
            request.drop_image()

    def remove(self, request: ImageRequest[ImageT]) -> bool:
        """Plan no more steps for a request; whether one was launched for it."""
        if request in self.admitted:
            self.admitted.remove(request)
            return False
        for sequence in request.sequences:
            if sequence in self.decoding:
                self.decoding.remove(sequence)
        return request.admitted

    def _prefills_in_turn(self, waiting: int) -> bool:
        if waiting + len(self.admitted) < self._images_per_prefill:
            return self._decodes >= _DECODES_QUIET
        if _DECODES_KEPT <= self._decodes < DECODES_BUSY:
            return not any(sequence.request.live for sequence in self.decoding)
        return self._decodes >= DECODES_BUSY

    def _prefill(self, *, hasty: bool) -> Step[ImageT] | None:
        """A prefill of the images that are prepared; unless it is hasty, only if most of those admitted are."""
        ready = [request for request in self.admitted if request.prepared]
        if not hasty and len(ready) < _READY * len(self.admitted):
            return None
        requests: list[ImageRequest[ImageT]] = []
        scheduled: list[ScheduledSequence[ImageT]] = []
        # What drafts may add: no more rows than there are batch slots, nor tokens than are nearly free.
        sequences = [sequence for request in ready for sequence in request.sequences]
        certain = sum(len(sequence.output.certain) for sequence in sequences)
        slots = self._n_batch_slots - len(sequences) - certain
        tokens = sum(len(sequence.prompt) for sequence in sequences) + certain
        fits = slots >= 0 and tokens <= MAX_PROMPT_TOKENS
        room = min(slots, self._drafted_tokens - tokens)
        share = max(0, room) // max(1, len(ready))
        for request in ready:
            try:
                rows = first_rows(request, share, self._drafts, self._from_images, certain=fits)
            except Exception as error:  # an output state's mistake is its own request's
                self._cancel(request, error)
                continue
            self.admitted.remove(request)
            requests.append(request)
            scheduled += rows
            self.decoding += request.sequences
        return self._numbered(StepKind.PREFILL, scheduled, requests) if requests else None

    def _decode(self) -> Step[ImageT] | None:
        scheduled: list[ScheduledSequence[ImageT]] = []
        failed: list[tuple[ImageRequest[ImageT], Exception]] = []
        left = self._n_batch_slots - len(self.decoding)
        for sequence in self.decoding:
            if sequence.verifying:
                continue
            try:
                rows = next_rows(sequence, left, self._drafts)
            except Exception as error:  # an output state's mistake is its own request's
                failed.append((sequence.request, error))
                continue
            left -= max(0, len(rows) - 1)
            scheduled += rows
        if failed:
            for request, mistake in failed:
                self._cancel(request, mistake)
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
