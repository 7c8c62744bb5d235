"""`saccade bench scale --simulate`: thousands of cameras on hundreds of GPUs, as a discrete-event simulation.

The placement is the very code that a supervisor runs, and its time is measured. How fast a GPU is, how long a worker
takes to start and what reports weigh are parts that were measured elsewhere, named in the output; how often things fail
and how loads swing are assumptions, named as such. No camera, GPU or network is touched.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from saccade.pipeline.errors import ConfigError
from saccade.pipeline.workers.placement import Placement, Settings, StreamNeed, WorkerSlot
from saccade.pipeline.workers.protocol import StreamReport, WorkerReport

RATES: Mapping[str, Mapping[int, float]] = {
    "nano": {1: 923.0, 2: 1513.0, 4: 1730.0, 8: 1750.0},
    "moondream-2": {1: 212.0},
}
"""Frames a second of one H200 in all, by model and workers on it. nano: DESIGN, 1 to 8 processes. Moondream 2: FP8, 32
streams of 640x360, 3 objects each, `saccade bench throughput` in engine/README.md; its random weights cost the same."""

_TICK_S = 10.0  # between decisions that nothing has called for
_SWING_S = 60.0  # between changes of the cameras' loads
_OPENING = 8  # streams that a worker opens at a time
_SERIES, _SERIES_BYTES = 104, 7292
"""Of Prometheus for one stream, without rules or sinks: counted in `GET /metrics` of a run of two (2026-11-22)."""


@dataclass(slots=True, frozen=True)
class Scenario:
    """What is simulated. The first group is sizes, the second measured parts, the third assumptions.

    Attributes:
        cameras, gpus, gpus_each: how many, and the GPUs of a machine.
        workers_each: workers on a GPU.
        model: of `RATES`.
        fps: frames a second of a camera that are to be processed.
        hours: simulated.
        start_s: from the end of a worker to the next that is ready.
        connect_s: from the command to open a stream to its first packet.
        silent_s: without a report, after which a worker of a machine that has gone is taken to have ended.
        keyframe_s: interval of the cameras' key frames.
        worker_failures, machine_failures: of each, a day.
        repair_s: for a machine.
        swing: standard deviation of the logarithm of a camera's load around its mean.
        seed: of all chance.
    """

    cameras: int = 10_000
    gpus: int = 200
    gpus_each: int = 8
    workers_each: int = 2
    model: str = "nano"
    fps: float = 15.0
    hours: float = 1.0
    start_s: float = 4.0
    connect_s: float = 0.2
    silent_s: float = 4.0
    keyframe_s: float = 2.0
    worker_failures: float = 1.0
    machine_failures: float = 0.5
    repair_s: float = 600.0
    swing: float = 0.3
    seed: int = 1

    def __post_init__(self) -> None:
        rates = RATES.get(self.model)
        if rates is None:
            raise ConfigError(f"--model: no speed of '{self.model}' is known; known: {', '.join(RATES)}")
        if self.workers_each not in rates:
            known = ", ".join(map(str, rates))
            raise ConfigError(f"--workers: no speed of {self.workers_each} workers on a GPU is known; known: {known}")
        for name in ("cameras", "gpus", "gpus_each"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name}: should be 1 or more")
        for name in ("fps", "hours", "keyframe_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--{name}: should be more than 0")

    @property
    def rate(self) -> float:
        """Frames a second of one worker."""
        return RATES[self.model][self.workers_each] / self.workers_each


@dataclass(slots=True, frozen=True)
class ScaleForecast:
    """What a simulation predicts.

    Attributes:
        offered_fps, processed: frames a second that all cameras offer, and the share that is processed.
        lost_to_failures, lost_to_load: shares that are not, by cause.
        failures: workers that ended, those of machines included.
        losses: streams that lost their worker, each time.
        back_p50_s, back_p99_s, back_max_s: from then to their next frame.
        moves: streams that were moved for balance, an hour.
        load_mean, load_p99: of the workers, over time; 1 where one has no time left.
        most_streams: on one worker at a time.
        homeless: the most streams at a time for which there was no room.
        place_p50_ms, place_p99_ms: what a decision takes on this machine.
        reports_bytes_s: that all workers send to the supervisor.
        series, scrape_bytes: of all streams' metrics for Prometheus, and what reading them once weighs.
    """

    scenario: Scenario
    offered_fps: float
    processed: float
    lost_to_failures: float
    lost_to_load: float
    failures: int
    losses: int
    back_p50_s: float
    back_p99_s: float
    back_max_s: float
    moves: float
    load_mean: float
    load_p99: float
    most_streams: int
    homeless: int
    place_p50_ms: float
    place_p99_ms: float
    reports_bytes_s: float
    series: int
    scrape_bytes: int

    def as_json(self) -> str:
        """All fields as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def as_text(self) -> str:
        """A report for people."""
        one = self.scenario
        rate = RATES[one.model][one.workers_each]
        return "\n".join(
            [
                f"{one.cameras} cameras at {one.fps:g} fps on {one.gpus} GPUs with {one.workers_each} workers each, "
                f"{one.hours:g} h simulated",
                f"measured   {one.model}: {rate:.0f} frames/s a GPU (one H200); a worker starts in {one.start_s:g} s, "
                f"a stream connects in {one.connect_s:g} s; a worker's silence is noticed after {one.silent_s:g} s",
                f"assumed    {one.worker_failures:g} failures a worker and {one.machine_failures:g} a machine a day, "
                f"{one.repair_s:g} s to repair one; loads swing by {one.swing:g}; key frames each {one.keyframe_s:g} s",
                f"frames     {100 * self.processed:.3f} % of {self.offered_fps:.0f} a second; "
                f"{100 * self.lost_to_failures:.3f} % lost to failures, {100 * self.lost_to_load:.3f} % to load",
                f"load       mean {self.load_mean:.2f}, p99 {self.load_p99:.2f}; most streams on "
                f"a worker {self.most_streams}, without one {self.homeless}",
                f"failures   {self.failures} workers, {self.losses} streams; back after {self.back_p50_s:.1f} s, "
                f"p99 {self.back_p99_s:.1f}, at most {self.back_max_s:.1f}",
                f"placement  {self.moves:.1f} moves an hour; {self.place_p50_ms:.0f} ms a decision, "
                f"p99 {self.place_p99_ms:.0f} (measured here)",
                f"metrics    {self.reports_bytes_s / 1e6:.2f} MB/s of reports; {self.series} series, "
                f"{self.scrape_bytes / 1e6:.0f} MB each time that all are read",
            ]
        )


def simulate(scenario: Scenario) -> ScaleForecast:
    """Run a scenario to its end."""
    return _Simulation(scenario).run()


class _Simulation:
    """Time moves from event to event; between them nothing changes."""

    def __init__(self, scenario: Scenario) -> None:
        self._it = scenario
        self._chance = random.Random(scenario.seed)
        self._rng = np.random.default_rng(scenario.seed)
        self._cameras = [f"camera{number:05d}" for number in range(scenario.cameras)]
        self._number = {name: number for number, name in enumerate(self._cameras)}
        self._swing = self._rng.standard_normal(scenario.cameras)
        count = scenario.gpus * scenario.workers_each
        self._workers = [f"worker{number:04d}" for number in range(count)]
        self._index = {name: number for number, name in enumerate(self._workers)}
        self._down: dict[str, tuple[float, float]] = {}  # worker → when that is noticed, and when it is ready again
        self._placement = Placement()
        self._places: dict[str, str] = {}
        self._where = np.full(scenario.cameras, -1)  # the worker of each camera that has one
        self._lost_at: dict[str, float] = {}  # camera → when it lost its worker; until it is opened again
        self._events: list[tuple[float, int, str, Any]] = []
        self._added = 0
        self._gaps: list[float] = []
        self._loads: list[float] = []
        self._place_s: list[float] = []
        self._moves = self._failures = self._homeless = self._most = 0
        self._late = 0.0  # frames

    def run(self) -> ScaleForecast:
        """From the start to the end."""
        it, end_s = self._it, self._it.hours * 3600.0
        for kind, rate in (("worker", it.worker_failures), ("machine", it.machine_failures)):
            self._plan_failure(kind, rate, 0.0)
        self._add(0.0, "swing")
        self._add(0.0, "tick")
        now_s = 0.0
        while self._events[0][0] < end_s:
            at_s, _, kind, what = heapq.heappop(self._events)
            self._late += self._late_fps() * (at_s - now_s)
            now_s = at_s
            if kind == "swing":
                self._swing = 0.9 * self._swing + math.sqrt(0.19) * self._rng.standard_normal(it.cameras)
                self._add(now_s + _SWING_S, "swing")
            elif kind == "tick":
                self._loads.extend(self._load().tolist())
                self._add(now_s + _TICK_S, "tick")
            elif kind in ("worker", "machine"):
                self._fail(kind, now_s, what)
            self._place(now_s)
        self._late += self._late_fps() * (end_s - now_s)
        return self._forecast(end_s)

    def _add(self, at_s: float, kind: str, what: Any = None) -> None:
        self._added += 1  # so that events of one moment come in their order
        heapq.heappush(self._events, (at_s, self._added, kind, what))

    # ---- failures

    def _plan_failure(self, kind: str, each_a_day: float, now_s: float) -> None:
        machines = math.ceil(self._it.gpus / self._it.gpus_each)
        count = len(self._workers) if kind == "worker" else machines
        if each_a_day > 0:
            at_s = now_s + self._chance.expovariate(each_a_day * count / 86_400.0)
            self._add(at_s, kind, self._chance.randrange(count))

    def _fail(self, kind: str, now_s: float, number: int) -> None:
        it = self._it
        if kind == "worker":
            ends, noticed_s, ready_s = [self._workers[number]], now_s, now_s + it.start_s
            self._plan_failure(kind, it.worker_failures, now_s)
        else:
            each = it.gpus_each * it.workers_each
            ends = self._workers[number * each : (number + 1) * each]
            noticed_s, ready_s = now_s + it.silent_s, now_s + it.repair_s + it.start_s
            self._plan_failure(kind, it.machine_failures, now_s)
        ends = [name for name in ends if name not in self._down]
        self._failures += len(ends)
        for name in ends:
            self._down[name] = noticed_s, ready_s
        gone = set(ends)
        self._lost_at |= {camera: now_s for camera, worker in self._places.items() if worker in gone}
        for at_s in {noticed_s, noticed_s + Settings().grace_s, ready_s}:
            self._add(at_s, "change")

    # ---- placement

    def _place(self, now_s: float) -> None:
        self._down = {name: times for name, times in self._down.items() if now_s < times[1]}
        cost = self._cost()
        streams = [StreamNeed(name, cost=float(cost[number])) for number, name in enumerate(self._cameras)]
        load, most = self._load(), max(64, math.ceil(1.5 * len(streams) / len(self._workers)))
        slots = [
            WorkerSlot(name, max_streams=most, busy=min(1.0, float(load[number])), ready=not self._noticed(name, now_s))
            for number, name in enumerate(self._workers)
        ]
        begun = time.perf_counter()
        places = self._placement.place(streams, slots, now_s)
        self._place_s.append(time.perf_counter() - begun)
        opened: dict[str, int] = {}
        for camera, worker in places.items():
            lost = camera in self._lost_at
            if not lost and self._places.get(camera) == worker:
                continue
            if lost and worker in self._down:
                continue  # it waits, or nobody has noticed
            if lost:
                self._open(camera, now_s, opened.setdefault(worker, 0))
                opened[worker] += 1
            elif camera in self._places:
                self._moves += 1
        self._places = places
        self._where = np.fromiter(
            (self._index[places[name]] if name in places else -1 for name in self._cameras), int, len(self._cameras)
        )
        self._homeless = max(self._homeless, len(streams) - len(places))
        self._most = max(self._most, int(np.bincount(self._where[self._where >= 0]).max(initial=0)))

    def _noticed(self, worker: str, now_s: float) -> bool:
        return worker in self._down and now_s >= self._down[worker][0]

    def _open(self, camera: str, now_s: float, before: int) -> None:
        """Open a stream that has lost its worker; `before` others are being opened there already."""
        wait_s = self._it.connect_s * (1 + before // _OPENING) + self._chance.uniform(0.0, self._it.keyframe_s)
        self._gaps.append(now_s + wait_s - self._lost_at.pop(camera))

    # ---- loads

    def _cost(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The share of a worker that each camera needs; its mean is that of a load that does not swing."""
        swing = self._it.swing
        return np.exp(swing * self._swing - swing * swing / 2) * (self._it.fps / self._it.rate)

    def _load(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        placed = self._where >= 0
        load = np.bincount(self._where[placed], self._cost()[placed], len(self._workers))
        return load.astype(np.float64, copy=False)

    def _late_fps(self) -> float:
        """Frames a second that are dropped, since their worker has no time for them."""
        load = self._load()
        share = np.append(np.maximum(0.0, 1.0 - 1.0 / np.maximum(load, 1e-9)), 1.0)  # the last: of those without one
        return float(share[self._where].sum()) * self._it.fps

    def _forecast(self, end_s: float) -> ScaleForecast:
        it = self._it
        offered = it.cameras * it.fps
        pending = sum(end_s - at_s for at_s in self._lost_at.values())
        failed = (sum(self._gaps) + pending) * it.fps / (offered * end_s)
        late = self._late / (offered * end_s)
        gaps = np.array(self._gaps or [0.0])
        each = StreamReport("camera00000", "live", None, True, 1_234_567, it.fps, 0.0123)
        report = len(json.dumps(WorkerReport(0.5, 1 << 30).to_message()))
        return ScaleForecast(
            it,
            offered,
            1.0 - failed - late,
            failed,
            late,
            self._failures,
            len(self._gaps) + len(self._lost_at),
            float(np.percentile(gaps, 50)),
            float(np.percentile(gaps, 99)),
            float(gaps.max()),
            self._moves / it.hours,
            float(np.mean(self._loads)),
            float(np.percentile(self._loads, 99)),
            self._most,
            self._homeless,
            1e3 * float(np.percentile(self._place_s, 50)),
            1e3 * float(np.percentile(self._place_s, 99)),
            float(it.cameras * len(json.dumps(asdict(each))) + len(self._workers) * report),
            it.cameras * _SERIES,
            it.cameras * _SERIES_BYTES,
        )
