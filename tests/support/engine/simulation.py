"""The real scheduler and loop in simulated time: cameras that offer frames, and a device as slow as an H200.

A device's times are those that `python -m benchmarks decode`, `frame` and `throughput` have measured of Moondream 2's
dimensions. What is simulated is exact and the same each time; what a host takes for its own work is one number a tick.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from saccade.engine.config import EngineConfig
from saccade.engine.core.admission import PagePool, StreamSettings
from saccade.engine.core.request import PrefillWindow, Request, Step, StepKind
from saccade.engine.core.request import Sequence as Answer
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.runtime.loop import StepLoop
from saccade.engine.tasks.task import Sampled
from saccade.engine.tasks.text_output import TextOutput
from saccade.pipeline.bench.cameras.measure import LARGE, SETTLE_S, arrivals, name_special
from saccade.pipeline.bench.cameras.report import CameraLog, CameraRow, CamerasBench, summarize
from tests.support.engine.untimed import Untimed

CROPS_4K = 10  # a global one and 3 × 3: of 720p and up all are such


@dataclass
class Camera:
    """Frames at a rate, from `begin` to `end` in seconds; `steps` of an answer, `crops` of an image, right drafts."""

    fps: float
    settings: StreamSettings = field(default_factory=StreamSettings)
    deadline_s: float = math.inf
    steps: int = 10
    crops: int = 1
    drafted: bool = False
    begin: float = 0.0
    end: float = math.inf


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


Ended = Callable[["Frame", BaseException | None], None]


class Frame:
    """What a camera has offered.

    Attributes:
        launched_at: when its prefill began on the device.
    """

    def __init__(self, sim: Simulation, number: int, at: float, ended: Ended) -> None:
        self.number, self.at = number, at
        self.camera = sim.cameras[number]
        self.launched_at = math.nan
        self.over = False
        self._ended = ended
        deadline, frame = at + self.camera.deadline_s, self.camera.settings.newest
        self.request: Request[Frame] = Request(self._windows, self._done, deadline, frame=frame)

    def _windows(self, request: Request[Frame]) -> list[PrefillWindow[Frame]]:
        assert not self.over
        answer = Answer[Frame]((1, 2, 3), (TextOutput if self.camera.drafted else Plain)(-1, self.camera.steps, 200))
        return [PrefillWindow(request, [answer], prepare=lambda: self)]

    def _done(self, request: Request[Frame], error: BaseException | None) -> None:
        assert not self.over, "ended twice"
        self.over = True
        self._ended(self, error)


Cost = Callable[[Step[Frame]], float]


def h200_bf16(step: Step[Frame]) -> float:
    """Seconds of a step of Moondream 2 in bf16 as measured: prefills of 1 to 8 images, decodes of 1 to 64 sequences."""
    if step.kind is StepKind.PREFILL:
        return 2.0e-3 + 5.4e-3 * _crops(step)
    return 0.84e-3 + 0.036e-3 * len(step.sequences)


def h200_fp8(step: Step[Frame]) -> float:
    """The same in FP8."""
    if step.kind is StepKind.PREFILL:
        return 2.4e-3 + 3.8e-3 * _crops(step)
    return 0.64e-3 + 0.039e-3 * len(step.sequences)


def _crops(step: Step[Frame]) -> float:
    """Images, where each further crop costs the tower's share of an image: 2 ms of 5 to 6 (`bench frame` at 1080p)."""
    return sum(1 + 0.26 * (image.camera.crops - 1) for image in step.images)


class SimulatedExecutor(Untimed):
    """`executor.Executor` whose steps only take time, one behind the other."""

    def __init__(self, sim: Simulation, cost: Cost) -> None:
        self._sim, self._cost = sim, cost
        self._free_at = 0.0
        self._ends = [0.0, 0.0]
        self.busy_s = 0.0

    def launch(self, slot: int, step: Step[Frame]) -> None:
        sim, takes = self._sim, self._cost(step)
        sim.now += sim.host_s
        begin = max(sim.now, self._free_at)
        self._free_at = self._ends[slot] = begin + takes
        self.busy_s += takes
        if step.windows:
            sim.prefills.append(len(step.windows))
        for image in step.images:
            image.launched_at = begin

    def finalize(self, slot: int, step: Step[Frame]) -> None:
        pass

    def ends(self, slot: int) -> float:
        return self._ends[slot]

    def has_run(self, slot: int) -> bool:
        return self._sim.now >= self._ends[slot]

    def read(self, slot: int, step: Step[Frame]) -> list[Sampled]:
        assert self.has_run(slot)
        self._sim.now += 5e-5
        return [(1.0, 0.0, 0.0)] * len(step.sequences)

    def prepare(self, image: object) -> Frame:
        raise NotImplementedError


class SimulatedLoop(StepLoop[Frame]):
    """The loop without a thread, and with simulated ones that prepare images."""

    def __init__(self, sim: Simulation) -> None:
        super().__init__(sim.executor, sim.scheduler, sim.config, clock=lambda: sim.now)
        self._sim = sim
        self.stalled_until = math.inf

    def _wait(self, until: float, wanted: float) -> None:
        sim = self._sim
        if not self.flights:
            self.stalled_until = until
            return
        sim.now = max(sim.now, min(until, sim.executor.ends(self.flights[0].slot)))
        sim.run_events()

    def _prepare_admitted(self) -> None:
        for window in self._scheduler.take_unprepared():
            window.admitted_at = self._clock()
            self._sim.prepare(window)

    def deliver(self, window: PrefillWindow[Frame], image: Frame, at: float) -> None:
        self._take_prepared([(window, image, None)], at)


class Simulation:
    """Runs cameras for some seconds, and to the end of what they have offered.

    Args:
        cameras: what they offer.
        cost: seconds of a step on the device.
        seed: of the cameras' dice.
        prepare_s: seconds that a thread takes for a crop.
        n_preparers: threads that do.
        host_s: seconds of the loop's thread for a step.
    """

    def __init__(
        self,
        cameras: Sequence[Camera],
        cost: Cost = h200_bf16,
        *,
        seed: int = 0,
        prepare_s: float = 1e-3,
        n_preparers: int = 4,
        host_s: float = 0.0,
    ) -> None:
        self.cameras = cameras
        self.now, self.host_s = 0.0, host_s
        self.seen = [Seen() for _ in cameras]
        self.prefills: list[int] = []
        self._prepare_s = prepare_s
        self._preparers = [0.0] * n_preparers
        self._dice = random.Random(seed)
        self.config = EngineConfig()
        self.scheduler: Scheduler[Frame] = Scheduler(self.config, PagePool(2560), 730, lambda: self.now)
        self.executor = SimulatedExecutor(self, cost)
        self._loop = SimulatedLoop(self)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        for number, camera in enumerate(cameras):
            self.scheduler.admission.configure(number, camera.settings)

    def run(self, seconds: float) -> list[Seen]:
        """Let every camera offer frames at its rate."""
        for number, camera in enumerate(self.cameras):
            first = camera.begin + self._dice.random() / camera.fps
            self.at(first, lambda number=number, first=first: self._offer(number, first, seconds))
        self.drain()
        return self.seen

    def drain(self) -> None:
        """Run until nothing is left to happen."""
        while True:
            self.run_events()
            self._loop.tick()
            if self._loop.flights:
                continue
            wake = self._events[0][0] if self._events else math.inf
            if self.scheduler.active:
                wake = min(wake, self._loop.stalled_until)
            if wake == math.inf:
                return
            self.now = max(self.now + 1e-6, wake)

    def run_events(self) -> None:
        """Do what is due."""
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Do something once it is `when`."""
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def submit(self, number: int, when: float, ended: Ended) -> None:
        """Let a camera offer a frame that came at `when`."""
        self.scheduler.submit(Frame(self, number, when, ended).request, number)

    def _offer(self, number: int, when: float, seconds: float) -> None:
        camera = self.cameras[number]
        if when < min(camera.end, seconds):
            self.seen[number].offered += 1
            self.submit(number, when, self._ended)
            later = when + self._dice.uniform(0.9, 1.1) / camera.fps
            self.at(later, lambda: self._offer(number, later, seconds))

    def _ended(self, frame: Frame, error: BaseException | None) -> None:
        seen = self.seen[frame.number]
        if not math.isnan(frame.launched_at):
            seen.launch_ages.append(frame.launched_at - frame.at)
        if error is None:
            seen.result_ages.append(self.now - frame.at)
        how = "done" if error is None else type(error).__name__
        seen.ends[how] = seen.ends.get(how, 0) + 1

    def prepare(self, window: PrefillWindow[Frame]) -> None:
        """Busy the first preparer that is free."""
        assert window.prepare is not None
        image = window.prepare()
        first = min(range(len(self._preparers)), key=self._preparers.__getitem__)
        done = max(self.now, self._preparers[first]) + self._prepare_s * image.camera.crops
        self._preparers[first] = done
        self.at(done, lambda: self._loop.deliver(window, image, done))


def closed_loop(cost: Cost, crops: Sequence[int], steps: int, seconds: float = 8.0, **options: float) -> float:
    """Images a second where 32 streams always have one; the first fifth of the time is not counted."""
    cameras = [Camera(1.0, StreamSettings(newest=False, in_flight=64), crops=one, steps=steps) for one in crops]
    sim = Simulation(cameras, cost, **options)  # type: ignore[arg-type]
    done: list[float] = []
    numbers = count()

    def submit() -> None:
        frame = Frame(sim, next(numbers) % len(crops), sim.now, ended)
        request = frame.request
        request.frame, request.windows = False, request.make_windows(request)
        request.windows[0].image, request.windows[0].prepare = frame, None
        sim.scheduler.submit(request)

    def ended(frame: Frame, error: BaseException | None) -> None:
        done.append(sim.now)
        if sim.now < 1.2 * seconds:
            sim.at(sim.now + 2e-4, submit)

    for _ in range(32):
        submit()
    sim.drain()
    return sum(0.2 * seconds <= at < 1.2 * seconds for at in done) / seconds


def bench_cameras(
    cost: Cost,
    streams: int = 64,
    fps: tuple[float, float] = (5, 30),
    *,
    load: float | None = 2.0,
    weights: Sequence[float] = (1.0,),
    deadline_s: float = 0.25,
    seconds: float = 20.0,
    steps: int = 9,
    **options: float,
) -> CamerasBench:
    """`saccade bench cameras` in simulated time: the same cameras at the same moments, and the same report."""
    crops = [*[1] * (streams - 1), CROPS_4K]
    capacity = closed_loop(cost, crops, steps, **options)
    rates = [fps[0] + (fps[1] - fps[0]) * i / (streams - 1) for i in range(streams)]
    if load is not None:
        rates = [rate * load * capacity / sum(rates) for rate in rates]
    rows = [CameraRow(f"{i}", rates[i], weights[i % len(weights)]) for i in range(streams)]
    name_special(rows)
    cameras = [
        Camera(
            row.fps,
            StreamSettings(weight=row.weight),
            deadline_s,
            steps,
            CROPS_4K if row.name == LARGE else 1,
        )
        for row in rows
    ]
    sim = Simulation(cameras, cost, **options)  # type: ignore[arg-type]
    logs = [CameraLog(row) for row in rows]

    def ended(frame: Frame, error: BaseException | None) -> None:
        log = logs[frame.number]
        if frame.at < SETTLE_S:
            return
        if error is not None:
            log.lost(error)
            return
        log.result.append(sim.now - frame.at)
        log.launch.append(frame.launched_at - frame.at)
        log.answered.append(frame.at)

    def offer(number: int, at: float) -> None:
        if at >= SETTLE_S:
            logs[number].row.offered += 1
            logs[number].moments.add(at)
        sim.submit(number, at, ended)

    for at, number in arrivals(rows, seconds + SETTLE_S):
        sim.at(at, partial(offer, number, at))
    sim.drain()
    return summarize(logs, seconds, capacity, deadline_s, 0.0, ("moondream-2", "simulated", cost.__name__))


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness (1984): 1 where all are equal, 1 / n where one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))
