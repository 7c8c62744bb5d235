"""The tick: launch(t+1) → commit(t) → finalize(t+1), in one thread, for as long as there is work.

With two slots a step's forward runs while the host still reads the step before it; with one, nothing overlaps and
nothing else differs. A step that fails, wherever it does, ends the looks that it was for and nothing else; so a device
that is lost is one error for each look. Knows nothing of names or results.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from saccade.engine.runtime.cpu_executor import Crops, Executor
from saccade.engine.runtime.monitor import Monitor
from saccade.engine.scheduling.scheduler import Look, Scheduler, Step, StepKind
from saccade.engine.scheduling.step_slots import StepSlots


class StepLoop:
    """Runs looks to their end. `add` and `cancel` may be called from any thread at any moment.

    Args:
        executor: runs the steps.
        scheduler: decides them.
        depth: step slots, 1 or 2.

    Attributes:
        monitor: what it counts, and how it is traced.
    """

    def __init__(self, executor: Executor, scheduler: Scheduler[Crops], depth: int) -> None:
        self._executor, self._scheduler = executor, scheduler
        self.monitor = Monitor()
        self._slots = StepSlots(depth)
        self._flights: deque[tuple[int, Step[Crops]]] = deque()
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._closing: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="saccade-engine", daemon=True)
        self._thread.start()

    def add(self, look: Look[Crops]) -> None:
        """Queue a look; whatever becomes of it is told through `look.done`, from the loop's thread.

        Raises:
            BaseException: the error given to `close`, if it was called.
        """
        with self._wake:
            if self._closing is not None:
                raise self._closing
            self._inbox.append(lambda: self._scheduler.add(look))
            self._wake.notify()

    def cancel(self, look: Look[Crops], error: BaseException) -> None:
        """End a look as soon as possible; does nothing if it is over."""
        with self._wake:
            self._inbox.append(lambda: self._scheduler.cancel(look, error))
            self._wake.notify()

    def counters(self) -> dict[str, float]:
        """All that is counted, see `Monitor.counters`."""
        return self.monitor.counters(self._scheduler)

    def time_sampling(self, rows: int) -> float | None:
        """Seconds that sampling takes where it is part of the forward's graph; None where the trace shows it by itself.

        To be asked while there is no work.
        """
        timed = getattr(self._executor, "time_sampling", None)
        return None if timed is None else float(timed(rows))

    def close(self, error: BaseException) -> None:
        """Finish what has begun, end what has not with `error`, and stop. Closing twice does nothing."""
        with self._wake:
            if self._closing is None:
                self._closing = error
                self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._receive():
                self._tick()
        except BaseException as error:  # nobody shall wait for a thread that is gone
            self._give_up(error)
            raise
        finally:
            self._executor.close()

    def _give_up(self, error: BaseException) -> None:
        with self._wake:
            self._closing = error
            said = list(self._inbox)
        for act in said:
            act()
        self._scheduler.end_all(error)

    def _receive(self) -> bool:
        """Take what other threads have said; waits only if there is nothing to do. False at the end."""
        with self._wake:
            if not self._wanted():
                with self.monitor.resting():
                    self._wake.wait_for(self._wanted)
            said = list(self._inbox)
            self._inbox.clear()
            closing = self._closing
        for act in said:
            act()
        if closing is not None:
            self._scheduler.turn_away(closing)
        return closing is None or bool(self._flights) or self._scheduler.busy

    def _wanted(self) -> bool:
        return bool(self._inbox or self._flights or self._scheduler.busy or self._closing)

    def _tick(self) -> None:
        monitor = self.monitor
        with monitor.span("schedule"):
            self._scheduler.expire(time.monotonic())
            step = self._scheduler.next_step() if self._slots.can_launch else None
        slot = -1
        if step is not None:
            slot = self._slots.launch()
            for look in step.looks:
                look.launched_at = time.monotonic()
            with monitor.launching(step):
                step = self._put(self._executor.launch, slot, step)
        if self._flights and (step is None or not self._slots.can_launch):
            self._commit()
        if step is not None:
            with monitor.finalizing(step):
                step = self._put(self._executor.finalize, slot, step)
        if step is not None:
            self._slots.finalize(slot)
            self._flights.append((slot, step))
        monitor.sample(self._scheduler, self._flights)

    def _put(self, part: Callable[[int, Step[Crops]], None], slot: int, step: Step[Crops]) -> Step[Crops] | None:
        """Put a part of a step on the streams; None if that failed, and the step with it."""
        try:
            part(slot, step)
        except Exception as error:
            # Some of it may be on the streams. What takes its lanes and pages next comes behind it on the compute
            # stream, but pictures that are let go of, and what the host sends and reads, do not: wait until it is over.
            # No other step has an error to tell meanwhile: the one before it has its event, and there is none behind.
            for stream in self._executor.streams.values():
                with suppress(Exception):
                    stream.record().synchronize()
            self._slots.abort(slot)
            self._scheduler.fail(step, error)
            return None
        return step

    def _commit(self) -> None:
        slot, step = self._flights.popleft()
        with self.monitor.committing(step):
            try:
                with self.monitor.waiting():
                    sampled = self._executor.read(slot, step)
            except Exception as error:
                self._slots.commit(slot)
                self._scheduler.fail(step, error)
                return
            self._slots.commit(slot)
            if step.kind is StepKind.PREFILL:
                for look in step.looks:
                    look.prefilled_at = time.monotonic()
            self._scheduler.commit(step, sampled)
