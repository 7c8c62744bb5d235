"""An endless recording, such as of a camera, in MP4 segments of some minutes each.

Knows frames and results, but no source, model or pipeline.
"""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

import av.error

from saccade.engine.results import Result
from saccade.sinks.base import Sink, SinkError, SourceHints
from saccade.sinks.overlay import draw
from saccade.sinks.record import Latency, drawn_latency
from saccade.sinks.urls import split_path
from saccade.sinks.video.mp4 import DEFAULT_RATE, Mp4Sink, Mp4Writer
from saccade.sinks.video.segments import DEFAULT_S, Segmenter, SegmentNames, is_pattern
from saccade.sources.frame import Frame

log = logging.getLogger(__name__)

SUFFIXES = (".mp4", ".m4v")


class RecordingSink:
    """Writes frames with their overlay as a sequence of MP4 files, each as `Mp4Sink` writes one.

    - Each begins at a frame, with its clock at 0; the last frame is shown until the first of the next file, so
      that together they last as long as what was recorded.
    - `video.segments.Segmenter` decides where a file ends: after its time, at a gap too long to keep, at another frame
      size. It is an ordinary MP4 then; a killed process costs the last 2 s of the file it was writing, and no other.
    - No existing file is ever replaced: a second one of the same name gets `-1` before its suffix.

    Args:
        path: with the time of each file's beginning in it, in local time, as `strftime` writes it; see `SegmentNames`.
        length_s: of a file, in seconds.
        rate: frames per second of the source, as a hint for the encoder.
        audio_from: file to copy the audio from; None for a silent video.

    Raises:
        SinkError: if no file can be written there.
    """

    shared: ClassVar[bool] = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        length_s: float = DEFAULT_S,
        rate: Fraction | None = None,
        audio_from: str | os.PathLike[str] | None = None,
    ) -> None:
        self._names = SegmentNames(os.fspath(path))
        self._segmenter = Segmenter(length_s)
        self._rate = rate or DEFAULT_RATE
        self._audio_from = Path(audio_from) if audio_from is not None else None
        self._path = self._names.root
        self._writer: Mp4Writer | None = None
        try:
            with tempfile.TemporaryFile(dir=self._names.root):  # fails now rather than at the first frame
                pass
        except OSError as error:
            raise SinkError(f"cannot write {self._names.pattern}: {error.strerror}") from None

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Draw and encode one frame, in a new file where a segment begins.

        Raises:
            SinkError: if it cannot be written, such as on a full disk.
        """
        seamless = self._segmenter.is_continuous(frame.pts, frame.time_base)
        starts = self._segmenter.starts_segment(frame.pts, frame.time_base, (frame.width, frame.height))
        if starts or self._writer is None:
            self._finish(frame.pts if seamless else None)
            self._begin(frame)
        try:
            assert self._writer is not None
            self._writer.add(frame, draw(frame.image, result, drawn_latency(frame, latency)))
        except (av.error.FFmpegError, OSError) as error:
            raise SinkError(f"cannot write {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Finish the file that is being written. A second call does nothing.

        Raises:
            SinkError: if its end cannot be written.
        """
        self._finish(None)

    def _begin(self, frame: Frame) -> None:
        try:
            self._path = self._new_file()
            self._writer = Mp4Writer(self._path, frame, self._rate, self._audio_from, from_zero=True)
        except (av.error.FFmpegError, OSError) as error:
            raise SinkError(f"cannot write {self._path}: {error.strerror}") from error
        log.info("%s: recording to %s", frame.stream, self._path)

    def _new_file(self) -> Path:
        now = datetime.now().astimezone()  # this machine's clock: a camera's own may be at 1970
        for number in itertools.count():
            path = self._path = self._names.at(now, number)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.open("xb").close()
            except FileExistsError:
                if path.parent.is_dir():
                    continue
                raise
            return path
        raise AssertionError("counting has no end")

    def _finish(self, until_pts: int | None) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.close(until_pts)
        except (av.error.FFmpegError, OSError) as error:
            raise SinkError(f"cannot finish {self._path}: {error.strerror}") from error


def open_mp4(target: str, hints: SourceHints) -> Sink:
    """Open `out.mp4`, or a recording: a path with the time in it, or with options such as `out.mp4?segment=10m`.

    Raises:
        SinkError: if an option is wrong or the file cannot be written.
    """
    path, options = split_path(target, SUFFIXES)
    length_s = options.seconds("segment", DEFAULT_S)
    options.reject_unknown()
    if is_pattern(path) or options:
        return RecordingSink(path, length_s=length_s, rate=hints.rate, audio_from=hints.audio_from)
    return Mp4Sink(path, rate=hints.rate, audio_from=hints.audio_from)
