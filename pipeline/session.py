"""A whole `saccade run`: everything a configuration names, opened, run and closed.

It is opened in an order in which a mistake costs little time and leaves no file behind. Knows nothing of terminals or
signals.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from saccade.engine.scheduling.task import Task
from saccade.pipeline.core.build import add, begin, load_engine, source_of, tasks_for
from saccade.pipeline.core.config import RunConfig, StreamConfig, parse_place
from saccade.pipeline.core.errors import ConfigError, RunFailed
from saccade.pipeline.core.stream_manager import Streams
from saccade.pipeline.core.stream_names import free_name
from saccade.pipeline.core.stream_run import Output, Run
from saccade.pipeline.server.http_server import HttpServer, check_open
from saccade.pipeline.sink_targets import Target, check_targets, open_output, targets_of
from saccade.sources import Source

_EVERY = "every stream"


@dataclass(slots=True, frozen=True)
class _Opened:
    """A stream with everything it needs."""

    name: str
    config: StreamConfig
    source: Source
    tasks: Sequence[Task]
    targets: Sequence[Target]
    outputs: list[Output]


class Session:
    """The streams of one command, opened but not begun. Made by `opened_session`.

    Attributes:
        streams: those that run.
        endless: whether it goes on when no stream runs any more, since others may be added.
    """

    def __init__(self, streams: Streams, first: Sequence[_Opened], common: Sequence[Target]) -> None:
        self.streams = streams
        self.endless = not first
        self._waiting = list(first)
        self._each = [target for target in common if target.each]
        self._server: HttpServer | None = None
        self._lock = threading.Lock()  # over what follows
        self._written: dict[Path, str] = {}  # files of streams, those that have ended among them, and whose each is
        for one in first:
            self._note(one.name, one.targets)
        self._note(_EVERY, [target for target in common if not target.each])

    def start(self) -> list[Run]:
        """Begin the streams that were configured; returns at once."""
        runs = []
        while self._waiting:
            one = self._waiting.pop(0)
            runs.append(add(self.streams, one.name, one.config, one.source, one.tasks, one.outputs))
        return runs

    def add(self, config: StreamConfig) -> Run:
        """Begin another stream. Its results go where those of every stream go.

        Raises:
            ConfigError, SourceError, EngineError, SinkError: if something it names cannot be used.
            StreamError: if its name is taken, or too many run.
        """

        def outputs(name: str, source: Source) -> list[Output]:
            targets = [target.of(name) for target in self._each]
            with self._lock:
                self._check(name, targets, config.source)
                self._note(name, targets)
            return _open_all(targets, source, config)

        return begin(self.streams, config, outputs)

    def _check(self, name: str, targets: Sequence[Target], source: str) -> None:
        """Refuse outputs of a new stream that would overwrite a source, or what another stream has found."""
        check_targets(targets, [source, *(status.source for status in self.streams.snapshot())])
        going = {_EVERY, *self.streams.names} - {name}
        for target in targets:
            if (path := target.path) is None or (owner := self._written.get(path.resolve())) is None:
                continue
            if owner in going or (target.replaces and path.exists() and path.stat().st_size):
                raise ConfigError(f"{target.flag}: {path} holds results of {owner}; give the new stream another name")

    def _note(self, name: str, targets: Sequence[Target]) -> None:
        self._written.update({path.resolve(): name for target in targets if (path := target.path)})

    def serve(self, place: tuple[str, int], token: str | None) -> None:
        """Tell of the streams and take orders over HTTP.

        Raises:
            ConfigError: if nobody can listen there.
        """
        self._server = HttpServer(self.streams, *place, token, add=self.add)

    def close(self) -> None:
        """End everything. A second call does nothing.

        Raises:
            RunFailed: if what was written could not be finished, or a stream does not end.
        """
        try:
            with ExitStack() as all_of_it:  # from the last to the first, whatever becomes of each
                all_of_it.callback(self.streams.close)
                for one in self._waiting:  # never begun
                    for output in one.outputs:
                        all_of_it.callback(output.sink.close)
                if self._server:
                    all_of_it.callback(self._server.close)
        except Exception as error:
            raise RunFailed from error


@contextmanager
def opened_session(config: RunConfig, progress: Callable[[int, int], None] | None = None) -> Iterator[Session]:
    """Open sources, model and outputs; yield the session, with nothing begun; close everything in the end.

    Args:
        config: names everything.
        progress: called with (done, all) while a GPU is prepared.

    Raises:
        ConfigError: if outputs would overwrite each other or a source, or the model cannot do what is asked.
        SourceError, EngineError, SinkError: if one of them cannot be used.
        RunFailed: if in the end something could not be finished.
    """
    common, wanted = targets_of(config), config.each()
    place = parse_place(config.http) if config.http else None
    if place:
        check_open(place[0], config.http_token)
    with ExitStack() as stack:
        sources = [stack.enter_context(source_of(one)) for one in wanted]
        names = {number: one.name for number, one in enumerate(wanted) if one.name}
        for number, source in enumerate(sources):
            names.setdefault(number, free_name(source.name, names.values()))
        own = [
            [target.of(names[n]) for target in (*(t for t in common if t.each), *map(Target, one.sinks))]
            for n, one in enumerate(wanted)
        ]
        together = [target for target in common if not target.each]
        check_targets([*together, *(target for targets in own for target in targets)], [one.source for one in wanted])
        engine = stack.enter_context(load_engine(config, progress))
        tasks = [tasks_for(engine, one) for one in wanted]
        with ExitStack() as on_failure:
            first = []
            for n, one in enumerate(wanted):
                outputs = _open_all(own[n], sources[n], one)
                for output in outputs:
                    on_failure.callback(output.sink.close)
                first.append(_Opened(names[n], one, sources[n], tasks[n], own[n], outputs))
            # A video is no shared output; where there is one stream only, it is that one's.
            alone = first[0] if len(first) == 1 else None
            shared: list[Output] = []
            for target in together:
                output = open_output(target, alone.source, alone.config.vid_stride) if alone else open_output(target)
                on_failure.callback(output.sink.close)
                (alone.outputs if alone and not output.sink.shared else shared).append(output)
            session = Session(Streams(engine, shared), first, common)
            on_failure.pop_all()
        stack.callback(session.close)
        if place:
            session.serve(place, config.http_token)
        yield session


def _open_all(targets: Sequence[Target], source: Source, config: StreamConfig) -> list[Output]:
    """Open the outputs of one stream; should one fail, close those already open, which then leave nothing behind."""
    outputs = []
    with ExitStack() as on_failure:
        for target in targets:
            outputs.append(open_output(target, source, config.vid_stride))
            on_failure.callback(outputs[-1].sink.close)
        on_failure.pop_all()
    return outputs
