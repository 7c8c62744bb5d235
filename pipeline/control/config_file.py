"""The configuration file of a run: reloaded when it changes, and saved on request."""

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
    """A configuration file, overridden by values of the command line.

    Attributes:
        path: path of the file.

    Args:
        path: path of the file.
        overrides: values of the command line.
    """

    def __init__(self, path: Path, overrides: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self._overrides = dict(overrides or {})
        self._looked_at = 0.0
        self._was_changed = False  # when it was looked at last
        self._stamp = self._now()

    @property
    def changed(self) -> bool:
        """Whether the file exists and has changed since it was read or written."""
        stamp = self._now()
        return stamp is not None and stamp != self._stamp

    def due(self) -> bool:
        """Return whether to read the file again: it changed at least a second ago. Checks once a second."""
        now = time.monotonic()
        if now < self._looked_at + _LOOK_S:
            return False
        before, self._looked_at = self._was_changed, now
        self._was_changed = self.changed
        return self._was_changed and before

    def _now(self) -> tuple[int, int, int] | None:
        """Return a stamp that changes with the file; None if it is missing, for example while an editor replaces it."""
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

    @property
    def names_streams(self) -> bool:
        """Whether the file defines the streams; otherwise, the command line does, and the file is a shared template."""
        return not self._overrides.keys() & {"source", "streams"}

    def load(self) -> RunConfig:
        """Load the configuration.

        Raises:
            ConfigError: if the file cannot be read or is invalid.
        """
        self._stamp = self._now()
        return load(self.path, self._overrides)

    def parse(self, text: str) -> RunConfig:
        """Parse a new text of the file.

        Raises:
            ConfigError: if the text is invalid.
        """
        return load_text(text, self._overrides)

    def save(self, wanted: RunConfig) -> None:
        """Save the wanted streams; everything else in the file stays, including comments.

        Raises:
            ConfigError: if saving fails; the file is unchanged.
        """
        if not self.names_streams:
            raise ConfigError("the streams are defined on the command line, so they cannot be saved to the file")

        def check(path: Path) -> None:
            if left := [change.name for change in plan(load(path, self._overrides), wanted)]:
                raise ConfigError(f"{', '.join(left)}: a command-line flag or an alias in the file prevents saving")

        save_streams(self.path, load(self.path, self._overrides), wanted, check)
        self._stamp = self._now()
