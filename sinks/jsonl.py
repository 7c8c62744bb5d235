"""JSON lines: one record a frame, to a file, which may be rotated by its size, or to standard output.

Knows frames and results, but no source, model or pipeline.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from pathlib import Path
from typing import BinaryIO, ClassVar, Self

from saccade.engine.results import Result
from saccade.sinks.base import SinkClosedError, SinkError, SourceHints
from saccade.sinks.record import Latency, make_record, to_json
from saccade.sinks.urls import split_path
from saccade.sources.frame import Frame

SUFFIXES = (".jsonl", ".ndjson")


class JsonlSink:
    """Writes `make_record` of every frame as a line of UTF-8 JSON, flushed at once so that `tail -f` sees it.

    Args:
        path: file to write; "-" for standard output. An existing file is replaced, or with `max_bytes` continued.
        max_bytes: a line that would make the file longer begins a new one, and the old one becomes `path.1`, the one
            before it `path.2` and so on; None for one file without end.
        keep: how many old files to keep.

    Raises:
        SinkError: if the file cannot be written.
    """

    shared: ClassVar[bool] = True

    def __init__(self, path: str | os.PathLike[str], *, max_bytes: int | None = None, keep: int = 5) -> None:
        self._path = os.fspath(path)
        self._max_bytes = None if self._path == "-" else max_bytes
        self._keep = keep
        self._lock = threading.Lock()
        self._reader_gone = False  # of standard output
        self._file: BinaryIO = sys.stdout.buffer if self._path == "-" else self._open()
        self._size = 0
        if self._max_bytes is not None and (existing := Path(self._path)).stat().st_size:
            self._size = existing.stat().st_size
            with existing.open("rb") as reader:
                reader.seek(-1, os.SEEK_END)
                if reader.read() != b"\n":  # a killed process may leave half a line
                    self._size += self._file.write(b"\n")

    @classmethod
    def open(cls, target: str, hints: SourceHints) -> Self:
        """Open `-`, or a path with options such as `out.jsonl?max_mb=100&keep=5`.

        Raises:
            SinkError: if an option is wrong or the file cannot be written.
        """
        if target == "-":
            return cls(target)
        path, options = split_path(target, SUFFIXES)
        megabytes, keep = options.number("max_mb"), options.count("keep", 5, 1000)
        options.reject_unknown()
        if options and megabytes is None:
            raise SinkError(f"{path}: keep is for files with max_mb, such as {path}?max_mb=100&keep={keep}")
        return cls(path, max_bytes=round(megabytes * 1e6) if megabytes else None, keep=keep)

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Write one line; callable from several threads.

        Raises:
            SinkClosedError: if the reader of the pipe has gone.
            SinkError: if the line cannot be written, such as on a full disk.
        """
        line = to_json(make_record(frame, result, latency)) + b"\n"
        with self._lock:
            try:
                if self._reader_gone:
                    raise BrokenPipeError
                if self._max_bytes is not None and 0 < self._size > self._max_bytes - len(line):
                    self._rotate()
                self._size += self._file.write(line)
                self._file.flush()
            except BrokenPipeError:
                if self._path == "-" and not self._reader_gone:
                    # Else the interpreter fails once more at its end, when it flushes what is left.
                    os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())
                self._reader_gone = True
                raise SinkClosedError("the reader of standard output has gone") from None
            except OSError as error:
                raise SinkError(f"cannot write {self._path}: {error.strerror}") from None

    def close(self) -> None:
        """Close the file; standard output stays open. A second call does nothing.

        Raises:
            SinkError: if an earlier line could not be written and still cannot.
        """
        if self._path == "-":
            return
        with self._lock:
            try:
                self._file.close()
            except OSError as error:
                raise SinkError(f"cannot finish {self._path}: {error.strerror}") from None

    def _open(self) -> BinaryIO:
        try:
            return Path(self._path).open("wb" if self._max_bytes is None else "ab")
        except OSError as error:
            raise SinkError(f"cannot write {self._path}: {error.strerror}") from None

    def _rotate(self) -> None:
        names = [Path(self._path), *(Path(f"{self._path}.{number}") for number in range(1, self._keep + 1))]
        for newer, older in reversed(list(itertools.pairwise(names))):
            if newer.exists():
                newer.replace(older)
        full, self._file = self._file, self._open()  # where it fails, the next line tries again
        self._size = 0
        full.close()
