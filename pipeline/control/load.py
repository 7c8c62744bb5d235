"""How busy a worker is, and which worker gets the next stream. Pure, but for the memory of this process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MAX_STREAMS = 64
"""The most streams that a worker takes."""
_LEAST_S = 0.9  # between two readings
_UNMEASURED = 1.0 / MAX_STREAMS
"""The load of a stream that no report counts yet."""


class Load:
    """The busy share of engines from one reading of their counters to the next; read once a second at most."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._share = 0.0

    def share(self, busy_s: float, now_s: float) -> float:
        """From 0 to 1; 0 at the first reading.

        Args:
            busy_s: seconds that the busiest engine has worked so far.
            now_s: the time on a clock that never goes back.
        """
        last = self._last
        if last is not None and now_s - last[1] < _LEAST_S:
            return self._share
        self._last = busy_s, now_s
        if last is not None:
            self._share = min(1.0, max(0.0, (busy_s - last[0]) / (now_s - last[1])))
        return self._share


@dataclass(slots=True, frozen=True)
class Candidate:
    """A worker that is ready.

    Attributes:
        name: of the worker.
        busy: share of time in which its engine is at work, as last reported, 0 to 1.
        streams: how many streams it has.
        new: how many of these its last report does not count.
    """

    name: str
    busy: float
    streams: int
    new: int = 0


def least_loaded(workers: Iterable[Candidate]) -> str | None:
    """The name of the worker that gets the next stream; None if each has `MAX_STREAMS`.

    A stream that no report counts yet weighs as much as the others of its worker do, so that streams that are opened
    together are spread.
    """
    able = [worker for worker in workers if worker.streams < MAX_STREAMS]

    def rank(worker: Candidate) -> tuple[float, int, str]:
        counted = worker.streams - worker.new
        each = max(_UNMEASURED, worker.busy / counted) if counted else _UNMEASURED
        return round(worker.busy + worker.new * each, 1), worker.streams, worker.name

    return min(able, key=rank).name if able else None


def rss_bytes() -> int:
    """The resident memory of this process; where only that is known, the most so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
