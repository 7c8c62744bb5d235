"""Which stream runs on which worker, from what both have been measured to need and to have. Pure: no clock, no I/O.

A move costs a stream a reconnection, so nothing moves without need: a stream stays where it is while its worker is
there, and streams are moved for balance only where the busiest worker is overloaded, has been for a while, and the move
makes it clearly less so. Loads are smoothed first, since a camera's load follows what it sees.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

MAX_STREAMS = 64
_UNMEASURED = 1.0 / MAX_STREAMS
"""The cost of a stream of weight 1 where none has been measured yet."""


@dataclass(slots=True, frozen=True)
class WorkerSlot:
    """A worker that can have streams.

    Attributes:
        name: of the worker.
        capacity: its speed, as that of others; 1 for a usual one.
        max_streams: the most streams it takes.
        busy: share of its time that it was at work lately, from 0 to 1; None if not known yet.
        ready: whether it takes streams now. One that is not, since it is being started again, keeps those it has for
            `Settings.grace_s`.
        draining: whether it is to have no streams any more, since it is to be stopped; it keeps those for which no
            other worker has room.
    """

    name: str
    capacity: float = 1.0
    max_streams: int = MAX_STREAMS
    busy: float | None = None
    ready: bool = True
    draining: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.capacity) and self.capacity > 0):
            raise ValueError(f"{self.name}: capacity should be more than 0, got {self.capacity}")
        if self.max_streams < 0:
            raise ValueError(f"{self.name}: max_streams should be 0 or more, got {self.max_streams}")


@dataclass(slots=True, frozen=True)
class StreamNeed:
    """A stream that is to run.

    Attributes:
        name: of the stream.
        weight: its share of a worker beside other streams; as configured.
        cost: share of a worker of capacity 1 that it took lately, or would have taken, had the worker processed every
            frame (`demand`); from 0, and above 1 where one worker does not suffice. None if not measured yet.
    """

    name: str
    weight: float = 1.0
    cost: float | None = None


@dataclass(slots=True, frozen=True)
class Settings:
    """How ready `Placement` is to move a stream.

    The defaults of `high` and `margin` are from `saccade bench scale --simulate`, 10,000 cameras on 200 GPUs at a mean
    load of 0.81: 182 moves an hour, where 0.8 and 0.1 made 970, with no frame lost to load in either.

    Attributes:
        high: load of a worker, from 0 to 1, above which streams are moved away from it.
        margin: how much less loaded the worker that takes the stream must be afterwards than the other was before.
        settle_s: for how long a worker must have been overloaded.
        cooldown_s: least seconds between two moves for balance from or to one worker.
        stay_s: how long a stream stays where it was moved to for balance.
        grace_s: how long a worker that is not ready keeps its streams, before they are opened elsewhere.
        smoothing_s: time constant of the loads.
        max_moves: most moves away from one worker at a time.
    """

    high: float = 0.9
    margin: float = 0.15
    settle_s: float = 10.0
    cooldown_s: float = 10.0
    stay_s: float = 120.0
    grace_s: float = 2.0
    smoothing_s: float = 10.0
    max_moves: int = 4


def demand(cost: float, processed: float, lost: float) -> float:
    """The share of a worker that a stream would take, had none of its frames been lost for want of time.

    A worker at its limit processes the newest frames only, and its shares add up to 1 whatever it lacks.

    Args:
        cost: the share that it took.
        processed: frames that were processed in the same time.
        lost: frames that newer ones have replaced, since they waited for too long.
    """
    return cost * (1.0 + lost / processed) if processed > 0 else cost


class _Smooth:
    """Values by name, each smoothed over time: an exponential moving average that counts the time passed."""

    def __init__(self, constant_s: float) -> None:
        self._constant_s = constant_s
        self._values: dict[str, float] = {}

    def update(self, now: Iterable[tuple[str, float | None]], passed_s: float) -> dict[str, float]:
        """Take the newest values, None for none; names that are missing are forgotten."""
        new = -math.expm1(-max(0.0, passed_s) / self._constant_s)
        values: dict[str, float] = {}
        for name, value in now:
            old = self._values.get(name)
            if value is None or not math.isfinite(value):
                if old is not None:
                    values[name] = old
            else:
                value = max(0.0, value)
                values[name] = value if old is None else old + (value - old) * new
        self._values = values
        return values


class Placement:
    """Places streams, and remembers where each is. Not thread-safe.

    Args:
        settings: how ready it is to move streams.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self._settings = settings or Settings()
        self._places: dict[str, str] = {}
        self._costs = _Smooth(self._settings.smoothing_s)
        self._busy = _Smooth(self._settings.smoothing_s)
        self._last_s: float | None = None
        self._unready_since: dict[str, float] = {}  # worker → seconds
        self._overloaded_since: dict[str, float] = {}  # worker → seconds
        self._moved_at: dict[str, float] = {}  # stream → seconds, of a move for balance
        self._balanced_at: dict[str, float] = {}  # worker → seconds, of a move for balance from or to it

    def adopt(self, places: dict[str, str]) -> None:
        """Take over where streams run already, as found when the supervisor has started anew."""
        self._places = dict(places)

    def place(self, streams: Sequence[StreamNeed], workers: Sequence[WorkerSlot], now_s: float) -> dict[str, str]:
        """Decide where each stream is to run from now on.

        Args:
            streams: all that are to run.
            workers: all that there are; one that is gone is not among them.
            now_s: the time on a clock that never goes back, in seconds.

        Returns:
            The name of a worker by the name of each stream; a stream for which there is no room has none.
        """
        passed_s = 0.0 if self._last_s is None else now_s - self._last_s
        self._last_s = now_s
        costs = self._estimate(streams, passed_s)
        table = _Table(workers)
        self._unready_since = {
            worker.name: self._unready_since.get(worker.name, now_s) for worker in workers if not worker.ready
        }
        waiting = self._keep(streams, costs, table, now_s)
        self._measure(workers, table, passed_s)
        # The largest first: what comes last then decides little. Names make it the same each time.
        table.fill(sorted(waiting, key=lambda stream: (-costs[stream.name], stream.name)), costs)
        self._balance(table, costs, now_s)
        self._places = table.places
        return dict(table.places)

    def _estimate(self, streams: Sequence[StreamNeed], passed_s: float) -> dict[str, float]:
        """The cost of each stream: its own, smoothed, or what streams of its weight cost."""
        known = self._costs.update(((stream.name, stream.cost) for stream in streams), passed_s)
        usual = median(known.values()) if known else _UNMEASURED
        return {stream.name: known.get(stream.name, usual * stream.weight) for stream in streams}

    def _keep(
        self, streams: Sequence[StreamNeed], costs: dict[str, float], table: _Table, now_s: float
    ) -> list[StreamNeed]:
        """Leave streams where they are; returns those that are nowhere, or can stay no longer."""
        waiting, leaving = [], []
        for stream in streams:
            worker = table.workers.get(self._places.get(stream.name, ""))
            if worker is None or table.room(worker) <= 0:
                waiting.append(stream)
                continue
            table.add(stream.name, worker.name, costs[stream.name])
            unready_s = now_s - self._unready_since.get(worker.name, now_s)
            if worker.draining or unready_s >= self._settings.grace_s:
                leaving.append(stream)
        rooms = sum(table.room(worker) for worker in table.takers) - len(waiting)
        for stream in leaving[: max(0, rooms)]:  # none leaves for where there is no room
            table.remove(stream.name, costs[stream.name])
            waiting.append(stream)
        names = {stream.name for stream in streams}
        self._moved_at = {name: at for name, at in self._moved_at.items() if name in names}
        return waiting

    def _measure(self, workers: Sequence[WorkerSlot], table: _Table, passed_s: float) -> None:
        """Add to the load of each worker what it does besides its streams."""
        busy = self._busy.update(((worker.name, worker.busy) for worker in workers), passed_s)
        for name, share in busy.items():
            table.load[name] += max(0.0, min(1.0, share) - table.load[name])

    def _balance(self, table: _Table, costs: dict[str, float], now_s: float) -> None:
        """Move streams away from workers that have been overloaded for a while."""
        settings = self._settings
        self._overloaded_since = {
            name: self._overloaded_since.get(name, now_s) for name, load in table.load.items() if load > settings.high
        }
        self._balanced_at = {name: at for name, at in self._balanced_at.items() if name in table.workers}

        def quiet(name: str) -> bool:
            return now_s - self._balanced_at.get(name, -math.inf) >= settings.cooldown_s

        ripe = [
            name
            for name, since in self._overloaded_since.items()
            if now_s - since >= settings.settle_s and quiet(name) and table.workers[name].ready
        ]
        for source in sorted(ripe, key=lambda name: (-table.load[name], name)):
            targets = table.idlest(worker for worker in table.takers if worker.name != source and quiet(worker.name))
            for _ in range(settings.max_moves):
                free = [
                    name
                    for name in table.by_worker[source]
                    if now_s - self._moved_at.get(name, -math.inf) >= settings.stay_s
                ]
                best = table.best_move(free, source, targets, costs, settings.margin)
                if best is None or table.load[source] <= settings.high:
                    break
                moved, target = best
                table.remove(moved, costs[moved])
                table.add(moved, target, costs[moved])
                self._moved_at[moved] = now_s
                self._balanced_at[source] = self._balanced_at[target] = now_s
                self._overloaded_since.pop(source, None)  # what it has now must settle first


class _Table:
    """Streams on workers while a decision is made: counts, loads and rooms kept up to date.

    Args:
        workers: all that there are.
    """

    def __init__(self, workers: Sequence[WorkerSlot]) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.takers = [worker for worker in workers if worker.ready and not worker.draining]
        self.load = dict.fromkeys(self.workers, 0.0)
        self.places: dict[str, str] = {}
        self.by_worker: dict[str, set[str]] = {name: set() for name in self.workers}

    def room(self, worker: WorkerSlot) -> int:
        """How many more streams a worker can have."""
        return worker.max_streams - len(self.by_worker[worker.name])

    def add(self, stream: str, worker: str, cost: float) -> None:
        """Put a stream on a worker."""
        self.places[stream] = worker
        self.by_worker[worker].add(stream)
        self.load[worker] += cost / self.workers[worker].capacity

    def remove(self, stream: str, cost: float) -> None:
        """Take a stream from where it is."""
        worker = self.places.pop(stream)
        self.by_worker[worker].remove(stream)
        self.load[worker] -= cost / self.workers[worker].capacity

    def fill(self, waiting: Iterable[StreamNeed], costs: dict[str, float]) -> None:
        """Give each stream the worker that is least loaded; one that is draining only if all others are full."""
        last = [worker for worker in self.workers.values() if worker.ready and worker.draining]
        heaps = [[self._rank(worker) for worker in group if self.room(worker) > 0] for group in (self.takers, last)]
        for heap in heaps:
            heapq.heapify(heap)
        for stream in waiting:
            heap = heaps[0] or heaps[1]
            if not heap:
                return
            worker = self.workers[heap[0][2]]
            self.add(stream.name, worker.name, costs[stream.name])
            if self.room(worker) > 0:
                heapq.heapreplace(heap, self._rank(worker))
            else:
                heapq.heappop(heap)

    def idlest(self, workers: Iterable[WorkerSlot]) -> list[str]:
        """Of the workers of each capacity that have room, the least loaded: what it cannot take, others cannot."""
        found: dict[float, WorkerSlot] = {}
        for worker in workers:
            if self.room(worker) > 0 and (
                worker.capacity not in found or self._rank(worker) < self._rank(found[worker.capacity])
            ):
                found[worker.capacity] = worker
        return [worker.name for worker in found.values()]

    def best_move(
        self, streams: Iterable[str], source: str, targets: Iterable[str], costs: dict[str, float], margin: float
    ) -> tuple[str, str] | None:
        """The stream and the target whose move leaves both workers least loaded; None if none is clearly better."""
        moves = []
        for name, target in product(streams, targets):
            if self.room(self.workers[target]) > 0:
                less = self.load[source] - costs[name] / self.workers[source].capacity
                more = self.load[target] + costs[name] / self.workers[target].capacity
                if more <= self.load[source] - margin:
                    moves.append((max(less, more), name, target))
        return min(moves)[1:] if moves else None

    def _rank(self, worker: WorkerSlot) -> tuple[float, int, str]:
        return (self.load[worker.name], len(self.by_worker[worker.name]), worker.name)
