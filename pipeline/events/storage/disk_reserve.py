"""A megabyte of a disk that is kept to be given up when the disk is full: then what is deleted can still be noted.

Knows nothing of what is stored.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

_BYTES = 1 << 20  # SQLite deletes hundreds of events within it


class DiskReserve:
    """A file of a megabyte.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self) -> None:
        """Make the file, unless it is there or there is no space for it."""
        if self._path.exists():
            return
        try:
            self._path.write_bytes(os.urandom(_BYTES))  # what a file system that compresses cannot shrink
        except OSError:
            self.release()

    def release(self) -> bool:
        """Give its space back; False if there is no such file."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("%s could not be deleted: %s", self._path, error.strerror)
            return False
        return True
