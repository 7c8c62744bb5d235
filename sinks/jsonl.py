"""JSON lines: one record a frame, to a file or to standard output.

Knows frames and results, but no source, model or pipeline.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import BinaryIO

from engine.results import Result
from sinks.base import SinkClosedError, SinkError
from sinks.record import Latency, make_record
from sources.frame import Frame


class JsonlSink:
    """Writes `make_record` of every frame as a line of UTF-8 JSON, flushed at once so that `tail -f` sees it.

    Args:
        path: file to write, replaced if it is there; "-" for standard output.

    Raises:
        SinkError: if the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._file: BinaryIO
        if self._path == "-":
            self._file = sys.stdout.buffer
        else:
            try:
                self._file = Path(self._path).open("wb")  # noqa: SIM115 - open until close()
            except OSError as error:
                raise SinkError(f"cannot write {self._path}: {error.strerror}") from None

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Write one line.

        Raises:
            SinkClosedError: if the reader of the pipe has gone.
            SinkError: if the line cannot be written, such as on a full disk.
        """
        # Compact and with allow_nan=False: every line is what any JSON parser takes.
        line = json.dumps(
            make_record(frame, result, latency), ensure_ascii=False, separators=(",", ":"), allow_nan=False
        )
        try:
            self._file.write(line.encode("utf-8", "replace") + b"\n")
            self._file.flush()
        except BrokenPipeError:
            if self._path == "-":
                # Else the interpreter fails once more at its end, when it flushes what nobody reads.
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())
            raise SinkClosedError(f"nobody reads {self._path} any more") from None
        except OSError as error:
            raise SinkError(f"cannot write {self._path}: {error.strerror}") from None

    def close(self) -> None:
        """Close the file; standard output stays open. A second call does nothing.

        Raises:
            SinkError: if an earlier line could not be written and still cannot.
        """
        if self._path == "-":
            return
        try:
            self._file.close()
        except OSError as error:
            raise SinkError(f"cannot finish {self._path}: {error.strerror}") from None
