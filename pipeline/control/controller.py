"""The controller of a run. Every change creates a new `RunConfig`, and `Controller.apply` applies it.

    with opened_run(config, ConfigFile(path)) as run:      # saccade.pipeline.run
        controller = run.controller
        controller.start()
        controller.apply(other)                            # a whole configuration: command line, file, SIGHUP
        controller.add(StreamConfig(source="rtsp://…"))    # one stream: HTTP, console, assistants
        controller.update("door", {"detect": ["cat"], "weight": 4.0})
        controller.update("door", {"zones": {}, "lines": {}})
        controller.restart("door")
        controller.remove("door")

`apply` validates a change, **stores it and then acts**. A completed change therefore survives `kill -9`. `apply`
accepts a configuration, or a function that computes the next desired configuration from the current one.

The desired state and the actual state are separate. `config` and `stream(name)` return the desired state.
`runner.statuses()` returns the actual state of each stream. The desired state is never derived from the actual state.

Every error is an exception with a message of one line:
    `ConfigError`   a setting is invalid; its subclass `NotKeptError` means that writing to the disk failed
    `SourceError`   a source cannot be opened; its subclass `NotAllowedError` means that the policy forbids it
    `EngineError`   the model rejects a prompt or fails
    `SinkError`     an output cannot be opened
    `StreamError`   the stream does not exist, its name is in use, or it does not stop

Other methods:
    `reload()`      reloads the file and returns one line per change
    `save()`        saves all changes to the file, preserves its comments, and returns its name
    `preview(text)` returns one line per change that a new text of the file would cause, and applies nothing
    `attach(…)`     runs a stream whose source has no address, such as a browser camera; this stream is never stored

All methods are thread-safe. Methods that open, stop or restart a stream wait for its source and outputs. Changes of
different streams do not wait for each other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from saccade.pipeline.config import ListedStream, RunConfig, StreamConfig
from saccade.pipeline.config.file import load_text
from saccade.pipeline.config.stream_names import free_name, name_of
from saccade.pipeline.control.config_file import ConfigFile
from saccade.pipeline.control.local import ERRORS, Local
from saccade.pipeline.control.plan import Change, Close, Open, Reopen, Update, later, merge, plan
from saccade.pipeline.control.runner import Ended, Runner
from saccade.pipeline.control.state import StateFile
from saccade.pipeline.errors import ConfigError, StreamError
from saccade.pipeline.runtime.run import Run
from saccade.pipeline.runtime.stream import OpenedStream
from saccade.pipeline.runtime.streams import Streams, StreamStatus

log = logging.getLogger(__name__)

_ASKING = frozenset({"detect", "point", "polygons", "query", "segment", "task"})

Edit = Callable[[RunConfig], RunConfig]
"""Computes the next desired configuration from the current one. Both have a list of named streams."""


@dataclass(slots=True, frozen=True)
class Outcome:
    """The result of a change to one stream: the new status of the stream, or the error."""

    change: Change
    status: StreamStatus | None = None
    error: Exception | None = None


@dataclass(slots=True, frozen=True)
class Applied:
    """The result of applying a configuration with `Controller.apply`.

    Attributes:
        outcomes: results of the stream changes, in the order in which they were applied.
        keys: changed run-wide settings that are in effect. All other changes of run-wide settings require a restart of
            Saccade.
    """

    outcomes: list[Outcome]
    keys: list[str]

    @property
    def changes(self) -> list[Change]:
        """The applied stream changes, including failed changes."""
        return [outcome.change for outcome in self.outcomes]

    def check(self) -> None:
        """Raise the first error of the stream changes. Do nothing if all changes succeeded."""
        for outcome in self.outcomes:
            if outcome.error is not None:
                raise outcome.error


class Controller:
    """Stores the desired state of a run, and makes a runner start, change and stop streams to match this state.

    Attributes:
        runner: runs the streams.
        file: configuration file, or None.

    Args:
        runner: runs the streams.
        base: configuration from the command line and the file.
        desired: desired configuration; None for `base`.
        first: opened streams, which `start` starts first.
        file: configuration file, or None.
        state: file that stores changes, or None.
        save_at_once: save each change to the configuration file.
        endless: continue the run when no stream is running, even if the configuration has streams.
    """

    def __init__(
        self,
        runner: Runner,
        base: RunConfig | None = None,
        *,
        desired: RunConfig | None = None,
        first: Sequence[OpenedStream] = (),
        file: ConfigFile | None = None,
        state: StateFile | None = None,
        save_at_once: bool = False,
        endless: bool = False,
    ) -> None:
        self.runner = runner
        runner.on_end = self._ended
        self._base = (base or RunConfig.model_construct()).resolved()
        self._desired = self._base if desired is None else desired.resolved()
        self._first = list(first)
        self.file = file
        self._state = state
        self._save_at_once = save_at_once
        self._lock = threading.Lock()  # guards base, desired and the attributes below; never held while opening
        self._attached: set[str] = set()  # streams whose source has no address
        self._over: set[str] = set()  # streams that have ended by themselves
        self.finished: dict[str, Ended] = {}
        """How streams of the configuration have ended, by name."""
        self._turns: WeakValueDictionary[str, Any] = WeakValueDictionary()  # locks of streams that are being changed
        self.endless = endless or not self._desired.streams
        """Whether the run continues without running streams, because streams can be added."""

    # ---- what is wanted, and how it is doing

    @property
    def config(self) -> RunConfig:
        """The desired configuration of the run."""
        with self._lock:
            return self._desired

    @property
    def local(self) -> Local:
        """The runner of this process. Raises AssertionError if the streams run on workers instead."""
        assert isinstance(self.runner, Local)
        return self.runner

    @property
    def streams(self) -> Streams:
        """The running streams of this process."""
        return self.local.streams

    def stream(self, name: str) -> ListedStream:
        """Return the desired configuration of a stream, even if the stream has failed.

        Raises:
            StreamError: if the stream does not exist.
        """
        return self._wanted(name, self.config)

    # ---- changes

    def start(self) -> list[Run]:
        """Start all desired streams. Return the runs of the streams that were already open.

        A stream that a client added in an earlier run is listed as failed if it cannot be opened.

        Raises:
            ConfigError, EngineError, SinkError, SourceError, StreamError: if a stream of the configuration cannot be
                opened.
        """
        runs = [self.local.start(stream) for stream in self._first]
        known = {stream.config.name for stream in self._first}
        self._first = []
        others = [Open(name, stream) for name, stream in self.config.named().items() if name not in known]
        for outcome in self._act(others, {}):
            if outcome.error is not None:
                assert isinstance(outcome.change, Open)
                if outcome.change.name in self._base.named():
                    raise outcome.error
                log.warning("stream %s could not be started: %s", outcome.change.name, outcome.error)
                self.runner.fail(outcome.change.stream, outcome.error)
        return runs

    def apply(self, wanted: RunConfig | Edit, *, base: RunConfig | None = None, again: Collection[str] = ()) -> Applied:
        """Apply a new configuration: validate it, store it, then change the streams.

        If a stream passes validation but cannot be opened, it is listed as failed, and its outcome contains the error.

        Args:
            wanted: new configuration of the command line and file, or a function that returns the next desired
                configuration from the current one. The function is called again if another thread stored a change
                first.
            base: new configuration of the file, if `wanted` is a function; None if the file has not changed.
            again: names of streams to reopen even if their configuration has not changed.

        Raises:
            ConfigError, EngineError, SinkError, SourceError, StreamError: if validation fails. Nothing is then changed.
        """
        if isinstance(wanted, RunConfig):
            base = wanted = wanted.resolved()
        checked: dict[str, Change] = {}
        prepared: dict[str, object] = {}
        keys: list[str] = []
        with ExitStack() as stack:
            while True:
                before = self.config
                after = wanted if isinstance(wanted, RunConfig) else wanted(before)
                changes = [self._reopened(one, again) for one in plan(_without(again, before), after)]
                if base is not None and not checked:
                    keys += self.runner.take(after)
                for change in changes:
                    if checked.get(change.name) == change:
                        continue
                    checked[change.name] = change
                    stream = self.runner.prepare(change, checked=self._is_foreign(change, base or self._base))
                    if stream is not None:
                        prepared[change.name] = stack.enter_context(stream)
                with self._lock:
                    if self._desired is before:
                        self._store(base or self._base, after)
                        break
            return Applied(self._act(changes, prepared), keys)

    def add(self, config: StreamConfig) -> StreamStatus:
        """Add a stream. If the configuration has no name, an unused name is derived from the source.

        Raises:
            ConfigError, EngineError, SinkError, SourceError: if the stream cannot be opened.
            StreamError: if the name is in use, or too many streams are running.
        """
        if config.nothing:
            raise ConfigError(config.nothing)

        def edit(desired: RunConfig) -> RunConfig:
            streams = desired.named()
            stream = _listed(config, self._free_name(config, streams))
            return _with(_without([stream.name], desired), stream)

        gone = self._gone() & {config.name or ""}
        before = {name: self.config.named().get(name) for name in gone}
        (outcome,) = [one for one in self.apply(edit, again=gone).outcomes if isinstance(one.change, Open)]
        if outcome.error is not None:
            self._undo(outcome.change.name, before.get(outcome.change.name))
            raise outcome.error
        assert outcome.status is not None
        return outcome.status

    def attach(self, stream: OpenedStream) -> Run:
        """Run an opened stream whose source has no address, such as a browser camera. The stream is not stored.

        Args:
            stream: stream from `Local.open`.

        Raises:
            ConfigError, SinkError, StreamError: if the stream cannot be started. The stream is then closed.
        """
        name = stream.config.name
        assert name is not None
        try:
            with self._lock:
                if name in self.runner.names or name in self._desired.named().keys() - self._attached:
                    raise StreamError(f"a stream named '{name}' already exists")
                self._attached.add(name)
                self._desired = _with(self._desired, stream.config)
            with self._turn(name):
                return self.local.begin(stream)
        except Exception:
            stream.close()
            with self._lock:
                self._drop(name, stream.config)
            raise

    def update(self, name: str, values: Mapping[str, Any]) -> ListedStream:
        """Change settings of a stream and return its new configuration. A failed stream is reopened.

        Args:
            name: name of the stream.
            values: new values, by key of `ListedStream`. They must be valid.

        Raises:
            ConfigError, EngineError: if the model does not support the new prompts.
            StreamError: if the stream does not exist.
        """

        def edit(desired: RunConfig) -> RunConfig:
            return _with(desired, _changed(self._wanted(name, desired), values))

        self.apply(edit).check()
        return self.stream(name)

    def check_rules(self, name: str, values: Mapping[str, Any]) -> None:
        """Check that a stream supports new rules, without applying the rules.

        Raises:
            PlacedError: see `runtime.tasks.check_rules`.
            StreamError: if the stream is not running.
        """
        self.runner.check_rules(_changed(self.stream(name), values))

    def remove(self, name: str) -> None:
        """Stop a stream and remove it from the desired state.

        Raises:
            StreamError: if the stream does not exist, or has not stopped before the timeout.
        """
        if name not in self.config.named():
            self.runner.remove(name)  # a stream of a program, or an error
            return
        self.apply(partial(_without, [name])).check()

    def restart(self, name: str) -> StreamStatus:
        """Stop a stream, and reopen it with its desired configuration. A failed stream is also reopened.

        Raises:
            ConfigError, EngineError, SinkError, SourceError: if the stream cannot be opened. The stream is then listed
                as failed.
            StreamError: if the stream does not exist, or has not stopped before the timeout.
        """
        wanted = self.config.named().get(name)
        if wanted is None or name in self._attached:
            self.runner.status(name)
            raise StreamError(
                f"stream '{name}' cannot be changed, because it was started from Python without a configuration"
            )
        self.apply(lambda desired: desired, again=[name]).check()
        return self.runner.status(name)

    # ---- the file

    def reload(self) -> list[str]:
        """Reload the configuration file and apply it. Return one line per change, or one line if nothing has changed.

        Changes that were made over HTTP are preserved, unless the edit of the file changes the same settings.

        Raises:
            ConfigError: if the file cannot be applied. Nothing is then changed.
        """
        file = self._required_file()
        try:
            edited, before = file.load(), self._base
            base = edited.resolved()
            applied = self.apply(lambda desired: merge(before, base, desired), base=base)
        except ERRORS as error:
            raise ConfigError(f"the configuration was not reloaded: {error}; nothing was changed") from None
        lines = [_line(outcome) for outcome in applied.outcomes] + _later_line(before, edited, applied.keys)
        if applied.keys:
            lines.append(f"all workers were replaced, because of changes in {', '.join(applied.keys)}")
        return lines or [f"{file.path}: nothing has changed"]

    def reload_lines(self) -> list[str]:
        """Reload the configuration file. Return the changes, or the error, as lines for a terminal."""
        try:
            return self.reload()
        except ConfigError as error:
            return [str(error)]

    def save(self) -> str:
        """Write all unsaved changes to the configuration file. Return the name of the file.

        Raises:
            ConfigError: if the file cannot be written.
        """
        file = self._required_file()
        with self._lock:
            wanted = self._stored(self._desired)
            file.save(wanted)
            self._base = wanted
            if self._state is not None:
                self._state.save(wanted, wanted)
        return file.path.name

    def preview(self, text: str) -> list[str]:
        """Return one line per change that new content of the configuration file would cause. Nothing is applied.

        Raises:
            ConfigError: if the text is invalid.
        """
        edited = load_text(text) if self.file is None else self.file.parse(text)
        with self._lock:
            base, desired = self._base, self._desired
        changes = plan(desired, merge(base, edited.resolved(), desired))
        return [_line(Outcome(change)) for change in changes] + _later_line(base, edited)

    # ---- how a change is made

    def _reopened(self, change: Change, again: Collection[str]) -> Change:
        """Replace an `Open` change by a `Reopen` change if the stream is running and is listed in `again`."""
        if isinstance(change, Open) and change.name in again and change.name in self.runner.names:
            return Reopen(change.name, change.stream)
        return change

    def _act(self, changes: Sequence[Change], prepared: Mapping[str, object]) -> list[Outcome]:
        """Apply stream changes in the given order. Each stream gets its newest desired configuration."""
        outcomes = []
        for change in changes:
            name = change.name
            with self._turn(name):
                # A later change may have been stored in the meantime; then this applies the later change.
                wanted = self.config.named().get(name)
                foreign = wanted is not None and self._is_foreign(Open(name, wanted), self._base)
                try:
                    if isinstance(change, Reopen) and not change.keys and wanted is not None:
                        status: StreamStatus | None = self.runner.reopen(name, wanted, checked=foreign)
                    else:
                        status = self.runner.follow(name, wanted, prepared.get(name), checked=foreign)
                except ERRORS as error:
                    outcomes.append(Outcome(change, error=error))
                else:
                    self._over.discard(name)
                    outcomes.append(Outcome(change, status))
        return outcomes

    def _turn(self, name: str) -> AbstractContextManager[object]:
        with self._lock:
            lock: AbstractContextManager[object] = self._turns.setdefault(name, threading.RLock())
            return lock

    def _store(self, base: RunConfig, desired: RunConfig) -> None:
        """Store a new desired state in the file and in memory. The caller must hold `_lock`."""
        kept = self._stored(desired)
        changed = bool(plan(self._stored(self._desired), kept))
        if self._save_at_once and self.file is not None and changed:
            if plan(base, kept):
                self.file.save(kept)
            base = kept
        elif self._state is not None and (changed or plan(self._base, base)):
            self._state.save(base, kept)
        self._base, self._desired = base, desired

    def _undo(self, name: str, before: ListedStream | None) -> None:
        """Restore the desired configuration of a stream that could not be started: `before`, or None to remove it."""
        with self._lock:
            desired = _without([name], self._desired)
            self._store(self._base, desired if before is None else _with(desired, before))
            if before is not None:
                self._over.add(name)

    def _stored(self, desired: RunConfig) -> RunConfig:
        """Return the desired configuration without streams that cannot be reopened, such as browser cameras."""
        if not self._attached:
            return desired
        return desired.with_streams(stream for name, stream in desired.named().items() if name not in self._attached)

    def _ended(self, ended: Ended) -> None:
        """Handle the end of a stream. A stream that a client added is forgotten when its source ends."""
        name = ended.name
        with self._lock:
            if name in self._base.named():
                self.finished[name] = ended
            if self.runner.closed:
                return
            if name in self._attached:
                self._drop(name, ended.config)
            elif not ended.stopped and ended.error is None and name in (wanted := self._desired.named()):
                if name in self._base.named() or wanted[name] != ended.config:
                    self._over.add(name)
                else:
                    try:
                        self._store(self._base, _without([name], self._desired))
                    except ConfigError as error:
                        log.warning("stream %s has ended: %s", name, error)
                        self._over.add(name)

    def _drop(self, name: str, config: ListedStream | None) -> None:
        """Remove an ended stream, unless a new stream has its name. The caller must hold `_lock`."""
        if self._desired.named().get(name) is config:
            self._attached.discard(name)
            self._desired = _without([name], self._desired)

    def _wanted(self, name: str, desired: RunConfig) -> ListedStream:
        """Return the desired configuration of a stream.

        Raises:
            StreamError: if the stream does not exist, or was started from Python without a configuration.
        """
        self.runner.status(name)
        wanted = desired.named().get(name)
        if wanted is None:
            raise StreamError(
                f"stream '{name}' cannot be changed, because it was started from Python without a configuration"
            )
        return wanted

    def _is_foreign(self, change: Change, base: RunConfig) -> bool:
        """Return whether a client of the HTTP server chose the source of a stream."""
        if isinstance(change, Close):
            return False
        given = base.named().get(change.name)
        wanted = change.stream
        return given is None or (given.source, given.record_source) != (wanted.source, wanted.record_source)

    def _gone(self) -> set[str]:
        """Return the names of ended and failed streams. New streams can use these names."""
        failed = {status.name for status in self.runner.statuses() if status.state == "failed"}
        return (self._over | failed) - set(self.runner.names)

    def _free_name(self, config: StreamConfig, streams: Mapping[str, ListedStream]) -> str:
        taken = {*streams, *self.runner.names} - self._gone()
        if config.name is None:
            return free_name(name_of(config.source), taken)
        if config.name in taken:
            raise StreamError(f"a stream named '{config.name}' already exists")
        return config.name

    def _required_file(self) -> ConfigFile:
        if self.file is None:
            raise ConfigError("Saccade has no configuration file: start it with --config FILE")
        return self.file


def _listed(config: StreamConfig, name: str) -> ListedStream:
    """Convert the configuration of a single stream to an entry of the list `streams`, under a new name."""
    values = {key: getattr(config, key) for key in config.model_fields_set}
    return ListedStream.model_construct(config.model_fields_set | {"name"}, **{**values, "name": name})


def _changed(stream: ListedStream, values: Mapping[str, Any]) -> ListedStream:
    changed = stream.model_copy(update=dict(values))
    # Other changes may take the rules that alone gave something to look for.
    if values.keys() & _ASKING and not changed.record and (nothing := changed.prompts.nothing):
        raise ConfigError(nothing)
    return changed


def _with(desired: RunConfig, stream: ListedStream) -> RunConfig:
    return desired.with_streams({**desired.named(), (stream.name or ""): stream}.values())


def _without(names: Collection[str | None], desired: RunConfig) -> RunConfig:
    return desired.with_streams(stream for name, stream in desired.named().items() if name not in names)


def _line(outcome: Outcome) -> str:
    change = outcome.change
    if outcome.error is not None:
        return f"{change.name}: {outcome.error}"
    if isinstance(change, Close):
        return f"{change.name}: removed"
    if isinstance(change, Open):
        return f"{change.name}: added"
    keys = ", ".join(sorted(change.keys))
    return (
        f"{change.name}: changed {keys}" if isinstance(change, Update) else f"{change.name}: restarted, changed {keys}"
    )


def _later_line(old: RunConfig, new: RunConfig, taken: Collection[str] = ()) -> list[str]:
    keys = [key for key in later(old, new) if key not in taken]
    return [f"{', '.join(keys)}: changed in the file; restart saccade to apply"] if keys else []
