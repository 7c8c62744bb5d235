"""The real scheduler in simulated time: cameras that offer frames, and a device whose steps take what an H200's do."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from saccade.engine.scheduling.admission import StreamSettings
from saccade.engine.scheduling.resources import PagePool
from saccade.engine.scheduling.scheduler import Scheduler
from saccade.engine.scheduling.step import ImageRequest, Step, StepKind
from saccade.engine.scheduling.step import Sequence as Answer
from saccade.engine.scheduling.text_output import TextOutput


@dataclass
class Camera:
    """Frames at a rate, from `begin` to `end` in seconds; `steps` of an answer, `crops` of an image, right drafts."""

    fps: float
    settings: StreamSettings = field(default_factory=StreamSettings)
    deadline_s: float = float("inf")
    steps: int = 10
    crops: int = 1
    drafted: bool = False
    begin: float = 0.0
    end: float = float("inf")


@dataclass
class Seen:
    """What became of a camera's frames: ages when their prefill was launched, and at the result; ends by cause."""

    launch_ages: list[float] = field(default_factory=list)
    result_ages: list[float] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    offered: int = 0

    @property
    def looks(self) -> int:
        """Frames that were run."""
        return len(self.result_ages)


class Plain(TextOutput):
    """A text that is not drafted."""

    __slots__ = ()

    @property
    def draftable(self) -> bool:
        return False


class Frame:
    """One submission."""

    def __init__(self, sim: Simulation, number: int, at: float) -> None:
        self._sim, self.number, self.at = sim, number, at
        self.camera = sim.cameras[number]
        self.deadline = at + self.camera.deadline_s
        self.planned = self.over = False

    def plan(self) -> Sequence[ImageRequest[Frame]]:
        assert not self.over
        assert not self.planned
        self.planned = True
        answer = Answer[Frame]((1, 2, 3), (TextOutput if self.camera.drafted else Plain)(-1, self.camera.steps, 200))
        request = ImageRequest[Frame](None, [answer], self._done, self.deadline)
        request.prepare = lambda: self
        return [request]

    def end(self, error: BaseException) -> None:
        self._finish(type(error).__name__)

    def _done(self, request: ImageRequest[Frame], error: BaseException | None) -> None:
        if error is None:
            self._sim.seen[self.number].result_ages.append(self._sim.now - self.at)
        self._finish("done" if error is None else type(error).__name__)

    def _finish(self, how: str) -> None:
        assert not self.over, "ended twice"
        self.over = True
        ends = self._sim.seen[self.number].ends
        ends[how] = ends.get(how, 0) + 1


def h200_bf16(step: Step[Frame]) -> float:
    """Seconds of a step of Moondream 2 in bf16 as measured: prefills of 1 to 8 images, decodes of 1 to 64 sequences."""
    if step.kind is StepKind.PREFILL:
        return 2.0e-3 + 5.4e-3 * sum(request.image.camera.crops for request in step.requests if request.image)
    return 0.84e-3 + 0.036e-3 * len(step.sequences)


class Simulation:
    """Runs cameras for some seconds, and to the end of what they have offered."""

    def __init__(
        self,
        cameras: Sequence[Camera],
        cost: Callable[[Step[Frame]], float] = h200_bf16,
        *,
        seed: int = 0,
        prepare_s: float = 1e-3,
        n_preparers: int = 4,
    ) -> None:
        self.cameras, self.cost = cameras, cost
        self.now = 0.0
        self.seen = [Seen() for _ in cameras]
        self.prefills: list[int] = []
        self._prepare_s = prepare_s
        self._preparers = [0.0] * n_preparers
        self._dice = random.Random(seed)
        self.scheduler: Scheduler[Frame] = Scheduler(PagePool(2560), 16, 730, 64, 8, clock=lambda: self.now)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def run(self, seconds: float) -> list[Seen]:
        for number, camera in enumerate(self.cameras):
            self.scheduler.admission.configure(number, camera.settings)
            first = camera.begin + self._dice.random() / camera.fps
            self._at(first, lambda number=number, first=first: self._offer(number, first, seconds))
        flights: deque[tuple[float, Step[Frame]]] = deque()
        free_at = 0.0
        while True:
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self.scheduler.expire(self.now)
            step = self.scheduler.next_step() if len(flights) < 2 else None
            for request in self.scheduler.take_unprepared():
                self._prepare(request)
            if step is not None:
                free_at = max(self.now, free_at) + self.cost(step)
                flights.append((free_at, step))
                for request in step.requests:
                    assert request.image is not None
                    frame = request.image
                    self.seen[frame.number].launch_ages.append(max(self.now, free_at - self.cost(step)) - frame.at)
                if step.requests:
                    self.prefills.append(len(step.requests))
            if flights and (step is None or len(flights) == 2):
                end, oldest = flights.popleft()
                self.now = max(self.now, end) + 5e-5
                self.scheduler.commit(oldest, [(1.0, 0.0, 0.0)] * len(oldest.sequences))
            elif step is None:
                wake = min(self.scheduler.wake_at(self.now), self._events[0][0] if self._events else float("inf"))
                if wake == float("inf"):
                    return self.seen
                self.now = max(self.now + 1e-6, wake)

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def _offer(self, number: int, when: float, seconds: float) -> None:
        camera = self.cameras[number]
        if when < min(camera.end, seconds):
            self.seen[number].offered += 1
            self.scheduler.submit(Frame(self, number, when), number)
            later = when + self._dice.uniform(0.9, 1.1) / camera.fps
            self._at(later, lambda: self._offer(number, later, seconds))

    def _prepare(self, request: ImageRequest[Frame]) -> None:
        """Busy the first preparer that is free."""
        assert request.prepare is not None
        image = request.prepare()
        first = min(range(len(self._preparers)), key=self._preparers.__getitem__)
        done = max(self.now, self._preparers[first]) + self._prepare_s * image.camera.crops
        self._preparers[first] = done
        self._at(done, lambda: self.scheduler.prepared(request, image))


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness (1984): 1 where all are equal, 1 / n where one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))
