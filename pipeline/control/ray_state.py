"""The state of streams and workers on Ray. `RayWorkers` protects it with a lock."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from saccade.pipeline.config import ListedStream
from saccade.pipeline.control.runner import Address, WorkerStatus
from saccade.pipeline.control.worker_calls import Ready, Report, WorkerSettings
from saccade.pipeline.errors import AwayError
from saccade.pipeline.runtime.streams import StreamStatus, unopened_status


@dataclass(slots=True)
class PlacedStream:
    """A stream of the run, with its worker and its state.

    Attributes:
        wanted: desired configuration.
        worker: name of the worker; None while the stream waits for a worker.
        status: status of the stream in the worker's last report.
        told_at: time at which `status` was received, on a monotonic clock, in seconds.
        error: reason of a failure, or None.
        opened: number of times that a worker has opened the stream.
        lock: held while the stream is opened, changed or closed.
        closed: set when the worker has sent its last message about the stream.
    """

    wanted: ListedStream
    worker: str | None = None
    status: StreamStatus | None = None
    told_at: float = 0.0
    error: str | None = None
    opened: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)
    closed: threading.Event = field(default_factory=threading.Event)

    def now(self) -> StreamStatus:
        """Return the last reported status of the stream. A failed or waiting stream also has the reason."""
        status = self.status or unopened_status(self.wanted, "waiting", None)
        if self.error is not None:
            return replace(status, state="failed", reason=self.error, config=self.wanted, worker=None)
        if self.worker is None or self.status is None:
            if status.config != self.wanted:  # it was changed meanwhile
                status = replace(status, prompts=self.wanted.prompts)
            reason = "waiting for a worker"
            return replace(status, state="waiting", reason=reason, config=self.wanted, worker=self.worker)
        recent = status.report.recent
        if recent.age_ms is not None:
            age_ms = recent.age_ms + 1000 * (time.monotonic() - self.told_at)
            status = replace(status, report=replace(status.report, recent=replace(recent, age_ms=age_ms)))
        return replace(status, config=self.wanted, worker=self.worker)


@dataclass(slots=True)
class WorkerSlot:
    """A worker of the run, also while its actor is restarted.

    Attributes:
        ready: message that the worker sent when it became ready; None while the worker is not ready.
        reason: reason why the worker is not ready.
        failures: number of consecutive failed starts.
        ended: whether the worker has sent its last message.
        loading: whether the worker is loading another engine.
        strays: streams that run on the worker without being assigned to it.
    """

    name: str
    settings: WorkerSettings
    actor: Any = None
    ready: Ready | None = None
    report: Report = field(default_factory=Report)
    reason: str | None = None
    starts: int = 0
    failures: int = 0
    ended_at: float | None = None
    restarted_in_s: list[float] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)  # counters of its ended processes
    ended: bool = False
    loading: bool = False
    strays: set[str] = field(default_factory=set)
    thread: threading.Thread | None = None

    def status(self, streams: Sequence[str]) -> WorkerStatus:
        """Return the status of the worker.

        Args:
            streams: names of the streams that run on the worker.
        """
        ready, report = self.ready, self.report
        counters = Counter(self.counted)
        counters.update(report.counters)
        return WorkerStatus(
            self.name,
            "ready" if ready else "ended" if self.ended or self.failures else "starting",
            None if ready else self.reason,
            ready.pid if ready else None,
            ready.machine if ready else "",
            streams,
            report.busy if ready else None,
            report.rss_bytes if ready else None,
            self.starts,
            list(self.restarted_in_s),
            counters,
        )

    def address(self) -> Address:
        """Return the address of the worker's HTTP server.

        Raises:
            AwayError: if the worker is not ready.
        """
        ready = self.ready
        if ready is None:
            raise AwayError(f"worker {self.name} is starting; try again in a few seconds")
        return Address(ready.url, {"Authorization": f"Bearer {ready.secret}"})
