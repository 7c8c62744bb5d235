"""The step loop of the engine, which runs in one thread while there is work.

The loop plans a batch step, launches its forward pass, and delivers finished results. Then it waits until the oldest
step has run, commits the samples to the sequences, and queues the sampling that depends on these samples.

With two step slots, the device runs a forward pass while the host reads the samples of the previous step. With one
slot, host and device take turns. If a step fails, only the requests in this step fail. Other threads post actions,
which the loop runs between two steps.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from saccade.engine.config import EngineConfig
from saccade.engine.core.admission import AdmissionLead, StreamSettings
from saccade.engine.core.request import ImageT, KeptPrefix, PrefillWindow, Request, Step, StepKind
from saccade.engine.core.scheduler import Scheduler, StepSlots
from saccade.engine.errors import EngineClosedError, EngineError, SupersededError
from saccade.engine.process import engine_closed, engine_opened
from saccade.engine.runtime.executor import Executor
from saccade.engine.runtime.monitor import Monitor

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Flight(Generic[ImageT]):
    """A batch step in progress.

    Attributes:
        slot: index of the step slot.
        step: the batch step that uses the slot.
        launched_at: time of the launch in seconds.
        finalized: whether sampling and the copy of the samples are queued.
    """

    slot: int
    step: Step[ImageT]
    launched_at: float
    finalized: bool = False


class StepLoop(Generic[ImageT]):
    """Runs the engine's requests in its own thread. `submit` and `cancel` are thread-safe.

    Args:
        executor: runs the batch steps.
        scheduler: plans the batch steps.
        config: engine configuration.
        n_preparers: number of threads that split images into crops.
        clock: function that returns the time in seconds. The scheduler must use the same clock.

    Attributes:
        monitor: counters and trace.
        flights: launched steps, oldest first.
    """

    def __init__(
        self,
        executor: Executor[ImageT],
        scheduler: Scheduler[ImageT],
        config: EngineConfig,
        n_preparers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor, self._scheduler, self._config, self._clock = executor, scheduler, config, clock
        self._preparer = Preparer(n_preparers, self._deliver)
        self._lead = AdmissionLead(config)
        self._landed_at = -math.inf  # time at which the last step was committed
        self._late = False  # whether the oldest step had run before the loop started to wait for it
        self._admitted_early = 0  # number of the prefill during which the next images were admitted
        self.monitor = Monitor()
        self.slots = StepSlots(config.depth)
        self.flights: deque[Flight[ImageT]] = deque()
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wanted: float = 1  # number of inbox items that wake the thread
        # For each stream, the newest frame that is still in the inbox.
        self._offered: dict[Hashable, Request[ImageT]] = {}
        self._closing: BaseException | None = None
        self._calls = executor.call_when_ready(self._ring)
        self._thread = threading.Thread(target=self._run, name="saccade-engine", daemon=True)

    def start(self) -> None:
        """Start the thread of the step loop."""
        engine_opened()
        self._thread.start()

    # ---- for other threads

    @property
    def n_pages(self) -> int:
        """Number of KV cache pages that all requests share."""
        return self._scheduler.resources.pages_total

    def require_open(self) -> None:
        """Raise an error if the engine is closed.

        Raises:
            EngineClosedError: if the step loop was stopped or has failed.
        """
        if self._closing is not None:
            # A new error each time, because a reused exception accumulates tracebacks.
            cause = None if isinstance(self._closing, EngineClosedError) else self._closing
            raise EngineClosedError(str(self._closing) if cause is None else f"the engine has failed: {cause}")

    def require_other_thread(self) -> None:
        """Check that the caller is not the thread of the step loop, which also runs callbacks.

        Raises:
            EngineError: if a callback, such as `on_text` or `call_when_done`, is the caller.
        """
        if threading.current_thread() is self._thread:
            raise EngineError(
                "waiting for a result in the engine's own thread would deadlock; "
                "use add_done_callback, which runs the callback in another thread"
            )

    def submit(self, request: Request[ImageT], stream: Hashable = None) -> None:
        """Queue a request. The thread of the step loop calls `request.done` with the outcome.

        A newer frame of a stream supersedes a queued frame, and the older image is freed immediately. This limits
        memory on a CPU, where several frames of a camera can arrive during one step.

        Raises:
            EngineClosedError: if the step loop was stopped or has failed.
        """
        superseded = None
        with self._wake:
            self.require_open()
            if request.frame:
                superseded = self._offered.pop(stream, None)
                self._offered[stream] = request
            if superseded is None:
                self._put(lambda: self._take(request, stream))
        if superseded is not None:
            superseded.done(superseded, SupersededError())

    def cancel(self, request: Request[ImageT], error: BaseException) -> None:
        """End a request as soon as possible. The call has no effect on finished requests."""
        with suppress(EngineClosedError):
            self._post(lambda: self._scheduler.cancel(request, error))

    def configure(self, stream: Hashable, settings: StreamSettings | None) -> None:
        """Set the scheduling weight and limits of a stream. None resets the stream to the defaults."""
        admission = self._scheduler.admission
        with suppress(EngineClosedError):
            if settings is None:
                self._post(lambda: admission.forget(stream))
            else:
                self._post(lambda: admission.configure(stream, settings))

    def release_prefix(self, kept: KeptPrefix) -> None:
        """Release the KV cache pages of an encoded image. After the step loop has ended, the call has no effect."""
        with suppress(EngineClosedError):
            self._post(lambda: self._scheduler.release_prefix(kept))

    def run_idle(self, work: Callable[[], T]) -> T:
        """Run a function in the thread of the step loop while the engine is idle, and return its result.

        Raises:
            EngineError: if the engine has requests or open encoded images, or if called in the thread of the step loop.
        """
        self.require_other_thread()
        outcome: Future[T] = Future()

        def act() -> None:
            if self.flights or not self._scheduler.at_rest:
                busy = "steps can be timed only on an idle engine that stores no encoded images"
                outcome.set_exception(EngineError(busy))
                return
            try:
                outcome.set_result(work())
            except Exception as error:
                outcome.set_exception(error)

        self._post(act)
        return outcome.result()

    def counters(self) -> dict[str, float]:
        """Return all counters of the engine by name; see `Monitor.counters`."""
        return self.monitor.counters(self._scheduler)

    def stop(self, error: BaseException) -> None:
        """Stop the step loop without waiting for it.

        Queued requests end with `error`. Requests in progress are finished, then the thread ends.
        """
        with self._wake:
            if self._closing is None:
                self._closing = error
                self._inbox.append(lambda: self._scheduler.cancel_waiting(error))
                self._wake.notify()

    def close(self, error: BaseException) -> None:
        """Stop the step loop and wait for its thread. Queued requests end with `error`."""
        self.stop(error)
        self._thread.join()

    def _take(self, request: Request[ImageT], stream: Hashable) -> None:
        if request.frame:
            with self._wake:
                request = self._offered.pop(stream)  # the newest frame of the stream
        self._scheduler.submit(request, stream)

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            self.require_open()
            self._put(action)

    def _put(self, action: Callable[[], None]) -> None:
        """Queue an action for the step loop. The caller must hold the lock."""
        self._inbox.append(action)
        if len(self._inbox) >= self._wanted:
            self._wake.notify()

    def _ring(self) -> None:
        """Notify the step loop that the samples of a step are ready."""
        with self._wake:
            self._wake.notify()

    def _deliver(self, made: Sequence[Prepared[ImageT]]) -> None:
        """Queue prepared images for the step loop. Images are accepted even after a request to close the loop."""
        at = self._clock()  # take the time here, because the loop may run the action later
        with self._wake:
            self._put(lambda: self._take_prepared(made, at))

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._at_end:
                self.tick()
        except BaseException as error:  # end all requests, so that no caller waits for a dead thread
            self._abandon(error)
            raise
        finally:
            self._preparer.close()
            self._executor.close()
            engine_closed()

    def _abandon(self, error: BaseException) -> None:
        with self._wake:
            self._closing = error
        while self._inbox:
            with suppress(Exception):  # if one fails, the others must still be ended
                self._inbox.popleft()()
        self._scheduler.cancel_all(error)

    def tick(self) -> None:
        """Run one iteration of the step loop: launch the next batch step if a step slot is free.

        If no other step can be launched, wait for the oldest step and add its samples to the answers (commit).
        """
        with self.monitor.span("schedule"):
            now = self._clock()
            self._scheduler.expire(now)
            step, until, wanted = self._plan(now)
        if step is not None:
            self._launch(step)
        with self.monitor.span("admit"):
            self._scheduler.report()
            if step is not None:
                self._scheduler.admit()
            self._prepare_admitted()
        if step is None or not self.slots.can_launch:
            self._late = self._has_landed
            self._wait(until, wanted)
            self._run_inbox()
            if self._has_landed:
                self._commit()
                if self.flights and not self.flights[0].finalized:
                    self._finalize(self.flights[0])
        if not self.flights:
            self._scheduler.report()
        self.monitor.sample(self._scheduler, (flight.step for flight in self.flights))

    def _plan(self, now: float) -> tuple[Step[ImageT] | None, float, float]:
        """Choose the next batch step and, if no step can be launched, the time to wait.

        While a prefill runs, the images of the next prefill are admitted shortly before its end; see `AdmissionLead`.

        Returns:
            The next step or None; the time in seconds at which to stop waiting; and the number of queued actions at
            which to stop waiting earlier.
        """
        scheduler, free = self._scheduler, self.slots.can_launch
        step = scheduler.next_step() if free else None
        if not self.flights:
            return step, scheduler.wake_at(now), 1
        until, wanted = math.inf, math.inf
        ahead = self.flights[0]
        prefilling = ahead.step.kind is StepKind.PREFILL and self.slots.depth > 1
        if prefilling and self._admitted_early != ahead.step.number:
            scheduler.report()  # after a result, a caller may submit its next image in time for this prefill
            self._run_inbox()
            until = self._lead.admit_at(len(ahead.step.windows), max(ahead.launched_at, self._landed_at))
            if until <= now:
                self._admitted_early, until = ahead.step.number, math.inf
                scheduler.admit(early=True)
        if self._calls and free:  # an inbox item may make a step possible
            until, wanted = min(until, scheduler.wake_at(now)), 1
        elif self._calls:  # on a CPU a step may take seconds
            until = min(until, scheduler.soonest)
        return step, until, wanted

    def _launch(self, step: Step[ImageT]) -> None:
        slot, launched_at = self.slots.launch(), self._clock()
        for window in step.windows:
            window.launched_at = launched_at
        flight = Flight(slot, step, launched_at)
        self.flights.append(flight)
        with self.monitor.launching(step):
            launched = self._try(self._executor.launch, flight)
        # Steps without text do not depend on the previous samples. Finalize them before callers get results and contend
        # for the GIL, which each call of the driver needs.
        if launched and (not step.writes_text or len(self.flights) == 1):
            self._finalize(flight)

    def _finalize(self, flight: Flight[ImageT]) -> None:
        """Queue the sampling of a batch step, and the copy of its samples to the host."""
        with self.monitor.finalizing(flight.step):
            self._scheduler.finalize(flight.step)
            if self._try(self._executor.finalize, flight):
                self.slots.finalize(flight.slot)
                flight.finalized = True

    def _try(self, part: Callable[[int, Step[ImageT]], None], flight: Flight[ImageT]) -> bool:
        """Queue one part of a batch step on the device. On an error, end the step's requests and return False."""
        try:
            part(flight.slot, flight.step)
        except Exception as error:
            # A part of the failed step may be in flight. Later users of its batch slots and pages follow on the compute
            # stream. Freed images and host buffers have no such order, so wait for the streams.
            for stream in self._executor.streams.values():
                with suppress(Exception):
                    stream.record().synchronize()
            self.flights.remove(flight)
            self.slots.abort(flight.slot)
            self._scheduler.fail(flight.step, error)
            return False
        return True

    def _wait(self, until: float, wanted: float) -> None:
        """Wait until the oldest step has run, `wanted` actions are queued, or the clock reaches `until`.

        The step loop waits only in this method. If the device does not support callbacks, the method polls the device.
        """
        slot = self.flights[0].slot if self.flights else None
        if slot is not None and until == wanted == math.inf:
            with self.monitor.waiting(self.flights[0].step), suppress(Exception):  # `read` raises it again
                self._executor.wait(slot, self.flights[0].step)
            return
        waiting = self.monitor.resting() if slot is None else self.monitor.waiting(self.flights[0].step)
        with waiting, self._wake:
            self._wanted = wanted
            while len(self._inbox) < wanted and not self._at_end:
                rest_s = until - self._clock()
                if rest_s <= 0 or self._has_landed:
                    break
                if slot is not None and not self._calls:
                    rest_s = min(rest_s, self._config.poll_s)
                self._wake.wait(None if rest_s == math.inf else rest_s)
            self._wanted = 1

    @property
    def _at_end(self) -> bool:
        return not (self._closing is None or self._inbox or self.flights or self._scheduler.active)

    @property
    def _has_landed(self) -> bool:
        """Return whether the oldest launched step has run. Its results can then be read."""
        try:
            return bool(self.flights) and self._executor.has_run(self.flights[0].slot)
        except Exception:  # `read` raises it again
            return True

    def _run_inbox(self) -> None:
        for _ in range(len(self._inbox)):
            # Take one action at a time, so that no action is lost if one raises.
            self._inbox.popleft()()

    def _commit(self) -> None:
        flight = self.flights.popleft()
        step, begun = flight.step, max(flight.launched_at, self._landed_at)
        with self.monitor.committing(step):
            try:
                sampled = self._executor.read(flight.slot, step)
            except Exception as error:
                self.slots.commit(flight.slot)
                self._scheduler.fail(step, error)
                return
            self.slots.commit(flight.slot)
            self._landed_at = now = self._clock()
            if step.kind is StepKind.PREFILL:
                self._lead.prefilled(len(step.windows), now - begun, late=self._late)
                for window in step.windows:
                    window.prefilled_at = now
            self._scheduler.commit(step, sampled)

    def _take_prepared(self, made: Sequence[Prepared[ImageT]], at: float) -> None:
        """Store images that were split into crops. End the requests whose images could not be prepared.

        Args:
            made: for each image or tile, its window with the crops or an error.
            at: time at which the images were prepared, in seconds.
        """
        for window, image, error in made:
            self._lead.prepared(at - window.admitted_at)
            if error is not None or image is None:
                self._scheduler.cancel(window.request, error or EngineError("the image could not be prepared"))
            else:
                self._scheduler.prepared(window, image)

    def _prepare_admitted(self) -> None:
        admitted, now = self._scheduler.take_unprepared(), self._clock()
        for window in admitted:
            window.admitted_at = now
        for _, windows in groupby(admitted, lambda window: id(window.request)):
            self._preparer.put(list(windows))


Prepared = tuple[PrefillWindow[ImageT], ImageT | None, BaseException | None]
"""A prefill window with its prepared image or the error."""


class Preparer:
    """Daemon threads that split images into crops while batch steps run.

    If the image is on the device, one thread prepares all prefill windows of the request, because cropping on the
    device is fast. Otherwise the windows are distributed over the threads.

    Args:
        n_threads: maximum number of threads. Each thread is started when it is first needed.
        deliver: callback that receives windows with their crops or errors. A preparer thread calls it. It must not
            raise.
    """

    def __init__(self, n_threads: int, deliver: Callable[[Sequence[Prepared[Any]]], None]) -> None:
        self._windows: SimpleQueue[list[PrefillWindow[Any]] | None] = SimpleQueue()
        self._deliver = deliver
        self._most, self._threads = n_threads, list[threading.Thread]()

    def put(self, windows: list[PrefillWindow[Any]]) -> None:
        """Queue the image and tiles of one request to be split into crops.

        All calls must come from the same thread.
        """
        for _ in windows:
            if len(self._threads) < self._most:
                name = f"saccade-prepare-{1 + len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._windows.put(windows)

    def close(self) -> None:
        """Split all queued images into crops, then end the threads and wait for them."""
        for _ in self._threads:
            self._windows.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (windows := self._windows.get()) is not None:
            try:
                windows = self._own_part(windows)
            except BaseException as error:  # the image, which all windows share, cannot be read
                self._deliver([(windows[0], None, error)])
            else:
                if made := [one for window in windows if (one := _prepared(window)) is not None]:
                    self._deliver(made)
                del made
            del windows  # otherwise the images would stay alive until the next windows arrive

    def _own_part(self, windows: list[PrefillWindow[Any]]) -> list[PrefillWindow[Any]]:
        """Return the images and tiles for the calling thread to crop. Queue all others for any thread."""
        on_device = windows[0].request.on_device
        if len(windows) == 1 or on_device is None or on_device():
            return windows
        for window in windows[1:]:
            self._windows.put([window])
        return windows[:1]


def _prepared(window: PrefillWindow[Any]) -> Prepared[Any] | None:
    """Split an image or tile into crops. Return the crops or the error, or None if the request has ended."""
    prepare = window.prepare
    if prepare is None:
        return None
    try:
        return window, prepare(), None
    except BaseException as error:  # one failed image must not end the thread
        return window, None, error
