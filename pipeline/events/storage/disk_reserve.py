"""Reserves 1 MB of disk space for an SQLite database.

SQLite needs disk space even to delete rows. On a full disk, the reserved space is freed, so that rows can be deleted.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

_BYTES = 1 << 20  # enough for SQLite to delete hundreds of events


class DiskReserve:
    """A file of 1 MB that is deleted to free disk space when the disk is full.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self) -> None:
        """Create the file that reserves disk space. Do nothing if the file exists or the disk is full."""
        if self._path.exists():
            return
        try:
            self._path.write_bytes(os.urandom(_BYTES))  # random, so that a compressing file system cannot shrink it
        except OSError:
            self.release()

    def release(self) -> bool:
        """Delete the file to free its disk space. Return False if the file does not exist."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("%s could not be deleted: %s", self._path, error.strerror)
            return False
        return True
