"""A whole `saccade run` on several workers: the process in front of them, which has no engine and no frames.

It opens what there is once a machine, for all streams: the store of events, which has one writer, the sinks that
streams share, and the HTTP server. The rest is in the workers, where the streams are. Knows nothing of terminals or
signals.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from saccade.pipeline.server.access import Access
from saccade.pipeline.server.api.config_api import ConfigApi
from saccade.pipeline.server.http_server import HttpServer, check_open, tls_of, token_of
from saccade.sources.http.auth import HttpAuth
from saccade.sources.http.tokens import is_loopback

from saccade.engine.errors import EngineError
from saccade.pipeline.config import ListedStream, RunConfig, StreamConfig, parse_place
from saccade.pipeline.config.stream_names import free_name, name_of
from saccade.pipeline.control.local import max_bytes_of, opened_store
from saccade.pipeline.errors import ConfigError, RunFailed
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.targets import HEATMAP, WHEP, Target, check_targets, open_output, targets_of
from saccade.pipeline.workers.auth import secret_headers
from saccade.pipeline.workers.front.api import FrontApi
from saccade.pipeline.workers.front.forwarding import Forwarder
from saccade.pipeline.workers.front.merged_events import MergedEvents
from saccade.pipeline.workers.front.metrics import MergedMetrics
from saccade.pipeline.workers.front.search import WorkersSearch
from saccade.pipeline.workers.machines.stores import MachineStores
from saccade.pipeline.workers.open_events import OpenEvents
from saccade.pipeline.workers.placement import Placement
from saccade.pipeline.workers.protocol import Message, Worker
from saccade.pipeline.workers.results import ResultReceiver
from saccade.pipeline.workers.rolling import replace_workers
from saccade.pipeline.workers.states import RefusedError, number_of
from saccade.pipeline.workers.supervisor import Supervisor
from saccade.processors import usable_processors
from saccade.sinks import SinkError, SinkStatus, SupportsEvents
from saccade.sources import SourceError

log = logging.getLogger(__name__)

CLOSE_S = 30.0
_LAST_S = 1.0  # for the results of a stream to arrive that its worker sent before it let go
_CHANGES = ("begin", "update", "end", "rules", "media")
_ERRORS: dict[str, type[Exception]] = {"EngineError": EngineError, "SinkError": SinkError, "SourceError": SourceError}


class MakeRelayed(Protocol):
    """Makes a worker."""

    def __call__(
        self,
        name: str,
        settings: Mapping[str, Any],
        on_message: Callable[[Worker, Message], None],
        on_results: Callable[[bytes], None] | None,
    ) -> Worker:
        """As `RayWorker`."""
        ...


class Front:
    """The streams of one command on several workers, not yet started. Made by `opened_front`.

    Attributes:
        supervisor: runs them.
        events: hands the events of their rules on.
        stores: where those are stored.
        endless: whether it goes on when no stream runs any more, since others may be added.
        reloader: the configuration file; None without one.

    Args:
        config: what was configured.
        streams: those to start with, by name.
        outputs: the sinks that all streams share, which are closed with it.
        store: keeps events; it stays the caller's.
        make: makes workers.
        secret: that workers know it by; made up if None.
        placement: decides where streams run.
        names: of the workers, such as run already; () for 1, 2, ….
    """

    def __init__(
        self,
        config: RunConfig,
        streams: Mapping[str, ListedStream],
        outputs: list[Output],
        store: EventStore | None,
        make: MakeRelayed,
        secret: str | None = None,
        placement: Placement | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self._config, self._make_worker = config, make
        self._outputs = outputs
        self._store = store
        self.reloader: Any = None
        self._secret = secret or secrets.token_urlsafe(32)
        self.endless = not streams
        self._first = dict(streams)
        self._also: set[str] = set()
        self._waiting: list[Any] = []
        self.events = OpenEvents(self._publish)
        if store is not None:
            self.events.load(store.going_on())
        self.stores = MachineStores(store, self._secret, self._load)
        self._failing: set[int] = set()
        self._receiver = ResultReceiver(outputs, self._is_live)
        names = names or [str(number) for number in range(1, config.workers + 1)]
        self.supervisor = Supervisor(
            self._make, names, placement, events=self.events, on_lost=self._lost, on_machine=self.stores.meet
        )
        self._keep: dict[str, Any] | None = None  # for the stores of other machines
        if store is not None:
            max_bytes = max_bytes_of(config)
            self._keep = {"folder": config.store, "keep_s": config.store_keep, "max_bytes": max_bytes}
        self._server: HttpServer | None = None
        self._closed = False

    @property
    def first_names(self) -> list[str]:
        """The streams that were configured."""
        return list(self._first)

    @property
    def url(self) -> str | None:
        """Where it is served; None if it is not."""
        return None if self._server is None else self._server.url

    def start(self, also: Collection[str] = ()) -> None:
        """Start workers and streams; returns at once.

        Events that went on when the last process ended do so with their streams, and end where these are no more.

        Args:
            also: streams that are opened soon, besides those to start with.
        """
        self._also = set(also)
        for name in self.events.streams - {*self._first, *also}:
            self.events.end(name)
        self.supervisor.start()
        for name, stream in self._first.items():
            values = stream.model_dump(mode="json", exclude_unset=True)
            self._waiting.append(self.supervisor.open(values, name, or_similar=False))

    def check(self) -> bool:
        """Whether every stream that was configured has been opened.

        Raises:
            ConfigError, EngineError, SinkError, SourceError: if one cannot be, or no worker can be started.
        """
        for opening in [one for one in self._waiting if one.done()]:
            self._waiting.remove(opening)
            try:
                opening.result()
            except RefusedError as error:
                raise _ERRORS.get(error.kind, ConfigError)(str(error)) from None
        seats = self.supervisor.seats()
        if all(seat.starts and seat.failures and seat.url is None and not seat.restarted_in_s for seat in seats):
            known = [seat.reason for seat in seats if seat.reason]
            if self._waiting or self.endless:
                raise EngineError(known[0] if known else "no worker can be started")
        return not self._waiting

    def serve(self, place: tuple[str, int], token: str | None, access: Access | None = None) -> None:
        """Serve all of it over HTTP.

        Raises:
            ConfigError: if the address is not available.
        """
        config = self._config
        auth: HttpAuth = access or HttpAuth(token)
        forwarder = Forwarder(self._secret)
        metrics = MergedMetrics(self.supervisor, secret_headers(self._secret), self.sink_statuses)
        api = FrontApi(self.supervisor, forwarder, auth, metrics, events=self._store is not None)
        search = WorkersSearch(self.stores, self.supervisor.seats, self._secret)
        merged = None
        if self._store is not None:  # which may be on other machines
            self.stores.serve_local()
            merged = MergedEvents(self.stores.urls, forwarder, auth, search)
        self._server = HttpServer(
            None,
            *place,
            token,
            tls=tls_of(config.http_cert, config.http_key),
            access=access,
            events=self._store if merged is None else None,
            search=search,
            routes=[*(merged.routes() if merged else ()), *api.routes(), *ConfigApi(FileOf(self)).routes()],
            public=api.public,
            on_startup=[forwarder.start],
            on_cleanup=[forwarder.close],
        )

    def sink_statuses(self) -> list[SinkStatus]:
        """How the sinks that all streams share are doing."""
        return [output.guard.status() for output in self._outputs]

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """End everything. A second call does nothing.

        Raises:
            RunFailed: if what was written could not be finished, or a worker does not end.
        """
        if self._closed:
            return
        self._closed = True
        try:
            with ExitStack() as everything:  # from the last to the first, whatever one of them raises
                for output in self._outputs:
                    everything.callback(output.sink.close)
                everything.callback(self._receiver.close)
                everything.callback(self.stores.close)
                everything.callback(self._end_events)
                everything.callback(self._end_workers, timeout_s)
                if self._server:
                    everything.callback(self._server.close)
        except Exception as error:
            raise RunFailed from error

    def _end_workers(self, timeout_s: float) -> None:
        self.supervisor.stop()
        if not self.supervisor.close(timeout_s):
            log.warning("not every worker has ended in time")

    def _end_events(self) -> None:
        for stream in {*self.supervisor.streams(), *self.events.streams}:
            self.events.end(stream)

    def replace_workers(self, config: RunConfig, configs: Mapping[str, Mapping[str, Any]]) -> None:
        """Have workers run by another configuration, one after another; returns when that is done.

        Args:
            config: of which only what concerns workers is taken (`worker_values`).
            configs: configurations that streams have from then on, by name.

        Raises:
            RollError: if that cannot be, and everything goes on as it was.
        """
        replace_workers(self.supervisor, partial(self._make, config=config), configs)
        self._config = config

    def _make(self, name: str, on_message: Any, config: RunConfig | None = None) -> Worker:
        config = config or self._config
        settings = {
            "config": worker_values(config),
            "index": number_of(name) - 1,
            "threads": threads_each(config.workers),
            "secret": self._secret,
            "media": str(self._store.media_folder) if self._store else None,
            "keep": self._keep,
            "open_by_default": is_loopback(parse_place(config.http)[0]) if config.http else True,
        }
        results = self._receiver.take if self._outputs else None
        return self._make_worker(name, settings, on_message, results)

    def _is_live(self, stream: str) -> bool:
        found = self.supervisor.streams().get(stream)
        return found is None or found.live is not False

    def _load(self, records: Sequence[Mapping[str, Any]], machine: str) -> None:
        """Take over what goes on in the store of a machine; where its stream is no more, it ends."""
        self.events.load(records, machine)
        wanted = {*self._first, *self._also, *self.supervisor.streams()}
        for stream in {record["stream"] for record in records} - wanted:
            self.events.end(stream)

    def _lost(self, stream: str, worker_ended: bool) -> None:
        """A stream runs no more where it did."""
        if worker_ended:
            self._receiver.end(stream)
        else:  # its worker says so behind the last result, and no other begins before
            self._receiver.wait_end(stream, _LAST_S)

    def _publish(self, record: Mapping[str, Any], machine: str) -> None:
        listeners: list[Callable[[Mapping[str, Any]], None]] = []
        if self._store is not None:
            listeners.append(lambda record: self.stores.write(record, machine))
        if record["type"] in _CHANGES:
            listeners += [one.sink.write_event for one in self._outputs if isinstance(one.sink, SupportsEvents)]
        for number, listener in enumerate(listeners):
            try:
                listener(record)
            except Exception as error:
                if number not in self._failing:  # once until it works again
                    log.warning("events of %s: %s", record["stream"], " ".join(str(error).split()))
                self._failing.add(number)
            else:
                self._failing.discard(number)


class FileOf:
    """The configuration file of a front, for its routes."""

    def __init__(self, front: Front) -> None:
        self._front = front

    @property
    def file(self) -> object:
        """None without one."""
        return self._front.reloader

    def save(self) -> str:
        """As `FrontReloader.save`."""
        return str(self._front.reloader.save())

    def reload(self) -> list[str]:
        """As `FrontReloader.reload`."""
        return list(self._front.reloader.reload())

    def preview(self, text: str) -> list[str]:
        """Not with workers."""
        raise ConfigError("what a file would change is not known with workers")


def check_front(config: RunConfig) -> None:
    """Check what workers cannot do; raises ConfigError."""
    if config.display:
        raise ConfigError("--display: a window needs one process; leave out --workers, or watch with --http")
    if watched := next((target for target in streams_of(config)[1] if target.text.startswith(WHEP)), None):
        raise ConfigError(f"{watched.flag}: {watched.text}: workers serve their video by --http")


@contextmanager
def opened_front(
    config: RunConfig,
    make: MakeRelayed,
    *,
    secret: str | None = None,
    placement: Placement | None = None,
    names: Sequence[str] = (),
) -> Iterator[Front]:
    """Open what all streams share; yield the front, with no worker started; close everything in the end.

    Arguments are as in `Front`.

    Raises:
        ConfigError: if the configuration is not one for workers, or outputs would overwrite each other or a source.
        SinkError: if an output cannot be opened.
        RunFailed: if in the end something could not be finished.
    """
    check_front(config)
    streams, shared = streams_of(config)
    each = [target for target in targets_of(config) if target.each]
    own = [target.of(name) for name, one in streams.items() for target in (*each, *map(Target, one.sinks))]
    own += [Target(one.heatmap, HEATMAP).of(name) for name, one in streams.items() if one.heatmap]
    every = [*shared, *own]
    check_targets(every, [stream.source for stream in streams.values()])
    token = token_of(config.http_token, config.http_token_file)
    place = parse_place(config.http) if config.http else None
    access = Access(Path(config.http_access), token) if config.http_access else None
    if place and access is None:
        check_open(place[0], token)
    with ExitStack() as stack:
        store = stack.enter_context(opened_store(config, keep_open=True))
        outputs: list[Output] = []
        with ExitStack() as on_failure:
            for target in shared:
                outputs.append(open_output(target))
                on_failure.callback(outputs[-1].sink.close)
            front = Front(config, streams, outputs, store, make, secret, placement, names)
            on_failure.pop_all()
        stack.callback(front.close)
        if place:
            front.serve(place, token, access)
        yield front


def worker_values(config: RunConfig) -> dict[str, Any]:
    """What a worker is to know of a configuration: streams come one by one, and what belongs to the machine is here."""
    ours = {*StreamConfig.model_fields, "streams", "workers", "store", "out", "jsonl", "display"}
    ours |= {key for key in RunConfig.model_fields if key.startswith(("http", "ray"))}
    values = config.model_dump(mode="json", exclude_unset=True, exclude=ours)
    return values | {"http": "127.0.0.1:0", "sinks": [target.text for target in targets_of(config) if target.each]}


def _is_video(target: Target) -> bool:
    return target.path is not None and target.path.suffix.lower() in (".mp4", ".m4v")


def streams_of(config: RunConfig) -> tuple[dict[str, ListedStream], list[Target]]:
    """The streams by name, the one configured or one like the source's; and the outputs that they share."""
    streams = _named(config)
    shared = [target for target in targets_of(config) if not target.each]
    if len(streams) == 1:  # a video is no shared output; where there is one stream only, it is that one's
        videos = [target for target in shared if _is_video(target)]
        shared = [target for target in shared if target not in videos]
        name, stream = next(iter(streams.items()))
        if videos:
            streams[name] = stream.model_copy(update={"sinks": [*stream.sinks, *(target.text for target in videos)]})
    return streams, shared


def _named(config: RunConfig) -> dict[str, ListedStream]:
    streams = config.each() if config.source or config.streams else []
    taken = {stream.name for stream in streams if stream.name}
    named: dict[str, ListedStream] = {}
    for stream in streams:
        name = stream.name or free_name(name_of(stream.source), taken)
        taken.add(name)
        named[name] = stream
    return named


def threads_each(workers: int) -> int:
    """How many threads each of so many workers has for an operation of its engine; 0 to leave that to the environment.

    Together they use half of the processors, as one engine does: decoders and encoders need the rest.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return 0
    return max(1, usable_processors() // (2 * workers))
