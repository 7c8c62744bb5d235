"""Isolates a failing sink: pauses it, counts dropped results and retries it, so that the run continues."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from saccade.engine.results import Result
from saccade.sinks.backoff import backoff_s
from saccade.sinks.base import Sink, SinkClosedError, SinkError, SinkStats, SupportsStats
from saccade.sinks.callback import CallbackSink
from saccade.sinks.record import Latency
from saccade.sources.frame import Frame

log = logging.getLogger(__name__)

SETTLE_S = 5.0  # a sink works again when it has not failed for so long: a video fails when a group of 2 s is written

State = Literal["ok", "paused", "ended"]


@dataclass(slots=True, frozen=True)
class SinkStatus:
    """Status of a sink, for the status page and metrics.

    Attributes:
        name: name of the sink, without secrets.
        state: `ok`; `paused` while writing fails; `ended` after the program that reads the output has exited.
        reason: reason for the state in one line; None if it is `ok`.
        lost: number of results not written because the sink was paused or failed.
        stats: the sink's own counters; None if it has none.
    """

    name: str
    state: State
    reason: str | None
    lost: int
    stats: SinkStats | None = None


class SinkGuard:
    """Writes to one sink and handles its failures. Thread-safe if the sink is shared.

    A failure pauses the sink. While the sink is paused, results are dropped and counted. Writing is retried after a
    back-off of 0.5 to 30 s. The state is `ok` again after 5 s without a failure. Errors are logged. Only
    `SinkClosedError` and the errors of a `CallbackSink` are raised.

    Args:
        sink: the sink to write to. The caller opens and closes the sink.
        name: name for logs and metrics, without secrets; the sink's class by default.
    """

    def __init__(self, sink: Sink, name: str = "") -> None:
        self._sink = sink
        self._name = name or type(sink).__name__
        self._lock = threading.Lock()  # over what follows
        self._state: State = "ok"
        self._reason: str | None = None
        self._failures = 0  # in a row
        self._retry_at = 0.0
        self._trying_since: float | None = None  # while it is paused and does not fail
        self._lost = 0
        self._lost_since: dict[str, int] = {}  # by stream, since its last frame that was written
        self._lost_of: Counter[str] = Counter()  # by stream
        self._last_reason = ""
        self._last_trace = ""  # as text: an exception would keep the frame that was not written in memory

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Write a result to the sink, or count it as lost.

        Raises:
            SinkClosedError: if the user has ended the run through the sink.
        """
        with self._lock:
            if self._state == "paused" and self._trying_since is None:
                if time.monotonic() < self._retry_at:
                    self._lose(frame)
                    return
                self._retry_at = time.monotonic() + backoff_s(self._failures)  # this thread tries, no other
            if lost := self._lost_since.pop(frame.stream, 0):
                frame = frame.changed(dropped_before=frame.dropped_before + lost)
        try:
            self._sink.write(frame, result, latency)
        except SinkClosedError as error:
            with self._lock:
                self._state, self._reason = "ended", str(error)
            raise
        except Exception as error:
            if isinstance(self._sink, CallbackSink):
                raise
            self._failed(frame, error)
        else:
            if self._state == "paused":
                self._worked()

    @property
    def works(self) -> bool:
        """Whether the sink is neither paused nor ended."""
        return self._state == "ok"

    @property
    def paused(self) -> bool:
        """Whether the sink has failed and will be retried."""
        return self._state == "paused"

    def end(self, stream: str) -> SinkError | None:
        """Forget a stream that has ended. Return an error if results of the stream were dropped, else None."""
        with self._lock:
            self._lost_since.pop(stream, None)
            lost = self._lost_of.pop(stream, 0)
            if not lost:
                return None
            error = SinkError(f"{self._last_reason}; dropped results: {lost}")
            error.add_note(self._last_trace)
            return error

    def status(self) -> SinkStatus:
        """Current status of the sink."""
        stats = self._sink.stats() if isinstance(self._sink, SupportsStats) else None
        with self._lock:
            return SinkStatus(self._name, self._state, self._reason, self._lost, stats)

    def _lose(self, frame: Frame, taken: int = 0) -> None:
        """Count as lost the result of `frame`, and a number (`taken`) of earlier results that the sink had accepted."""
        self._lost += 1 + taken
        self._lost_of[frame.stream] += 1 + taken
        self._lost_since[frame.stream] = self._lost_since.get(frame.stream, 0) + frame.dropped_before + 1 + taken

    def _failed(self, frame: Frame, error: Exception) -> None:
        expected = isinstance(error, SinkError)
        reason = str(error) if expected else f"{self._name}: {type(error).__name__}: {' '.join(str(error).split())}"
        with self._lock:
            first = self._state == "ok"
            self._failures += 1
            self._retry_at = time.monotonic() + backoff_s(self._failures)
            self._state, self._reason, self._last_reason = "paused", reason, reason
            self._last_trace = "".join(traceback.format_exception(error))
            self._lose(frame, error.lost if isinstance(error, SinkError) else 0)
            self._trying_since = None
        if first:  # the trace of an unexpected error, which is a bug
            log.warning("%s; dropping results until a retry succeeds", reason, exc_info=None if expected else error)

    def _worked(self) -> None:
        with self._lock:
            now = time.monotonic()
            if self._trying_since is None:
                self._trying_since = now
            settled = self._state == "paused" and now - self._trying_since >= SETTLE_S
            if settled:
                self._state, self._reason, self._failures, self._trying_since = "ok", None, 0, None
        if settled:
            log.warning("sink %s works again; results dropped so far: %d", self._name, self._lost)
