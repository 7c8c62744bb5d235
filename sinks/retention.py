"""Deletes the oldest of a sink's files: those past an age, and as many as are beyond a total size.

Knows paths and sizes, not what is in the files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from saccade.sinks.urls import Options

log = logging.getLogger(__name__)

INTERVAL_S = 10.0  # between two checks while a file is written; ten thousand files take some 50 ms


@dataclass(slots=True, frozen=True)
class Retention:
    """What is kept of the files that a sink has written.

    Attributes:
        max_age_s: files last written longer ago than this are deleted; None for no limit.
        max_bytes: total size, the file being written included; None for no limit.
    """

    max_age_s: float | None = None
    max_bytes: int | None = None

    @classmethod
    def of_options(cls, options: Options, max_age_s: float | None) -> Retention:
        """Read the option `max_gb`; raises SinkError if it is wrong."""
        gigabytes = options.number("max_gb")
        return cls(max_age_s, round(gigabytes * 1e9) if gigabytes else None)

    def __bool__(self) -> bool:
        return self.max_age_s is not None or self.max_bytes is not None

    def prune(self, files: Iterable[Path], current: Path | None = None, room: int = 0) -> list[Path]:
        """Delete the oldest of `files` until the limits hold; return what was deleted.

        Args:
            files: what the sink has written, by this run and earlier ones.
            current: the one being written; it counts, and is never deleted.
            room: bytes that the current file is to have at least.
        """
        found = []
        for path in files:
            try:
                status = path.stat()
            except OSError:
                continue  # deleted meanwhile
            found.append((status.st_mtime, path, status.st_size))
        total = sum(max(size, room) if path == current else size for _, path, size in found)
        deleted = []
        for modified_at, path, size in sorted(found):
            too_old = self.max_age_s is not None and time.time() - modified_at > self.max_age_s
            too_much = self.max_bytes is not None and total > self.max_bytes
            if path == current or not (too_old or too_much):
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("cannot delete %s, which is past its retention: %s", path, error.strerror)
                continue
            total -= size
            deleted.append(path)
        if deleted:
            log.info("%s and %d more deleted: past their retention", deleted[0], len(deleted) - 1)
        return deleted
