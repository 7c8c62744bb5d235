"""What a person sees of a session while it runs: a bar for one file, else a table, and a line for what changes.

Ends it when told by Ctrl-C or SIGTERM. Knows how streams are doing, not how they come about.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.live import Live
from rich.progress import TextColumn
from rich.table import Table
from rich.text import Text

from saccade.pipeline.cli.error_report import take_warnings
from saccade.pipeline.cli.formatting import progress_bar
from saccade.pipeline.core.stream_manager import StreamStatus, status_of
from saccade.pipeline.core.stream_run import Run
from saccade.pipeline.session import Session

POLL_S = 0.1
_TABLE_S = 0.5
_END_S = 30.0  # for the sinks to take what they were given, when told to end
_ENGINE_S = 120.0  # for a large model to finish the frames that it has

Show = Callable[[Sequence[StreamStatus]], None]


def follow(session: Session, *, quiet: bool) -> tuple[list[Run], bool]:
    """Start `session` and show how it goes until it ends; Ctrl-C or SIGTERM ends it early, and a second one at once.

    What becomes of a live source's connection is told in a line each time it changes, with or without a terminal; and
    warnings, such as of a broker that cannot be reached, as they come.

    Args:
        session: not yet started.
        quiet: show only what fails.

    Returns:
        The runs that it was configured with, and whether it was ended early by a signal.
    """
    console = Console(stderr=True)
    told: dict[str, str | None] = {}
    stopped_at: float | None = None

    def tell(line: str) -> None:
        console.print(f"saccade: {line}", markup=False, highlight=False, soft_wrap=True)

    with _signals() as caught:
        runs = session.start()
        with _view(console, runs, session.endless, quiet) as show:
            while True:
                over = not session.streams.names and all(run.ended for run in runs)
                statuses = {status.name: status for status in (*map(status_of, runs), *session.streams.snapshot())}
                for warning in take_warnings():
                    tell(warning)
                for gone in told.keys() - statuses.keys():
                    del told[gone]
                for name, status in statuses.items():
                    line = _line(status, quiet, alone=len(runs) == 1 and name == runs[0].name)
                    if line == told.get(name):
                        continue
                    told[name] = line
                    if line and (stopped_at is None or status.state == "failed"):
                        tell(line)
                show(list(statuses.values()))
                if over and (caught or not session.endless):
                    break
                if caught and stopped_at is None:
                    stopped_at = time.monotonic()
                    session.streams.stop()
                going = next((run for run in runs if not run.ended), None)
                patience_s = _ENGINE_S if going and going.waiting_s else _END_S
                if stopped_at is not None and time.monotonic() > stopped_at + patience_s:
                    break  # closing the session tells which stream does not end
                if going is None:
                    time.sleep(POLL_S)
                else:
                    going.join(POLL_S)
        return runs, bool(caught)


def _line(status: StreamStatus, quiet: bool, *, alone: bool) -> str | None:
    """What is to be told of a stream, if anything."""
    if status.state == "failed":
        return None if alone else f"{status.name}: {status.reason}"  # of one alone the exit tells
    if quiet or not (status.live or status.state == "stuck") or status.state == "ended":
        return None
    reason = f" ({status.reason})" if status.reason else ""
    return f"{status.name}: {status.state}{reason}" + (f", {status.detail}" if status.detail else "")


@contextmanager
def _view(console: Console, runs: Sequence[Run], endless: bool, quiet: bool) -> Iterator[Show]:
    """What is kept up to date on a terminal, and leaves nothing behind; nothing where there is none."""
    if quiet or not console.is_terminal:
        yield lambda statuses: None
    elif len(runs) == 1 and not endless and not runs[0].source.info.live:
        figures = "{task.fields[fps]:.1f} fps · {task.fields[ms]:.0f} ms a frame · {task.fields[objects]} objects"
        bar = progress_bar(TextColumn(figures), console=console)
        task = bar.add_task("", total=runs[0].expected_frames, fps=0.0, ms=0.0, objects=0)

        def show(statuses: Sequence[StreamStatus]) -> None:
            report = statuses[0].report
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
    """The streams as a table: one a line."""
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


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM in the list yielded; the second of a kind ends the process as it would have anyway."""
    caught: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        # Only this: the handler interrupts the main thread anywhere, so taking a lock here could be for ever.
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
