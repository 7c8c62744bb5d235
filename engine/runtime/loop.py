"""Ticks in one thread, for as long as there is work; other threads post to it what it is to do between two of them.

Knows nothing of names or results.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Generic, TypeVar

from saccade.engine.core.adapters import Adapter
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.step import ImageRequest, ImageT, KeptPrefix
from saccade.engine.core.streams import StreamSettings, Submission
from saccade.engine.errors import EngineClosedError, EngineError, SupersededError
from saccade.engine.process import engine_closed, engine_opened
from saccade.engine.runtime.executor import Executor
from saccade.engine.runtime.preparer import Preparer
from saccade.engine.runtime.step_cycle import StepCycle

T = TypeVar("T")


class StepLoop(Generic[ImageT]):
    """Runs image requests to their end. `add` and `cancel` may be called from any thread at any moment.

    Args:
        executor: runs the steps.
        scheduler: decides them.
        depth: step slots, 1 or 2.
        n_preparers: threads that cut images of admitted requests.

    Attributes:
        monitor: what it counts, and how it is traced.
    """

    def __init__(
        self, executor: Executor[ImageT], scheduler: Scheduler[ImageT], depth: int, n_preparers: int = 1
    ) -> None:
        self._executor, self._scheduler = executor, scheduler
        self._preparer = Preparer(n_preparers, self._deliver)
        self._cycle = StepCycle(executor, scheduler, depth, self._preparer.put, self._pause)
        self.monitor = self._cycle.monitor
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._wanted: float = 1  # things in the inbox for which the thread is woken
        self._offered: dict[Hashable, Submission[ImageT]] = {}  # of a stream, the newest that is still in the inbox
        self._closing: BaseException | None = None
        engine_opened()
        self._thread = threading.Thread(target=self._run, name="saccade-engine", daemon=True)
        self._thread.start()

    @property
    def n_pages(self) -> int:
        """Pages of the cache that requests share."""
        return self._scheduler.resources.pages_total

    def require_open(self) -> None:
        """Do nothing while requests are taken.

        Raises:
            EngineClosedError: if the loop was stopped, or has failed.
        """
        if self._closing is not None:
            # A new error each time: one that is raised again and again collects the tracebacks of all its callers.
            cause = None if isinstance(self._closing, EngineClosedError) else self._closing
            raise EngineClosedError(str(self._closing) if cause is None else f"the engine has failed: {cause}")

    def require_other_thread(self) -> None:
        """Do nothing in other threads than the loop's.

        Raises:
            EngineError: in the loop's, which runs what `call_when_done` is given, `on_text`, and tasks.
        """
        if threading.current_thread() is self._thread:
            raise EngineError(
                "a result cannot be waited for in the engine's own thread, which has to make it: "
                "use add_done_callback, whose calls have a thread of their own"
            )

    def add(self, *requests: ImageRequest[ImageT], stream: Hashable = None) -> None:
        """Queue image requests, all at once; their outcome is reported by `request.done`, in the loop's thread.

        Raises:
            EngineClosedError: if the loop was stopped, or has failed.
        """

        def act() -> None:
            for request in requests:
                self._scheduler.add(request, stream)

        self._post(act)

    def submit(self, submission: Submission[ImageT], stream: Hashable) -> None:
        """Let a request wait in its stream's place, of one that keeps the newest; it is planned once it is admitted.

        What a newer one replaces ends here, also while the loop is busy: on a CPU a step takes as long as a camera
        takes for two frames, and six 4K cameras held five each.

        Raises:
            EngineClosedError: if the loop was stopped, or has failed.
        """
        with self._wake:
            self.require_open()
            replaced = self._offered.pop(stream, None)
            self._offered[stream] = submission
            if replaced is None:
                self._put(lambda: self._take_offered(stream))
        if replaced is not None:
            replaced.end(SupersededError())

    def withdraw(self, submission: Submission[ImageT], error: BaseException) -> None:
        """End a request that waits in its stream's place; does nothing if it has begun."""
        with suppress(EngineClosedError):
            self._post(lambda: self._scheduler.withdraw(submission, error))

    def configure(self, stream: Hashable, settings: StreamSettings | None) -> None:
        """Set how a stream shares the engine; None forgets it."""

        def act() -> None:
            if settings is None:
                self._scheduler.admission.forget(stream)
            else:
                self._scheduler.admission.configure(stream, settings)

        with suppress(EngineClosedError):
            self._post(act)

    def cancel(self, request: ImageRequest[ImageT], error: BaseException) -> None:
        """End an image request as soon as possible; does nothing if it is over."""
        with suppress(EngineClosedError):
            self._post(lambda: self._scheduler.cancel(request, error))

    def keep_prefix(self, image: ImageT, adapter: Adapter | None) -> KeptPrefix:
        """Prefill an image for several requests to read, and wait for it.

        Raises:
            EngineError: whatever has ended it, such as that there are no pages for it; or in the loop's thread.
        """
        self.require_other_thread()
        kept, over = KeptPrefix(), Future[None]()

        def done(request: ImageRequest[ImageT], error: BaseException | None) -> None:
            over.set_result(None) if error is None else over.set_exception(error)

        request = ImageRequest(image, [], done, adapter=adapter, keeps=kept)
        try:
            self.add(request)
            over.result()
        except BaseException:  # also an interrupt while it waits
            self.cancel(request, CancelledError())
            self.release_prefix(kept)
            raise
        return kept

    def release_prefix(self, kept: KeptPrefix) -> None:
        """Release a kept prefix; does nothing once the loop has ended."""
        with suppress(EngineClosedError):
            self._post(lambda: self._scheduler.release_prefix(kept))

    def run_idle(self, work: Callable[[], T]) -> T:
        """Run something in the loop's thread, and wait for it.

        Raises:
            EngineError: unless no request is waiting or being answered, and no prefix is kept; or in the loop's thread.
        """
        self.require_other_thread()
        outcome: Future[T] = Future()

        def act() -> None:
            if self._cycle.flights or not self._scheduler.at_rest:
                busy = "the engine is at work, or keeps encoded images: steps are timed only while it is idle"
                outcome.set_exception(EngineError(busy))
                return
            try:
                outcome.set_result(work())
            except Exception as error:
                outcome.set_exception(error)

        self._post(act)
        return outcome.result()

    def counters(self) -> dict[str, float]:
        """All that is counted, see `Monitor.counters`."""
        return self.monitor.counters(self._scheduler)

    def stop(self, error: BaseException) -> None:
        """Finish what has begun, end what has not with `error`, then end the thread; does not wait."""
        with self._wake:
            if self._closing is None:
                self._closing = error
                self._inbox.append(lambda: self._scheduler.cancel_waiting(error))
                self._wake.notify()

    def close(self, error: BaseException) -> None:
        """`stop`, and wait for the thread."""
        self.stop(error)
        self._thread.join()

    def _take_offered(self, stream: Hashable) -> None:
        with self._wake:
            submission = self._offered.pop(stream)
        self._scheduler.submit(submission, stream)

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            self.require_open()
            self._put(action)

    def _put(self, action: Callable[[], None]) -> None:
        """Queue something, with the lock held."""
        self._inbox.append(action)
        if len(self._inbox) >= self._wanted:
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._receive():
                self._cycle.tick()
        except BaseException as error:  # no caller may wait for a thread that has ended
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
            with suppress(Exception):  # one that fails must not leave the callers of the others waiting
                self._inbox.popleft()()
        self._scheduler.cancel_all(error)

    def _deliver(self, request: ImageRequest[ImageT], image: ImageT, error: BaseException | None) -> None:
        """Take what a preparer has made, also while the loop is closing."""
        at = time.monotonic()  # the loop may be waiting for a step
        with self._wake:
            self._put(lambda: self._cycle.prepared(request, image, error, at))

    def _receive(self) -> bool:
        """Run what other threads have queued; waits only if there is nothing to do. False at the end."""
        with self._wake:
            if not self._has_work():
                with self.monitor.resting():
                    while not self._has_work():
                        rest_s = self._cycle.stalled_until - time.monotonic()
                        self._wake.wait(None if rest_s == math.inf or not self._scheduler.active else max(0.0, rest_s))
            closing = self._closing
        self._run_inbox()
        return closing is None or bool(self._cycle.flights) or self._scheduler.active

    def _run_inbox(self) -> None:
        """Run what is queued by now."""
        for _ in range(len(self._inbox)):
            # One by one: what a collected stream adds in this thread is not lost, nor what is behind one that raises.
            self._inbox.popleft()()
            self._cycle.stalled_until = -math.inf

    def _pause(self, until: float, count: float) -> None:
        """Wait until a moment, or until so many things are queued, or `stop`; and run what is queued by then."""
        with self._wake:
            self._wanted = count
            rest_s = until - time.monotonic()
            if rest_s > 0 and len(self._inbox) < count:
                self._wake.wait(rest_s)
            self._wanted = 1
        self._run_inbox()

    def _has_work(self) -> bool:
        if self._inbox or self._cycle.flights:
            return True
        if self._scheduler.active:
            return time.monotonic() >= self._cycle.stalled_until
        return self._closing is not None
