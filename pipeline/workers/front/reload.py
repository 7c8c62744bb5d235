"""The configuration file of a run with workers: read anew when it changes. Knows no signals and no terminal.

Streams that are other than before are closed and opened anew; a file with a mistake changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.pipeline.core.config import RunConfig
from saccade.pipeline.core.errors import ConfigError, StreamError
from saccade.pipeline.reload import FileReloader, run_differences, stream_differences
from saccade.pipeline.workers.front.front import Front, streams_of
from saccade.pipeline.workers.supervisor import Supervisor


class FrontReloader(FileReloader):
    """The file of a front.

    Args:
        path: of the file.
        overrides: the command line's values over it.
        config: what the front was opened from.
        front: runs it.
    """

    def __init__(self, path: Path, overrides: Mapping[str, Any], config: RunConfig, front: Front) -> None:
        super().__init__(path, overrides)
        self._config = config
        self._front = front

    def save(self) -> str:
        """Zones and lines are in the workers; raises ConfigError."""
        raise ConfigError("with workers the file is not written from here: put zones, lines and rules into it yourself")

    def _apply(self, wanted: RunConfig) -> list[str]:
        lines = change_streams(self._front.supervisor, self._config, wanted)
        self._config = wanted
        return lines


def change_streams(supervisor: Supervisor, config: RunConfig, wanted: RunConfig) -> list[str]:
    """Run what another configuration says instead of `config`; returns a line for each change."""
    before, after = streams_of(config)[0], streams_of(wanted)[0]
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
    if later := sorted(run_differences(config, wanted)):
        lines.append(f"{', '.join(later)}: changed in the file, and taken when saccade is started again")
    return lines
