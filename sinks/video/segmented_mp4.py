"""Sink for endless annotated recordings: MP4 files (segments) of a few minutes each."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

from saccade.engine.results import Result
from saccade.sinks.base import Sink, SinkError, SourceHints
from saccade.sinks.os_errors import write_failure
from saccade.sinks.overlay import draw
from saccade.sinks.record import Latency, drawn_latency
from saccade.sinks.retention import INTERVAL_S, Retention
from saccade.sinks.urls import split_path
from saccade.sinks.video.live_audio import LiveAudio
from saccade.sinks.video.mp4 import Mp4Sink, check_writable
from saccade.sinks.video.mp4_writer import OpenMp4
from saccade.sinks.video.part_file import free_path
from saccade.sinks.video.segments import DEFAULT_S, Segmenter, SegmentNames, is_pattern
from saccade.sources.frame import Frame

log = logging.getLogger(__name__)

SUFFIXES = (".mp4", ".m4v")


class RecordingSink:
    """Records frames with their overlay as a sequence of MP4 files (segments).

    - The timestamps of each file start at 0.
    - A new file starts after `length_s`, after a long gap, if the frame size changes, or after an error.
    - A killed process loses at most 2 s of the current file.
    - Existing files are never replaced. A second file of the same name gets `-1` before its suffix.

    Args:
        path: path with `strftime` placeholders for the local start time of each file; see `SegmentNames`.
        length_s: length of a file in seconds.
        rate: approximate frames per second of the source.
        audio_from: file to copy the audio from, or the audio of a live source; None for videos without audio.
        retention: limits of the files' age and total size, including files of earlier runs.

    Raises:
        SinkError: if no file can be written to this path.
    """

    shared: ClassVar[bool] = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        length_s: float = DEFAULT_S,
        rate: Fraction | None = None,
        audio_from: str | os.PathLike[str] | LiveAudio | None = None,
        retention: Retention | None = None,
    ) -> None:
        self._names = SegmentNames(os.fspath(path))
        self._segmenter = Segmenter(length_s)
        self._retention = retention or Retention()
        self._pruned_at = 0.0
        source = Path(audio_from) if isinstance(audio_from, (str, os.PathLike)) else audio_from
        self._file = OpenMp4(rate, source, from_zero=True)
        try:
            check_writable(self._names.root / "segment")
        except SinkError as error:
            raise SinkError(str(error).replace(str(self._names.root / "segment"), self._names.pattern)) from None

    def write(self, frame: Frame, result: Result, latency: Latency) -> None:
        """Draw the overlay on one frame and encode it into the current or a new file.

        Raises:
            SinkError: if writing fails, for example on a full disk. The next call starts a new file.
        """
        seamless = self._segmenter.is_continuous(frame.pts, frame.time_base)
        if self._segmenter.starts_segment(frame.pts, frame.time_base, frame.shown_size):
            self._file.end(frame.pts if seamless else None)
        self._file.end_if_moved()
        if not self._file:
            self._begin(frame)
        self._file.add(frame, draw(frame.image, result, drawn_latency(frame, latency)))
        if self._retention and time.monotonic() - self._pruned_at > INTERVAL_S:
            self._prune()

    def close(self) -> None:
        """Complete the current MP4 file. A second call does nothing.

        Raises:
            SinkError: if the file cannot be completed, such as on a full disk.
        """
        self._file.end()

    def _begin(self, frame: Frame) -> None:
        if not self._names.root.is_dir():  # not created anew: it may be where a disk was mounted
            raise SinkError(f"cannot write {self._names.pattern}: the folder {self._names.root} no longer exists")
        now = datetime.now().astimezone()  # this machine's clock: a camera's own may be at 1970
        path = free_path(self._names.at(now))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SinkError(f"cannot write {path}: {write_failure(path, error)}") from None
        self._file.begin(path, frame)
        log.info("stream %s: recording to %s", frame.stream, path)
        if self._retention:
            self._prune()

    def _prune(self) -> None:
        self._pruned_at = time.monotonic()
        for path in self._retention.prune(self._files(), self._file.path):
            for folder in list(path.parents)[: self._names.depth]:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()

    def _files(self) -> Iterator[Path]:
        """Yield the paths of all files of the recording, including those of earlier runs."""
        below = "/".join("*" for _ in range(self._names.depth + 1))
        return (path for path in self._names.root.glob(below) if self._names.owns(path))


def open_mp4(target: str, hints: SourceHints) -> Sink:
    """Create a sink for one MP4 file or for a recording of several MP4 files.

    A target such as `out.mp4` means one file. Time placeholders (`door-%H%M.mp4`) or options
    (`out.mp4?segment=10m&keep=7d&max_gb=50`) mean a recording.

    Raises:
        SinkError: if an option is invalid or the file cannot be written.
    """
    path, options = split_path(target, SUFFIXES)
    length_s = options.seconds("segment", DEFAULT_S)
    retention = Retention.of_options(options, options.age("keep"))
    options.reject_unknown()
    audio_from: str | LiveAudio | None = hints.audio_from
    if hints.listen is not None:
        audio_from = LiveAudio()
        hints.listen(audio_from.take)
    if is_pattern(path) or options:
        return RecordingSink(path, length_s=length_s, rate=hints.rate, audio_from=audio_from, retention=retention)
    return Mp4Sink(path, rate=hints.rate, audio_from=audio_from)
