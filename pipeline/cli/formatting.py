"""Formats text for terminals: progress bars, summaries and tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TimeRemainingColumn

from saccade.pipeline.runtime.stats import Report

if TYPE_CHECKING:
    from saccade.engine.golden.check_engine import Quantity

LOST = {
    "lost": "lost or damaged in transit",
    "full": "dropped because the model was busy",
    "max_fps": "skipped by max_fps",
    "deadline": "dropped because the deadline had passed",
    "closed": "read but not processed",
    "failed": "dropped because the model or a stage failed",
    "gate": "dropped by a gate",
    "sink full": "dropped because a sink was busy",
    "sink closed": "dropped because a sink was closed",
}
"""For each cause in `Report.drops`, its text in the summary."""


@contextmanager
def counting() -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar. Yield a function (done, total) that updates the bar."""
    bar = progress_bar()
    task = bar.add_task("")
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_preparation(done: int, total: int) -> None:
    """Show the progress of GPU preparation (warm-up) in a terminal.

    The line disappears when the preparation is complete.
    """
    if sys.stderr.isatty():
        line = f"preparing the GPU: {done} of {total}" if done < total else ""
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def progress_bar(*figures: ProgressColumn, console: Console | None = None) -> Progress:
    """Return a progress bar. It disappears at the end, and is hidden if the console is not a terminal."""
    console = console or Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), *figures, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def summary(report: Report) -> str:
    """Return a summary of a finished run: speed, number of objects and dropped frames, in one or two lines."""
    latency = report.latency
    lines = [
        f"{_counted(report.frames, 'frame')} in {report.elapsed_s:.1f} s: {report.fps:.1f} fps, "
        f"{report.model_ms:.1f} ms a frame (prefill {latency.prefill:.1f}, decode {latency.decode_tokens:.1f}), "
        f"{_counted(report.objects, 'object')}"
        if report.frames
        else "no frames"
    ]
    if report.events is not None:
        lines[0] += f", {_counted(report.events, 'event')}"
    lost = [f"{_counted(count, 'frame')} {LOST[cause]}" for cause, count in report.drops.items()]
    if report.corrupt_packets:
        lost.append(f"{_counted(report.corrupt_packets, 'damaged packet')} skipped")
    if lost:
        lines.append(", ".join(lost))
    return "\n".join(lines)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def golden_table(quantities: Sequence[Quantity]) -> str:
    """Return a table that compares the engine with the reference implementation of the model.

    For each compared quantity, the table lists the number of differing values and the largest difference.
    """
    from saccade.engine.golden.check_engine import ANY_NUMBER

    lines = [f"{'quantity':<20}{'compared':>9}{'differ':>8}{'largest':>12}{'allowed':>12}"]
    for one in quantities:
        shown = one.tolerance >= ANY_NUMBER
        allowed = "any" if shown else f"{one.tolerance:.3g}"
        verdict = f"DISAGREES at {one.where}" if not one.ok else f"at {one.where}" if shown and one.where else "ok"
        lines.append(f"{one.name:<20}{one.compared:>9}{one.differing:>8}{one.worst:>12.3g}{allowed:>12}  {verdict}")
    if any(one.name == "crops" and not one.ok for one in quantities):
        from PIL import __version__ as pillow

        lines.append(
            f"Pillow {pillow} resized these crops; releases resize differently: try Pillow 13 or later, or Pillow 12"
        )
    return "\n".join(lines) if quantities else "nothing was compared"
