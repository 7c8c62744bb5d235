"""The tick: launch(t+1) → report, admit → commit(t) → finalize(t+1). Knows no threads.

A step without text is finalized as soon as it is launched: what it samples depends on nothing that is committed, and
callers that have just got their results take the interpreter from this thread at each call of the driver.

With two slots a step's forward runs while the host still reads the step ahead of it; with one, nothing overlaps and
nothing else differs. A decode step is shorter than what the host does for 8 answers that are complete and 8 images that
come next: that waits until the next step is launched. A step that fails, at any point, ends its own image requests and
nothing else; so a lost device is one error for each of them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic

from saccade.engine.core.lead import AdmissionLead
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.step import ImageRequest, ImageT, Step, StepKind
from saccade.engine.core.step_planner import DECODES_BUSY
from saccade.engine.core.step_slots import StepSlots
from saccade.engine.errors import EngineError
from saccade.engine.runtime.executor import Executor
from saccade.engine.runtime.monitor import Monitor


class StepCycle(Generic[ImageT]):
    """One tick after another, each when `tick` is called; for one thread.

    Args:
        executor: runs the steps.
        scheduler: decides them.
        depth: step slots, 1 or 2.
        prepare: is given each admitted request whose image is to be cut, and gives it to `prepared` later.
        pause: waits until a moment, or until so many things have come from outside, and then runs these.
        clock: seconds, as the scheduler's.

    Attributes:
        monitor: what it counts, and how it is traced.
        flights: steps in flight by their slots, the oldest first.
        stalled_until: before that only what comes from outside, or lands, makes a step possible.
    """

    def __init__(
        self,
        executor: Executor[ImageT],
        scheduler: Scheduler[ImageT],
        depth: int,
        prepare: Callable[[ImageRequest[ImageT]], None],
        pause: Callable[[float, float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor, self._scheduler = executor, scheduler
        self._prepare, self._pause, self._clock = prepare, pause, clock
        self._lead = AdmissionLead(DECODES_BUSY)
        self._launched_at: deque[float] = deque()  # of the steps in flight
        self._landed_at = -math.inf  # the last step
        self.monitor = Monitor()
        self.slots = StepSlots(depth)
        self.flights: deque[tuple[int, Step[ImageT]]] = deque()
        self.stalled_until = -math.inf

    def tick(self) -> None:
        """Launch the next step if there is one, commit the oldest one if it is time, finalize what was launched."""
        monitor = self.monitor
        with monitor.span("schedule"):
            now = self._clock()
            self._scheduler.expire(now)
            step = self._scheduler.next_step() if self.slots.can_launch else None
            self._prepare_admitted()
        if step is None and not self.flights:
            self.stalled_until = self._scheduler.wake_at(now)
        ahead = step is None and bool(self.flights)
        if ahead:
            if not self._next_is_full():  # else first things first: it only needs to be launched
                self._scheduler.report()
            now, step = self._next_early()
        slot, launched_at = -1, self._clock()
        if step is not None:
            slot = self.slots.launch()
            for request in step.requests:
                request.launched_at = launched_at
            with monitor.launching(step):
                step = self._put(self._executor.launch, slot, step)
            if step is not None and step.kind is StepKind.PREFILL:
                self._lead.launched(self._clock() - now)
        if early := step is not None and not step.writes_text:
            step = self._finalize(slot, step)
        with monitor.span("admit"):
            self._scheduler.report()
            if step is not None:
                self._scheduler.admit()
                self._prepare_admitted()
        if self.flights and (step is None or not self.slots.can_launch):
            if not ahead:
                self._admit_early()
            self._commit()
        if not early:
            step = self._finalize(slot, step)
        if step is not None:
            self.slots.finalize(slot)
            self.flights.append((slot, step))
            self._launched_at.append(launched_at)
        if not self.flights:
            self._scheduler.report()
        monitor.sample(self._scheduler, self.flights)

    def prepared(
        self, request: ImageRequest[ImageT], image: ImageT | None, error: BaseException | None, at: float
    ) -> None:
        """Take the image of a request that was given to `prepare`, or the error that there was instead, made `at`."""
        self._lead.prepared(at - request.admitted_at)
        if error is not None or image is None:
            self._scheduler.cancel(request, error or EngineError("no image was made"))
        else:
            self._scheduler.prepared(request, image)

    def _prepare_admitted(self) -> None:
        for request in self._scheduler.take_unprepared():
            request.admitted_at = self._clock()
            self._prepare(request)

    def _admit_early(self) -> float:
        """While a prefill runs, admit the next images as long before its end as preparing them takes.

        At once where prefills follow each other and the next is full, of images that will not be newer: the device has
        one more in line then. At 64 streams with 4 ms a prefill it waited 0.6 ms for each, and 0.25 since.

        Returns:
            When they are to be launched; infinity: behind it.
        """
        _, step = self.flights[0]
        if step.kind is not StepKind.PREFILL or self.slots.depth == 1:
            return math.inf
        prefill = len(step.requests), max(self._launched_at[0], self._landed_at)
        at = self._lead.admit_at(*prefill)
        full = self._next_is_full()
        while not full:
            if at == math.inf:
                return math.inf
            self._pause(at, self._scheduler.lacking if self._lead.follow else math.inf)
            full = self._next_is_full()
            if self._clock() >= at:
                break
        self._scheduler.admit_early()
        self._prepare_admitted()
        if full:
            return -math.inf
        return self._lead.launch_at(*prefill)

    def _next_is_full(self) -> bool:
        """Whether the next prefill can be had now, of as many images as can be, which will not be newer later."""
        return self._lead.follow and self._scheduler.lacking <= 0

    def _next_early(self) -> tuple[float, Step[ImageT] | None]:
        """A step to be launched behind a prefill that runs, and when that was decided."""
        at = self._admit_early()
        if at == math.inf or not self.slots.can_launch:
            return self._clock(), None
        self._pause(at, math.inf)
        return self._clock(), self._scheduler.next_step(early=True)

    def _finalize(self, slot: int, step: Step[ImageT] | None) -> Step[ImageT] | None:
        """Have a step, if there is one, sampled and copied; None if that failed."""
        if step is None:
            return None
        with self.monitor.finalizing(step):
            self._scheduler.finalize(step)
            return self._put(self._executor.finalize, slot, step)

    def _put(self, part: Callable[[int, Step[ImageT]], None], slot: int, step: Step[ImageT]) -> Step[ImageT] | None:
        """Put a part of a step on the streams; None if that failed, and the step with it."""
        try:
            part(slot, step)
        except Exception as error:
            # Some of it may be on the streams. What takes its batch_slots and pages next comes behind it on the compute
            # stream, but images that are freed, and what the host sends and reads, do not: wait until it is over.
            # No other step has an error to tell meanwhile: the one before it has its event, and there is none behind.
            for stream in self._executor.streams.values():
                with suppress(Exception):
                    stream.record().synchronize()
            self.slots.abort(slot)
            self._scheduler.fail(step, error)
            return None
        return step

    def _commit(self) -> None:
        slot, step = self.flights.popleft()
        begun = max(self._launched_at.popleft(), self._landed_at)
        with self.monitor.committing(step):
            try:
                waited = step.kind is StepKind.PREFILL and not self._executor.has_run(slot)
                with self.monitor.waiting():
                    sampled = self._executor.read(slot, step)
            except Exception as error:
                self.slots.commit(slot)
                self._scheduler.fail(step, error)
                return
            self.slots.commit(slot)
            self._landed_at = now = self._clock()
            if step.kind is StepKind.PREFILL:
                self._lead.prefilled(len(step.requests), now - begun, waited=waited)
                for request in step.requests:
                    request.prefilled_at = now
            else:
                self._lead.decoded()
            self._scheduler.commit(step, sampled)
