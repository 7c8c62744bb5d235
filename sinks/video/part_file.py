"""The file on disk for an MP4 that is being written. It is named `NAME.part` until it is playable."""

from __future__ import annotations

import itertools
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from saccade.sinks.file_lock import check_free, hold

log = logging.getLogger(__name__)

SUFFIX = ".part"
_CHECK_S = 1.0  # between two looks at whether the file is still there


class PartFile:
    """A new file for a fragmented MP4. `av.open` can write to it.

    The file is named `path.part` until players can play it. It is locked until it is closed.

    Args:
        path: final path. An existing file is replaced once the new one is playable.

    Attributes:
        path: current path.
        closed: whether FFmpeg must stop writing. If True, FFmpeg does not write the MP4 trailer.

    Raises:
        OSError: if the file cannot be created, or another process is writing it.
    """

    def __init__(self, path: Path) -> None:
        self._final = path
        self.path = path.with_name(path.name + SUFFIX)
        check_free(path)
        self._file = _open_held(self.path)
        status = os.fstat(self._file.fileno())
        self._identity = status.st_dev, status.st_ino
        self._checked_at = time.monotonic()
        self._walked = 0  # up to here, boxes are whole and known
        self._fragment_end = 0  # behind the last whole fragment; 0 before the first
        self._moof = False  # whether the last box known is a `moof`, whose data comes next
        self._undo: list[tuple[int, bytes]] | None = None  # what the end of the MP4 has overwritten
        self.closed = False

    @property
    def playable(self) -> bool:
        """Whether the file is playable: it contains at least one complete fragment."""
        return self._fragment_end > 0

    # ---- for FFmpeg

    def write(self, data: bytes) -> int:
        """Write all bytes of `data` at the current position. Raise OSError if this fails."""
        view = memoryview(data)
        if self._undo is not None:
            at = self._file.tell()
            self._undo.append((at, os.pread(self._file.fileno(), len(view), at)))
        written = 0
        while written < len(view):
            written += self._file.write(view[written:]) or 0
        return written

    def seek(self, offset: int, whence: int = 0) -> int:
        """Set the position of the next write in bytes, like `io.IOBase.seek`."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the position of the next write in bytes, like `io.IOBase.tell`."""
        return self._file.tell()

    # ---- for the writer

    def publish(self) -> None:
        """Rename the file to its final name as soon as it is playable. Call this after each fragment."""
        if self.path != self._final:
            self._walk()
            if self.playable:
                self._rename()

    def begin_end(self) -> None:
        """Prepare for FFmpeg's conversion of the file to an ordinary MP4, so that `give_up` can undo it."""
        self._walk()
        self._undo = [(os.fstat(self._file.fileno()).st_size, b"")]

    def finish(self) -> None:
        """Close the completed MP4 and rename it to its final name."""
        self.closed = True
        self._file.close()
        if self.path != self._final:
            self._rename()

    def give_up(self) -> None:
        """Close the file after an error. Keep its complete fragments; delete it if it has none.

        A second call does nothing.
        """
        if self._file.closed:
            return
        self.closed = True
        try:
            self._take_back()
            self._walk()
            if self.playable:
                os.ftruncate(self._file.fileno(), self._fragment_end)
                if self.path != self._final:
                    self._rename()
            elif not self._moved():
                self.path.unlink(missing_ok=True)
        except OSError as error:
            log.debug("%s: %s", self.path, error)  # it is gone, or its disk is
        finally:
            self._file.close()

    def moved(self) -> bool:
        """Return whether another program has deleted, moved or replaced the file. Checked at most once a second."""
        if time.monotonic() - self._checked_at < _CHECK_S:
            return False
        self._checked_at = time.monotonic()
        return self._moved()

    def _moved(self) -> bool:
        try:
            status = os.stat(self.path)
        except OSError:
            return True
        return (status.st_dev, status.st_ino) != self._identity

    def _rename(self) -> None:
        if not self._moved():
            self.path.replace(self._final)
            self.path = self._final

    def _take_back(self) -> None:
        undo, self._undo = self._undo, None
        if undo:
            for at, before in reversed(undo[1:]):
                os.pwrite(self._file.fileno(), before, at)
            os.ftruncate(self._file.fileno(), undo[0][0])

    def _walk(self) -> None:
        """Find the end of the last complete fragment of the file."""
        descriptor = self._file.fileno()
        size = os.fstat(descriptor).st_size
        while len(head := os.pread(descriptor, 8, self._walked)) == 8:
            length, kind = int.from_bytes(head[:4]), head[4:]
            if length < 8 or self._walked + length > size:
                return
            self._walked += length
            if kind == b"mdat" and self._moof:
                self._fragment_end = self._walked
            self._moof = kind == b"moof"


def _open_held(path: Path) -> BinaryIO:
    """Create and lock an empty file. The content of an existing file is discarded."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            hold(descriptor)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    os.ftruncate(descriptor, 0)
                    return os.fdopen(descriptor, "w+b", buffering=0)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its writer has just given it its name, and closed it: it is not ours to empty


def free_path(path: Path) -> Path:
    """Return `path` if it is unused, else the first unused of `NAME-1`, `NAME-2` and so on."""
    for number in itertools.count():
        free = path.with_name(f"{path.stem}-{number}{path.suffix}") if number else path
        if not (os.path.lexists(free) or os.path.lexists(free.with_name(free.name + SUFFIX))):
            return free
    raise AssertionError("unreachable: itertools.count() never ends")
