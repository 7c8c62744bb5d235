"""The configuration file of a run: read again when it changes, and written to on request. Knows nothing that runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from saccade.pipeline.config import RunConfig
from saccade.pipeline.config.edit import save_streams
from saccade.pipeline.config.file import load, load_text
from saccade.pipeline.control.plan import plan
from saccade.pipeline.errors import ConfigError

Stamp = tuple[int, int, int]


class FileStamp:
    """Whether a file is another than it was when it was last read.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._now()

    @property
    def changed(self) -> bool:
        """Whether it is there, and another."""
        stamp = self._now()
        return stamp is not None and stamp != self._stamp

    def take(self) -> None:
        """It is being read now."""
        self._stamp = self._now()

    def _now(self) -> Stamp | None:
        """What changes with the file; None while it is not there, as while an editor replaces it."""
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


class ConfigFile(FileStamp):
    """A configuration file with the command line's values over it.

    Attributes:
        path: of the file.

    Args:
        path: of the file.
        overrides: the command line's values.
    """

    def __init__(self, path: Path, overrides: Mapping[str, Any] | None = None) -> None:
        super().__init__(path)
        self.path = path
        self._overrides = dict(overrides or {})

    @property
    def names_streams(self) -> bool:
        """Whether the streams are those of the file: otherwise it is a template, for runs beside each other."""
        return not self._overrides.keys() & {"source", "streams"}

    def load(self) -> RunConfig:
        """Read it.

        Raises:
            ConfigError: if it cannot be read or is invalid.
        """
        self.take()
        return load(self.path, self._overrides)

    def parse(self, text: str) -> RunConfig:
        """Read another text of it.

        Raises:
            ConfigError: if it is invalid.
        """
        return load_text(text, self._overrides)

    def save(self, wanted: RunConfig) -> None:
        """Write the streams that are wanted; what is not other stays as it is, comments among it.

        Raises:
            ConfigError: if that cannot be; the file is as it was.
        """
        if not self.names_streams:
            raise ConfigError("the streams were given on the command line, and are not in the file")

        def check(path: Path) -> None:
            if left := [change.name for change in plan(load(path, self._overrides), wanted)]:
                raise ConfigError(
                    f"{', '.join(left)}: a flag of the command line or an alias in the file is in the way"
                )

        save_streams(self.path, load(self.path, self._overrides), wanted, check)
        self.take()
