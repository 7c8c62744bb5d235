"""A whole `saccade run`: everything a configuration names, opened, run and closed.

It is opened in an order in which a mistake costs little time and leaves no file behind. Knows nothing of terminals or
signals.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from saccade.pipeline.config import ListedStream, RunConfig, StreamConfig, parse_place
from saccade.pipeline.config.queue_policy import NEWEST
from saccade.pipeline.config.stream_names import free_name
from saccade.pipeline.errors import ConfigError, RunFailed
from saccade.pipeline.events.hub import EventHub
from saccade.pipeline.events.record import Change, read_event
from saccade.pipeline.events.storage.recorder import MediaWriter
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import StoreError
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.run import Run
from saccade.pipeline.runtime.stream import OpenedStream, load_engine, open_stream
from saccade.pipeline.runtime.streams import Streams
from saccade.pipeline.runtime.targets import HEATMAP, Target, check_frames, check_targets, open_output, targets_of
from saccade.pipeline.server.access import Access
from saccade.pipeline.server.api.config_api import ConfigApi
from saccade.pipeline.server.http_server import HttpServer, check_open, tls_of, token_of
from saccade.sinks import SupportsEvents
from saccade.sinks.video.broadcast import BroadcastSink
from saccade.sources.http.auth import HttpAuth
from saccade.sources.network.dialer import CheckAddress

if TYPE_CHECKING:
    from aiohttp import web

    from saccade.engine import Engine

_EVERY = "every stream"

log = logging.getLogger(__name__)


class Session:
    """The streams of one command, open and not yet started. Made by `opened_session`.

    Attributes:
        streams: those that run.
        events: hands the events of their rules to the outputs.
        endless: whether it goes on when no stream runs any more, since others may be added.
        first_names: of the streams that were configured, in their order.
        config_api: the configuration file over HTTP, once `actions` of it are set.

    Args:
        streams: where they will run.
        first: the streams that are configured, by name.
        each: the outputs of which every stream has its own.
        shared: the outputs that all streams share.
        events: where the events of those that are configured go.
        store: keeps them.
        media: writes their clips and snapshots.
        ask: answers what rules ask; None for the engine of the streams.
    """

    def __init__(
        self,
        streams: Streams,
        first: dict[str, OpenedStream] | None = None,
        each: Sequence[Target] = (),
        shared: Sequence[Target] = (),
        events: EventHub | None = None,
        store: EventStore | None = None,
        media: MediaWriter | None = None,
        ask: Engine | None = None,
    ) -> None:
        self.streams = streams
        self.events = events or EventHub()
        for sink in streams.sinks:
            if isinstance(sink, SupportsEvents):
                self.events.add(sink.write_event)
        self.endless = not first
        self._store = store
        self._history = store is not None or media is not None  # kept here, or where the events go
        self._media = media
        self.first_names = list(first or {})
        self.config_api = ConfigApi()
        self._ask = ask
        self._waiting = dict(first or {})
        self._each = list(each)
        self._server: HttpServer | None = None
        self._lock = threading.Lock()  # over what follows
        self._written: dict[Path, str] = {}  # file → its stream; also of streams that have ended
        for name, stream in self._waiting.items():
            self._note(name, [*_own_targets(stream.config, each, name), *_written_by_stages(stream.config, name)])
        self._note(_EVERY, shared)

    def start(self) -> list[Run]:
        """Start the streams that were configured; returns at once."""
        for record in self._store.ended if self._store else ():  # the outputs know that they began
            self.events.publish(Change("end", read_event(record)))
        runs = []
        while self._waiting:
            name = next(iter(self._waiting))
            runs.append(self._waiting[name].start(self.streams, name, reserved=False))
            del self._waiting[name]
        return runs

    def add(self, config: StreamConfig, *, check: CheckAddress | None = None, repeat: bool = False) -> Run:
        """Start another stream, whose results go where those of every stream go; `check`, … as in `open_stream`.

        Raises:
            ConfigError, SourceError, EngineError, SinkError: if something it names cannot be used.
            StreamError: if its name is taken, or too many streams run.
        """
        with self.open(config, check=check, repeat=repeat) as stream:
            return self.begin(stream)

    def open(self, config: StreamConfig, *, check: CheckAddress | None = None, repeat: bool = False) -> OpenedStream:
        """Open another stream, to be given to `begin` or closed; arguments as in `open_stream`.

        Raises:
            ConfigError, SourceError, EngineError: if something it names cannot be used.
        """
        return open_stream(
            config,
            self.streams.engine,
            check=check,
            repeat=repeat,
            events=self.events,
            history=self._history,
            media=self._media,
            ask=self._ask,
        )

    def begin(self, stream: OpenedStream) -> Run:
        """Open its outputs, and start it; the caller closes it if that fails.

        Raises:
            ConfigError, SinkError: if an output cannot be used.
            StreamError: if its name is taken, or too many streams run.
        """
        config = stream.config
        with stream.reserve(self.streams) as name:
            targets = _own_targets(config, self._each, name)
            files = [*targets, *_written_by_stages(config, name)]
            with self._lock:
                self._check(name, files, config.source)
                check_frames(files, stream.source.info)
                self._note(name, files)
            _open_outputs(stream, targets, name, self.events)
            return stream.start(self.streams, name)

    def check(self, config: StreamConfig, name: str | None) -> None:
        """Open a stream as `add` would, under a name that it has or None, and close it again.

        Raises:
            ConfigError, SourceError, EngineError: as `add`.
        """
        with open_stream(config, self.streams.engine, events=self.events) as stream:
            known = name or config.name or stream.source.name
            targets = [*_own_targets(config, self._each, known), *_written_by_stages(config, known)]
            with self._lock:
                self._check(known, targets, config.source)

    def _check(self, name: str, targets: Sequence[Target], source: str) -> None:
        """Refuse outputs of a new stream that would overwrite a source or the results of another stream."""
        check_targets(targets, [source, *(status.source for status in self.streams.snapshot())])
        going = {_EVERY, *self.streams.names} - {name}
        for target in targets:
            if (path := target.path) is None or (owner := self._written.get(path.resolve())) is None:
                continue
            if owner in going or (target.replaces and path.exists() and path.stat().st_size):
                raise ConfigError(f"{target.flag}: {path} holds results of {owner}; give the new stream another name")

    def _note(self, name: str, targets: Sequence[Target]) -> None:
        self._written.update({path.resolve(): name for target in targets if (path := target.path)})

    def serve(
        self,
        place: tuple[str, int],
        token: str | None,
        tls: ssl.SSLContext | None = None,
        allow_sources: Sequence[str] = (),
        videos: BroadcastSink | None = None,
        access: HttpAuth | None = None,
        routes: Sequence[web.AbstractRouteDef] = (),
    ) -> None:
        """Serve the state of the streams, and adding and changing them, over HTTP; and the console of their `videos`.

        Further `routes` have the same authentication.

        Raises:
            ConfigError: if the address is not available.
        """
        from saccade.pipeline.server.console import Console  # imports aiortc, which nothing else here needs

        console = Console(
            self.streams,
            videos or BroadcastSink(),
            token=token,
            config=self.config_api,
            auth=access,
            events=self._store is not None,
            ask=self._ask,
        )
        self._server = HttpServer(
            self.streams,
            *place,
            token,
            tls=tls,
            allow_sources=allow_sources,
            add=self.add,
            access=access,
            events=self._store,
            hub=self.events,
            ask=self._ask,
            routes=[*console.routes(), *self.config_api.routes(), *routes],
            public=console.public,
            on_cleanup=[console.whep.close],
        )

    @property
    def url(self) -> str | None:
        """Where it is served; None if it is not."""
        return None if self._server is None else self._server.url

    def close(self) -> None:
        """End everything. A second call does nothing.

        Raises:
            RunFailed: if what was written could not be finished, or a stream does not end.
        """
        try:
            with ExitStack() as everything:  # from the last to the first, whatever one of them raises
                everything.callback(self.events.close)
                if self._media:
                    everything.callback(self._media.close)
                everything.callback(self.streams.close)
                for stream in self._waiting.values():
                    everything.callback(stream.close)
                if self._server:
                    everything.callback(self._server.close)
        except Exception as error:
            raise RunFailed from error


@contextmanager
def opened_session(config: RunConfig, progress: Callable[[int, int], None] | None = None) -> Iterator[Session]:
    """Open sources, model and outputs; yield the session, with nothing started; close everything in the end.

    Args:
        config: names everything.
        progress: called with (done, all) while a GPU is prepared.

    Raises:
        ConfigError: if outputs would overwrite each other or a source, or the model cannot do what is asked for.
        SourceError, EngineError, SinkError: if one of them cannot be used.
        RunFailed: if in the end something could not be finished.
    """
    targets = targets_of(config)
    each = [target for target in targets if target.each]
    shared = [target for target in targets if not target.each]
    place = parse_place(config.http) if config.http else None
    token = token_of(config.http_token, config.http_token_file)
    tls = tls_of(config.http_cert, config.http_key)
    access = Access(Path(config.http_access), token) if config.http_access else None
    if place and access is None:
        check_open(place[0], token)
    with ExitStack() as stack:
        events = EventHub()
        store = stack.enter_context(opened_store(config))
        stack.callback(events.close)
        media = None
        if store is not None:
            events.add(store.write, history=True)
            media = MediaWriter(store.media_folder, events.publish)
            stack.callback(media.close)
        kept = store is not None
        streams = _named(
            [stack.enter_context(open_stream(one, events=events, history=kept, media=media)) for one in config.each()]
        )
        own = {name: _own_targets(stream.config, each, name) for name, stream in streams.items()}
        every = [*shared, *(target for targets in own.values() for target in targets)]
        every += [target for name, stream in streams.items() for target in _written_by_stages(stream.config, name)]
        check_targets(every, [stream.config.source for stream in streams.values()])
        for name, stream in streams.items():
            files = [*own[name], *_written_by_stages(stream.config, name), *shared]
            check_frames(files, stream.source.info)
        engine = stack.enter_context(load_engine(config, progress))
        ask = stack.enter_context(load_engine(config.ask, progress)) if config.ask else None
        for stream in streams.values():
            stream.resolve_tasks(engine, ask)
        for name, stream in streams.items():
            _open_outputs(stream, own[name], name, events)
        with ExitStack() as on_failure:
            # A video is no shared output; where there is one stream only, it is that one's.
            alone = next(iter(streams.values())) if len(streams) == 1 else None
            common: list[Output] = []
            for target in shared:
                output = open_output(target, alone.source, alone.config.vid_stride) if alone else open_output(target)
                if alone and not output.sink.shared:
                    alone.outputs.append(output)
                else:
                    common.append(output)
                    on_failure.callback(output.sink.close)
            videos = BroadcastSink()
            viewing = [Output(videos, NEWEST, viewing=True)] if place else []
            session = Session(Streams(engine, [*common, *viewing]), streams, each, shared, events, store, media, ask)
            on_failure.pop_all()
        stack.callback(session.close)
        if place:
            session.serve(place, token, tls, config.allow_sources, videos, access)
        yield session


def max_bytes_of(config: RunConfig) -> int | None:
    """How many bytes of clips and snapshots a store may have; None for no limit."""
    return None if config.store_max_gb is None else round(config.store_max_gb * 1e9)


@contextmanager
def opened_store(config: RunConfig, *, keep_open: bool = False) -> Iterator[EventStore | None]:
    """The store that is configured; None if none is, or the disk fails. `keep_open` as in `EventStore`.

    Raises:
        ConfigError: if it cannot be used.
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
        log.warning("--store: %s; nothing is stored until the next start", error)  # all else goes on
        yield None
        return
    with closing(store):
        yield store


def _named(streams: Sequence[OpenedStream]) -> dict[str, OpenedStream]:
    """The streams by name: the one configured, else one made from the source that no other has."""
    names = {number: stream.config.name for number, stream in enumerate(streams) if stream.config.name}
    for number, stream in enumerate(streams):
        names.setdefault(number, free_name(stream.source.name, names.values()))
    return {names[number]: stream for number, stream in enumerate(streams)}


def _own_targets(config: StreamConfig, each: Sequence[Target], name: str) -> list[Target]:
    """The outputs of one stream alone."""
    sinks = config.sinks if isinstance(config, ListedStream) else []
    return [target.of(name) for target in (*each, *map(Target, sinks))]


def _written_by_stages(config: StreamConfig, name: str) -> list[Target]:
    """The files of one stream that its stages write, and which are no outputs to open."""
    return [Target(config.heatmap, HEATMAP).of(name)] if config.heatmap else []


def _open_outputs(stream: OpenedStream, targets: Sequence[Target], name: str, events: EventHub) -> None:
    """Open the outputs of one stream, which then closes them, so that they leave nothing behind should one fail."""
    for target in targets:
        output = open_output(target, stream.source, stream.config.vid_stride)
        stream.outputs.append(output)
        if isinstance(output.sink, SupportsEvents):
            stream.on_end.append(events.add(output.sink.write_event, name))
