"""The configuration file of a run. Saccade reloads the file when it changes, and can save streams to it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.pipeline.config import RunConfig
from saccade.pipeline.config.edit import save_streams
from saccade.pipeline.config.file import load, load_text
from saccade.pipeline.control.plan import plan
from saccade.pipeline.errors import ConfigError

_LOOK_S = 1.0


class ConfigFile:
    """A configuration file. Command-line values override values in the file.

    Args:
        path: path of the file.
        overrides: values from the command line, by key.
    """

    def __init__(self, path: Path, overrides: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._overrides = dict(overrides or {})
        self._looked_at = 0.0
        self._was_changed = False  # when it was looked at last
        self._stamp = self._now()

    @property
    def changed(self) -> bool:
        """Whether the file exists and has changed since Saccade last read or wrote it."""
        stamp = self._now()
        return stamp is not None and stamp != self._stamp

    def due(self) -> bool:
        """Return whether the file has changed and should be reloaded. The file is checked at most once per second."""
        now = time.monotonic()
        if now < self._looked_at + _LOOK_S:
            return False
        # Two consecutive checks must find a change, so that a half-written file is not read.
        before, self._looked_at = self._was_changed, now
        self._was_changed = self.changed
        return self._was_changed and before

    def _now(self) -> tuple[int, int, int] | None:
        """Return the modification time, size and inode of the file. Return None if the file is missing."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    @property
    def names_streams(self) -> bool:
        """Whether the streams come from the configuration file, and not from the command line."""
        return not self._overrides.keys() & {"source", "streams"}

    def load(self) -> RunConfig:
        """Load the configuration file, and override its values with the command-line values.

        Raises:
            ConfigError: if the file cannot be read or is invalid.
        """
        self._stamp = self._now()
        return load(self.path, self._overrides)

    def parse(self, text: str) -> RunConfig:
        """Parse text in the format of the configuration file, and override its values with the command-line values.

        Raises:
            ConfigError: if the text is invalid.
        """
        return load_text(text, self._overrides)

    def save(self, wanted: RunConfig) -> None:
        """Save the streams of a configuration to the configuration file. Comments and all other settings are preserved.

        Args:
            wanted: configuration with the streams to save.

        Raises:
            ConfigError: if saving fails. The file is then unchanged.
        """
        if not self.names_streams:
            raise ConfigError("cannot save the streams, because the command line defines them")

        def check(path: Path) -> None:
            if left := [change.name for change in plan(load(path, self._overrides), wanted)]:
                raise ConfigError(
                    f"cannot save the streams {', '.join(left)}: a command-line flag or a YAML alias in the file sets "
                    "their values"
                )

        save_streams(self.path, load(self.path, self._overrides), wanted, check)
        self._stamp = self._now()
