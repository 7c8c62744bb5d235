"""`saccade run --ray ADDRESS`: has a supervisor on a Ray cluster run the streams, and shows how they are doing.

A signal ends everything, as with any run. If this command is killed, the supervisor and the workers go on; the same
command finds them again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from saccade.engine.errors import EngineError
from saccade.pipeline.cli.commands.run_workers import Reports, show_changes, show_finished, streams_table
from saccade.pipeline.cli.error_report import FAILED, INTERRUPTED
from saccade.pipeline.cli.signals import EndingSignals
from saccade.pipeline.core.config import RunConfig
from saccade.pipeline.core.errors import ConfigError
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


def run_on_ray(settings: RunConfig, *, quiet: bool) -> int:
    """Run what is configured on a cluster, to its end; returns the exit code.

    Raises:
        ConfigError: if Ray is not installed, the cluster cannot be reached or has no room.
        EngineError, SinkError, SourceError: as `opened_session`.
    """
    assert settings.ray is not None
    try:
        from saccade.pipeline.workers.cluster.ray_cluster import RayCluster
    except ImportError:
        raise ConfigError("--ray needs Ray: pip install 'saccade[ray]'") from None
    with EndingSignals() as signals, RayCluster(settings.ray) as cluster:
        cluster.place(settings.workers, settings.ray_cpus, settings.ray_gpus)
        signals.catch()
        try:
            supervisor = cluster.supervisor(Path.cwd(), Path(settings.ray_state).absolute())
            _begin(cluster, supervisor, settings)
            _follow(cluster, supervisor, settings, signals, quiet=quiet)
        finally:
            finished: dict[str, Message] = cluster.end(CLOSE_S if signals.urgent_at is None else _URGENT_S)
    failed = show_finished(finished, settings, quiet=quiet)
    return FAILED if failed else INTERRUPTED if signals else 0


def _begin(cluster: Any, supervisor: Any, settings: RunConfig) -> None:
    values = settings.model_dump(mode="json", exclude_unset=True)
    if (token := os.environ.get("SACCADE_TOKEN")) and not settings.http_token:
        values["http_token"] = token
    _raise(cluster.ask(supervisor.begin, values))


def _raise(error: tuple[str, str] | None) -> None:
    if error is not None:
        raise _ERRORS.get(error[0], ConfigError)(error[1])


def _follow(cluster: Any, supervisor: Any, settings: RunConfig, signals: EndingSignals, *, quiet: bool) -> None:
    """Show the streams until all have ended, or a signal comes."""
    console = Console(stderr=True)
    shown: dict[str, str] = {}
    heard_at = time.monotonic()
    with streams_table(console, quiet) as show:
        while not signals:
            status = cluster.ask_if_there(supervisor.status)
            if status is None:
                if time.monotonic() > heard_at + _LOST_S:
                    raise ConfigError("--ray: the supervisor does not answer any more")
            elif not status["begun"]:  # it runs on another machine now, where it knows nothing
                _begin(cluster, supervisor, settings)
            else:
                heard_at = time.monotonic()
                _raise(status["error"])
                reports: Reports = {
                    name: (worker, StreamReport(**report)) for name, (worker, report) in status["reports"].items()
                }
                show_changes(console, reports, status["warnings"], shown, quiet=quiet)
                show(reports)
                if status["over"]:
                    return
            time.sleep(_POLL_S)
