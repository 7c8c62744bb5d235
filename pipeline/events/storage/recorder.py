"""Decides what is kept of an event, and has it written: its clip, with seconds before and after, and its best image.

What is written goes through one thread and a bounded queue: a slow disk delays no frame, and what it cannot take is
counted. Knows events, frames and packets; not how they are stored.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np
from numpy.typing import NDArray

from saccade.pipeline.events.record import Event, MediaDone
from saccade.pipeline.events.scene import sharpness_of
from saccade.pipeline.events.storage.clips import PacketRing, copy_clip, write_clip
from saccade.pipeline.events.storage.store_reader import MEDIA
from saccade.sinks.overlay.draw import draw_outlines
from saccade.sinks.still import jpeg
from saccade.sources.live.decoder import decode_behind_the_model

if TYPE_CHECKING:
    from saccade.engine.results import Outline
    from saccade.sources import Frame
    from saccade.sources.demux import FileIndex

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
        self._waiting: queue.Queue[tuple[MediaDone, Callable[[Path], object] | None, bool] | None] = queue.Queue(
            _MAX_WAITING
        )
        self._failing = self._closed = False
        self._thread = threading.Thread(target=self._work, name="saccade media", daemon=True)
        self._thread.start()

    def path(self, event: str, kind: str) -> Path:
        """Of a file of an event, which may be there or not."""
        return self._folder / f"{event}{MEDIA[kind]}"

    def write(self, file: MediaDone, work: Callable[[Path], object] | None, *, whole: bool = True) -> None:
        """Have a file of an event written by `work`, which is given its path; returns at once.

        Args:
            file: which one.
            work: writes it; None if there is nothing new to be written: what is there is noted.
            whole: whether that is all of it; if not, nothing is noted yet.
        """
        try:
            self._waiting.put_nowait((file, work, whole))
        except queue.Full:
            log.warning("event %s: no %s: too much waits to be written", file.event, file.kind)
            if whole:
                self._noted(file)

    def close(self) -> None:
        """Write what waits, for some seconds at most. A second call does nothing."""
        if self._thread.is_alive():
            deadline = time.monotonic() + _CLOSE_S
            self._closed = True
            with suppress(queue.Full):  # a disk hangs
                self._waiting.put(None, timeout=_CLOSE_S)
                self._thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        decode_behind_the_model()  # once for the thread: some clips are coded again, which must not cost frames
        # Where the queue was too full for what ends it, it ends once all is written.
        while not (self._closed and self._waiting.empty()) and (job := self._waiting.get()) is not None:
            file, work, whole = job
            path = self.path(file.event, file.kind)
            if work is not None:
                self._write(file, work, path)
            if whole:
                self._noted(replace(file, path=str(path)) if path.exists() else file)

    def _write(self, file: MediaDone, work: Callable[[Path], object], path: Path) -> None:
        part = path.with_name(f"{path.name}{_PART}")
        try:
            work(part)
            part.replace(path)
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


@dataclass(slots=True)
class _Recording:
    """What is to be kept of one event; times are on the clock of `Frame.steady_at`."""

    begin: float
    end: float
    saved_at: float  # when what there is of the clip is written, in case this process does not live to the end
    before: Path | None = None  # the clip up to where the stream ran last, elsewhere
    whole: bool = False  # whether the clip is written
    shown: bool = False  # whether there is a snapshot
    quality: float = -1.0  # of the best image; below that of any
    image: NDArray[np.uint8] | None = None
    image_size: tuple[int, int] = (0, 0)  # with square pixels
    outlines: Sequence[Outline] = ()  # to be drawn into it


class Recorder:
    """Records the events of one stream; `note` and `close` are called in its thread, packets come in any.

    Args:
        writer: writes the files.
        before_s, after_s: seconds of video before and after an event.
        file: that is the source, of `FileSource.index`; None for a live one, whose packets are given to `ring.add`.
    """

    def __init__(
        self, writer: MediaWriter, *, before_s: float = 5.0, after_s: float = 5.0, file: FileIndex | None = None
    ) -> None:
        self._writer = writer
        self._before_s, self._after_s = before_s, after_s
        self._file = file
        self.ring = PacketRing(before_s + 1.0)
        """The packets of a live source."""
        self._stream = ""
        self._elsewhere: set[str] = set()  # events whose files another machine has
        self._recordings: dict[str, _Recording] = {}
        self._ending: dict[str, _Recording] = {}  # whose time goes on after the event

    @property
    def kept(self) -> dict[str, int]:
        """Bytes of video for clips, and clips that are not written yet. Read from any thread."""
        return {"clip_bytes": self.ring.bytes, "clips": len(self._recordings) + len(self._ending)}

    @property
    def has_clips(self) -> bool:
        """Whether there is video to cut clips from."""
        return self._file is not None or self.ring.newest is not None

    def resume(self, event: Event) -> None:
        """Take note of an event that went on when the stream ran last, elsewhere; go on with its files, if here.

        Its snapshot stays; what is cut from now on comes behind its clip. If the snapshot, which is written first, is
        not here, its files are another machine's, and remain as they are.
        """
        if not self._writer.path(event.id, "snapshot").exists():
            self._stream = event.stream
            self._elsewhere.add(event.id)
            return
        clip = self._writer.path(event.id, "clip")  # if there is one by then
        endless = float("inf")
        recording = _Recording(-endless, endless, saved_at=endless, before=clip, shown=True, quality=endless)
        self._recordings[event.id], self._stream = recording, event.stream
        self.ring.hold(event.id, recording.begin)

    def note(self, event: Event, frame: Frame, outlines: Sequence[Outline] = ()) -> None:
        """Take note of an event that goes on, or has just ended, with the frame that shows it and outlines in that."""
        if event.id in self._elsewhere:
            return
        recording = self._recordings.get(event.id)
        if recording is None or event.end_time is None:
            recording = recording or self._begin(event)
            if recording.end == float("inf"):  # it has gone on for a while elsewhere
                recording.end = frame.steady_at + MOST_S - max(0.0, frame.captured_at - event.start_time)
            self._consider(recording, event, frame, outlines)
            if not recording.shown and recording.image is not None:
                recording.shown = True
                self._write_snapshot(event.id, recording)
        if event.end_time is not None:
            self._end(event)

    def advance(self, now: float) -> None:
        """Cut the clips whose time is over, and save what there is of others, once.

        Args:
            now: of the newest frame, as in `Frame.steady_at`.
        """
        for name, recording in list(self._ending.items()):
            if now > recording.end:
                del self._ending[name]
                self._write_clip(name, recording)
        if self._file is not None:
            return
        for name, recording in self._recordings.items():
            if not recording.whole and now > recording.end + self._after_s:
                recording.end += self._after_s
                self._write_clip(name, recording)
            elif now > recording.saved_at:
                recording.saved_at = float("inf")
                if packets := self.ring.cut(recording.begin, now):
                    file = MediaDone(self._stream, name, "clip")
                    self._writer.write(file, partial(write_clip, packets), whole=False)

    def finish(self, event: Event) -> None:
        """Take note that an event has ended without a frame."""
        if event.id in self._elsewhere:
            self._elsewhere.remove(event.id)
            for kind in MEDIA:
                self._writer.write(MediaDone(self._stream, event.id, kind), None)
        elif event.id in self._recordings:
            self._end(event)

    def close(self) -> None:
        """Cut every clip with what there is."""
        for name, recording in list(self._recordings.items()):
            self._finish(name, recording.end)
        self.advance(float("inf"))

    def _begin(self, event: Event) -> _Recording:
        begin = max(event.since_at, event.start_at - _BEFORE_S) - self._before_s
        times = begin, event.start_at + MOST_S, event.start_at + self._after_s
        recording = self._recordings[event.id] = _Recording(*times)
        self._stream = event.stream
        self.ring.hold(event.id, begin)
        return recording

    def _end(self, event: Event) -> None:
        self._finish(event.id, max(event.start_at, event.frame_at))

    def _finish(self, name: str, end: float) -> None:
        recording = self._recordings.pop(name)
        if recording.image is not None:
            self._write_snapshot(name, recording)
        if not recording.whole:
            recording.end = min(recording.end, end) + self._after_s
            self._ending[name] = recording

    def _consider(self, recording: _Recording, event: Event, frame: Frame, outlines: Sequence[Outline]) -> None:
        """Keep the frame's image if it shows the event better: by score, size and sharpness of its best object."""
        if event.frame_at != frame.steady_at:
            return  # nothing of it is to be seen now
        quality = 1e-9
        if event.box is not None:
            x1, y1, x2, y2 = event.box
            most = event.score * (x2 - x1) * (y2 - y1)
            if recording.quality > most:  # even if it were perfectly sharp
                return
            quality = most * sharpness_of(frame.image, event.box)
        if quality > recording.quality * _BETTER:
            recording.quality, recording.image, recording.image_size = quality, frame.image, frame.shown_size
            recording.outlines = outlines

    def _write_snapshot(self, name: str, recording: _Recording) -> None:
        if recording.image is not None:
            work = partial(_write_jpeg, recording.image, recording.image_size, recording.outlines)
            self._writer.write(MediaDone(self._stream, name, "snapshot"), work)
            recording.image = None

    def _write_clip(self, name: str, recording: _Recording) -> None:
        recording.whole = True
        self.ring.release(name)
        file = MediaDone(self._stream, name, "clip")
        if self._file is not None:
            begin, end = max(0.0, recording.begin), recording.end
            self._writer.write(file, partial(copy_clip, self._file, begin, end))
        elif packets := self.ring.cut(recording.begin, recording.end):
            self._writer.write(file, partial(write_clip, packets, before=recording.before))
        elif self.has_clips or recording.before is not None:
            self._writer.write(file, None)  # nothing new


def _write_jpeg(image: NDArray[np.uint8], size: tuple[int, int], outlines: Sequence[Outline], path: Path) -> None:
    if size != (image.shape[1], image.shape[0]):
        image = np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), dtype=np.uint8)
    if outlines:
        image = image.copy()  # the frame's own may be in use elsewhere
        draw_outlines(image, outlines)
    path.write_bytes(jpeg(image, 90))
