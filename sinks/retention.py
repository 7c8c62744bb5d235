"""Retention of a sink's files: deletes the oldest files by age and total size."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from saccade.sinks.urls import Options

log = logging.getLogger(__name__)

INTERVAL_S = 10.0  # between two checks while a file is written; ten thousand files take some 50 ms


def elapsed_s() -> float:
    """Return the time of a monotonic clock in seconds. On Linux, the clock continues while the system is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class FileAges:
    """Measures how long files have been unchanged. Changes of the system time have no effect on this age."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float]] | None = None  # when it changed: as the file has it, and when

    def update(self, modified_at: Mapping[int, float], wall: float, now: float) -> dict[int, float]:
        """Return the age of each file in seconds, by inode.

        Args:
            modified_at: Unix modification time of each file in seconds, by inode.
            wall: current Unix time in seconds.
            now: current time on the monotonic clock, in seconds.
        """
        before, self._known = self._known, {}
        for inode, changed in modified_at.items():
            if before is None:
                self._known[inode] = changed, now - max(0.0, wall - changed)
            else:
                old = before.get(inode)
                self._known[inode] = old if old is not None and old[0] == changed else (changed, now)
        return {inode: now - at for inode, (_, at) in self._known.items()}


@dataclass(slots=True)
class Retention:
    """Limits on the files that a sink has written.

    Attributes:
        max_age_s: age in seconds after which files are deleted; None for no limit.
        max_bytes: maximum total size in bytes, including the file that is being written; None for no limit.
    """

    max_age_s: float | None = None
    max_bytes: int | None = None
    _ages: FileAges = field(default_factory=FileAges, init=False, repr=False, compare=False)

    @classmethod
    def of_options(cls, options: Options, max_age_s: float | None) -> Retention:
        """Parse the option `max_gb` of a sink. Raises SinkError if it is invalid."""
        gigabytes = options.number("max_gb")
        return cls(max_age_s, round(gigabytes * 1e9) if gigabytes else None)

    def __bool__(self) -> bool:
        return self.max_age_s is not None or self.max_bytes is not None

    def prune(self, files: Iterable[Path], current: Path | None = None, room: int = 0) -> list[Path]:
        """Delete the oldest files until the age and size limits are met. Return the deleted files.

        Args:
            files: files of the sink, including those of earlier runs.
            current: the file being written. Its size counts, but it is never deleted.
            room: bytes to reserve for the current file. A smaller current file counts as this size.
        """
        found = []
        for path in files:
            try:
                status = path.stat()
            except OSError:
                continue  # deleted meanwhile
            found.append((path, status.st_mtime, status.st_size, status.st_ino))
        ages = self._ages.update({inode: changed for _, changed, _, inode in found}, time.time(), elapsed_s())
        total = sum(max(size, room) if path == current else size for path, _, size, _ in found)
        deleted = []
        for path, _, size, inode in sorted(found, key=lambda one: (-ages[one[3]], one[1], one[0])):
            too_old = self.max_age_s is not None and ages[inode] > self.max_age_s
            too_much = self.max_bytes is not None and total > self.max_bytes
            if path == current or not (too_old or too_much):
                continue
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("retention: cannot delete %s: %s", path, error.strerror)
                continue
            total -= size
            deleted.append(path)
        if deleted:
            log.info(
                "retention: deleted %s and %d other files",
                deleted[0],
                len(deleted) - 1,
            )
        return deleted
