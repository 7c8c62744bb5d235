"""The configuration file of a session that runs: read anew when it changes, and written to on request.

Only what has changed is restarted; a file with a mistake changes nothing. Knows no signals and no terminal.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from saccade.engine.errors import EngineError
from saccade.pipeline.analytics.analyze import analyze_stage
from saccade.pipeline.analytics.settings import Regions
from saccade.pipeline.config import ListedStream, Prompts, RunConfig
from saccade.pipeline.config.edit import save_settings
from saccade.pipeline.config.file import load
from saccade.pipeline.errors import ConfigError, StreamError
from saccade.pipeline.events.settings import RuleSettings
from saccade.pipeline.events.stage import event_stage
from saccade.pipeline.runtime.tasks import change_prompts, tasks_for
from saccade.pipeline.server.rules_api import change_rules, check_rules
from saccade.pipeline.session import Session
from saccade.sinks import SinkError
from saccade.sources import SourceError

_PROMPTS = frozenset(Prompts.model_fields)
_REGIONS = frozenset(Regions.model_fields)
_LIVE = _PROMPTS | _REGIONS | {"rules"}  # what changes while a stream runs

_ERRORS = (ConfigError, EngineError, SinkError, SourceError, StreamError)

Stamp = tuple[int, int, int]
T = TypeVar("T")


class FileStamp:
    """Whether a file is another than it was when it was last read.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._now()

    @property
    def changed(self) -> bool:
        """Whether it is there, and another."""
        stamp = self._now()
        return stamp is not None and stamp != self._stamp

    def take(self) -> None:
        """It is being read now."""
        self._stamp = self._now()

    def _now(self) -> Stamp | None:
        """What changes with the file; None while it is not there, as while an editor replaces it."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


EditedRegions = dict[int | None, Regions]
EditedRules = dict[int | None, Sequence[RuleSettings]]


class FileReloader(ABC):
    """A configuration file that is read anew. Every method is callable from any thread.

    Args:
        path: of the file.
        overrides: the command line's values over it.
    """

    def __init__(self, path: Path, overrides: Mapping[str, Any]) -> None:
        self._path = path
        self._overrides = dict(overrides)
        self._stamp = FileStamp(path)
        self._lock = threading.Lock()

    @property
    def changed(self) -> bool:
        """Whether the file is another than it was when it was last read, or written to from here."""
        return self._stamp.changed

    def reload(self) -> list[str]:
        """Read the file and run what it says now; returns a line for each change, or that there is none.

        Raises:
            ConfigError: if that cannot be; everything goes on as it was.
        """
        with self._lock:
            self._stamp.take()
            try:
                wanted = load(self._path, self._overrides)
                return self._apply(wanted) or [f"{self._path}: nothing has changed"]
            except _ERRORS as error:
                raise ConfigError(f"{error}; everything goes on as it was") from None

    def reload_lines(self) -> list[str]:
        """`reload` for a terminal: a line for each change, or for why there is none."""
        try:
            return self.reload()
        except ConfigError as error:
            return [str(error)]

    def save(self) -> str:
        """Write the zones, lines and rules of the running streams into the file; returns its name.

        Raises:
            ConfigError: if it cannot be written.
        """
        with self._lock:
            if self._overrides.keys() & {"source", "streams"}:
                raise ConfigError("the streams were given on the command line, and are not in the file")
            save_settings(self._path, *self._edited(), lambda path: load(path, self._overrides))
            self._stamp.take()
            self._take(load(self._path, self._overrides))
            return self._path.name

    @abstractmethod
    def _edited(self) -> tuple[EditedRegions, EditedRules]:
        """What running streams have other than the configuration says, by their number in it; None for the only one."""

    @abstractmethod
    def _take(self, saved: RunConfig) -> None:
        """The file says what runs: take it for the configuration."""

    @abstractmethod
    def _apply(self, wanted: RunConfig) -> list[str]:
        """Run what another configuration says; returns a line for each change."""


class ConfigReloader(FileReloader):
    """The file of a session.

    Args:
        path: of the file.
        overrides: the command line's values over it.
        config: what the session was opened from.
        session: runs it.
    """

    def __init__(self, path: Path, overrides: Mapping[str, Any], config: RunConfig, session: Session) -> None:
        super().__init__(path, overrides)
        self._config = config
        self._session = session
        self._names: list[str | None] = list(session.first_names)

    def _edited(self) -> tuple[EditedRegions, EditedRules]:
        single = bool(self._config.source)
        regions: EditedRegions = {}
        rules: EditedRules = {}
        for number, (name, stream) in enumerate(zip(self._names, self._config.each(), strict=True)):
            if name is None or name not in self._session.streams.names:
                continue
            stages, place = self._session.streams.get(name).stages, None if single else number
            analysis, watching = analyze_stage(stages), event_stage(stages)
            if analysis is not None and analysis.regions != Regions.model_construct(
                zones=stream.zones, lines=stream.lines
            ):
                regions[place] = analysis.regions
            if watching is not None and list(watching.rules) != stream.rules:
                rules[place] = watching.rules
        return regions, rules

    def _take(self, saved: RunConfig) -> None:
        self._config = saved

    def _apply(self, wanted: RunConfig) -> list[str]:
        before, after = self._config.each(), wanted.each()
        names = self._match(before, after)
        old = {name: stream for name, stream in zip(self._names, before, strict=True) if name is not None}
        running = set(self._session.streams.names)
        new = [(name, stream) for name, stream in zip(names, after, strict=True) if name is None or name not in old]
        kept = [(name, stream) for name, stream in zip(names, after, strict=True) if name is not None and name in old]
        differences = {name: stream_differences(old[name], stream) for name, stream in kept}
        restarts = [
            (name, stream)
            for name, stream in kept
            if differences[name] - _LIVE or (differences[name] and name not in running)
        ]
        for name, stream in [*new, *restarts]:  # whatever cannot be opened is found before anything is ended
            self._session.check(stream, name)
        for name, stream in kept:
            if differences[name] & _PROMPTS:
                tasks_for(self._session.streams.engine, stream)
            if "rules" in differences[name] and name in running and (name, stream) not in restarts:
                check_rules(self._session.streams.get(name), self._session.streams.engine, stream.rules, stream)
        lines: list[str] = []

        def attempt(name: str, done: str, action: Callable[[], T]) -> T | None:
            try:
                result = action()
            except _ERRORS as error:  # such as an output that cannot be opened; the other streams are none the worse
                lines.append(f"{name}: {error}")
                return None
            lines.append(f"{name}: {done}")
            return result

        for name in sorted(old.keys() - {name for name, _ in kept}):
            attempt(name, "removed", partial(self._end, name))
        for name, stream in kept:
            changed = ", ".join(sorted(differences[name]))
            if (name, stream) in restarts:
                attempt(name, f"started anew, with other {changed}", partial(self._restart, name, stream))
            elif changed:
                attempt(name, f"other {changed}", partial(self._change, name, stream, differences[name]))
        for number, (name, stream) in enumerate(zip(names, after, strict=True)):
            if name is None or name not in old:
                run = attempt(name or stream.source, "added", partial(self._session.add, stream))
                names[number] = run.name if run else name
        later = sorted(run_differences(self._config, wanted))
        lines += [f"{', '.join(later)}: changed in the file, and taken when saccade is started again"] if later else []
        self._config, self._names = wanted, names
        return lines

    def _match(self, before: list[ListedStream], after: list[ListedStream]) -> list[str | None]:
        """The name that each stream of the new file has had until now; its own, or None, if it is new."""
        unnamed = [
            (stream.source, name) for name, stream in zip(self._names, before, strict=True) if stream.name is None
        ]
        names: list[str | None] = []
        for stream in after:
            found = next((pair for pair in unnamed if pair[0] == stream.source), None) if not stream.name else None
            if found:
                unnamed.remove(found)
            names.append(stream.name or (found[1] if found else None))
        return names

    def _restart(self, name: str, stream: ListedStream) -> None:
        wanted = stream.model_copy(update={"name": name})
        streams = self._session.streams
        with streams.reopening(name) if name in streams.names else nullcontext():
            self._session.add(wanted)

    def _end(self, name: str) -> None:
        try:
            self._session.streams.remove(name)
        except StreamError:
            if name in self._session.streams.names:
                raise

    def _change(self, name: str, stream: ListedStream, changed: set[str]) -> None:
        run = self._session.streams.get(name)
        if changed & _REGIONS and (stage := analyze_stage(run.stages)) is not None:
            stage.regions = Regions.model_construct(zones=stream.zones, lines=stream.lines)
        if "rules" in changed:
            change_rules(run, self._session.streams.engine, stream.rules)
        if changed & _PROMPTS:
            asked = {key: getattr(stream, key) for key in Prompts.model_fields}
            change_prompts(run, self._session.streams.engine, Prompts.model_validate(asked))
        run.settings = stream.model_copy(update={"name": name})


def stream_differences(old: ListedStream, new: ListedStream) -> set[str]:
    """Settings of a stream that differ, but for its name."""
    return {key for key in ListedStream.model_fields if getattr(old, key) != getattr(new, key)} - {"name"}


def run_differences(old: RunConfig, new: RunConfig) -> set[str]:
    """Settings of the whole run that differ; those of streams are taken at once."""
    return {
        key
        for key in RunConfig.model_fields.keys() - ListedStream.model_fields.keys() | {"sinks"}
        if key != "streams" and getattr(old, key) != getattr(new, key)
    }
