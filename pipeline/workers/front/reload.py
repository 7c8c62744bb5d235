"""The configuration file of a run with workers: read anew when it changes. Knows no signals and no terminal.

Only changed streams restart, and what concerns workers themselves, such as the model, has them replaced one after
another (`rolling`); a file with a mistake changes nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from saccade.pipeline.config import ListedStream, RunConfig
from saccade.pipeline.control.config_file import ConfigFile
from saccade.pipeline.control.local import ERRORS
from saccade.pipeline.control.plan import differences, later
from saccade.pipeline.errors import ConfigError, StreamError
from saccade.pipeline.runtime.targets import targets_of
from saccade.pipeline.workers.front.front import Front, streams_of, worker_values
from saccade.pipeline.workers.rolling import RollError
from saccade.pipeline.workers.supervisor import Supervisor

log = logging.getLogger(__name__)


class FrontReloader(ConfigFile):
    """The file of a front. Every method is callable from any thread.

    Args:
        path: of the file.
        overrides: the command line's values over it.
        front: runs it.
        changer: has it run by another configuration.
    """

    def __init__(self, path: Path, overrides: Mapping[str, Any], front: Front, changer: Changer) -> None:
        super().__init__(path, overrides)
        self._changer = changer
        self._front = front
        self._one = threading.Lock()

    def reload(self) -> list[str]:
        """Read the file and run what it says now; returns a line for each change, or that there is none.

        Raises:
            ConfigError: if that cannot be; everything goes on as it was.
        """
        with self._one:
            try:
                return self._changer.apply(self.load()) or [f"{self.path}: nothing has changed"]
            except ERRORS as error:
                raise ConfigError(f"{error}; everything goes on as it was") from None

    def reload_lines(self) -> list[str]:
        """`reload` for a terminal: a line for each change, or for why there is none."""
        try:
            return self.reload()
        except ConfigError as error:
            return [str(error)]

    def save(self, wanted: RunConfig | None = None) -> str:  # type: ignore[override]
        """Write what the streams run by into the file; returns its name.

        Raises:
            ConfigError: if it cannot be written.
        """
        with self._one:
            streams = [ListedStream.model_validate(one.config) for one in self._front.supervisor.streams().values()]
            super().save(self._changer.config.resolved().with_streams(streams))
            self._changer.config = self.load()
            return self.path.name


class Changer:
    """Has a front run by other configurations, one after another. Methods are callable from any thread.

    Attributes:
        config: by which it runs.

    Args:
        front: whose streams and workers.
        config: what it was opened from.
        on_taken: called, in some thread, with each configuration that it runs by from then on.
    """

    def __init__(
        self, front: Front, config: RunConfig, on_taken: Callable[[RunConfig], None] = lambda new: None
    ) -> None:
        self.config = config
        self._front = front
        self._on_taken = on_taken
        self._lock = threading.Lock()
        self._rolling = False
        self._next: RunConfig | None = None

    @property
    def rolling(self) -> bool:
        """Whether workers are being replaced."""
        return self._rolling

    def apply(self, wanted: RunConfig) -> list[str]:
        """Run by another; returns a line for each change. Where workers are replaced, the rest is logged later."""
        with self._lock:
            if self._rolling:
                self._next = wanted
                return ["workers are being replaced; this is taken when that is done"]
            keys = rolled_keys(self.config, wanted)
            if not keys:
                lines = change_streams(self._front.supervisor, self.config, wanted)
                self.config = wanted
                self._on_taken(wanted)
                return lines
            self._rolling = True
        threading.Thread(target=self._roll, args=(wanted, keys), name="saccade roll", daemon=True).start()
        return [f"{', '.join(keys)}: changed; workers are replaced one after another, and streams go on"]

    def _roll(self, wanted: RunConfig, keys: list[str]) -> None:
        try:
            before, after = streams_of(self.config)[0], streams_of(wanted)[0]
            changed = {
                name: stream.model_dump(mode="json", exclude_unset=True) | {"name": name}
                for name, stream in after.items()
                if name in before and differences(before[name], stream)
            }
            self._front.replace_workers(wanted, changed)
            lines = change_streams(self._front.supervisor, self.config, wanted, moved=changed)
            self.config = wanted
            self._on_taken(wanted)
            lines.append(f"every worker was replaced, with other {', '.join(keys)}")
        except RollError as error:
            lines = [f"{error}; everything goes on as it was"]
        except Exception:
            log.exception("workers could not be replaced")
            lines = []
        with self._lock:
            self._rolling, following, self._next = False, self._next, None
        if self._front.supervisor.stopping:
            return
        for line in [*lines, *(self.apply(following) if following else [])]:
            log.warning("%s", line)


def rolled_keys(config: RunConfig, wanted: RunConfig) -> list[str]:
    """The settings that differ and concern workers: another takes each one's place."""
    before, after = worker_values(config), worker_values(wanted)
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def change_streams(
    supervisor: Supervisor, config: RunConfig, wanted: RunConfig, moved: Collection[str] = ()
) -> list[str]:
    """Run what another configuration says instead of `config`; returns a line for each change.

    Args:
        supervisor: runs the streams.
        config: by which they run.
        wanted: by which they are to.
        moved: names of those that have their new configuration already.
    """
    before, after = streams_of(config)[0], streams_of(wanted)[0]
    lines = []
    for name in sorted(before.keys() - after.keys()):
        try:
            supervisor.close_stream(name)
            lines.append(f"{name}: removed")
        except StreamError:
            pass  # it has ended before
    for name, stream in after.items():
        values = stream.model_dump(mode="json", exclude_unset=True)
        changed = sorted(differences(before[name], stream)) if name in before else []
        try:
            if name not in before:
                supervisor.open(values, name, or_similar=False)
                lines.append(f"{name}: added")
            elif changed:
                if name not in moved:
                    _warn_of(name, supervisor.restart(name, values))
                lines.append(f"{name}: started anew, with other {', '.join(changed)}")
        except StreamError as error:
            lines.append(f"{name}: {error}")
    held = set(later(config, wanted)) - set(rolled_keys(config, wanted))
    if _shared(config) != _shared(wanted):
        held.add("sinks")
    if held:
        lines.append(f"{', '.join(sorted(held))}: changed in the file, and taken when saccade is started again")
    return lines


def _shared(config: RunConfig) -> list[str]:
    return [target.text for target in targets_of(config) if target.flag == "--sink" and not target.each]


def _warn_of(name: str, opening: Future[str]) -> None:
    def done(future: Future[str]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            log.warning("%s: %s; it goes on as it was", name, error)

    opening.add_done_callback(done)
