"""Shows a run in a terminal: a progress bar for a single file, otherwise a table of the streams.

State changes of streams and warnings are printed as lines. A signal stops the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.progress import TextColumn
from rich.table import Table
from rich.text import Text

from saccade.pipeline.cli.error_report import take_warnings
from saccade.pipeline.cli.formatting import progress_bar
from saccade.pipeline.cli.signals import EndingSignals
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.runtime.streams import StreamStatus

_POLL_S = 0.1
_TABLE_S = 0.5
_URGENT_ENGINE_S = 2.0  # for the engine after an urgent signal, which leaves the sinks as much again
_URGENT_END_S = 4.0

Show = Callable[[Sequence[StreamStatus]], None]


def follow(controller: Controller, signals: EndingSignals, *, quiet: bool) -> None:
    """Run the streams of a controller and show them, until all streams have ended or a signal stops the run.

    Args:
        controller: the controller, not yet started. Its configuration file is reloaded after a change or on SIGHUP. At
            the end, `controller.finished` contains the result of each stream.
        signals: signals to catch. After the first signal, the engine completes its frames and every file is closed.
            After SIGTERM or a second SIGINT, the engine has 2 s to complete its frames.
        quiet: show only errors.
    """
    console = Console(stderr=True)
    shown: dict[str, str | None] = {}
    runner, file = controller.runner, controller.file
    reloading: threading.Thread | None = None
    stopped_at: float | None = None

    def show_line(line: str) -> None:
        console.print(f"saccade: {line}", markup=False, highlight=False, soft_wrap=True)

    def reload() -> None:
        for line in controller.reload_lines():
            show_line(line)

    signals.catch()
    controller.start()
    names = list(controller.config.named())
    only = names[0] if len(names) == 1 else None
    alone = _statuses(controller).get(only) if only and not controller.endless else None
    with _view(console, alone, quiet) as show:
        while True:
            busy = reloading is not None and reloading.is_alive()
            over = runner.idle and not busy
            statuses = _statuses(controller)
            for warning in take_warnings():
                show_line(warning)
            if file is not None and not busy and not signals and (signals.take_reload() or file.due()):
                # In a thread: it may open cameras, or load another model.
                reloading = threading.Thread(target=reload, name="saccade reload", daemon=True)
                reloading.start()
            for removed in shown.keys() - statuses.keys():
                del shown[removed]
            for name, status in statuses.items():
                line = _line(status, quiet, alone=name == only)
                if line == shown.get(name):
                    continue
                shown[name] = line
                if line and (stopped_at is None or status.state == "failed"):
                    show_line(line)
            show(list(statuses.values()))
            if over and (signals or not controller.endless):
                break
            if signals:
                now = time.monotonic()
                stopped_at = stopped_at or now
                urgent_s = 0.0 if signals.urgent_at is None else now - signals.urgent_at
                limit_s = runner.stop(abandon=urgent_s > _URGENT_ENGINE_S)
                if now >= stopped_at + limit_s or urgent_s > _URGENT_END_S:
                    break  # closing the streams reports the stream that hangs
            time.sleep(_POLL_S)


def _statuses(controller: Controller) -> dict[str, StreamStatus]:
    ended = {name: one.status for name, one in controller.finished.copy().items()}
    return ended | {status.name: status for status in controller.runner.statuses()}


def _line(status: StreamStatus, quiet: bool, *, alone: bool) -> str | None:
    """Return the line to print when the state of a stream has changed. Return None if no line should be printed."""
    if status.state == "failed":
        return None if alone else f"{status.name}: {status.reason}"  # with a single stream, the exit message reports it
    if quiet or not (status.live or status.state == "stuck") or status.state == "ended":
        return None
    reason = f" ({status.reason})" if status.reason else ""
    mark = ": " if reason else ", "
    where = f", worker {status.worker}" if status.worker else ""
    return f"{status.name}: {status.state}{reason}" + (f"{mark}{status.detail}" if status.detail else "") + where


@contextmanager
def _view(console: Console, alone: StreamStatus | None, quiet: bool) -> Iterator[Show]:
    """Show a progress bar for a single file, otherwise a table, until the `with` block ends.

    If there is no terminal, show nothing.
    """
    if quiet or not console.is_terminal:
        yield lambda statuses: None
    elif alone is not None and not alone.live:
        figures = "{task.fields[fps]:.1f} fps · {task.fields[ms]:.0f} ms a frame · {task.fields[objects]} objects"
        bar = progress_bar(TextColumn(figures), console=console)
        task = bar.add_task("", total=alone.frames, fps=0.0, ms=0.0, objects=0)

        def show(statuses: Sequence[StreamStatus]) -> None:
            for report in (status.report for status in statuses[:1]):
                bar.update(task, completed=report.frames, fps=report.fps, ms=report.model_ms, objects=report.objects)

        with bar:
            yield show
    else:
        with Live(console=console, auto_refresh=False, transient=True) as live:
            drawn_at = 0.0

            def draw(statuses: Sequence[StreamStatus]) -> None:
                nonlocal drawn_at
                if time.monotonic() > drawn_at + _TABLE_S:
                    drawn_at = time.monotonic()
                    live.update(table_of(statuses), refresh=True)

            yield draw


def table_of(statuses: Sequence[StreamStatus]) -> Table:
    """Return a table with one row per stream, for a terminal."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("stream", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("fps", "age", "dropped", "p50", "p99", "objects"):
        table.add_column(heading, justify="right", no_wrap=True)
    for status in statuses:
        now = status.report.recent
        state = f"{status.state} ({status.reason})" if status.reason else status.state
        over = status.state in ("ended", "failed")
        table.add_row(
            Text(status.name),
            Text(state, style="green" if status.ok and not over else "dim" if status.ok else "red"),
            f"{status.report.fps if over else now.fps:.1f}",
            "" if over else _time(now.age_ms),
            str(sum(status.report.drops.values())),
            _time(now.p50_ms),
            _time(now.p99_ms),
            str(status.report.objects if over else now.objects),
        )
    return table


def _time(ms: float | None) -> str:
    if ms is None:
        return "–"
    return f"{ms:.0f} ms" if ms < 1000 else f"{ms / 1000:.1f} s"
