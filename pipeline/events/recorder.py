"""Decides what is kept of an event, and has it written: its clip, with seconds before and after, and its best image.

What is written goes through one thread and a bounded queue: a slow disk delays no frame, and what it cannot take is
counted. Knows events, frames and packets; not how they are stored.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
from numpy.typing import NDArray

from saccade.pipeline.events.clips import PacketRing, copy_clip, write_clip
from saccade.pipeline.events.record import Event, MediaDone
from saccade.pipeline.events.scene import sharpness_of
from saccade.pipeline.events.store_reader import MEDIA
from saccade.sources.live.decoder import decode_behind_the_model

if TYPE_CHECKING:
    from saccade.sources import Frame

log = logging.getLogger(__name__)

MOST_S = 60.0
"""How long a clip may be, in seconds, before what follows the event."""

_BEFORE_S = 30.0  # of what came before an event with a long `for`
_MAX_WAITING = 256
_CLOSE_S = 20.0
_BETTER = 1.1  # times as good, that makes another image the best
_PART = ".part"

Noted = Callable[[MediaDone], None]
"""Is given what is whole, or has failed."""


class MediaWriter:
    """Writes files in a thread of its own, as NAME.part until they are whole.

    Args:
        folder: where they go.
        noted: is given what has become of each.
    """

    def __init__(self, folder: Path, noted: Noted) -> None:
        self._folder = folder
        self._noted = noted
        self._waiting: queue.Queue[tuple[MediaDone, Callable[[Path], object]] | None] = queue.Queue(_MAX_WAITING)
        self._failing = False
        self._thread = threading.Thread(target=self._work, name="saccade media", daemon=True)
        self._thread.start()

    def write(self, file: MediaDone, work: Callable[[Path], object]) -> None:
        """Have a file of an event written by `work`, which is given its path; returns at once."""
        try:
            self._waiting.put_nowait((file, work))
        except queue.Full:
            log.warning("event %s: no %s: too much waits to be written", file.event, file.kind)
            self._noted(file)

    def close(self) -> None:
        """Write what waits, for some seconds at most. A second call does nothing."""
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(_CLOSE_S)

    def _work(self) -> None:
        decode_behind_the_model()  # once for the thread: some clips are coded again, which must not cost frames
        while (job := self._waiting.get()) is not None:
            file, work = job
            name = f"{file.event}{MEDIA[file.kind]}"
            part = self._folder / f"{name}{_PART}"
            try:
                work(part)
                part.replace(self._folder / name)
            except Exception as error:
                if isinstance(error, OSError) and not self._failing:  # a full disk: once until it works again
                    log.warning("%s: images and clips of events cannot be written: %s", self._folder, error.strerror)
                elif not isinstance(error, OSError):
                    log.warning("event %s: no %s: %s", file.event, file.kind, error)
                self._failing = isinstance(error, OSError)
                with suppress(OSError):
                    part.unlink(missing_ok=True)
            else:
                self._failing = False
                file = replace(file, path=str(self._folder / name))
            self._noted(file)


@dataclass(slots=True)
class _Recording:
    """What is to be kept of one event."""

    begin: float
    end: float
    quality: float = -1.0  # of the best image; below that of any
    image: NDArray[np.uint8] | None = None


class Recorder:
    """Records the events of one stream; `note` and `close` are called in its thread, packets come in any.

    Args:
        writer: writes the files.
        before_s, after_s: seconds of video before and after an event.
        file: that is the source; None for a live one, whose packets are given to `ring.add`.
    """

    def __init__(
        self, writer: MediaWriter, *, before_s: float = 5.0, after_s: float = 5.0, file: Path | None = None
    ) -> None:
        self._writer = writer
        self._before_s, self._after_s = before_s, after_s
        self._file = file
        self.ring = PacketRing(before_s + 1.0)
        """The packets of a live source."""
        self._stream = ""
        self._recordings: dict[str, _Recording] = {}
        self._ending: dict[str, _Recording] = {}  # whose time goes on after the event

    @property
    def has_clips(self) -> bool:
        """Whether there is video to cut clips from."""
        return self._file is not None or self.ring.newest is not None

    def note(self, event: Event, frame: Frame) -> None:
        """Take note of an event that goes on, or has just ended, with the frame that shows it."""
        recording = self._recordings.get(event.id)
        if recording is None:
            begin = max(event.since, event.start_time - _BEFORE_S) - self._before_s
            recording = self._recordings[event.id] = _Recording(begin, event.start_time + MOST_S)
            self.ring.hold(event.id, begin)
            self._consider(recording, event, frame)
            self._stream = event.stream
            self._write_snapshot(event.id, recording)
        elif event.end_time is None:
            self._consider(recording, event, frame)
        if event.end_time is not None:
            self._end(event.id, event.end_time)

    def advance(self, now: float) -> None:
        """Cut the clips whose time is over at a time of capture."""
        for name, recording in list(self._ending.items()):
            if now > recording.end:
                del self._ending[name]
                self._write_clip(name, recording)

    def finish(self, event: Event) -> None:
        """Take note that an event has ended without a frame."""
        if event.id in self._recordings:
            self._end(event.id, event.frame_time if event.end_time is None else event.end_time)

    def close(self) -> None:
        """Cut every clip with what there is."""
        for name, recording in list(self._recordings.items()):
            self._end(name, recording.end)
        self.advance(float("inf"))

    def _end(self, name: str, end_time: float) -> None:
        recording = self._recordings.pop(name)
        recording.end = min(recording.end, end_time) + self._after_s
        if recording.image is not None:
            self._write_snapshot(name, recording)
        self._ending[name] = recording

    def _consider(self, recording: _Recording, event: Event, frame: Frame) -> None:
        """Keep the frame's image if it shows the event better: by score, size and sharpness of its best object."""
        if event.frame_time != frame.captured_at:
            return  # nothing of it is to be seen now
        quality = 1e-9
        if event.box is not None:
            x1, y1, x2, y2 = event.box
            most = event.score * (x2 - x1) * (y2 - y1)
            if recording.quality > most:  # even if it were perfectly sharp
                return
            quality = most * sharpness_of(frame.image, event.box)
        if quality > recording.quality * _BETTER:
            recording.quality, recording.image = quality, frame.image

    def _write_snapshot(self, name: str, recording: _Recording) -> None:
        if recording.image is not None:
            self._writer.write(MediaDone(self._stream, name, "snapshot"), partial(_write_jpeg, recording.image))
            recording.image = None

    def _write_clip(self, name: str, recording: _Recording) -> None:
        self.ring.release(name)
        file = MediaDone(self._stream, name, "clip")
        if self._file is not None:
            begin, end = max(0.0, recording.begin), recording.end
            self._writer.write(file, partial(copy_clip, self._file, begin, end))
        elif packets := self.ring.cut(recording.begin, recording.end):
            self._writer.write(file, partial(write_clip, packets))


def _write_jpeg(image: NDArray[np.uint8], path: Path) -> None:
    done, data = cv2.imencode(".jpg", cv2.cvtColor(image, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 90])
    if not done:
        raise ValueError("the image cannot be coded")
    path.write_bytes(data.tobytes())
