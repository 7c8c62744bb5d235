"""One annotated MP4 of a stream.

Knows frames and results, but no source, model or pipeline.
"""

from __future__ import annotations

import logging
import os
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

from saccade.engine.results import Result
from saccade.sinks.base import SinkError
from saccade.sinks.file_lock import check_free
from saccade.sinks.os_errors import write_failure
from saccade.sinks.overlay import draw
from saccade.sinks.record import Latency, drawn_latency
from saccade.sinks.video.mp4_writer import OpenMp4
from saccade.sinks.video.part_file import SUFFIX, free_path
from saccade.sources.frame import Frame

log = logging.getLogger(__name__)


class Mp4Sink:
    """Writes frames with their overlay as H.264 (yuv420p) in MP4.

    - Timestamps are the source's own, exactly: pts × time_base of every frame is kept, and so is a variable frame rate.
      Only where the first frame comes later than 1 s is the whole clock moved so that the file starts at 0.
    - A frame of odd width or height is padded by repeating its last column or row. Frames of another size than the
      first are fitted into it with black borders.
    - Until it is closed the file is fragmented, one fragment a GOP of 2 s, so a killed process loses at
      most the last one; closing turns it into an ordinary MP4.
    - The file is called `path.part` until its first group can be played, so a killed process leaves no `.mp4` that
      cannot.
    - After an error, or where the file is deleted or moved meanwhile, the next frame begins another file, with `-1`
      before its suffix if there is one already.
    - Audio is copied, not encoded again, as far as the video goes.
    - The index of all frames is kept in memory, 9 MB an hour at 30 a second: for an endless stream, use
      `RecordingSink`.

    Args:
        path: file to write; an existing one is replaced once the new one can be played.
        rate: frames per second of the source, as a hint for the encoder and for how long the last frame is shown.
        audio_from: file to copy the audio from, usually the source itself; None for a silent video.

    Raises:
        SinkError: if the file cannot be written, or is `audio_from` itself.
    """

    shared: ClassVar[bool] = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rate: Fraction | None = None,
        audio_from: str | os.PathLike[str] | None = None,
    ) -> None:
        self._path = Path(path)
        source = Path(audio_from) if audio_from is not None else None
        if source is not None and self._path.exists() and self._path.samefile(source):
            raise SinkError(f"{self._path} is the source itself; write to another file")
        if self._path.is_symlink():
            self._path = Path(os.path.realpath(self._path))  # replaces what it points to, and not the link
        check_writable(self._path)
        self._file = OpenMp4(rate, source, from_zero=False)
        self._begun = False
        self._closed = False

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Draw and encode one frame.

        Raises:
            SinkError: if it cannot be written, such as on a full disk; the next frame begins another file.
        """
        self._file.end_if_moved()
        if not self._file:
            self._file.begin(free_path(self._path) if self._begun else self._path, frame)
            self._begun = True
        self._file.add(frame, draw(frame.image, result, drawn_latency(frame, latency)))

    def close(self) -> None:
        """Finish the file; where no frame came, no file is left. A second call does nothing.

        Raises:
            SinkError: if the end of the file cannot be written.
        """
        if self._closed:
            return
        self._closed = True
        if not self._begun:
            log.warning("no frame came, so %s was not written", self._path)
        self._file.end()


def check_writable(path: Path) -> None:
    """Fail now rather than at the first frame; leaves nothing behind.

    Raises:
        SinkError: if no file can be written there.
    """
    try:
        if path.exists():
            if not path.is_file():  # opening a FIFO would wait for its reader
                raise SinkError(f"cannot write {path}: not a file")
            with path.open("ab"):
                pass
        for written in (path, path.with_name(path.name + SUFFIX)):
            check_free(written)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SinkError(f"cannot write {path}: {write_failure(path, error)}") from None
