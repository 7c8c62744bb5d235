"""Sink that writes one JSON record per frame to a file, optionally rotated by size, or to standard output."""

from __future__ import annotations

import itertools
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from saccade.engine.results import Result
from saccade.sinks.base import CHANGES, ReaderGoneError, SinkError, SourceHints
from saccade.sinks.file_lock import hold
from saccade.sinks.os_errors import write_failure
from saccade.sinks.record import Latency, make_record, to_json
from saccade.sinks.retention import INTERVAL_S, Retention
from saccade.sinks.urls import split_path
from saccade.sources.frame import Frame

SUFFIXES = (".jsonl", ".ndjson")
KEEP = 5


class JsonlSink:
    """Writes the record of each frame as one line of JSON in UTF-8, without buffering.

    A line is written completely or not at all, even on a full disk. If the file is deleted or moved, a new file is
    created.

    Args:
        path: path of the file; "-" for standard output. An existing file is overwritten, or appended to if `max_bytes`
            is set.
        max_bytes: size in bytes at which the file is rotated (renamed to `path.1`); None for no rotation.
        keep: number of rotated files to keep; None for all.
        retention: limits of the rotated files' age and of the total size.
        events: whether to write events of rules instead of records of frames.

    Raises:
        SinkError: if the file cannot be written or locked, or a limit is out of range.
    """

    shared: ClassVar[bool] = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int | None = None,
        keep: int | None = KEEP,
        retention: Retention | None = None,
        events: bool = False,
    ) -> None:
        if max_bytes is not None and max_bytes < 1:
            raise SinkError(f"max_bytes must be at least 1, or None for no rotation; got {max_bytes!r}")
        if keep is not None and keep < 0:
            raise SinkError(f"keep must be at least 0, or None for no limit on rotated files; got {keep!r}")
        self._path = os.fspath(path)
        self._max_bytes = None if self._path == "-" else max_bytes
        self._keep = keep
        self._retention = retention or Retention()
        self._events = events
        self._lock = threading.Lock()
        self._reader_gone = False
        self._closed = False
        self._file: _LineFile | None = None
        self._pruned_at = 0.0
        if self._path == "-":
            check_standard_output()
        else:
            try:
                self._file = _LineFile(Path(self._path), replace=max_bytes is None)
            except OSError as error:
                raise SinkError(f"cannot write {self._path}: {write_failure(self._path, error)}") from None

    @classmethod
    def open(cls, target: str, hints: SourceHints) -> Self:
        """Create the sink for `-`, or for a path with options such as `out.jsonl?max_mb=100&keep=5`.

        Options: `max_mb` is the size at which the file is rotated. `keep` is the maximum number of rotated files, or
        their maximum age such as `7d`. `max_gb` is the maximum total size. `send=events` writes events of rules
        instead of records of frames.

        Raises:
            SinkError: if an option is invalid or the file cannot be written.
        """
        if target == "-":
            return cls(target)
        path, options = split_path(target, SUFFIXES)
        megabytes = options.number("max_mb")
        keep, age_s = options.count_or_age("keep", 1000)
        retention = Retention.of_options(options, age_s)
        events = options.choice("send", ("frames", "events")) == "events"
        options.reject_unknown()
        if (keep is not None or retention) and megabytes is None:
            raise SinkError(f"{path}: options keep and max_gb need max_mb, as in {path}?max_mb=100&keep=5")
        if keep is None and not retention:
            keep = KEEP
        return cls(
            path, max_bytes=round(megabytes * 1e6) if megabytes else None, keep=keep, retention=retention, events=events
        )

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Write the record of a frame as one line. Thread-safe.

        Raises:
            ReaderGoneError: if the program that reads the pipe has exited.
            SinkError: if the line cannot be written, such as on a full disk.
        """
        if not self._events:
            self._append(to_json(make_record(frame, result, latency)) + b"\n")

    def write_event(self, event: Mapping[str, Any]) -> None:
        """Write an event of a rule as one line. Do nothing if the sink writes records of frames."""
        if self._events and event["type"] in CHANGES:
            self._append(to_json(event) + b"\n")

    def _append(self, line: bytes) -> None:
        with self._lock:
            try:
                if self._reader_gone or self._closed:
                    raise BrokenPipeError
                if self._file is None:
                    sys.stdout.buffer.write(line)
                    sys.stdout.buffer.flush()
                    return
                if self._max_bytes is not None and 0 < self._file.size > self._max_bytes - len(line):
                    self._rotate(self._file)
                self._file.append(line)
                if self._retention and time.monotonic() - self._pruned_at > INTERVAL_S:
                    self._prune()
            except BrokenPipeError:
                if self._path == "-" and not self._reader_gone:
                    # Else the interpreter fails once more at its end, when it flushes what is left.
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.buffer.fileno())
                self._reader_gone = True
                raise ReaderGoneError(f"the program that reads {self._shown} has exited") from None
            except OSError as error:
                raise SinkError(f"cannot write {self._shown}: {write_failure(self._path, error)}") from None

    def close(self) -> None:
        """Close the JSONL file. Standard output stays open. A second call does nothing."""
        with self._lock:
            self._closed = True
            if self._file is not None:
                self._file.close()

    @property
    def _shown(self) -> str:
        return "standard output" if self._path == "-" else self._path

    def _rotate(self, file: _LineFile) -> None:
        old = self._old_files()
        if self._keep is not None:
            for path in old[self._keep - 1 :]:
                path.unlink()
            old = old[: self._keep - 1]
        for number in range(len(old), 0, -1):
            old[number - 1].replace(f"{file.path}.{number + 1}")
        file.path.replace(f"{file.path}.1")
        file.reopen()  # where this fails, the next line tries again
        self._prune(room=self._max_bytes or 0)

    def _old_files(self) -> list[Path]:
        """Return the rotated files `path.1`, `path.2` and so on, up to the first missing number."""
        numbered = (Path(f"{self._path}.{number}") for number in itertools.count(1))
        return list(itertools.takewhile(Path.exists, numbered))

    def _prune(self, room: int = 0) -> None:
        self._pruned_at = time.monotonic()
        if self._retention:
            path = Path(self._path)
            mine = re.compile(re.escape(path.name) + r"(\.\d+)?")
            self._retention.prune((one for one in path.parent.iterdir() if mine.fullmatch(one.name)), path, room)


def check_standard_output() -> None:
    """Check that records can be written to standard output.

    Raises:
        SinkError: if standard output is closed or not writable.
    """
    if getattr(sys.stdout, "buffer", None) is None:
        raise SinkError("cannot write standard output: it is closed; name a file instead of -")


class _LineFile:
    """A text file to which only complete lines are appended."""

    def __init__(self, path: Path, *, replace: bool) -> None:
        self.path = path
        self.size = 0
        self._descriptor = -1
        self._identity = (0, 0)  # device and inode
        self._torn = False  # the last line has no end
        self.reopen(replace=replace)

    def append(self, line: bytes) -> None:
        """Append a line, completely or not at all. Raises OSError if the line cannot be written."""
        if self._descriptor < 0 or self._moved():
            self.reopen()
        if self._torn:
            line = b"\n" + line
        written = 0
        try:
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
        except OSError:
            if written:
                self._cut()
            raise
        self.size += written
        self._torn = False

    def reopen(self, *, replace: bool = False) -> None:
        """Close the file and open its path again. Truncate the newly opened file if `replace` is True."""
        self.close()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            if replace and stat.S_ISREG(os.fstat(descriptor).st_mode):
                hold(descriptor)  # alone, since what others append would be lost
                os.ftruncate(descriptor, 0)
            hold(descriptor, beside_others=True)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        status = os.fstat(self._descriptor)
        self._identity, self.size = (status.st_dev, status.st_ino), status.st_size
        self._torn = self.size > 0 and not self._ends_with_newline()  # a killed process may leave half a line

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _cut(self) -> None:
        """Remove a partially written line from the end of the file."""
        try:
            os.ftruncate(self._descriptor, self.size)
        except OSError:  # such as of a pipe
            self._torn = True

    def _moved(self) -> bool:
        """Return whether another program has deleted, moved or replaced the file."""
        try:
            status = os.stat(self.path)
        except OSError:
            return True
        return (status.st_dev, status.st_ino) != self._identity

    def _ends_with_newline(self) -> bool:
        with self.path.open("rb") as reader:
            reader.seek(-1, os.SEEK_END)
            return reader.read() == b"\n"
