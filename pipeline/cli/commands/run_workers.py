"""`saccade run` with workers: Ray actors of this machine, or of a cluster; shows how the streams are doing.

A signal ends everything, as with any run. A local Ray ends with the command, also where that is killed; on a cluster
the supervisor and the workers go on then, and the same command finds them again.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from saccade.distribution import install_command
from saccade.engine.errors import EngineError
from saccade.pipeline.cli.error_report import FAILED, take_warnings
from saccade.pipeline.cli.formatting import summary
from saccade.pipeline.cli.live_view import FileWatch
from saccade.pipeline.cli.signals import EndingSignals
from saccade.pipeline.config import RunConfig
from saccade.pipeline.control.config_file import ConfigFile
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.runtime.stats import Report
from saccade.pipeline.runtime.targets import shown_targets
from saccade.pipeline.workers.front.front import CLOSE_S, check_front
from saccade.pipeline.workers.front.reload import FrontReloader
from saccade.pipeline.workers.protocol import Message, StreamReport
from saccade.sinks import Latency, SinkError
from saccade.sources import SourceError

if TYPE_CHECKING:
    from saccade.pipeline.workers.ray_cluster import RemoteSupervisor
    from saccade.pipeline.workers.supervisor_actor import SupervisorActor

    Supervisor = SupervisorActor | RemoteSupervisor

Reports = dict[str, tuple[str, StreamReport]]
"""The newest report of each stream that a worker has, with the worker's name."""

_POLL_S = 0.1
_TABLE_S = 0.5
_LOST_S = 60.0  # without an answer of the supervisor, which Ray starts again elsewhere meanwhile
_URGENT_S = 3.0  # for the workers to end after an urgent signal; the promise is 5 s for everything
_ERRORS: dict[str, type[Exception]] = {
    "ConfigError": ConfigError,
    "EngineError": EngineError,
    "SinkError": SinkError,
    "SourceError": SourceError,
}


class _LostError(Exception):
    """The supervisor has not answered for long."""


def run_workers(settings: RunConfig, config: Path | None, overrides: Mapping[str, Any], *, quiet: bool) -> int:
    """Run what is configured on workers, to its end; returns the exit code.

    Where a supervisor runs on the cluster already, it takes what is configured now.

    Args:
        settings: all of it.
        config: the file that it comes from, which is read again when it changes; None if there is none.
        overrides: the command line's values over the file.
        quiet: show only what fails.

    Raises:
        ConfigError: if Ray is not installed, does not start or cannot be reached, or has no room.
        EngineError, SinkError, SourceError, RunFailed: as `opened_run`.
    """
    flag = "--ray"
    if settings.ray is None:
        flag = "--workers"
        # Read when Ray is imported. Its servers listen on every address: only who has the token may use them.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0")
    try:
        from saccade.pipeline.workers.ray_cluster import RayCluster
    except ImportError:
        raise ConfigError(f"{flag} needs Ray: {install_command('ray')}") from None
    check_front(settings)
    with ExitStack() as stack:
        signals = stack.enter_context(EndingSignals())
        if settings.ray is None and settings.http is None:  # nothing but the file changes what is to run
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="saccade"))
            settings = settings.model_copy(update={"ray_state": f"{folder}/desired.db"})
        cluster = stack.enter_context(RayCluster(settings))
        made = cluster.place()
        signals.catch()
        ended: Callable[[float], dict[str, Message]] = cluster.end
        try:
            supervisor = cluster.supervisor(Path.cwd())
            if cluster.local:
                ended = supervisor.close  # type: ignore[union-attr]
            _begin(supervisor, settings)
            changes = _Changes(config, overrides, supervisor)
            if not cluster.local:
                supervisor.update(_values(settings))
            made = True
            if config and not sys.stdin.isatty():  # on a terminal SIGHUP means that it was closed
                signals.reload_on_hangup()
            _follow(supervisor, settings, signals, changes, quiet=quiet)
        except _LostError:
            raise ConfigError(
                "--ray: the supervisor does not answer; streams go on, and are found by --ray again"
            ) from None
        except BaseException:
            if made:  # what another command has begun goes on
                ended(CLOSE_S)
            raise
        finished = ended(CLOSE_S if signals.urgent_at is None else _URGENT_S)
    failed = show_finished(finished, settings, quiet=quiet)
    return FAILED if failed else signals.exit_code


def show_finished(finished: Mapping[str, Message], settings: RunConfig, *, quiet: bool) -> bool:
    """Print what streams have counted, and where results are; returns whether one has failed."""
    targets = shown_targets(settings)
    stream = sys.stderr if "-" in targets else sys.stdout  # where the records are printed, nothing else is
    failed = False
    for name, message in finished.items():
        if message["error"]:
            failed = True
            print(f"saccade: {name}: {message['error']}", file=sys.stderr)
        elif message["corrupt_packets"] and not message["live"]:
            failed = True
            print(f"saccade: {name} is damaged: {message['corrupt_packets']} packets were skipped", file=sys.stderr)
        if not quiet and "frames" in message:
            print(f"{name}: {summary(_report_of(message))}", file=stream)
    for target in targets if not quiet else []:
        if target != "-":
            print(f"→ {target}", file=stream)
    return failed


class _Changes:
    """Of the configuration file, handed on to the supervisor."""

    def __init__(self, path: Path | None, overrides: Mapping[str, Any], supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._watch = FileWatch()
        self._file: ConfigFile | None = ConfigFile(path, overrides) if path else None
        front, changer = getattr(supervisor, "front", None), getattr(supervisor, "changer", None)
        if path and front and changer:  # in this process, where the routes for the file are, too
            self._file = front.reloader = FrontReloader(path, overrides, front, changer)

    def take(self, *, now: bool) -> list[str]:
        """Read the file if it has changed, or in any case `now`; returns a line for each change."""
        file = self._file
        if file is None or not (now or self._watch.due(file)):
            return []
        if isinstance(file, FrontReloader):
            return file.reload_lines()
        try:
            return self._supervisor.update(_values(file.load())) or [f"{file.path}: nothing has changed"]
        except ConfigError as error:
            return [f"{error}; everything goes on as it was"]


def _values(settings: RunConfig) -> dict[str, Any]:
    values: dict[str, Any] = settings.model_dump(mode="json", exclude_unset=True)
    if (token := os.environ.get("SACCADE_TOKEN")) and not settings.http_token:
        values["http_token"] = token
    return values


def _begin(supervisor: Supervisor, settings: RunConfig) -> None:
    _raise(supervisor.begin(_values(settings)))


def _raise(error: tuple[str, str] | None) -> None:
    if error is not None:
        raise _ERRORS.get(error[0], ConfigError)(error[1])


def _follow(
    supervisor: Supervisor, settings: RunConfig, signals: EndingSignals, changes: _Changes, *, quiet: bool
) -> None:
    """Show the streams until all have ended, or a signal comes."""
    console = Console(stderr=True)
    shown: dict[str, str] = {}
    heard_at = time.monotonic()
    with streams_table(console, quiet) as show:
        while not signals:
            status = supervisor.status()
            if status is None:
                if time.monotonic() > heard_at + _LOST_S:
                    raise _LostError
            elif not status["begun"]:  # it runs on another machine now, where it knows nothing
                _begin(supervisor, settings)
            else:
                heard_at = time.monotonic()
                _raise(status["error"])
                reports: Reports = {
                    name: (worker, StreamReport(**report)) for name, (worker, report) in status["reports"].items()
                }
                changed = changes.take(now=signals.take_reload()) if status["opened"] else []
                lines = [*status["warnings"], *take_warnings(), *changed]
                show_changes(console, reports, lines, shown, quiet=quiet)
                show(reports)
                if status["over"]:
                    return
            time.sleep(_POLL_S)


def show_changes(
    console: Console, reports: Reports, warnings: Iterable[str], shown: dict[str, str], *, quiet: bool
) -> None:
    """Print warnings, and each live stream whose state or worker is another than in `shown`, which is updated."""
    for warning in warnings:
        console.print(f"saccade: {warning}", markup=False, highlight=False, soft_wrap=True)
    for name, (worker, report) in reports.items():
        reason = f" ({report.reason})" if report.reason else ""
        line = f"{name}: {report.state}{reason}, worker {worker}"
        if report.live and not quiet and shown.get(name) != line:
            console.print(f"saccade: {line}", markup=False, highlight=False, soft_wrap=True)
        shown[name] = line


@contextmanager
def streams_table(console: Console, quiet: bool) -> Iterator[Callable[[Reports], None]]:
    """A table of the streams that is kept up to date on a terminal; nothing without one."""
    if quiet or not console.is_terminal:
        yield lambda reports: None
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        drawn_at = 0.0

        def draw(reports: Reports) -> None:
            nonlocal drawn_at
            if time.monotonic() > drawn_at + _TABLE_S:
                drawn_at = time.monotonic()
                live.update(_table_of(reports), refresh=True)

        yield draw


def _table_of(reports: Reports) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("stream", "worker", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("fps", "frames"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, (worker, report) in reports.items():
        state = f"{report.state} ({report.reason})" if report.reason else report.state
        table.add_row(Text(name), worker, Text(state), f"{report.fps:.1f}", str(report.frames))
    return table


def _report_of(message: Message) -> Report:
    keys = ("frames", "objects", "elapsed_s", "drops", "corrupt_packets")
    return Report(latency=Latency(**message["latency"]), **{key: message[key] for key in keys})
