"""A worker: a Ray actor that runs streams on one engine. Its HTTP server answers requests that need video frames.

The worker queues events, and also results for outputs that streams share. The controller fetches both. The worker
continues to process its streams if the controller disconnects.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.engine.errors import EngineClosedError
from saccade.pipeline.analytics.stages import find_stage
from saccade.pipeline.config import ListedStream, RunConfig
from saccade.pipeline.config.queue_policy import NEWEST
from saccade.pipeline.control.load import rss_bytes
from saccade.pipeline.control.local import Local, own_targets
from saccade.pipeline.control.plan import Change
from saccade.pipeline.control.results import RelaySink
from saccade.pipeline.control.runner import Ended, ModelInfo
from saccade.pipeline.control.source_policy import SourcePolicy
from saccade.pipeline.control.stores import store_here
from saccade.pipeline.control.worker_calls import Batch, ChangeRequest, Ready, Report, WorkerSettings, taken, told
from saccade.pipeline.errors import AwayError, ConfigError, StreamError, one_line
from saccade.pipeline.events.hub import EventHub
from saccade.pipeline.events.record import Event, read_event
from saccade.pipeline.events.stage import EventStage
from saccade.pipeline.events.storage.recorder import MediaWriter
from saccade.pipeline.events.storage.store_reader import media_path
from saccade.pipeline.events.verdicts import Verdict
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.stream import EventPlaces, OpenedStream, load_engine
from saccade.pipeline.runtime.streams import Streams, StreamStatus
from saccade.pipeline.runtime.targets import Target
from saccade.pipeline.search import SnapshotAsker
from saccade.sinks.video.broadcast import BroadcastSink

if TYPE_CHECKING:
    from saccade.pipeline.api.http_server import HttpServer

log = logging.getLogger(__name__)

REPORT_S = 1.0
MAX_MESSAGES = 10_000  # enough for hours of events; only the newest report is kept
MAX_RESULTS = 256  # beyond it, live streams drop their oldest results
_MOST = 64  # maximum messages and maximum results per batch
_ENGINE_S = 1.5  # time for the engine to complete its frames at the end
_HANGS_S = 120.0  # the process ends if Python has not run for this time, because a hanging library keeps the GIL
_WISH_S = 15.0


class Outbox:
    """Queues messages and results of a worker for the controller. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the attributes below
        self._messages: deque[tuple[str, Any]] = deque()
        self._results: deque[bytes] = deque()

    def put(self, kind: str, value: Any) -> None:
        """Add a message for the controller to the queue. If the queue is full, the oldest message is dropped."""
        with self._changed:
            if kind == "report" and self._messages and self._messages[-1][0] == "report":
                self._messages.pop()
            if len(self._messages) >= MAX_MESSAGES:
                self._messages.popleft()
            self._messages.append((kind, value))
            self._changed.notify_all()

    def put_result(self, data: bytes) -> None:
        """Add a pickled result to the queue. Wait while the queue is full."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._results) < MAX_RESULTS)
            self._results.append(data)
            self._changed.notify_all()

    def take(self, wait_s: float) -> Batch:
        """Wait up to `wait_s` seconds for messages or results. Remove and return at most 64 of each."""
        with self._changed:
            self._changed.wait_for(lambda: self._messages or self._results, wait_s)
            messages = [self._messages.popleft() for _ in range(min(_MOST, len(self._messages)))]
            results = [self._results.popleft() for _ in range(min(_MOST, len(self._results)))]
            self._changed.notify_all()
        return Batch(messages, results)


class Worker:
    """An engine with its streams and their HTTP server. The constructor starts the engine and the server.

    Args:
        settings: settings of the worker.
        media: folder for clips and snapshots, or None.
        outbox: receives messages and results for the controller.
        host: address that the HTTP server listens on.
        verdicts: known false alarms, by stream. A worker that replaces another worker receives the same mapping.

    Raises:
        ConfigError, EngineError: if the configuration cannot be used, or the model cannot be loaded.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        media: str | None,
        outbox: Outbox,
        host: str = "127.0.0.1",
        verdicts: dict[str, Sequence[Verdict]] | None = None,
    ) -> None:
        self.settings = settings
        self._outbox = outbox
        self._each = [Target(text) for text in settings.values.get("sinks", ())]
        self._prepared: dict[str, OpenedStream] = {}
        self._numbers = itertools.count()
        self._wishes: dict[int, tuple[threading.Event, list[Any]]] = {}
        self._stack = ExitStack()
        with ExitStack() as on_failure:
            on_failure.callback(self._stack.close)
            self._open(
                RunConfig.model_validate(dict(settings.values)), media, host, {} if verdicts is None else verdicts
            )
            on_failure.pop_all()

    def _open(self, config: RunConfig, media: str | None, host: str, verdicts: dict[str, Sequence[Verdict]]) -> None:
        if threads := self.settings.threads:
            os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is loaded
        import torch

        if threads:
            torch.set_num_threads(threads)  # if torch is already loaded
        device = device_of(config.device, self.settings.index, torch.cuda.device_count())
        engine = self._stack.enter_context(load_engine(config.model_copy(update={"device": device})))
        ask = self._stack.enter_context(load_engine(config.ask)) if config.ask else None
        hub = EventHub()
        hub.add(lambda record: self._outbox.put("event", dict(record)), history=True)
        files = MediaWriter(Path(media), hub.publish) if media else None
        videos = BroadcastSink()
        outputs = [Output(videos, NEWEST, viewing=True)]
        if self.settings.results:
            outputs.append(Output(RelaySink(self._outbox.put_result)))
        self.local = Local(
            Streams(engine, outputs),
            each=self._each,
            events=EventPlaces(hub, history=files is not None, media=files, verdicts=verdicts),
            ask=ask,
            policy=SourcePolicy(config.allow_sources, open_by_default=self.settings.open_by_default),
            videos=videos,
        )
        self._stack.callback(self.local.close)
        self._searcher = (
            SnapshotAsker(self.local.asks, lambda event: media_path(Path(media), event, "snapshot")) if media else None
        )
        from saccade.pipeline.api.http_server import serve_local  # FastAPI is slow to import

        self.secret = secrets.token_urlsafe(32)
        self.server: HttpServer = serve_local(
            self.local, self.wish, host, self.secret, Path(media) if media else None, config.ice_servers
        )
        self._stack.callback(self.server.close)
        self.local.on_end = self._ended

    # ---- streams

    def prepare(self, change: Change, *, checked: bool) -> None:
        """Check a configuration change. If the change adds a stream, open the stream without starting it."""
        opened = self.local.prepare(change, checked=checked)
        if opened is not None:
            self._prepared[change.name] = opened

    def release(self, name: str) -> None:
        """Close a stream that `prepare` has opened and `follow` has not started."""
        if (opened := self._prepared.pop(name, None)) is not None:
            opened.close()

    def follow(
        self,
        name: str,
        wanted: ListedStream | None,
        *,
        checked: bool = False,
        events: Sequence[Mapping[str, Any]] = (),
        verdicts: Sequence[Verdict] = (),
        again: bool = False,
    ) -> StreamStatus | None:
        """Open, change, reopen or stop a stream, so that it matches a configuration.

        Errors are the same as for `Local.follow`.

        Args:
            name: name of the stream.
            wanted: desired configuration; None stops the stream.
            checked: whether to check that the source is one of the allowed sources.
            events: last event of each rule, if the stream has run before.
            verdicts: false alarms of the stream.
            again: whether the stream has run before. If True, its earlier output files are renamed first.
        """
        if wanted is not None:
            self.set_verdicts(name, verdicts)
        prepared = self._prepared.pop(name, None)
        if wanted is None or name in self.local.names or not (events or again):
            status = self.local.follow(name, wanted, prepared, checked=checked)
        else:
            if prepared is not None:
                prepared.close()
            if again:
                keep_outputs(name, wanted, self._each)
            stream = self.local.open(wanted, checked=checked)
            stream.resume(read_event(record) for record in events)
            self.local.begin(stream)
            status = self.local.status(name)
        if wanted is None:
            self.local.events.verdicts.pop(name, None)
            self.local.events.hub.flush()
            self._outbox.put("closed", name)
        return status

    def set_verdicts(self, name: str, verdicts: Sequence[Verdict]) -> None:
        """Replace the known false alarms of a stream. The change applies from the stream's next frame."""
        self.local.events.verdicts[name] = verdicts

    def move_to(self, other: Worker, wanted: Mapping[str, ListedStream]) -> None:
        """Move every stream to another engine in this process. Open events continue.

        Args:
            other: the worker with the other engine.
            wanted: new configurations of streams, by name. Other streams keep their configuration.

        Raises:
            ConfigError, EngineError, SinkError, SourceError, StreamError: if a stream cannot be moved, for example
                because its source is a file. Streams that were already moved are moved back.
        """
        running = [status for status in self.local.statuses() if status.name in self.local.names]
        before = {status.name: status.config for status in running if status.config is not None}
        after = {name: wanted.get(name, config) for name, config in before.items()}
        for status in running:
            name, stream = status.name, after[status.name]
            if not status.live:
                raise ConfigError(
                    f"stream {name} is processing a file: the engine can be replaced only after the file has ended"
                )
            other.local.check(stream)
        moved: list[str] = []
        try:
            for name, stream in after.items():
                moved.append(name)
                self._hand_over(name, stream, other)
        except Exception:
            for name in moved:
                with contextlib.suppress(Exception):
                    other._hand_over(name, before[name], self)
            raise

    def _hand_over(self, name: str, wanted: ListedStream, other: Worker) -> None:
        events: list[Event] = []
        if name in self.local.names:
            stage = find_stage(self.local.streams.get(name).stages, EventStage)
            if stage is not None:
                stage.moves = True
            self.local.remove(name)
            events = stage.left if stage is not None else []
        keep_outputs(name, wanted, self._each)
        stream = other.local.open(wanted)
        stream.resume(events)
        other.local.begin(stream)

    def _ended(self, ended: Ended) -> None:
        if ended.stopped or self.local.closed:
            return
        self.local.events.hub.flush()  # so that the events precede the end message
        # As one that can be sent, whatever the error is.
        error = StreamError(one_line(str(ended.error))) if ended.error else None
        self._outbox.put("ended", replace(ended, error=error))

    # ---- what viewers ask for, and others

    def wish(self, name: str, values: Mapping[str, Any]) -> ListedStream:
        """Request that the controller changes a stream, and wait for the result.

        Return the stream's new configuration.

        Raises:
            ConfigError, EngineError, StreamError: if the change is not possible.
        """
        number, done, answer = next(self._numbers), threading.Event(), list[Any]()
        self._wishes[number] = done, answer
        try:
            self._outbox.put("wish", ChangeRequest(number, name, dict(values)))
            if not done.wait(_WISH_S):
                raise StreamError("the change was not made, because the controller does not respond; try again")
        finally:
            del self._wishes[number]
        stream: ListedStream = taken(answer[0])
        return stream

    def answer(self, number: int, answer: ListedStream | Exception) -> None:
        """Pass the controller's response to the waiting call of `wish` with this request number."""
        if (wish := self._wishes.get(number)) is not None:
            wish[1].append(answer)
            wish[0].set()

    def match(self, text: str, events: Sequence[str]) -> list[float | None]:
        """For each event, return the probability (0 to 1) that its snapshot matches a text.

        The probability is None if the snapshot is not on this machine.

        Raises:
            ConfigError, EngineError: see `SnapshotAsker.match`.
            AwayError: if the worker is closing.
        """
        if self._searcher is None:
            return [None] * len(events)
        try:
            found = dict(self._searcher.match(text, events))
        except EngineClosedError:
            raise AwayError("the worker is shutting down; try again in a few seconds") from None
        return [found[event] for event in events]

    def report(self) -> Report:
        """Return the state of the worker and of its streams."""
        (own,) = self.local.workers()
        seen = {}
        for name in self.local.streams.names:
            with contextlib.suppress(StreamError):
                stage = find_stage(self.local.streams.get(name).stages, EventStage)
                seen[name] = stage.seen if stage else {}
        sinks = [one for one in self.local.sink_statuses() if one[0]]
        return Report(
            self.local.statuses(),
            seen,
            sinks,
            own.busy or 0.0,
            own.rss_bytes or 0,
            own.counters,
            self.local.events.hub.dropped,
        )

    def close(self) -> None:
        """Stop all streams, and wait a few seconds for their frames in flight. Then close the engine."""
        runs = self.local.streams.stop()
        deadline = time.monotonic() + _ENGINE_S
        for run in runs:
            run.join(max(0.0, deadline - time.monotonic()))
        self.local.streams.abandon()
        self._stack.close()


class WorkerActor:
    """The Ray actor of a worker. Its methods return errors that are meant for the user, instead of raising them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while a worker is started, replaced or closed
        self._worker: Worker | None = None
        self._outbox = Outbox()
        self._about: Ready | None = None
        self._over = threading.Event()
        self._media: str | None = None
        self._where = ("", "")
        self._host = "127.0.0.1"

    def start(self, settings: WorkerSettings, wanted: Sequence[str]) -> Ready | Exception:
        """Load the engine of the worker, unless an engine with equal settings is already loaded.

        Args:
            settings: settings of the worker.
            wanted: names of the streams to keep running. All other streams are stopped.
        """
        with self._lock:
            return told(lambda: self._start(settings, wanted))

    def replace(self, settings: WorkerSettings, wanted: Mapping[str, ListedStream]) -> Ready | Exception:
        """Load a new engine, and move all streams from the current engine to the new engine.

        If this fails, the streams continue on the current engine.
        """
        with self._lock:
            return told(lambda: self._replace(settings, wanted))

    def poll(self, wait_s: float) -> Batch:
        """Wait up to `wait_s` seconds for messages or results for the controller. Return at most 64 of each."""
        return self._outbox.take(wait_s)

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the worker and return its result. An error meant for the user is returned, not raised.

        Args:
            method: name of the method, such as `follow`, or `local.counts` for a method of `Local`.
            arguments: positional arguments.
            options: keyword arguments.
        """
        return told(lambda: attrgetter(method)(self._running)(*arguments, **options))

    def close(self) -> None:
        """Stop all streams, close the engine, and tell the controller that the worker has ended."""
        with self._lock:
            self._over.set()
            worker, self._worker = self._worker, None
            try:
                if worker is not None:
                    worker.close()
            finally:
                self._outbox.put("end", None)

    @property
    def _running(self) -> Worker:
        if self._worker is None:
            raise AwayError("the worker is starting; try again in a few seconds")
        return self._worker

    def _start(self, settings: WorkerSettings, wanted: Sequence[str]) -> Ready:
        if self._worker is not None and self._worker.settings.values == settings.values and self._about is not None:
            local = self._worker.local
            for name in set(local.names) - set(wanted):
                self._worker.follow(name, None)
            running = {status.name: status.config for status in local.statuses() if status.name in local.names}
            streams = {name: config for name, config in running.items() if config is not None}
            return replace(self._about, streams=streams)
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        with contextlib.suppress(OSError):
            os.chdir(settings.folder)
        if settings.cluster:
            import ray

            found: Any = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            self._host = str(found)
            machine, node, self._media = store_here(settings, self._host)
            self._where = machine, node
        else:
            self._media = settings.media
        if not self._over.is_set() and self._about is None:
            logging.getLogger("saccade").addHandler(_Warnings(self._outbox))
            threading.Thread(target=self._report, name="saccade report", daemon=True).start()
        self._worker = Worker(settings, self._media, self._outbox, self._host)
        return self._describe(self._worker)

    def _replace(self, settings: WorkerSettings, wanted: Mapping[str, ListedStream]) -> Ready:
        old = self._running
        if problem := room_for_another():
            raise ConfigError(problem)
        new = Worker(settings, self._media, self._outbox, self._host, old.local.events.verdicts)
        try:
            old.move_to(new, wanted)
        except BaseException:
            new.close()
            raise
        self._worker = new
        ready = self._describe(new)
        old.close()
        return ready

    def _describe(self, worker: Worker) -> Ready:
        machine, node = self._where
        model: ModelInfo = worker.local.model
        self._about = Ready(worker.server.url, worker.secret, os.getpid(), model, {}, machine, node)
        return self._about

    def _report(self) -> None:
        while not self._over.wait(REPORT_S):
            faulthandler.dump_traceback_later(_HANGS_S, exit=True, file=2)  # works even if sys.stderr is not a file
            if (worker := self._worker) is not None:
                with contextlib.suppress(Exception):  # raised while the worker is closing
                    self._outbox.put("report", worker.report())
        faulthandler.cancel_dump_traceback_later()


class _Warnings(logging.Handler):
    def __init__(self, outbox: Outbox) -> None:
        super().__init__(logging.WARNING)
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        self._outbox.put("warning", one_line(record.getMessage()))


def device_of(device: str, index: int, gpus: int) -> str:
    """Return the device of a worker. If the configured device has no GPU index, GPUs are assigned round-robin.

    Args:
        device: configured device, such as `cuda`, `cuda:1` or `cpu`.
        index: index of the worker, from 0.
        gpus: number of GPUs.
    """
    return f"cuda:{index % gpus}" if device in ("auto", "cuda") and gpus else device


def keep_outputs(name: str, config: ListedStream, each: Sequence[Target]) -> None:
    """Rename the existing output files of a stream. A restarted stream would otherwise overwrite them.

    Args:
        name: name of the stream.
        config: configuration of the stream.
        each: outputs with `{stream}` in the path, which are opened once per stream.
    """
    for target in own_targets(config, each, name):
        path = target.path
        if path is None or not target.replaces or not path.is_file() or not path.stat().st_size:
            continue
        number = 1
        while (aside := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
            number += 1
        path.rename(aside)


def room_for_another(cgroup: Path = Path("/sys/fs/cgroup"), meminfo: Path = Path("/proc/meminfo")) -> str | None:
    """Check whether the free memory of the machine is enough for a second engine.

    Return an error message if the memory is not enough; None if it is enough or unknown.
    """
    free: list[int] = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free.append(int(lines["MemAvailable"].split()[0]) << 10)
    with contextlib.suppress(OSError, KeyError, ValueError):
        limit, used = (cgroup / "memory.max").read_text(), (cgroup / "memory.current").read_text()
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        free.append(int(limit) - int(used) + int(statistics["inactive_file"]))  # the page cache is reclaimed first
    needed = rss_bytes()
    if not free or needed <= (available := max(0, min(free))):
        return None
    return f"{available >> 20} MiB of memory are free, but one more engine needs about {needed >> 20} MiB"
