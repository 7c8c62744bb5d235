"""What a person sees while a run goes on and when it is over. Knows reports; nothing of how they come about."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipeline.run import Report, Run

POLL_S = 0.1

LOST = {
    "full": "dropped because the model was busy",
    "closed": "read but not looked at",
    "sink full": "dropped because a sink was busy",
    "sink closed": "not taken by a sink",
}
"""Cause of a drop as in `Report.drops` → what to tell."""


def follow(run: Run, *, quiet: bool) -> bool:
    """Start `run` and show its progress until it ends; Ctrl-C or SIGTERM ends it early, and a second one at once.

    Args:
        run: the run, not yet started.
        quiet: show nothing.

    Returns:
        True if it was ended early by a signal.
    """
    console = Console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[fps]:.1f} fps · {task.fields[ms]:.0f} ms a frame · {task.fields[objects]} objects"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
    task = bar.add_task("", total=run.expected_frames, fps=0.0, ms=0.0, objects=0)
    with _signals() as caught, bar:
        run.start()
        stopping = False
        while not run.join(POLL_S):
            report = run.report()
            bar.update(task, completed=report.frames, fps=report.fps, ms=report.model_ms, objects=report.objects)
            if caught and not stopping:
                stopping = True
                run.stop()
        return bool(caught)


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
