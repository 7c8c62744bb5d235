"""Which stream runs on which worker, from what both have been measured to need and to have. Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_STREAMS = 64


@dataclass(slots=True, frozen=True)
class WorkerSlot:
    """A worker that can have streams.

    Attributes:
        name: of the worker.
        capacity: its speed, as that of others; 1 for a usual one.
        max_streams: the most streams it takes.
        busy: share of its time that it was at work lately, from 0 to 1; None if not known yet.
        ready: whether it takes streams now. One that is not, since it is being started again, keeps those it has.
    """

    name: str
    capacity: float = 1.0
    max_streams: int = MAX_STREAMS
    busy: float | None = None
    ready: bool = True


@dataclass(slots=True, frozen=True)
class StreamNeed:
    """A stream that is to run.

    Attributes:
        name: of the stream.
        weight: its share of a worker beside other streams; as configured.
        cost: share of a worker of capacity 1 that it took lately, from 0 to 1; None if not measured yet.
    """

    name: str
    weight: float = 1.0
    cost: float | None = None


class Placement:
    """Places streams, and remembers where each is. Not thread-safe."""

    def __init__(self) -> None:
        self._places: dict[str, str] = {}

    def place(self, streams: Sequence[StreamNeed], workers: Sequence[WorkerSlot], now_s: float) -> dict[str, str]:
        """Decide where each stream is to run from now on.

        Args:
            streams: all that are to run.
            workers: all that there are; one that is gone is not among them.
            now_s: the time on a clock that never goes back, in seconds.

        Returns:
            The name of a worker by the name of each stream; a stream for which there is no room has none.
        """
        known = {worker.name: worker for worker in workers}
        count = dict.fromkeys(known, 0)
        places: dict[str, str] = {}
        for stream in streams:
            old = self._places.get(stream.name)
            if old in count and count[old] < known[old].max_streams:
                places[stream.name] = old
                count[old] += 1
        for stream in streams:
            room = [name for name, worker in known.items() if worker.ready and count[name] < worker.max_streams]
            if stream.name not in places and room:
                name = min(room, key=lambda name: (count[name] / known[name].capacity, name))
                places[stream.name] = name
                count[name] += 1
        self._places = places
        return dict(places)
