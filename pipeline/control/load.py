"""Measures the load of workers, and selects the worker with the least load for a new stream."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MAX_STREAMS = 64
"""Maximum number of streams per worker."""
_LEAST_S = 0.9  # minimum time between two readings
_UNMEASURED = 1.0 / MAX_STREAMS
"""The assumed load of a stream that is not included in a report yet."""


class Load:
    """Computes the utilization of an engine from a counter of its busy time. Updated at most once per second."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._share = 0.0

    def share(self, busy_s: float, now_s: float) -> float:
        """Return the fraction of time that an engine was busy since the last update, from 0 to 1.

        The first call returns 0.

        Args:
            busy_s: value of the busy-time counter of the engine, in seconds.
            now_s: current time on a monotonic clock, in seconds.
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
    """A ready worker that the next stream can be assigned to, with its load.

    Attributes:
        name: name of the worker.
        busy: fraction of time that the worker's engine was busy, in the last report, from 0 to 1.
        streams: number of streams on the worker.
        new: number of these streams that were opened after the last report.
    """

    name: str
    busy: float
    streams: int
    new: int = 0


def least_loaded(workers: Iterable[Candidate]) -> str | None:
    """Return the name of the worker with the least load. Return None if every worker has `MAX_STREAMS` streams."""
    able = [worker for worker in workers if worker.streams < MAX_STREAMS]

    def rank(worker: Candidate) -> tuple[float, int, str]:
        counted = worker.streams - worker.new
        each = max(_UNMEASURED, worker.busy / counted) if counted else _UNMEASURED
        return round(worker.busy + worker.new * each, 1), worker.streams, worker.name

    return min(able, key=rank).name if able else None


def rss_bytes() -> int:
    """Return the resident memory (RSS) of this process in bytes. Outside Linux, return the peak value."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
