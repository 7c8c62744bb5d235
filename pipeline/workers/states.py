"""What a supervisor knows of its streams and workers: values that it changes and others read."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from saccade.pipeline.workers.placement import StreamNeed, WorkerSlot
from saccade.pipeline.workers.protocol import MakeWorker, Message, StreamReport, Worker, WorkerReport

SILENT_S = 30.0  # without a report, after which a worker is taken to hang
START_S = 180.0  # likewise until it is ready: a large model, on a busy machine
GRACE_S = 10.0  # a worker that is being started again keeps its streams for so long, before others take them
_LONG_S = 3.0  # a worker that has taken streams for so long is started again at once; else, at last, after a back-off
_MOST_BACKOFF_S = 30.0
_BEGINS_S = 5.0  # from when it takes streams, in which what it does besides is its own beginning
_FEW = 3  # ends in a row that are followed by a new start at once

Phase = Literal["waiting", "opening", "open", "closing", "failed"]


class RefusedError(Exception):
    """A worker cannot open a stream. `str()` of it is one line for the user.

    Attributes:
        kind: the name of the error there.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def number_of(worker: str) -> int:
    """The number of a worker, from 1, whatever it was replaced by: 1 of `1.2`."""
    return int(worker.partition(".")[0])


def settle(future: Future[Any], outcome: object) -> None:
    """Give a future its result, or its exception if it is one, unless the one who waited has given up."""
    with suppress(InvalidStateError):
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


@dataclass(slots=True)
class StreamState:
    """A stream that is to run.

    Attributes:
        name: of the stream.
        config: its configuration as it is now, as values of a `ListedStream`.
        checked: whether its worker checks the source by the rules for the HTTP API.
        live: whether its source is; None before it was opened.
        phase: how far it is.
        worker: where it is, or is being opened or closed.
        reason: why it has failed; None if it has not.
        opened: how often it was opened.
        opened_at: `time.monotonic()` of the last time.
        cost: as in `StreamReport`, the newest.
        key: of its newest opening, by which late messages of an older one are recognised.
        opening, closing: who waits for it to be open, or closed.
        removed: it is to end.
        before: its last configuration, to which it returns if it cannot be opened by the new one; None if it is open.
        stays: why it could not move to another worker; None if it could.
        outdated: its configuration has changed since it began to be opened, so that it is opened once more.
    """

    name: str
    config: dict[str, Any]
    checked: bool = False
    key: int = 0
    live: bool | None = None
    phase: Phase = "waiting"
    worker: str | None = None
    reason: str | None = None
    opened: int = 0
    opened_at: float = 0.0
    cost: float | None = None
    opening: list[Future[str]] = field(default_factory=list)
    closing: list[Future[None]] = field(default_factory=list)
    removed: bool = False
    before: dict[str, Any] | None = None
    stays: str | None = None
    outdated: bool = False

    @property
    def need(self) -> StreamNeed:
        """What it needs, for placement."""
        return StreamNeed(self.name, self.config.get("weight", 1.0), self.cost)

    def take(self, report: StreamReport) -> None:
        """Take what its worker reports of it."""
        self.cost = report.cost
        if report.settings is not None:
            self.config = {**report.settings, "name": self.name}

    def note_opened(self, live: bool, now: float) -> None:
        """A worker has opened it. Where nobody waits for that any more, it is to end."""
        self.phase, self.live, self.opened_at, self.before = "open", live, now, None
        self.opened += 1
        self.removed |= self.opened == 1 and bool(self.opening) and all(done.cancelled() for done in self.opening)
        if self.outdated:
            return
        for done in self.opening:
            settle(done, self.name)
        self.opening.clear()

    def open_at(self, worker: str, key: int) -> Message:
        """Note that it is being opened at a worker; returns the command."""
        self.phase, self.worker, self.key, self.outdated = "opening", worker, key, False
        how = {"checked": self.checked, "again": self.opened > 0}
        return {"do": "open", "stream": self.name, "key": key, "config": self.config, **how}


@dataclass(slots=True)
class WorkerSeat:
    """A place for a worker: the process there now, and how those before did.

    Attributes:
        name: of the worker.
        worker: the process; None while none is started.
        url: of its HTTP API, once it is ready.
        pid: of its process, or of the last one.
        machine: where it is, if that stores its events; "" where the front does.
        report: the newest.
        starts: how often one was started.
        started_at, ready_at, heard_at, ended_at, retry_at: `time.monotonic()` of the newest start, the newest time it
            took streams, the newest message, the newest end, and the next start.
        failures: ends in a row, each soon after the start.
        reason: why the newest has ended, or could not begin.
        restarted_in_s: how long the last ones took from the end of one to the next that was ready.
        make: makes its process.
        trial: it has not been ready yet, and is given up if it ends before.
        draining: it is to have no streams any more.
        configs: configurations that streams have from when they come here.
    """

    name: str
    worker: Worker | None = None
    url: str | None = None
    pid: int | None = None
    machine: str = ""
    report: WorkerReport | None = None
    starts: int = 0
    started_at: float = 0.0
    ready_at: float = 0.0
    heard_at: float = 0.0
    ended_at: float | None = None
    retry_at: float = 0.0
    failures: int = 0
    reason: str | None = None
    restarted_in_s: deque[float] = field(default_factory=lambda: deque(maxlen=100))
    make: MakeWorker | None = None
    trial: bool = False
    draining: bool = False
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def ready(self) -> bool:
        """Whether it takes streams."""
        return self.worker is not None and self.worker.state == "ready" and self.url is not None

    @property
    def slot(self) -> WorkerSlot:
        """What it has, for placement."""
        known = self.report is not None and self.heard_at > self.ready_at + _BEGINS_S
        busy = self.report.busy if self.report and known else None
        return WorkerSlot(self.name, busy=busy, ready=self.ready, draining=self.draining)

    def due(self, now: float) -> bool:
        """Whether its process is to be started now."""
        return self.worker is None and now >= self.retry_at and not self.draining and not (self.trial and self.starts)

    def hangs(self, now: float) -> bool:
        """Whether nothing has come from it for too long."""
        return self.worker is not None and now > self.heard_at + (SILENT_S if self.ready else START_S)

    def comes_back(self, now: float) -> bool:
        """Whether it is ready so soon that its streams should wait for it, though it is not now."""
        if self.draining or self.trial or self.failures > _FEW:
            return False
        return now < (now if self.ended_at is None else self.ended_at) + GRACE_S

    def note_end(self, now: float, reason: str) -> None:
        """Its process is gone: decide when the next is started."""
        worked = self.url is not None
        self.failures = 0 if worked and now - self.ready_at > _LONG_S else self.failures + 1
        late = max(0, self.failures - _FEW) if worked else self.failures
        self.retry_at = now + (min(_MOST_BACKOFF_S, 0.5 * 2.0**late) if late else 0.0)
        self.worker, self.url, self.report = None, None, None
        self.ended_at, self.reason = now, self.reason or reason
