"""Which stream runs on which worker, from what both have been measured to need and to have. Pure: no clock, no I/O.

A stream is opened where the load is least, and stays there: it moves only where its worker is gone, or is being
replaced. Loads are smoothed first, since a camera's load follows what it sees.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

MAX_STREAMS = 64
GRACE_S = 2.0  # a worker that is not ready keeps its streams for so long, before they are opened elsewhere
SMOOTHING_S = 10.0  # time constant of the loads
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
            `GRACE_S`.
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
    """Places streams, and remembers where each is. Not thread-safe."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}
        self._costs = _Smooth(SMOOTHING_S)
        self._busy = _Smooth(SMOOTHING_S)
        self._last_s: float | None = None
        self._unready_since: dict[str, float] = {}  # worker → seconds

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
            if worker.draining or unready_s >= GRACE_S:
                leaving.append(stream)
        rooms = sum(table.room(worker) for worker in table.takers) - len(waiting)
        for stream in leaving[: max(0, rooms)]:  # none leaves for where there is no room
            table.remove(stream.name, costs[stream.name])
            waiting.append(stream)
        return waiting

    def _measure(self, workers: Sequence[WorkerSlot], table: _Table, passed_s: float) -> None:
        """Add to the load of each worker what it does besides its streams."""
        busy = self._busy.update(((worker.name, worker.busy) for worker in workers), passed_s)
        for name, share in busy.items():
            table.load[name] += max(0.0, min(1.0, share) - table.load[name])


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

    def _rank(self, worker: WorkerSlot) -> tuple[float, int, str]:
        return (self.load[worker.name], len(self.by_worker[worker.name]), worker.name)
