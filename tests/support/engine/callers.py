"""The real step cycle in simulated time, with callers who hand in an image when they have got the last one's answer.

Callers and the step loop share one lock, that of the interpreter: who wants it waits behind those that have wanted it
before, and the loop gives it up wherever it calls the driver.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable

from saccade.engine.phase import Phase
from saccade.engine.runtime.loop.step_cycle import StepCycle
from saccade.engine.scheduling.output_state import OutputState, Sampled
from saccade.engine.scheduling.resources import PagePool
from saccade.engine.scheduling.scheduler import Scheduler
from saccade.engine.scheduling.step import ImageRequest, Sequence, Step
from tests.support.engine.untimed import Untimed

CALLS = 30  # of the driver in a launch, in each of which the lock is free for a moment
_MOMENT_S = 2e-6
_WAKE_S = 120e-6  # until a thread that waits for an answer runs, in the mean


class OneValue(OutputState):
    """An answer that a prefill completes."""

    __slots__ = ()
    phases = (Phase.Y,)

    def commit(self, sampled: Sampled) -> bool:
        return True


class Callers(Untimed):
    """So many threads, and an executor whose prefills take what nano's do on an H200.

    Args:
        count: of the callers.
        most: images of a prefill.
        caller_s: seconds for which a caller holds the lock to hand in an image.
        call_s: the same for each of the loop's calls of the driver.

    Attributes:
        prefills: images of each.
        waits: seconds from handing in an image to its answer.
    """

    def __init__(self, count: int, most: int = 16, caller_s: float = 130e-6, call_s: float = 8e-6) -> None:
        self._caller_s, self._call_s = caller_s, call_s
        self.now = self._free_at = 0.0
        self._ends = [0.0, 0.0]
        self._leaving = 0
        self._wanting: list[tuple[float, float, Callable[[], None]]] = []  # the lock: since when, how long, what for
        self._inbox: deque[ImageRequest[str]] = deque()
        self._dice = random.Random(count)
        self.prefills: list[int] = []
        self.waits: list[float] = []
        clock = lambda: self.now  # noqa: E731 - both want a function
        self._scheduler: Scheduler[str] = Scheduler(PagePool(8192), 16, 730, 128, most, clock=clock, drafts=False)
        self._cycle = StepCycle(self, self._scheduler, 2, lambda request: None, self._pause, clock)
        for _ in range(count):
            self._return()

    def run(self, seconds: float) -> float:
        """Answers a second; the first third of the time is not counted."""
        settled, end = -1, self.now + seconds
        while self.now < end:
            if settled < 0 and self.now > end - seconds * 2 / 3:
                settled, begun = len(self.waits), self.now
                self.prefills.clear()
            self._let(until=self.now)
            while not (self._inbox or self._cycle.flights or self._scheduler.active):
                self._let(until=self._wanting[0][0])
            self._take_inbox()
            self._cycle.tick()
        return (len(self.waits) - settled) / (self.now - begun)

    def leave(self, count: int) -> None:
        """Let so many callers take no more part once they have their answers."""
        self._leaving = count

    def launch(self, slot: int, step: Step[str]) -> None:
        for _ in range(CALLS):
            self.now += self._call_s
            self._let(until=self.now + _MOMENT_S)
        for graph_s in (250e-6, 120e-6, 50e-6):  # in which the driver does not need the lock
            self._let(until=self.now + graph_s)
        self._free_at = self._ends[slot] = max(self.now, self._free_at) + 0.4e-3 + 0.15e-3 * len(step.requests)
        self.prefills.append(len(step.requests))

    def finalize(self, slot: int, step: Step[str]) -> None:
        pass

    def has_run(self, slot: int) -> bool:
        return self.now >= self._ends[slot]

    def read(self, slot: int, step: Step[str]) -> list[Sampled]:
        self._let(until=max(self.now + _MOMENT_S, self._ends[slot]))
        return [(0.0, 0.0, 0.0)] * len(step.sequences)

    def prepare(self, image: object) -> str:
        raise NotImplementedError

    def _let(self, until: float, count: float = math.inf) -> None:
        """Let others have the lock until then, or so many images have come, and those that wait for it by then."""
        while self._wanting and self._wanting[0][0] <= until and len(self._inbox) < count:
            since, held_s, act = self._wanting.pop(0)
            self.now = max(self.now, since) + held_s
            act()
        if len(self._inbox) < count:
            self.now = max(self.now, until)

    def _pause(self, until: float, count: float) -> None:
        self._let(until, count)
        self._take_inbox()

    def _take_inbox(self) -> None:
        while self._inbox:
            self.now += 10e-6
            self._scheduler.add(self._inbox.popleft())

    def _return(self) -> None:
        """A caller wants to hand in an image, unless it leaves."""
        if self._leaving:
            self._leaving -= 1
            return
        since, held_s = self.now + self._dice.expovariate(1 / _WAKE_S), self._caller_s * self._dice.uniform(0.6, 1.4)
        self._wanting.append((since, held_s, self._hand_in))
        self._wanting.sort(key=lambda one: one[0])

    def _hand_in(self) -> None:
        at = self.now

        def done(request: ImageRequest[str], error: BaseException | None) -> None:
            assert error is None
            self.now += 30e-6
            self.waits.append(self.now - at)
            self._return()

        self._inbox.append(ImageRequest("image", [Sequence((1, 2, 3), OneValue(1))], done))
