"""The configuration file of a run with workers: read anew when it changes. Knows no signals and no terminal.

Streams that are other than before are closed and opened anew; a file with a mistake changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.pipeline.core.config import RunConfig
from saccade.pipeline.core.config.file import load
from saccade.pipeline.core.errors import ConfigError, StreamError
from saccade.pipeline.reload import FileStamp, run_differences, stream_differences
from saccade.pipeline.workers.front.front import Front, streams_of


class FrontReloader:
    """The file. Every method is callable from any thread.

    Args:
        path: of the file.
        overrides: the command line's values over it.
        config: what the front was opened from.
        front: runs it.
    """

    def __init__(self, path: Path, overrides: Mapping[str, Any], config: RunConfig, front: Front) -> None:
        self._path = path
        self._overrides = dict(overrides)
        self._config = config
        self._front = front
        self._stamp = FileStamp(path)
        self._lock = threading.Lock()

    @property
    def changed(self) -> bool:
        """Whether the file is another than it was when it was last read."""
        return self._stamp.changed

    def reload(self) -> list[str]:
        """Read the file and run what it says now; returns a line for each change, or for why there is none."""
        with self._lock:
            self._stamp.take()
            try:
                wanted = load(self._path, self._overrides)
            except ConfigError as error:
                return [f"{error}; everything goes on as it was"]
        return self.apply(wanted) or [f"{self._path}: nothing has changed"]

    def save(self) -> str:
        """Zones and lines are in the workers; raises ConfigError."""
        raise ConfigError("with workers the file is not written from here: put zones, lines and rules into it yourself")

    def apply(self, wanted: RunConfig) -> list[str]:
        """Run what another configuration says; returns a line for each change."""
        with self._lock:
            return self._apply(wanted)

    def _apply(self, wanted: RunConfig) -> list[str]:
        supervisor = self._front.supervisor
        before, after = streams_of(self._config)[0], streams_of(wanted)[0]
        lines = []
        for name in sorted(before.keys() - after.keys()):
            try:
                supervisor.close_stream(name)
                lines.append(f"{name}: removed")
            except StreamError:
                pass  # it has ended before
        for name, stream in after.items():
            values = stream.model_dump(mode="json", exclude_unset=True)
            changed = sorted(stream_differences(before[name], stream)) if name in before else []
            try:
                if name not in before:
                    supervisor.open(values, name, or_similar=False)
                    lines.append(f"{name}: added")
                elif changed:
                    supervisor.restart(name, values)
                    lines.append(f"{name}: started anew, with other {', '.join(changed)}")
            except StreamError as error:
                lines.append(f"{name}: {error}")
        if later := sorted(run_differences(self._config, wanted)):
            lines.append(f"{', '.join(later)}: changed in the file, and taken when saccade is started again")
        self._config = wanted
        return lines
