"""Runs streams in this process.

All streams share one engine and the shared outputs. Each stream can also have its own outputs.

`Local.follow` makes a stream match its configuration: it opens, changes, reopens or stops the stream. The
controller calls it. Each worker process also has a `Local`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Self

from saccade.engine.errors import EngineError
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.counts import Minute, Totals
from saccade.pipeline.analytics.stages import find_stage
from saccade.pipeline.config import ListedStream, RunConfig
from saccade.pipeline.config.prompts import Prompts
from saccade.pipeline.config.queue_policy import NEWEST
from saccade.pipeline.control.load import Load, rss_bytes
from saccade.pipeline.control.plan import Change as StreamChange
from saccade.pipeline.control.plan import Close, Reopen, change_of
from saccade.pipeline.control.runner import Address, Ended, ModelInfo, StoredEvents, WorkerStatus
from saccade.pipeline.control.source_policy import SourcePolicy
from saccade.pipeline.errors import ConfigError, RunFailed, StreamError, reason_of
from saccade.pipeline.events.hub import EventHub
from saccade.pipeline.events.machine import RuleState
from saccade.pipeline.events.record import Change, read_event
from saccade.pipeline.events.stage import EventStage
from saccade.pipeline.events.storage.recorder import MediaWriter
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import EventQuery, StoreError
from saccade.pipeline.events.verdicts import Verdict, VerdictStage
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.run import Run
from saccade.pipeline.runtime.stream import EventPlaces, OpenedStream, load_engine, open_source_of, open_stream
from saccade.pipeline.runtime.streams import Streams, StreamStatus, status_of, unopened_status
from saccade.pipeline.runtime.targets import HEATMAP, Target, check_frames, check_targets, open_output, targets_of
from saccade.pipeline.runtime.tasks import check_asked, check_rules, in_model_names, tasks_for
from saccade.pipeline.search import REQUESTED, Progress, Searched, search_events
from saccade.sinks import SinkError, SinkStatus, SupportsEvents
from saccade.sinks.recording import Archive, RecordingPlace
from saccade.sinks.video.broadcast import BroadcastSink
from saccade.sources import Source, SourceError

if TYPE_CHECKING:
    from saccade.engine import Engine

log = logging.getLogger(__name__)

_ENGINE_S = 120.0  # for a large model to finish the frames that it has
_END_S = 30.0  # for the sinks to write what they have
ERRORS = (ConfigError, EngineError, SinkError, SourceError, StreamError)
"""The errors of opening a stream, each with a message of one line."""

_OUTPUT_KEYS = frozenset({"sinks", "heatmap", "queue", "in_flight", "record"})
_EVERY = "every stream"


class Local:
    """Runs streams on one engine in this process, until the `with` block ends or `close` is called.

    Thread-safe, but calls for the same stream must not overlap. `Runner` describes the errors of its methods.

    Attributes:
        streams: the running streams.
        videos: sink that shows the streams to viewers, or None.
        store: event store, or None.
        asks: engine that answers questions.
        on_end: called when a stream ends, see `Runner`.

    Args:
        streams: the streams and their engine. `close` closes them.
        each: outputs that are opened once per stream.
        shared: open outputs that all streams share.
        events: receivers of events; None creates them. `close` closes them.
        store: event store. The caller closes it.
        ask: engine for questions of rules and clients; None uses the engine of the streams.
        policy: sources that clients can open; None allows all sources.
        videos: sink that shows the streams to viewers, or None.
    """

    def __init__(
        self,
        streams: Streams,
        *,
        each: Sequence[Target] = (),
        shared: Sequence[Target] = (),
        events: EventPlaces | None = None,
        store: EventStore | None = None,
        ask: Engine | None = None,
        policy: SourcePolicy | None = None,
        videos: BroadcastSink | None = None,
    ) -> None:
        self.streams = streams
        self.events = events or EventPlaces(EventHub())
        self.store = store
        self.videos = videos
        self.asks = ask or streams.engine
        self.on_end: Callable[[Ended], object] = lambda ended: None
        for sink in streams.sinks:
            if isinstance(sink, SupportsEvents):
                self.events.hub.add(sink.write_event)
        self._policy = policy
        self._each = list(each)
        self._load = Load()
        self._prompts: dict[str, tuple[ListedStream, Prompts]] = {}  # of each stream, in the model's names
        self._begun: set[str] = set()  # streams whose end has not been reported
        self._judging = threading.Lock()  # a stream gets the verdicts in the order in which they are stored
        self._lock = threading.Lock()  # guards the attributes below
        self._archives: dict[str, tuple[str, Archive]] = {}  # with the setting from which it was made
        self._written: dict[Path, str] = {}  # file → its stream, including ended streams
        self._note(_EVERY, shared)

    @property
    def engine(self) -> Engine:
        """The engine that processes the frames. Questions can use another engine, see `asks`."""
        return self.streams.engine

    def archive(self, run: Run) -> Archive | None:
        """Return the recordings of a stream, including recordings of earlier runs. Return None if recording is off."""
        config, name = run.config, run.name
        if config is None or config.record is None:
            return None
        with self._lock:
            known = self._archives.get(name)
            if known is None or known[0] != config.record:
                known = config.record, Archive(RecordingPlace.parse(config.record, name))
                self._archives[name] = known
        return known[1]

    def check(self, stream: ListedStream) -> None:
        """Check that the model supports the prompts and questions of a stream.

        Raises:
            ConfigError, EngineError: if the model does not support a prompt or a question.
        """
        tasks_for(self.engine, stream)
        check_asked(self.asks, stream)

    def check_rules(self, stream: ListedStream) -> None:
        """Check that a stream supports its rules: the labels, questions, zones and lines in the rules."""
        check_rules(self.engine, self.asks, stream)

    def prepare(self, change: StreamChange, *, checked: bool) -> OpenedStream | None:
        """Check whether a change of a stream is possible, before anything is stored or stopped.

        Args:
            change: change of the stream.
            checked: whether to check that the source is one of the allowed sources.

        Returns:
            The opened stream if the change adds a stream, otherwise None. The caller passes the stream to `follow` or
            closes it.

        Raises:
            ConfigError, EngineError, SourceError: if the change is not possible.
        """
        if isinstance(change, Close):
            return None
        if change.name not in self.streams.names:
            return self.open(change.stream, checked=checked)
        self.check(change.stream)
        if isinstance(change, Reopen) and change.keys - _OUTPUT_KEYS:
            self.open(change.stream, checked=checked).close()
        if isinstance(change, Reopen):
            targets = _files(change.stream, self._each, change.name)
            with self._lock:
                self._check_files(change.name, targets, change.stream.source)
        return None

    def open(self, stream: ListedStream, *, checked: bool = False, source: Source | None = None) -> OpenedStream:
        """Open a stream without starting it. The caller passes the stream to `start` or closes it.

        Args:
            stream: configuration of the stream. It must have a name.
            checked: whether to check that the source is one of the allowed sources.
            source: an open source to use, or None to open the source of the configuration.

        Raises:
            ConfigError, EngineError, SourceError: if the stream cannot be opened.
        """
        check = None
        if checked and self._policy is not None:
            for one in (stream.source, stream.record_source):
                if one is not None:
                    self._policy.check(one)
            check = self._policy.check if self._policy.restricted else None
        return open_stream(stream, self.engine, ask=self.asks, events=self.events, source=source, check=check)

    def start(self, stream: OpenedStream) -> Run:
        """Start a stream whose outputs are open. If the start fails, the caller closes the stream.

        Raises:
            StreamError: if the name is in use, or too many streams are running.
        """
        name = _name(stream)
        self._note(name, _files(stream.config, self._each, name))
        self._begin(name, stream)
        return stream.start(self.streams)

    def follow(
        self, name: str, wanted: ListedStream | None, prepared: object = None, *, checked: bool = False
    ) -> StreamStatus | None:
        """Open, change, reopen or stop a stream, so that it matches a configuration.

        Args:
            name: name of the stream.
            wanted: desired configuration; None stops the stream.
            prepared: result of `prepare`, or None.
            checked: whether to check that the source is one of the allowed sources.

        Returns:
            The status of the stream, or None if the stream was stopped.

        Raises:
            ConfigError, EngineError, SinkError, SourceError, StreamError: if the stream cannot be opened or stopped.
        """
        run = self._running(name)
        opened = prepared if isinstance(prepared, OpenedStream) else None
        if opened is not None and (wanted is None or run is not None or opened.config != wanted):
            opened.close()
            opened = None
        if wanted is None:
            self._end(name)
            return None
        if run is not None and run.config is not None:
            change = change_of(name, run.config, wanted)
            if isinstance(change, Reopen):
                return self.reopen(name, wanted, checked=checked)
            if change is not None:
                run.update(wanted)
            return self._status_of(run)
        return self._status_of(self.begin(opened or self.open(wanted, checked=checked)))

    def reopen(self, name: str, wanted: ListedStream, *, checked: bool) -> StreamStatus:
        """Stop a stream and open it again. A stream that cannot be opened is listed as failed.

        Arguments and errors are the same as for `follow`.
        """
        with self.streams.reopening(name):
            return self._status_of(self.begin(self.open(wanted, checked=checked)))

    def begin(self, stream: OpenedStream) -> Run:
        """Open the outputs of a stream and start the stream. If this fails, close the stream."""
        name = _name(stream)
        with stream, self.streams.reserve(name):
            self._begin(name, stream)
            files = _files(stream.config, self._each, name)
            with self._lock:
                self._check_files(name, files, stream.config.source)
                check_frames(files, stream.source.info)
                self._note(name, files)
            open_outputs(stream, self._each, self.events.hub)
            return stream.start(self.streams, reserved=True)

    def remove(self, name: str) -> None:
        """Stop a running stream, or remove a failed stream from the list."""
        self.streams.remove(name)

    def take(self, config: RunConfig) -> list[str]:
        """Return the keys of the settings that take effect at once: none, because this process must be restarted."""
        return []

    def _begin(self, name: str, stream: OpenedStream) -> None:
        self._begun.add(name)
        stream.on_end.append(partial(self._ended, name))

    def _ended(self, name: str, run: Run | None) -> None:
        if run is not None:
            self.on_end(Ended(name, run.config, run.error, run.stopped, status_of(run)))
        self._begun.discard(name)

    def _end(self, name: str) -> None:
        try:
            self.streams.remove(name)
        except StreamError:
            if name in self.streams.names:
                raise

    def fail(self, stream: ListedStream, error: Exception) -> None:
        """Record that a stream could not be opened. Its state is then "failed"."""
        self.streams.fail(unopened_status(stream, "failed", reason_of(error)))

    # ---- how it is doing

    @property
    def names(self) -> list[str]:
        """The names of streams that are running or being opened."""
        return self.streams.names

    @property
    def idle(self) -> bool:
        """Whether no stream is running or being opened, and `on_end` has been called for every ended stream."""
        return self.streams.idle and not self._begun

    def stop(self, *, abandon: bool = False) -> float:
        """Request that all streams stop, without waiting. Return how long stopping can still take, in seconds."""
        runs = self.streams.stop()
        if abandon:
            self.streams.abandon()
        return _ENGINE_S if any(run.waiting_s for run in runs) else _END_S

    @property
    def closed(self) -> bool:
        """Whether the runner has been stopped or closed."""
        return self.streams.closed

    @property
    def ready(self) -> bool:
        """Whether streams can be added."""
        return not self.streams.closed

    @property
    def model(self) -> ModelInfo:
        """The model that runs on video frames."""
        model = self.engine.model
        return ModelInfo(model.name, model.device, model.classes, model.skills, "query" in self.asks.model.skills)

    def statuses(self) -> list[StreamStatus]:
        """Return the status of every stream, including failed streams."""
        found = self.streams.snapshot()
        for gone in set(self._prompts) - {status.name for status in found}:
            self._prompts.pop(gone, None)
        return [self._with_prompts(status) for status in found]

    def status(self, name: str) -> StreamStatus:
        """Return the status of a stream. Raise StreamError if the stream does not exist."""
        found = next((status for status in self.streams.snapshot() if status.name == name), None)
        return self._status_of(self.streams.get(name)) if found is None else self._with_prompts(found)

    def workers(self) -> list[WorkerStatus]:
        """Return a list with one entry: the status of this process."""
        counters = {engine: engine.counters() for engine in dict.fromkeys((self.engine, self.asks))}
        busy_s = max(one.get("busy_seconds_total", 0.0) for one in counters.values())
        return [
            WorkerStatus(
                "1",
                "ready",
                pid=os.getpid(),
                streams=self.streams.names,
                busy=self._load.share(busy_s, time.monotonic()),
                rss_bytes=rss_bytes(),
                counters=counters[self.engine],
            )
        ]

    def sink_statuses(self) -> list[tuple[str, SinkStatus]]:
        """Return the status of every sink, with the name of its stream. The name is empty for a shared sink."""
        return self.streams.sink_statuses()

    def lost_changes(self) -> dict[str, int]:
        """Return the number of dropped event changes, by queue: `hub` and `store`."""
        return {"hub": self.events.hub.dropped} | ({"store": self.store.dropped} if self.store else {})

    def rule_states(self, name: str) -> list[RuleState] | None:
        """Return the state of each rule of a stream. Return None if the stream has no rules."""
        run = self.streams.get(name)
        stage = find_stage(run.stages, EventStage)
        return None if stage is None or run.config is None else list(stage.states)

    def counts(self, name: str, since: float) -> tuple[Totals, list[Minute]]:
        """Return the total object counts of a stream, and its counts for each minute after the Unix time `since`."""
        stage = find_stage(self.streams.get(name).stages, AnalyzeStage)
        if stage is None:
            raise StreamError(f"stream '{name}' counts no objects: it was opened without the stage AnalyzeStage")
        return stage.totals(), list(stage.minutes(since))

    def search(self, text: str, query: EventQuery, progress: Progress) -> Searched:
        """Search stored events by a text. The model scores their snapshots."""
        if self.store is None:
            raise ConfigError("Saccade stores no events: restart it with --store DIR")
        return Searched(search_events(self.store, self.asks, text, query, candidates=REQUESTED, progress=progress))

    def judge(self, event: str, *, false_alarm: bool) -> str | None:
        """Mark an event as a false alarm, or remove the mark; see `Runner.judge`."""
        if self.store is None:
            return None
        with self._judging:
            stream = self.store.judge(event, false_alarm=false_alarm)
            if stream is not None:
                self.events.verdicts[stream] = self.store.verdicts(stream)
        return stream

    def held_back(self, stream: str) -> dict[str, int]:
        """Return the number of detections that each false alarm of a stream has suppressed. The keys are event IDs."""
        run = self._running(stream)
        stage = None if run is None else find_stage(run.stages, VerdictStage)
        return {} if stage is None else stage.held_back

    def address(self, stream: str | None) -> Address | None:
        """Return None, because streams in this process have no worker address."""
        return None

    def _status_of(self, run: Run) -> StreamStatus:
        return self._with_prompts(status_of(run))

    def _with_prompts(self, status: StreamStatus) -> StreamStatus:
        if status.config is None:
            return status
        known = self._prompts.get(status.name)
        if known is None or known[0] is not status.config:  # the live view asks for every stream 10 times a second
            known = self._prompts[status.name] = status.config, in_model_names(self.engine, status.config)
        return replace(status, prompts=known[1])

    def close(self) -> None:
        """Stop every stream, and close the engine and all shared outputs. A second call does nothing.

        Raises:
            RunFailed: if a stream has not stopped before the timeout, or an output could not write its last data.
        """
        try:
            with ExitStack() as everything:  # in reverse order, even if one of them raises
                everything.callback(self.events.hub.close)
                if self.events.media:
                    everything.callback(self.events.media.close)
                everything.callback(self.streams.close)
        except Exception as error:
            raise RunFailed from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running(self, name: str) -> Run | None:
        try:
            return self.streams.get(name)
        except StreamError:
            return None

    def _check_files(self, name: str, targets: Sequence[Target], source: str) -> None:
        """Check that no output of a stream overwrites a source or an output file of another stream."""
        others = [status.source for status in self.streams.snapshot() if status.name != name]
        check_targets(targets, [source, *others])
        going = {_EVERY, *self.streams.names} - {name}
        for target in targets:
            if (path := target.path) is None or (owner := self._written.get(path.resolve())) is None:
                continue
            if owner in going or (target.replaces and path.exists() and path.stat().st_size):
                raise ConfigError(
                    f"{target.flag}: {path} already contains results of {owner}; choose another file or stream name"
                )

    def _note(self, name: str, targets: Sequence[Target]) -> None:
        self._written.update({path.resolve(): name for target in targets if (path := target.path)})


@contextmanager
def opened_local(
    config: RunConfig,
    streams: Mapping[str, ListedStream],
    *,
    policy: SourcePolicy | None = None,
    watched: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[Local, list[OpenedStream]]]:
    """Open sources, model and outputs without starting the streams. Close everything when the `with` block ends.

    Args:
        config: configuration of the run.
        streams: initial streams, by name.
        policy: sources that clients can open; None allows all sources.
        watched: whether viewers can watch the streams.
        progress: progress callback (steps done, total steps) for the preparation of a GPU.

    Yields:
        The `Local`, and the opened streams, which the caller passes to `Local.start`.

    Raises:
        ConfigError: if an output would overwrite a source or another output, or the model does not support a task.
        SourceError, EngineError, SinkError: if a source, the model or an output cannot be opened.
        RunFailed: if a stream has not stopped before the timeout, or an output could not write its last data.
    """
    targets = targets_of(config)
    each = [target for target in targets if target.each]
    shared = [target for target in targets if not target.each]
    with ExitStack() as stack:
        hub = EventHub()
        store = stack.enter_context(opened_store(config))
        stack.callback(hub.close)
        media = None
        if store is not None:
            hub.add(store.write, history=True)
            media = MediaWriter(store.media_folder, hub.publish)
            stack.callback(media.close)
        sources = {name: stack.enter_context(open_source_of(stream)) for name, stream in streams.items()}
        files = {name: _files(stream, each, name) for name, stream in streams.items()}
        check_targets([*shared, *chain(*files.values())], [stream.source for stream in streams.values()])
        for name, own in files.items():
            check_frames([*own, *shared], sources[name].info)
        engine = stack.enter_context(load_engine(config, progress))
        ask = stack.enter_context(load_engine(config.ask, progress)) if config.ask else None
        places = EventPlaces(hub, history=store is not None, media=media)
        if store is not None:
            for verdict in verdicts_of(store):
                places.verdicts[verdict.stream] = [*places.verdicts.get(verdict.stream, ()), verdict]
        opened = [
            stack.enter_context(open_stream(stream, engine, ask=ask, events=places, source=sources[name]))
            for name, stream in streams.items()
        ]
        for one in opened:
            open_outputs(one, each, hub)
        videos = BroadcastSink() if watched else None
        with ExitStack() as on_failure:
            # A video cannot be shared; with a single stream, it belongs to that stream.
            alone = opened[0] if len(opened) == 1 else None
            common: list[Output] = []
            for target in shared:
                output = open_output(target, alone.source, alone.config.vid_stride) if alone else open_output(target)
                if alone and not output.sink.shared:
                    alone.outputs.append(output)
                else:
                    common.append(output)
                    on_failure.callback(output.sink.close)
            viewing = [Output(videos, NEWEST, viewing=True)] if videos else []
            running = Streams(engine, [*common, *viewing])
            local = Local(
                running, each=each, shared=shared, events=places, store=store, ask=ask, policy=policy, videos=videos
            )
            on_failure.pop_all()
        stack.callback(local.close)
        for record in store.ended if store else ():  # the outputs have seen the begin of these events
            hub.publish(Change("end", read_event(record)))
        yield local, opened


def verdicts_of(store: StoredEvents, stream: str | None = None) -> Sequence[Verdict]:
    """Return the events that users marked as false alarms, of one stream or of all streams.

    Return an empty sequence if the event store cannot be read.
    """
    try:
        return store.verdicts(stream)
    except StoreError as error:
        log.warning("%s: cannot read false alarms, so none are suppressed: %s", stream or "all streams", error)
        return ()


def max_bytes_of(config: RunConfig) -> int | None:
    """Return the limit of the total size of all clips and snapshots, in bytes. None means no limit."""
    return None if config.store_max_gb is None else round(config.store_max_gb * 1e9)


@contextmanager
def opened_store(config: RunConfig, *, keep_open: bool = False) -> Iterator[EventStore | None]:
    """Open the configured event store. Yield None if no store is configured or its disk fails.

    Args:
        config: configuration of the run.
        keep_open: see `EventStore`.

    Raises:
        ConfigError: if the store cannot be used, for example because another process uses it.
    """
    if config.store is None:
        yield None
        return
    try:
        store = EventStore(
            Path(config.store), keep_s=config.store_keep, max_bytes=max_bytes_of(config), keep_open=keep_open
        )
    except StoreError as error:
        if not error.disk:
            raise ConfigError(f"--store: {error}") from None
        log.warning("--store: %s; no events are stored until Saccade is restarted", error)  # everything else continues
        yield None
        return
    with closing(store):
        yield store


def open_outputs(stream: OpenedStream, each: Sequence[Target], hub: EventHub) -> None:
    """Open the outputs of a stream. The stream closes its outputs when it ends."""
    for target in own_targets(stream.config, each, _name(stream)):
        output = open_output(target, stream.source, stream.config.vid_stride)
        stream.outputs.append(output)
        if isinstance(output.sink, SupportsEvents):
            stream.on_end.append(_calling(hub.add(output.sink.write_event, _name(stream))))


def _calling(remove: Callable[[], None]) -> Callable[[Run | None], None]:
    return lambda run: remove()


def _name(stream: OpenedStream) -> str:
    return stream.config.name or stream.source.name


def own_targets(stream: ListedStream, each: Sequence[Target], name: str) -> list[Target]:
    """Return the outputs of one stream: its own outputs, and `each` with `{stream}` replaced by the name."""
    return [target.of(name) for target in (*each, *map(Target, stream.sinks))]


def _files(stream: ListedStream, each: Sequence[Target], name: str) -> list[Target]:
    """Return the outputs of a stream, and the heatmap file if the stream has one."""
    written = [Target(stream.heatmap, HEATMAP).of(name)] if stream.heatmap else []
    return [*own_targets(stream, each, name), *written]
