"""A reserve file of 1 MB, released when the disk is full, so that deletions can still be recorded."""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

_BYTES = 1 << 20  # enough for SQLite to delete hundreds of events


class DiskReserve:
    """A reserve file of 1 MB.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self) -> None:
        """Create the file, unless it exists or the disk is full."""
        if self._path.exists():
            return
        try:
            self._path.write_bytes(os.urandom(_BYTES))  # random, so that a compressing file system cannot shrink it
        except OSError:
            self.release()

    def release(self) -> bool:
        """Delete the file to free its space; return False if it does not exist."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("%s could not be deleted: %s", self._path, error.strerror)
            return False
        return True
