"""Records media files of events: a video clip and a snapshot.

The clip has some seconds of video before and after the event. The snapshot is the frame with the best view of the
object. One thread writes the files from a bounded queue, so that a slow disk never delays frames. If the queue is
full, files are dropped and counted.
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
from saccade.pipeline.events.storage.clips import Moment, PacketRing, copy_clip, image_at, write_clip
from saccade.pipeline.events.storage.store_reader import MEDIA
from saccade.sinks.overlay.draw import draw_outlines
from saccade.sinks.still import jpeg
from saccade.sources.frame import square_size
from saccade.sources.live.decoder import decode_behind_the_model

if TYPE_CHECKING:
    from saccade.engine.results import Outline
    from saccade.sources import Frame
    from saccade.sources.demux import FileIndex
    from saccade.sources.live.packets import CodedPacket

log = logging.getLogger(__name__)

MOST_S = 60.0
"""Maximum length of a clip in seconds, not counting the time after the event."""

_BEFORE_S = 30.0  # maximum time before the begin of an event with a long `for`
_MAX_WAITING = 256
_CLOSE_S = 20.0
_BETTER = 1.1  # factor by which a new image must be better
_PART = ".part"
_SKEW_S = 3.0  # by which the packets of a second stream may be ahead of the analysed frames, or behind them

Noted = Callable[[MediaDone], None]
"""Receives each media file that is complete or has failed."""


class MediaWriter:
    """Writes media files in a separate thread. The name of an incomplete file ends with `.part`.

    Args:
        folder: folder for the media files.
        noted: called with each file that is complete or has failed.
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
        """Return the path of a media file of an event, even if the file does not exist."""
        return self._folder / f"{event}{MEDIA[kind]}"

    def write(self, file: MediaDone, work: Callable[[Path], object] | None, *, whole: bool = True) -> None:
        """Queue a media file for writing and return at once.

        Args:
            file: the media file.
            work: function that writes the file to the given path. None if the file already exists.
            whole: whether the file is final. If False, `noted` is not called.
        """
        try:
            self._waiting.put_nowait((file, work, whole))
        except queue.Full:
            log.warning("event %s: the %s was dropped, because the disk is too slow", file.event, file.kind)
            if whole:
                self._noted(file)

    def close(self) -> None:
        """Write the queued files, then stop. Files that are not written within 20 s are dropped.

        A second call does nothing.
        """
        if self._thread.is_alive():
            deadline = time.monotonic() + _CLOSE_S
            self._closed = True
            with suppress(queue.Full):  # the disk hangs
                self._waiting.put(None, timeout=_CLOSE_S)
                self._thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self) -> None:
        decode_behind_the_model()  # once per thread: transcoding clips must not slow down frames
        # If the queue was too full for the end marker, the thread ends after the last file.
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
            # For example a full disk; log once until it works again.
            if isinstance(error, OSError) and not self._failing:
                log.warning("%s: cannot write snapshots and clips of events: %s", self._folder, error.strerror)
            elif not isinstance(error, OSError):
                log.warning("event %s: cannot write the %s: %s", file.event, file.kind, error)
            self._failing = isinstance(error, OSError)
            with suppress(OSError):
                part.unlink(missing_ok=True)
        else:
            self._failing = False


@dataclass(slots=True)
class _Best:
    """The image for an event's snapshot: the best view of the object so far."""

    image: NDArray[np.uint8]
    size: tuple[int, int]  # with square pixels
    outlines: Sequence[Outline]  # to draw into the image
    at: Moment
    packets: Sequence[CodedPacket] | None  # of the second stream, up to the same frame; None before they have arrived


@dataclass(slots=True)
class _Recording:
    """The clip and the snapshot of one event while they are recorded."""

    begin: Moment
    end: Moment
    saved_at: float  # steady time when a partial clip is written, in case the process is killed before the end
    before: Path | None = None  # the clip up to the point where the previous worker stopped
    whole: bool = False  # whether the complete clip is written
    shown: bool = False  # whether a snapshot exists
    quality: float = -1.0  # of the best image; -1 for no image
    best: _Best | None = None  # not written yet


class Recorder:
    """Records video clips and snapshots of the events of one stream.

    Call `note` and `close` in the thread of the stream. Any thread can add packets.

    Args:
        writer: writes the files.
        before_s, after_s: seconds of video before and after an event.
        file: index of the source file, from `FileSource.index`. None for a live source, which adds packets with
            `ring.add`.
        second: whether the packets come from a second, higher-resolution stream of the camera. The two streams are
            aligned by capture times if known, otherwise by arrival times.
    """

    def __init__(
        self,
        writer: MediaWriter,
        *,
        before_s: float = 5.0,
        after_s: float = 5.0,
        file: FileIndex | None = None,
        second: bool = False,
    ) -> None:
        self._writer = writer
        self._before_s, self._after_s = before_s, after_s
        self._file = file
        self._second = second
        self.ring = PacketRing(before_s + 1.0 + second * _SKEW_S)
        """The packets of a live source."""
        self._stream = ""
        self._elsewhere: set[str] = set()  # events whose files are on another machine
        self._recordings: dict[str, _Recording] = {}
        self._ending: dict[str, _Recording] = {}  # ended events whose clips still run

    @property
    def kept(self) -> dict[str, int]:
        """The number of unwritten clips (`clips`) and the buffered bytes (`clip_bytes`). Thread-safe."""
        return {"clip_bytes": self.ring.bytes, "clips": len(self._recordings) + len(self._ending)}

    @property
    def has_clips(self) -> bool:
        """Whether video for clips is available."""
        return self._file is not None or self.ring.newest is not None

    def resume(self, event: Event) -> None:
        """Continue to record an event that began on another worker. New video is appended to the existing clip."""
        if not self._writer.path(event.id, "snapshot").exists():
            self._stream = event.stream
            self._elsewhere.add(event.id)
            return
        clip = self._writer.path(event.id, "clip")  # if it exists by then
        endless = float("inf")
        begin, end = Moment(-endless), Moment(endless)
        recording = _Recording(begin, end, saved_at=endless, before=clip, shown=True, quality=endless)
        self._recordings[event.id], self._stream = recording, event.stream
        self.ring.hold(event.id, begin.steady)

    def note(self, event: Event, frame: Frame, outlines: Sequence[Outline] = ()) -> None:
        """Add a frame to the recording of an event that is open or has just ended.

        Args:
            event: the event.
            frame: frame that shows the event.
            outlines: object contours to draw on the snapshot.
        """
        if event.id in self._elsewhere:
            return
        recording = self._recordings.get(event.id)
        if recording is None or event.end_time is None:
            recording = recording or self._begin(event)
            if recording.end.steady == float("inf"):  # the event continued on another worker for a while
                left_s = MOST_S - max(0.0, frame.captured_at - event.start_time)
                recording.end = self._moment(event, frame.steady_at, frame.captured_at).later(left_s)
            self._consider(recording, event, frame, outlines)
            if not recording.shown and not self._second:
                self._write_snapshot(event.id, recording)
        if event.end_time is not None:
            self._end(event)

    def advance(self, now: float) -> None:
        """Write all clips whose end time is reached.

        Args:
            now: time of the newest frame (`Frame.steady_at`), in seconds.
        """
        if self._second:
            self._take_larger(now)
        for name, recording in list(self._ending.items()):
            if not recording.whole and self._is_over(recording.end, now):
                self._write_clip(name, recording)
            if recording.whole and recording.best is None:
                del self._ending[name]
        if self._file is not None:
            return
        for name, recording in self._recordings.items():
            if not recording.whole and self._is_over(recording.end.later(self._after_s), now):
                recording.end = recording.end.later(self._after_s)
                self._write_clip(name, recording)
            elif now > recording.saved_at:
                recording.saved_at = float("inf")
                if packets := self.ring.cut(recording.begin, Moment(now)):
                    file = MediaDone(self._stream, name, "clip")
                    self._writer.write(file, partial(write_clip, packets), whole=False)

    def finish(self, event: Event) -> None:
        """Finish the recording of an event that has ended. A second call does nothing."""
        if event.id in self._elsewhere:
            self._elsewhere.remove(event.id)
            for kind in MEDIA:
                self._writer.write(MediaDone(self._stream, event.id, kind), None)
        elif event.id in self._recordings:
            self._end(event)

    def close(self) -> None:
        """Write the clips of all unfinished recordings. The clips end at the last received packet."""
        for name, recording in list(self._recordings.items()):
            self._finish(name, recording.end)
        self.advance(float("inf"))

    def _begin(self, event: Event) -> _Recording:
        started = self._moment(event, event.start_at, event.start_time)
        since = self._moment(event, event.since_at, event.since)
        begin = max(since, started.later(-_BEFORE_S), key=_steady).later(-self._before_s)
        recording = _Recording(begin, started.later(MOST_S), event.start_at + self._after_s)
        self._recordings[event.id], self._stream = recording, event.stream
        self.ring.hold(event.id, begin.steady - self._second * _SKEW_S)
        return recording

    def _end(self, event: Event) -> None:
        started = self._moment(event, event.start_at, event.start_time)
        self._finish(event.id, max(started, self._moment(event, event.frame_at, event.frame_time), key=_steady))

    def _finish(self, name: str, end: Moment) -> None:
        recording = self._recordings.pop(name)
        if not self._second:
            self._write_snapshot(name, recording)
        if not recording.whole:
            recording.end = min(recording.end, end, key=_steady).later(self._after_s)
        if not recording.whole or recording.best is not None:
            self._ending[name] = recording

    def _moment(self, event: Event, steady: float, captured: float) -> Moment:
        return Moment(steady, captured if self._second and event.capture_clock == "rtcp" else None)

    def _is_over(self, time: Moment, now: float) -> bool:
        if not self._second:
            return now > time.steady
        return (now > time.steady and self.ring.reaches(time)) or now > time.steady + _SKEW_S

    def _take_larger(self, now: float) -> None:
        for going in (self._recordings, self._ending):
            for name, recording in going.items():
                if (best := recording.best) is None:
                    continue
                if best.packets is None and self._is_over(best.at, now):
                    best.packets = self.ring.cut(best.at, best.at)
                if best.packets is not None and (not recording.shown or going is self._ending):
                    self._write_snapshot(name, recording)

    def _consider(self, recording: _Recording, event: Event, frame: Frame, outlines: Sequence[Outline]) -> None:
        """Use a frame for the snapshot if it shows the event's object better than all earlier frames."""
        if event.frame_at != frame.steady_at:
            return  # this frame does not show the event
        quality = 1e-9
        if event.box is not None:
            x1, y1, x2, y2 = event.box
            most = event.score * (x2 - x1) * (y2 - y1)
            if recording.quality > most:  # even a perfectly sharp image would not be better
                return
            quality = most * sharpness_of(frame.image, event.box)
        if quality > recording.quality * _BETTER:
            recording.quality = quality
            at = self._moment(event, frame.steady_at, frame.captured_at)
            recording.best = _Best(frame.image, frame.shown_size, outlines, at, None)

    def _write_snapshot(self, name: str, recording: _Recording) -> None:
        if recording.best is not None:
            self._writer.write(MediaDone(self._stream, name, "snapshot"), partial(_write_jpeg, recording.best))
            recording.best, recording.shown = None, True

    def _write_clip(self, name: str, recording: _Recording) -> None:
        recording.whole = True
        self.ring.release(name)
        file = MediaDone(self._stream, name, "clip")
        if self._file is not None:
            begin, end = max(0.0, recording.begin.steady), recording.end.steady
            self._writer.write(file, partial(copy_clip, self._file, begin, end))
        elif packets := self.ring.cut(recording.begin, recording.end):
            self._writer.write(file, partial(write_clip, packets, before=recording.before))
        elif self.has_clips or recording.before is not None:
            self._writer.write(file, None)  # report the existing file


def _steady(moment: Moment) -> float:
    return moment.steady


def _write_jpeg(best: _Best, path: Path) -> None:
    image, size, outlines = best.image, best.size, best.outlines
    larger = image_at(best.packets, best.at) if best.packets else None
    if larger is not None:
        image, aspect = larger
        size = square_size(image.shape[1], image.shape[0], aspect)
    if size != (image.shape[1], image.shape[0]):
        image = np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), dtype=np.uint8)
    if outlines:
        image = image.copy()  # the frame's image may be shared
        draw_outlines(image, outlines)
    path.write_bytes(jpeg(image, 90))
