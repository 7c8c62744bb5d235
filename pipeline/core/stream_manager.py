"""The streams running now, by name, all on one engine: added, changed and removed by anybody while the others go on.

    streams = Streams(engine, [Output(JsonlSink("-"))])
    streams.add("door", open_source("rtsp://…"), [Detect("person")])

Each stream is a `Run` of its own, so one that fails or hangs takes no other with it. Knows nothing of configuration,
terminals or HTTP.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from saccade.engine.scheduling.task import Task
from saccade.pipeline.core.bounded_queue import QueuePolicy
from saccade.pipeline.core.errors import StreamError
from saccade.pipeline.core.stats import Report
from saccade.pipeline.core.stream_names import check_name
from saccade.pipeline.core.stream_run import Output, Run
from saccade.sinks import Sink, SinkStatus
from saccade.sources import LiveSource, Source, State, redact

if TYPE_CHECKING:
    from saccade.engine import Engine

log = logging.getLogger(__name__)

MAX_STREAMS = 64
_OWED_S = 30.0  # an engine that has worked on a frame for so long does not answer any more
_CLOSE_S = 15.0
_OVER = "no stream can be added any more: everything is being closed"


@dataclass(slots=True, frozen=True)
class StreamStatus:
    """How a stream is doing.

    Attributes:
        name: of the stream.
        source: its address or path, free of credentials.
        state: that of a live source; `running` for a file; `stuck` when the engine owes a result for 30 s; `ended`; or
            `failed`, for good.
        reason: why it is not well, in half a line; None when it is.
        live: whether the source is live.
        connections: how often a live source has become so.
        detail: of a live source that is live: codec, size and decoder, in half a line.
        tasks: what is looked for.
        report: what was done so far.
    """

    name: str
    source: str
    state: State | Literal["running", "stuck", "failed"]
    reason: str | None
    live: bool
    connections: int
    detail: str | None
    tasks: tuple[Task, ...]
    report: Report

    @property
    def ok(self) -> bool:
        """Whether frames come and are looked at, or nothing has gone wrong yet."""
        return self.state in ("running", "live", "ended") or (self.state == "connecting" and self.reason is None)


def status_of(run: Run) -> StreamStatus:
    """How a run is doing."""
    source, error = run.source, run.error
    state: State | Literal["running", "stuck", "failed"] = "running"
    reason: str | None = None
    detail: str | None = None
    connections = 0
    if isinstance(source, LiveSource):
        status = source.status
        state, reason, connections = status.state, status.reason, status.connections
    info = source.info
    if isinstance(source, LiveSource) and state == "live":
        if info.codec:
            detail = f"{info.codec} {info.width}x{info.height}, decoded by {source.decoder}"
        else:
            state = "connecting"  # the first frame has arrived, but is still being converted
    if run.ended:
        state, reason = ("failed", redact(" ".join(str(error).split()))) if error else ("ended", None)
    elif (owed_s := run.waiting_s) > _OWED_S:
        state, reason = "stuck", f"the model owes a result for {owed_s:.0f} s"
    url = redact(info.url)
    return StreamStatus(run.name, url, state, reason, info.live, connections, detail, run.tasks, run.report())


class Streams:
    """Runs by name. Any thread may call anything.

    A stream whose source is over, or that fails, leaves by itself; `snapshot` still tells of one that failed, until its
    name is taken again or removed.

    Args:
        engine: what finds things; it stays the caller's.
        outputs: where every stream's results go, besides its own outputs. Their sinks take the writes of several
            threads, and are closed by `close`, once.
        max_streams: how many may run at a time.
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
        self._max = max_streams
        self._lock = threading.Lock()  # never held while anything is waited for
        self._runs: dict[str, Run] = {}
        self._coming: set[str] = set()  # names that are taken, but whose outputs are still being opened
        self._failed: dict[str, Run] = {}
        self._closed = False

    def add(
        self,
        name: str,
        source: Source,
        tasks: Sequence[Task],
        *,
        outputs: Sequence[Output] | Callable[[], Sequence[Output]] = (),
        tiles: int = 1,
        queue: QueuePolicy | None = None,
        in_flight: int = 2,
        on_end: Callable[[Run], None] | None = None,
    ) -> Run:
        """Begin a stream. Source and outputs are its own from here on, unless this raises.

        Args:
            name: what its records are called; the source's own name does not count.
            source: where its frames come from.
            tasks: as in `Run`.
            outputs: where only this stream's results go; or what opens them, called once the name is this stream's,
                since to open a file of that name is to empty the one that was there.
            tiles: as in `Run`.
            queue: as in `Run`.
            in_flight: as in `Run`.
            on_end: called in one of its threads when it is over, for whatever reason, and has left.

        Raises:
            StreamError: if the name cannot be used or is taken, or too many run.
        """
        try:
            check_name(name)
        except ValueError as error:
            raise StreamError(str(error)) from None

        def ended(run: Run) -> None:
            self._leave(run)
            if on_end:
                on_end(run)

        with self._lock:
            if self._closed:
                raise StreamError(_OVER)
            if name in self._runs or name in self._coming:
                raise StreamError(f"there is a stream called '{name}' already")
            if len(self._runs) + len(self._coming) >= self._max:
                raise StreamError(f"{self._max} streams are running, and no more may")
            self._coming.add(name)
        try:
            own = outputs() if callable(outputs) else outputs
            with self._lock:  # until its threads run, so that nobody waits for what is not there yet
                if self._closed:
                    raise StreamError(_OVER)
                self._runs[name] = run = Run(
                    source,
                    self.engine,
                    tasks,
                    [*own, *self._shared],
                    tiles=tiles,
                    queue=queue,
                    in_flight=in_flight,
                    name=name,
                    on_end=ended,
                )
                self._failed.pop(name, None)
                run.start()
        finally:
            with self._lock:
                self._coming.discard(name)
        return run

    @property
    def sinks(self) -> list[Sink]:
        """Where the results of every stream go."""
        return [output.sink for output in self._shared]

    def sink_statuses(self) -> list[tuple[str, SinkStatus]]:
        """How every sink is doing, with the name of its stream, or "" if it is all streams'."""
        with self._lock:
            runs = list(self._runs.values())
        shared = [("", output.guard.status()) for output in self._shared]
        return [*shared, *((run.name, status) for run in runs for status in run.sink_statuses())]

    @property
    def names(self) -> list[str]:
        """The streams running now, in the order in which they came, and those that are about to."""
        with self._lock:
            return list(dict.fromkeys([*self._runs, *self._coming]))

    def get(self, name: str) -> Run:
        """The run of a stream.

        Raises:
            StreamError: if none of that name is running.
        """
        with self._lock:
            run = self._runs.get(name)
        if run is None:
            raise StreamError(f"no stream is called '{name[:80]}'")
        return run

    def remove(self, name: str, timeout_s: float = _CLOSE_S) -> None:
        """End a stream, or forget one that failed.

        Raises:
            StreamError: if there is none of that name, or it does not end in time; it then ends later.
        """
        with self._lock:
            if self._failed.pop(name, None):
                return
        run = self.get(name)
        run.stop()
        if not run.join(timeout_s):
            raise StreamError(f"'{name}' was told to end, but has not within {timeout_s:g} s")

    def snapshot(self) -> list[StreamStatus]:
        """How every stream is doing, those that failed included."""
        with self._lock:
            runs = [*self._runs.values(), *self._failed.values()]
        return [status_of(run) for run in runs]

    def stop(self) -> list[Run]:
        """Tell every stream to end, and return those told; does not wait for them."""
        with self._lock:
            runs = list(self._runs.values())
        for run in runs:
            run.stop()
        return runs

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """End every stream, then close the shared sinks. A second call does nothing.

        Raises:
            StreamError: if a stream or sink does not end in time.
            SinkError: if what was written to a shared sink could not be finished.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + timeout_s
        runs = self.stop()
        late = [run.name for run in runs if not run.join(max(0.0, deadline - time.monotonic()))]
        errors = self._close_sinks(max(1.0, deadline - time.monotonic()))
        if errors:
            raise errors[0]
        if late:
            raise StreamError(f"{', '.join(late)}: told to end, but not done within {timeout_s:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _leave(self, run: Run) -> None:
        with self._lock:
            self._runs.pop(run.name, None)
            if run.error and not self._closed:
                while len(self._failed) >= self._max:
                    del self._failed[next(iter(self._failed))]
                self._failed[run.name] = run
        log.info("%s: %s", run.name, status_of(run).reason or "ended")

    def _close_sinks(self, timeout_s: float) -> list[Exception]:
        """Close the shared sinks side by side, so that one that hangs keeps none of the others open."""
        errors: list[Exception] = []

        def close(output: Output) -> None:
            try:
                output.sink.close()
            except Exception as error:
                errors.append(error)

        threads = [
            threading.Thread(target=close, args=(output,), name="saccade close", daemon=True) for output in self._shared
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread, output in zip(threads, self._shared, strict=True):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                errors.append(StreamError(f"{type(output.sink).__name__} is not closed after {timeout_s:g} s"))
        return errors
