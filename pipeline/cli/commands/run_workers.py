"""`saccade run --workers N`: starts the workers, shows how the streams are doing, and ends them when a signal comes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from saccade.pipeline.cli.error_report import FAILED, take_warnings
from saccade.pipeline.cli.formatting import summary
from saccade.pipeline.cli.live_view import FileWatch
from saccade.pipeline.cli.signals import EndingSignals
from saccade.pipeline.config import RunConfig
from saccade.pipeline.runtime.stats import Report
from saccade.pipeline.runtime.targets import shown_targets
from saccade.pipeline.workers.front.front import CLOSE_S, Front, opened_front
from saccade.pipeline.workers.front.reload import FrontReloader
from saccade.pipeline.workers.protocol import Message, StreamReport
from saccade.sinks import Latency

Reports = dict[str, tuple[str, StreamReport]]
"""The newest report of each stream that a worker has, with the worker's name."""

_POLL_S = 0.1
_TABLE_S = 0.5
_URGENT_S = 3.0  # for the workers to end after an urgent signal; the promise is 5 s for everything


def run_workers(settings: RunConfig, config: Path | None, overrides: Mapping[str, Any], *, quiet: bool) -> int:
    """Run what is configured on workers, to its end; returns the exit code.

    Args:
        settings: all of it.
        config: the file that it comes from, which is read anew when it changes; None if there is none.
        overrides: the command line's values over the file.
        quiet: show only what fails.

    Raises:
        ConfigError, EngineError, SinkError, SourceError, RunFailed: as `opened_run`.
    """
    with EndingSignals() as signals, opened_front(settings) as front:
        reloader = FrontReloader(config, overrides, settings, front) if config else None
        front.reloader = reloader
        if reloader and not sys.stdin.isatty():  # on a terminal SIGHUP means that it was closed
            signals.reload_on_hangup()
        signals.catch()
        _follow(front, signals, reloader, quiet=quiet)
        front.close(CLOSE_S if signals.urgent_at is None else _URGENT_S)
        finished = front.supervisor.finished()
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


def _follow(front: Front, signals: EndingSignals, reloader: FrontReloader | None, *, quiet: bool) -> None:
    """Show the streams until all have ended, or a signal comes."""
    console = Console(stderr=True)
    shown: dict[str, str] = {}
    watch = FileWatch()
    front.start()
    with streams_table(console, quiet) as show:
        while not signals:
            opened = front.check()
            reports = _reports(front)
            changes: list[str] = []
            if reloader is not None and opened and (signals.take_reload() or watch.due(reloader)):
                changes = reloader.reload_lines()
            show_changes(console, reports, [*take_warnings(), *changes], shown, quiet=quiet)
            show(reports)
            streams = front.supervisor.streams().values()
            if opened and not front.endless and all(stream.phase == "failed" for stream in streams):
                break
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


def _reports(front: Front) -> Reports:
    """The newest report of each stream that a worker has, with the worker's name."""
    return {
        one.name: (seat.name, one)
        for seat in front.supervisor.seats()
        if seat.report is not None
        for one in seat.report.streams
    }


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
