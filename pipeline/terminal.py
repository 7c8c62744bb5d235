"""What a person sees: progress while something goes on, and what came of it. Knows reports, not how they come about."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from pipeline.run import Run
from pipeline.stats import Report

if TYPE_CHECKING:
    from engine.evaluation import Evaluation
    from engine.golden import Quantity

POLL_S = 0.1

LOST = {
    "lost": "lost or damaged on the way",
    "full": "dropped because the model was busy",
    "closed": "read but not looked at",
    "sink full": "dropped because a sink was busy",
    "sink closed": "not taken by a sink",
}
"""Cause of a drop as in `Report.drops` → what to tell."""


def follow(run: Run, *, quiet: bool) -> bool:
    """Start `run` and show its progress until it ends; Ctrl-C or SIGTERM ends it early, and a second one at once.

    What becomes of a live source's connection is told in a line each time it changes, with or without a terminal.

    Args:
        run: the run, not yet started.
        quiet: show nothing.

    Returns:
        True if it was ended early by a signal.
    """
    figures = "{task.fields[fps]:.1f} fps · {task.fields[ms]:.0f} ms a frame · {task.fields[objects]} objects"
    bar = _bar(TextColumn("{task.description}" + figures), quiet=quiet)
    task = bar.add_task("", total=run.expected_frames, fps=0.0, ms=0.0, objects=0)
    with _signals() as caught, bar:
        run.start()
        stopping = False
        told: str | None = None
        while not run.join(POLL_S):
            connection = run.connection
            if connection and connection != told and not quiet and not stopping:
                told = connection
                bar.console.print(f"saccade: {connection}", markup=False, highlight=False, soft_wrap=True)
            report = run.report()
            live = f"{connection.partition(',')[0]} · " if connection else ""
            bar.update(
                task,
                description=live,
                completed=report.frames,
                fps=report.fps,
                ms=report.model_ms,
                objects=report.objects,
            )
            if caught and not stopping:
                stopping = True
                run.stop()
        return bool(caught)


@contextmanager
def counting() -> Iterator[Callable[[int, int], None]]:
    """Show the progress of what calls the function yielded with (done, all)."""
    bar = _bar()
    task = bar.add_task("")
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _bar(*figures: ProgressColumn, quiet: bool = False) -> Progress:
    """A progress bar on standard error that leaves nothing behind, and is not there where no terminal is."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), *figures, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)


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


def summary(report: Report, written: Sequence[str]) -> str:
    """A few lines on what was done and where it went."""
    latency = report.latency
    lines = [
        f"{report.frames} frames in {report.elapsed_s:.1f} s: {report.fps:.1f} fps, {report.model_ms:.1f} ms a frame "
        f"(prefill {latency.prefill:.1f}, decode {latency.decode_tokens:.1f}), {report.objects} objects"
    ]
    lost = [f"{count} frames {LOST[cause]}" for cause, count in report.drops.items()]
    if report.corrupt_packets:
        lost.append(f"{report.corrupt_packets} damaged packets skipped")
    if lost:
        lines.append(", ".join(lost))
    lines += [f"→ {path}" for path in written]
    return "\n".join(lines)


def evaluation_table(scores: Evaluation) -> str:
    """The scores of every class, and the means, in percent."""

    def percent(value: float | None) -> str:
        return "–" if value is None else f"{100 * value:.1f}"

    def row(name: str, boxes: object, *rates: object) -> str:
        return f"{name:<16}{boxes:>8}" + "".join(f"{rate:>11}" for rate in rates)

    lines = [row("class", "boxes", "AP50", "AP50:95", "precision", "recall", "empty")]
    for one in scores.classes:
        rates = (one.ap50, one.ap, one.precision, one.recall, one.empty)
        lines.append(row(one.name, one.boxes, *map(percent, rates)))
    boxes = sum(one.boxes for one in scores.classes)
    lines.append(row("all", boxes, percent(scores.ap50), percent(scores.ap), "", "", percent(scores.empty)))
    return "\n".join([*lines, f"{scores.pictures} pictures; in percent; precision, recall and empty at conf 0.5"])


def golden_table(quantities: Sequence[Quantity]) -> str:
    """The largest disagreement of each quantity."""
    lines = [f"{'quantity':<20}{'compared':>9}{'largest':>12}{'allowed':>12}"]
    for one in quantities:
        verdict = "ok" if one.ok else f"DISAGREES at {one.where}"
        lines.append(f"{one.name:<20}{one.compared:>9}{one.worst:>12.3g}{one.tolerance:>12.3g}  {verdict}")
    return "\n".join(lines) if quantities else "nothing was compared"
