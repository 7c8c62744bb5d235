"""The running streams on one engine, by name. Streams can be added, changed and removed while other streams run.

    streams = Streams(engine, [Output(JsonlSink("-"))])
    streams.add("door", open_source("rtsp://…"), [Detect("person")])

Each stream has a separate `Run`, so that a failing or hanging stream does not affect other streams.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from saccade.engine.tasks.task import Task
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.counts import Totals
from saccade.pipeline.analytics.stages import Gate, Stage, find_stage
from saccade.pipeline.config import ListedStream, Prompts, ShareSettings
from saccade.pipeline.config.queue_policy import QueuePolicy
from saccade.pipeline.config.stream_names import check_free
from saccade.pipeline.errors import StreamError, one_line, reason_of
from saccade.pipeline.runtime.output import Output, close_sinks
from saccade.pipeline.runtime.run import Run
from saccade.pipeline.runtime.shared_threads import SharedThreads
from saccade.pipeline.runtime.stats import Report, Stats
from saccade.sinks import Sink, SinkStatus
from saccade.sources import LiveSource, Source, State, redact

if TYPE_CHECKING:
    from saccade.engine import Engine

log = logging.getLogger(__name__)

MAX_STREAMS = 64
_STUCK_S = 30.0  # an engine without a result for this time counts as stuck
_CLOSE_S = 15.0
_CLOSED = "no stream can be added, because Saccade is shutting down"


@dataclass(slots=True, frozen=True)
class StreamStatus:
    """The state and the counters of a stream.

    Attributes:
        name: name of the stream.
        source: address or path of the source, without credentials.
        state: `running` for a file; the state of the source for a live source; `stuck` if the engine has returned no
            result for 30 s; `waiting` if no worker runs the stream; `ended`; `failed` after an error.
        reason: reason for an unhealthy state, otherwise None.
        live: whether the source is live.
        connections: number of times that a live source has connected.
        detail: codec, size and decoder of the video. For a disconnected live source, the last error.
        report: counters of the stream.
        counts: object counts of the analytics stage, or None.
        config: configuration of the stream; None if a program created the run without a configuration.
        prompts: prompts with the labels that the model uses, including labels of rules; None if unknown.
        worker: name of the worker that runs the stream; None without workers, and in the state `waiting`.
        frames: approximate number of frames of a file; None if unknown.
    """

    name: str
    source: str
    state: State | Literal["running", "stuck", "failed", "waiting"]
    reason: str | None
    live: bool
    connections: int
    detail: str | None
    report: Report
    counts: Totals | None = None
    config: ListedStream | None = None
    prompts: Prompts | None = None
    worker: str | None = None
    frames: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the stream is healthy: it is running, starting without an error, or has ended without an error."""
        return self.state in ("running", "live", "ended") or (self.state == "connecting" and self.reason is None)


def status_of(run: Run) -> StreamStatus:
    """Return the status of the stream that a run processes."""
    source, error = run.source, run.error
    state: State | Literal["running", "stuck", "failed"] = "running"
    reason: str | None = None
    detail: str | None = None
    connections = 0
    if isinstance(source, LiveSource):
        status = source.status
        state, reason, connections = status.state, status.explanation, status.connections
        detail = status.message
    info = source.info  # read after the state, because a live source then knows its `info`
    if source.decoder and (state == "live" or not isinstance(source, LiveSource)):
        detail = f"{info.codec} {info.width}x{info.height}, decoded by {source.decoder}"
    if run.ended:
        state, reason = ("failed", one_line(str(error))) if error else ("ended", None)
    elif (waited_s := run.waiting_s) > _STUCK_S:
        state, reason = "stuck", f"no result from the model for {waited_s:.0f} s"
    url = redact(info.url)
    analysis = find_stage(run.stages, AnalyzeStage)
    counts = analysis.totals() if analysis else None
    return StreamStatus(
        run.name,
        url,
        state,
        reason,
        info.live,
        connections,
        detail,
        run.report(),
        counts,
        run.config,
        frames=info.frames,
    )


def unopened_status(config: ListedStream, state: Literal["failed", "waiting"], reason: str | None) -> StreamStatus:
    """Return the status of a stream that could not be opened, or that waits for a worker."""
    source = redact(config.source)
    nothing = Stats().report({}, 0, {})
    return StreamStatus(config.name or source, source, state, reason, True, 0, None, nothing, None, config)


class Streams:
    """The running streams, by name. Thread-safe.

    A stream that ends is removed. A stream that fails stays listed until it is removed, or a new stream uses its name.

    Args:
        engine: the engine. The caller closes it.
        outputs: outputs that all streams share. Their sinks must be thread-safe. `close` closes the sinks.
        max_streams: maximum number of running streams.
    """

    def __init__(
        self,
        engine: Engine,
        outputs: Sequence[Output] = (),
        *,
        max_streams: int = MAX_STREAMS,
    ) -> None:
        self.engine = engine
        self._shared = [replace(output, shared=True) for output in outputs]
        self._threads = SharedThreads("saccade collect")
        self._max = max_streams
        self._lock = threading.Lock()  # never held while waiting
        self._runs: dict[str, Run] = {}
        self._reserved: list[str] = []  # names of streams that are being opened
        self._failed: dict[str, StreamStatus] = {}
        self._to_reopen: set[str] = set()  # failed streams that could not be reopened
        self._reopened: dict[str, StreamStatus] = {}  # streams that are being reopened
        self._closed = False

    @contextmanager
    def reserve(self, name: str) -> Iterator[str]:
        """Reserve a stream name while the stream is opened.

        The reservation prevents two streams with the same name from overwriting each other's output file.

        Args:
            name: name of the stream.

        Yields:
            The name, for a call of `add` with `reserved=True` inside the block.

        Raises:
            StreamError: if the name is invalid or in use, or too many streams are running.
        """
        with self._lock:
            if self._closed:
                raise StreamError(_CLOSED)
            taken = self._runs.keys() | self._reserved
            check_free(name, taken)
            if len(taken) >= self._max:
                raise StreamError(f"the limit of {self._max} running streams is reached: remove a stream first")
            self._reserved.append(name)
        try:
            yield name
        finally:
            with self._lock:
                self._reserved.remove(name)

    def add(
        self,
        name: str,
        source: Source,
        tasks: Sequence[Task],
        *,
        outputs: Sequence[Output] = (),
        tiles: int = 1,
        queue: QueuePolicy | None = None,
        in_flight: int = 2,
        share: ShareSettings | None = None,
        stages: Sequence[Stage] = (),
        gates: Sequence[Gate] = (),
        on_end: Callable[[Run], None] | None = None,
        reserved: bool = False,
        config: ListedStream | None = None,
    ) -> Run:
        """Start a stream. The stream closes its source, stages and outputs when it ends.

        If this call fails, the caller closes the source, stages and outputs.

        Args:
            name: name of the stream.
            source: source of the frames.
            tasks: tasks for each frame.
            outputs: outputs that only this stream uses.
            tiles: see `Run`.
            queue: see `Run`.
            in_flight: see `Run`.
            share: see `Run`.
            stages: see `Run`.
            gates: see `Run`.
            on_end: called in a thread of the stream, after the stream has ended and is no longer listed.
            reserved: whether the caller has reserved the name with `reserve`.
            config: see `Run`.

        Raises:
            StreamError: if the name is invalid or in use, too many streams are running, or no thread can be started.
        """

        def ended(run: Run) -> None:
            self._leave(run)
            if on_end:
                on_end(run)

        with nullcontext() if reserved else self.reserve(name):
            run = Run(
                source,
                self.engine,
                tasks,
                [*outputs, *self._shared],
                tiles=tiles,
                queue=queue,
                in_flight=in_flight,
                share=share,
                stages=stages,
                gates=gates,
                name=name,
                on_end=ended,
                threads=self._threads,
                config=config,
            )
            with self._lock:  # held until the threads run, so that `close` never joins an unstarted thread
                if self._closed:
                    raise StreamError(_CLOSED)
                try:
                    run.start()
                except RuntimeError as error:
                    raise StreamError(f"stream '{name}' cannot be started: {error}") from error
                self._runs[name] = run
                self._forget(name)
        return run

    @property
    def closed(self) -> bool:
        """Whether `close` was called. Streams can then no longer be added."""
        with self._lock:
            return self._closed

    @property
    def sinks(self) -> list[Sink]:
        """The sinks that all streams share."""
        return [output.sink for output in self._shared]

    def sink_statuses(self) -> list[tuple[str, SinkStatus]]:
        """Return the status of every sink, with the name of its stream. The name is empty for a shared sink."""
        with self._lock:
            runs = list(self._runs.values())
        shared = [("", output.guard.status()) for output in self._shared]
        return [*shared, *((run.name, status) for run in runs for status in run.sink_statuses())]

    @property
    def names(self) -> list[str]:
        """The names of the running streams in start order, followed by the names of streams that are being opened."""
        with self._lock:
            return list(dict.fromkeys([*self._runs, *self._reserved, *self._reopened]))

    @property
    def idle(self) -> bool:
        """Whether no stream is running, being opened or being reopened."""
        with self._lock:
            return not (self._runs or self._reserved or self._reopened or self._to_reopen)

    def get(self, name: str) -> Run:
        """Return the run of a stream.

        Raises:
            StreamError: if no stream with this name is running.
        """
        with self._lock:
            if run := self._runs.get(name):
                return run
            again = name in self._reopened
        raise StreamError(
            f"stream '{name}' is being reopened; try again" if again else f"stream '{name[:80]}' does not exist"
        )

    def remove(self, name: str, timeout_s: float = _CLOSE_S) -> None:
        """Stop a running stream, or remove a failed stream from the list.

        Raises:
            StreamError: if the stream does not exist, or has not stopped before the timeout. After a timeout, the
                stream stops as soon as it can.
        """
        with self._lock:
            if self._forget(name) and name not in self._runs:
                return
        _end(self.get(name), timeout_s)

    @contextmanager
    def reopening(self, name: str) -> Iterator[None]:
        """Stop a stream, and reserve its name while the `with` block opens the stream again. The stream stays listed.

        If the block raises an error, the stream is listed as failed with this error.

        Raises:
            StreamError: if the stream does not exist, has not stopped before the timeout, or is already being reopened.
        """
        with self._lock:
            if name in self._reopened:
                raise StreamError(f"stream '{name}' is being reopened; try again")
            run, failed = self._runs.get(name), self._failed.get(name)
        if run is None and failed is None:
            raise StreamError(f"stream '{name[:80]}' does not exist")
        before = status_of(run) if run is not None else failed
        assert before is not None
        with self._lock:
            self._reopened[name] = before
            self._forget(name)
        reason = None
        try:
            if run is not None:
                _end(run, _CLOSE_S)
            yield
        except Exception as error:
            reason = reason_of(error)
            raise
        finally:
            with self._lock:
                del self._reopened[name]
            if reason is not None and (run is None or run.ended):
                self.fail(replace(before, state="failed", reason=reason))

    def fail(self, status: StreamStatus) -> None:
        """List a stream as failed, because it could not be opened."""
        with self._lock:
            if status.name not in self._runs:
                self._note_failed(status)
                self._to_reopen.add(status.name)

    def snapshot(self) -> list[StreamStatus]:
        """Return the status of every stream, including failed streams and streams that are being reopened."""
        with self._lock:
            runs, failed = list(self._runs.values()), list(self._failed.values())
            known = self._runs.keys() | self._failed
            reopened = [status for name, status in self._reopened.items() if name not in known]
        listed = [*map(status_of, runs), *failed]
        return listed + [replace(status, state="connecting", reason="being reopened") for status in reopened]

    def stop(self) -> list[Run]:
        """Request that every stream stops, without waiting. Return the runs of the streams."""
        with self._lock:
            runs = list(self._runs.values())
        for run in runs:
            run.stop()
        return runs

    def abandon(self) -> None:
        """Stop all streams without waiting. Unfinished frames are dropped."""
        with self._lock:
            runs = list(self._runs.values())
        for run in runs:
            run.abandon()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Stop every stream, then close the shared sinks. A second call does nothing.

        Args:
            timeout_s: timeout in seconds.

        Raises:
            StreamError: if a stream or sink has not stopped before the timeout.
            SinkError: if a shared sink could not write all its data.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + timeout_s
        runs = self.stop()
        late = [run.name for run in runs if not run.join(max(0.0, deadline - time.monotonic()))]
        for threads in (self._threads, *(output.threads for output in self._shared)):
            threads.join(max(0.0, deadline - time.monotonic()))
        errors = close_sinks(self._shared, max(1.0, deadline - time.monotonic()))
        if errors:
            raise errors[0]
        if late:
            raise StreamError(f"streams that did not stop within {timeout_s:g} s: {', '.join(late)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _leave(self, run: Run) -> None:
        with self._lock:
            self._runs.pop(run.name, None)
            if run.error and not self._closed:
                self._note_failed(status_of(run))
        log.info("stream %s stopped: %s", run.name, status_of(run).reason or "ended")

    def _note_failed(self, status: StreamStatus) -> None:
        while len(self._failed) >= self._max:
            self._forget(next(iter(self._failed)))
        self._failed[status.name] = status

    def _forget(self, name: str) -> bool:
        self._to_reopen.discard(name)
        return self._failed.pop(name, None) is not None


def _end(run: Run, timeout_s: float) -> None:
    run.stop()
    if not run.join(timeout_s):
        raise StreamError(f"stream '{run.name}' did not stop within {timeout_s:g} s")
