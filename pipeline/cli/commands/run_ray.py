"""`saccade run --ray ADDRESS`: has a supervisor on a Ray cluster run the streams, and shows how they are doing.

A signal ends everything, as with any run. If this command is killed, the supervisor and the workers go on; the same
command finds them again.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from saccade.distribution import install_command
from saccade.engine.errors import EngineError
from saccade.pipeline.cli.commands.run_workers import Reports, show_changes, show_finished, streams_table
from saccade.pipeline.cli.error_report import FAILED
from saccade.pipeline.cli.live_view import FileWatch
from saccade.pipeline.cli.signals import EndingSignals
from saccade.pipeline.config import RunConfig
from saccade.pipeline.config.file import load
from saccade.pipeline.control.config_file import FileStamp
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.workers.front.front import CLOSE_S
from saccade.pipeline.workers.protocol import Message, StreamReport
from saccade.sinks import SinkError
from saccade.sources import SourceError

_POLL_S = 0.3
_LOST_S = 60.0  # without an answer of the supervisor, which Ray starts again elsewhere meanwhile
_URGENT_S = 3.0
_ERRORS: dict[str, type[Exception]] = {
    "ConfigError": ConfigError,
    "EngineError": EngineError,
    "SinkError": SinkError,
    "SourceError": SourceError,
}


class _LostError(Exception):
    """The supervisor has not answered for long."""


def run_on_ray(settings: RunConfig, config: Path | None, overrides: Mapping[str, Any], *, quiet: bool) -> int:
    """Run what is configured on a cluster, to its end; returns the exit code.

    Arguments are as in `run_workers`. Where a supervisor runs already, it takes what is configured now.

    Raises:
        ConfigError: if Ray is not installed, the cluster cannot be reached or has no room.
        EngineError, SinkError, SourceError: as `opened_run`.
    """
    assert settings.ray is not None
    try:
        from saccade.pipeline.workers.cluster.ray_cluster import RayCluster
    except ImportError:
        raise ConfigError(f"--ray needs Ray: {install_command('ray')}") from None
    with EndingSignals() as signals, RayCluster(settings.ray) as cluster:
        made = cluster.place(settings.workers, settings.ray_cpus, settings.ray_gpus)
        signals.catch()
        try:
            supervisor = cluster.supervisor(Path.cwd(), Path(settings.ray_state).absolute())
            changes = _Changes(config, overrides, cluster, supervisor)
            _begin(cluster, supervisor, settings)
            cluster.ask(supervisor.update, _values(settings))
            made = True
            if config and not sys.stdin.isatty():  # on a terminal SIGHUP means that it was closed
                signals.reload_on_hangup()
            _follow(cluster, supervisor, settings, signals, changes, quiet=quiet)
        except _LostError:
            raise ConfigError(
                "--ray: the supervisor does not answer; streams go on, and are found by --ray again"
            ) from None
        except Exception:
            if made:  # what another command has begun goes on
                cluster.end(CLOSE_S)
            raise
        finished: dict[str, Message] = cluster.end(CLOSE_S if signals.urgent_at is None else _URGENT_S)
    failed = show_finished(finished, settings, quiet=quiet)
    return FAILED if failed else signals.exit_code


class _Changes:
    """Of the configuration file, handed on to the supervisor."""

    def __init__(self, path: Path | None, overrides: Mapping[str, Any], cluster: Any, supervisor: Any) -> None:
        self._path, self._overrides = path, dict(overrides)
        self._cluster, self._supervisor = cluster, supervisor
        self._stamp = FileStamp(path) if path else None
        self._watch = FileWatch()

    def take(self, *, now: bool) -> list[str]:
        """Read the file if it has changed, or in any case `now`; returns a line for each change."""
        if self._path is None or self._stamp is None or not (now or self._watch.due(self._stamp)):
            return []
        self._stamp.take()
        try:
            wanted = load(self._path, self._overrides)
            lines: list[str] = self._cluster.ask(self._supervisor.update, _values(wanted))
        except ConfigError as error:
            return [f"{error}; everything goes on as it was"]
        return lines or [f"{self._path}: nothing has changed"]


def _values(settings: RunConfig) -> dict[str, Any]:
    values: dict[str, Any] = settings.model_dump(mode="json", exclude_unset=True)
    if (token := os.environ.get("SACCADE_TOKEN")) and not settings.http_token:
        values["http_token"] = token
    return values


def _begin(cluster: Any, supervisor: Any, settings: RunConfig) -> None:
    _raise(cluster.ask(supervisor.begin, _values(settings)))


def _raise(error: tuple[str, str] | None) -> None:
    if error is not None:
        raise _ERRORS.get(error[0], ConfigError)(error[1])


def _follow(
    cluster: Any, supervisor: Any, settings: RunConfig, signals: EndingSignals, changes: _Changes, *, quiet: bool
) -> None:
    """Show the streams until all have ended, or a signal comes."""
    console = Console(stderr=True)
    shown: dict[str, str] = {}
    heard_at = time.monotonic()
    with streams_table(console, quiet) as show:
        while not signals:
            status = cluster.ask_if_there(supervisor.status)
            if status is None:
                if time.monotonic() > heard_at + _LOST_S:
                    raise _LostError
            elif not status["begun"]:  # it runs on another machine now, where it knows nothing
                _begin(cluster, supervisor, settings)
            else:
                heard_at = time.monotonic()
                _raise(status["error"])
                reports: Reports = {
                    name: (worker, StreamReport(**report)) for name, (worker, report) in status["reports"].items()
                }
                lines = [*status["warnings"], *changes.take(now=signals.take_reload())]
                show_changes(console, reports, lines, shown, quiet=quiet)
                show(reports)
                if status["over"]:
                    return
            time.sleep(_POLL_S)
