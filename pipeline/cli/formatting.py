"""Text for terminals: progress bars, summaries and tables of reports. Knows reports, not what makes them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TimeRemainingColumn

from saccade.pipeline.runtime.stats import Report

if TYPE_CHECKING:
    from saccade.engine.golden.quantity import Quantity

LOST = {
    "lost": "lost or damaged on the way",
    "full": "dropped because the model was busy",
    "max_fps": "left out, as they were more than max_fps",
    "deadline": "dropped because the result would have come too late",
    "closed": "read but not processed",
    "failed": "that the model or a stage failed on",
    "gate": "not admitted by a gate",
    "sink full": "dropped because a sink was busy",
    "sink closed": "not taken by a sink",
}
"""Cause of a drop as in `Report.drops` → its wording in the summary."""


@contextmanager
def counting() -> Iterator[Callable[[int, int], None]]:
    """Show the progress of what calls the function yielded with (done, all)."""
    bar = progress_bar()
    task = bar.add_task("")
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total)


def show_preparation(done: int, total: int) -> None:
    """Show on a terminal how far a GPU is prepared, in a line that is removed at the end."""
    if sys.stderr.isatty():
        line = f"preparing the GPU: {done} of {total}" if done < total else ""
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def progress_bar(*figures: ProgressColumn, console: Console | None = None) -> Progress:
    """A progress bar on standard error, removed at its end, and absent where there is no terminal."""
    console = console or Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), *figures, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def summary(report: Report) -> str:
    """A line or two on what was done."""
    latency = report.latency
    lines = [
        f"{report.frames} frames in {report.elapsed_s:.1f} s: {report.fps:.1f} fps, {report.model_ms:.1f} ms a frame "
        f"(prefill {latency.prefill:.1f}, decode {latency.decode_tokens:.1f}), {report.objects} objects"
        if report.frames
        else "no frames"
    ]
    lost = [f"{count} frames {LOST[cause]}" for cause, count in report.drops.items()]
    if report.corrupt_packets:
        lost.append(f"{report.corrupt_packets} damaged packets skipped")
    if lost:
        lines.append(", ".join(lost))
    return "\n".join(lines)


def golden_table(quantities: Sequence[Quantity]) -> str:
    """How many of each quantity differ, and by how much at most."""
    from saccade.engine.golden.quantity import ANY_NUMBER

    lines = [f"{'quantity':<20}{'compared':>9}{'differ':>8}{'largest':>12}{'allowed':>12}"]
    for one in quantities:
        shown = one.tolerance >= ANY_NUMBER
        allowed = "any" if shown else f"{one.tolerance:.3g}"
        verdict = f"DISAGREES at {one.where}" if not one.ok else f"at {one.where}" if shown and one.where else "ok"
        lines.append(f"{one.name:<20}{one.compared:>9}{one.differing:>8}{one.worst:>12.3g}{allowed:>12}  {verdict}")
    if any(one.name == "crops" and not one.ok for one in quantities):
        from PIL import __version__ as pillow

        lines.append(f"Pillow {pillow} has cut these crops; its releases resize in two orders: try 13 or later, or 12")
    return "\n".join(lines) if quantities else "nothing was compared"
