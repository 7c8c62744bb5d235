"""Sink that writes the annotated video of a stream to one MP4 file."""

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
from saccade.sinks.video.live_audio import LiveAudio
from saccade.sinks.video.mp4_writer import OpenMp4
from saccade.sinks.video.part_file import SUFFIX, free_path
from saccade.sources.frame import Frame

log = logging.getLogger(__name__)


class Mp4Sink:
    """Writes frames with their overlay to one MP4 file, as H.264 (yuv420p).

    - The source's presentation timestamps are kept, also with a variable frame rate. If the first frame is at 1 s or
      later, the file starts at 0 instead.
    - Odd widths and heights are padded by repeating the last column or row. A frame of another size is scaled to the
      size of the first frame, with black borders.
    - A killed process loses at most the last 2 s. The file is named `path.part` until players can play it.
    - After an error, or if the file is deleted or moved, the next frame starts a new file, for example `NAME-1.mp4`.
    - Audio of a file is copied without transcoding, up to the end of the video. Audio of a live source is transcoded
      to AAC, unless it is AAC.
    - Memory use grows by 9 MB per hour at 30 fps. Use `RecordingSink` for endless streams.

    Args:
        path: path of the file; an existing file is replaced once the new one is playable.
        rate: approximate frames per second of the source.
        audio_from: file to copy the audio from, usually the source; or the audio of a live source. None for a
            video without audio.

    Raises:
        SinkError: if the file cannot be written, or is `audio_from` itself.
    """

    shared: ClassVar[bool] = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        rate: Fraction | None = None,
        audio_from: str | os.PathLike[str] | LiveAudio | None = None,
    ) -> None:
        self._path = Path(path)
        source = Path(audio_from) if isinstance(audio_from, (str, os.PathLike)) else audio_from
        if isinstance(source, Path) and self._path.exists() and self._path.samefile(source):
            raise SinkError(f"{self._path} is the source itself; write to another file")
        if self._path.is_symlink():
            self._path = Path(os.path.realpath(self._path))  # replaces what it points to, and not the link
        check_writable(self._path)
        self._file = OpenMp4(rate, source, from_zero=False)
        self._begun = False
        self._closed = False

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Draw the overlay on one frame and encode it.

        Raises:
            SinkError: if writing fails, for example on a full disk. The next call starts a new file.
        """
        self._file.end_if_moved()
        if not self._file:
            self._file.begin(free_path(self._path) if self._begun else self._path, frame)
            self._begun = True
        self._file.add(frame, draw(frame.image, result, drawn_latency(frame, latency)))

    def close(self) -> None:
        """Complete the MP4 file, or delete it if no frame was written. A second call does nothing.

        Raises:
            SinkError: if the file cannot be completed, such as on a full disk.
        """
        if self._closed:
            return
        self._closed = True
        if not self._begun:
            log.warning("%s was not written, because the source had no frame", self._path)
        self._file.end()


def check_writable(path: Path) -> None:
    """Check before the first frame whether a file can be created at this path. Leaves no file behind.

    Raises:
        SinkError: if no file can be written to this path.
    """
    try:
        if path.exists():
            if not path.is_file():  # opening a FIFO would wait for its reader
                raise SinkError(f"cannot write {path}: it is not a regular file")
            with path.open("ab"):
                pass
        for written in (path, path.with_name(path.name + SUFFIX)):
            check_free(written)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SinkError(f"cannot write {path}: {write_failure(path, error)}") from None
