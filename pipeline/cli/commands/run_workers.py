"""`saccade run` with workers: shows how the streams are doing, and sums up in the end.

A signal ends everything, as with any run. A local Ray ends with the command, also where that is killed; on a cluster
the workers go on then, and the same command finds them again.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from rich.console import Console

from saccade.pipeline.cli.error_report import FAILED, take_warnings
from saccade.pipeline.cli.formatting import show_preparation, summary
from saccade.pipeline.cli.live_view import POLL_S, FileWatch, view
from saccade.pipeline.cli.signals import EndingSignals
from saccade.pipeline.config import RunConfig
from saccade.pipeline.control.config_file import ConfigFile
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.run import opened_run
from saccade.pipeline.runtime.streams import StreamStatus
from saccade.pipeline.runtime.targets import shown_targets

if TYPE_CHECKING:
    from saccade.pipeline.control.ray import RayWorkers


def run_workers(settings: RunConfig, file: ConfigFile | None, *, quiet: bool) -> int:
    """Run what is configured on workers, to its end; returns the exit code.

    Args:
        settings: all of it.
        file: that it comes from, which is read again when it changes; None if there is none.
        quiet: show only what fails.

    Raises:
        ConfigError, EngineError, SinkError, SourceError, RunFailed: as `opened_run`.
    """
    with EndingSignals() as signals:
        signals.catch()  # before Ray is started, which is to end with this
        try:
            with opened_run(settings, file, show_preparation, given_up=lambda: bool(signals)) as opened:
                workers: RayWorkers = opened.controller.runner  # type: ignore[assignment]
                if file and not sys.stdin.isatty():  # on a terminal SIGHUP means that it was closed
                    signals.reload_on_hangup()
                if not signals:
                    _follow(opened.controller, workers, signals, quiet=quiet)
        except SystemExit:  # while Ray was being started
            if not signals:
                raise
            return signals.exit_code
        failed = _sum_up(workers, settings, quiet=quiet)
    return FAILED if failed else signals.exit_code


def _follow(controller: Controller, workers: RayWorkers, signals: EndingSignals, *, quiet: bool) -> None:
    """Start the streams and show them until all have ended, or a signal comes."""
    console = Console(stderr=True)
    shown: dict[str, str] = {}
    watch = FileWatch()
    reloading: threading.Thread | None = None

    def show_line(line: str) -> None:
        console.print(f"saccade: {line}", markup=False, highlight=False, soft_wrap=True)

    def reload() -> None:
        for line in controller.reload_lines():
            show_line(line)

    controller.start()
    with view(console, quiet) as show:
        while not signals and (controller.endless or not workers.idle):
            for warning in take_warnings():
                show_line(warning)
            file = controller.file
            idle = file is not None and not (reloading and reloading.is_alive())
            if idle and file is not None and (signals.take_reload() or watch.due(file)):
                # In a thread, as it may load another model.
                reloading = threading.Thread(target=reload, name="saccade reload", daemon=True)
                reloading.start()
            statuses = workers.statuses()
            for status in statuses:
                line = _line(status)
                if status.live and not quiet and shown.get(status.name) != line:
                    show_line(line)
                shown[status.name] = line
            show(statuses)
            time.sleep(POLL_S)


def _line(status: StreamStatus) -> str:
    reason = f" ({status.reason})" if status.reason else ""
    where = f", worker {status.worker}" if status.worker else ""
    return f"{status.name}: {status.state}{reason}{where}"


def _sum_up(workers: RayWorkers, settings: RunConfig, *, quiet: bool) -> bool:
    """Print what streams have counted, and where results are; returns whether one has failed."""
    targets = shown_targets(settings)
    stream = sys.stderr if "-" in targets else sys.stdout  # where the records are printed, nothing else is
    failed = False
    for name, ended in workers.finished.items():
        report = ended.status.report
        if ended.error:
            failed = True
            print(f"saccade: {name}: {ended.error}", file=sys.stderr)
        elif report.corrupt_packets and not ended.status.live:
            failed = True
            print(f"saccade: {name} is damaged: {report.corrupt_packets} packets were skipped", file=sys.stderr)
        if not quiet:
            print(f"{name}: {summary(report)}", file=stream)
    for target in targets if not quiet else []:
        if target != "-":
            print(f"→ {target}", file=stream)
    return failed
