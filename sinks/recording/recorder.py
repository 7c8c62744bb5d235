"""Records the encoded packets of one stream, in a separate thread.

Recording does not delay the analysis of frames. If the disk is too slow, all packets until the next keyframe are
dropped. If the disk is full, recording is retried.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import av.error

from saccade.sinks.backoff import backoff_s
from saccade.sinks.base import SinkError
from saccade.sinks.guard import SinkStatus
from saccade.sinks.os_errors import write_failure
from saccade.sinks.recording.archive import Archive
from saccade.sinks.recording.cutter import FragmentCutter, TimedPacket
from saccade.sinks.recording.place import RecordingPlace
from saccade.sinks.video.audio import AudioWriter
from saccade.sinks.video.fragments import (
    SOUND,
    VIDEO,
    VIDEO_SCALE,
    Sample,
    fragment_of,
    head_of,
    length_prefixed,
)
from saccade.sinks.video.part_file import SUFFIX, free_path
from saccade.sources.live.packets import AudioPacket, CodedPacket, jumps, parameters_of

log = logging.getLogger(__name__)

GAP_S = 3.0
"""Seconds without frames after which a new file starts, so that gaps occur only between files."""

_CODECS = ("h264", "hevc")
_WAKE_S = 0.25
_LATER_S = 0.3  # frames wait so long for the audio of the same time
_MOST_BYTES = 64 << 20  # that wait: half a minute of 16 Mb/s
_PRUNE_S = 60.0
_CLOSE_S = 5.0
_STEP_S = 1.0  # by which a wall clock is off that was set
_SETTLE_S = 5.0


@dataclass(slots=True)
class _OpenFile:
    """The MP4 file that is being recorded. It is created on disk when its first fragment is complete."""

    began: CodedPacket  # its first
    parameters: tuple[str, frozenset[bytes]]
    wall_offset: float  # of the wall clock to the one that nobody sets
    after: str | None  # why something is missing before it
    cutter: FragmentCutter = field(default_factory=FragmentCutter)
    sound: AudioWriter | None = None
    path: Path | None = None
    descriptor: int = -1
    identity: tuple[int, int] = (0, 0)
    fragments: int = 0
    size: int = 0
    origin: int = 0  # on the clock of packets


class PacketRecorder:
    """Records the encoded packets of one stream to MP4 files, from construction until `close`.

    Each file starts at a keyframe. A new file starts after the configured duration, after a gap, and after a change of
    the video format, the audio format or the system time.

    Args:
        stream: name of the stream.
        place: location of the files.

    Raises:
        SinkError: if the location is not writable.
    """

    def __init__(self, stream: str, place: RecordingPlace) -> None:
        self._stream, self._place = stream, place
        root = place.names.root
        try:
            root.mkdir(parents=True, exist_ok=True)
            probe = root / f".{os.getpid()}{SUFFIX}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise SinkError(f"cannot record to {root}: {write_failure(root / 'file', error)}") from None
        self._wake = threading.Event()
        self._lock = threading.Lock()  # over the three that follow
        self._queue: deque[CodedPacket | AudioPacket | None] = deque()  # None: some were dropped here
        self._waiting = 0  # bytes
        self._full = False  # whether packets are dropped up to the next keyframe
        self._closed = False
        self._frames: deque[CodedPacket | None] = deque()
        self._sound: AudioWriter | None = None
        self._file: _OpenFile | None = None
        self._last: CodedPacket | None = None
        self._after: str | None = "the recording began"
        self._number = 0
        self._failures = 0
        self._failed_at = self._retry_at = self._pruned_at = 0.0
        self._reason: str | None = None
        self._complained: set[str] = set()
        self._dropped = 0
        self.bytes = 0
        """Number of bytes written so far."""
        self.cpu_s = 0.0
        """CPU time of the recording thread in seconds."""
        self._thread = threading.Thread(target=self._work, name="saccade record", daemon=True)
        self._thread.start()

    def take(self, packet: CodedPacket | AudioPacket) -> None:
        """Queue an encoded video or audio packet for recording. Does not block."""
        with self._lock:
            video = isinstance(packet, CodedPacket)
            may_begin = isinstance(packet, CodedPacket) and packet.key and self._waiting < _MOST_BYTES // 2
            if self._closed or (self._full and not may_begin):
                self._dropped += video
                return
            if self._full:
                self._full = False
                self._queue.append(None)
            elif self._waiting > _MOST_BYTES:
                self._full = True
                self._dropped += video
                return
            self._queue.append(packet)
            self._waiting += len(packet.data)

    def status(self) -> SinkStatus:
        """Return the recorder's status, including the number of frames that were not written. Thread-safe."""
        return SinkStatus("record", "paused" if self._failures else "ok", self._reason, self._dropped)

    def close(self) -> None:
        """Write the queued packets, then stop recording. Waits up to 5 s. A second call does nothing."""
        with self._lock:
            self._closed = True
        self._wake.set()
        self._thread.join(_CLOSE_S)

    # ---- in the thread

    def _work(self) -> None:
        self._number = Archive(self._place).last_number + 1
        while True:
            closed = self._wake.wait(_WAKE_S)
            with self._lock:
                packets, self._queue = self._queue, deque()
            for packet in packets:
                if isinstance(packet, AudioPacket):
                    self._take_sound(packet)
                else:
                    self._frames.append(packet)
            now = time.monotonic()
            while self._frames:
                frame = self._frames[0]
                if frame is None:
                    self._complain("the disk is too slow: frames are dropped until the next keyframe")
                    self._after = "the disk was too slow"
                elif frame.arrived_at > now - _LATER_S and not closed:
                    break
                self._frames.popleft()
                if frame is None:
                    continue
                with self._lock:
                    self._waiting -= len(frame.data)
                try:
                    self._take(frame)
                except Exception as error:  # a bug must not end the recording
                    self._failed(error)
            self._settle()
            self.cpu_s = time.thread_time()
            if closed:
                break
        try:
            self._end_file()
        except OSError as error:
            self._failed(error)

    def _take(self, packet: CodedPacket) -> None:
        if packet.codec not in _CODECS:
            self._complain(f"video codec {packet.codec} cannot be recorded; set the camera to H.264 or H.265")
            return
        last, self._last = self._last, packet
        broken = last is not None and jumps(last.pts, last, packet)
        if self._file is not None and (broken or (packet.key and self._ends(self._file, packet, last))):
            self._note_gap(packet, last)
            self._end_file()
        if self._file is None:
            if not packet.key or time.monotonic() < self._retry_at:
                self._dropped += self._failures > 0
                return
            offset = time.time() - time.monotonic()
            self._file = _OpenFile(packet, parameters_of(packet), offset, self._after)
            self._after = None
        self._write(self._file, self._file.cutter.push(packet))

    def _ends(self, file: _OpenFile, packet: CodedPacket, last: CodedPacket | None) -> bool:
        """Return whether a new file must start at the keyframe `packet`. `last` is the packet before the keyframe."""
        gap = self._after is not None or (last is not None and packet.pts - last.pts > GAP_S * VIDEO_SCALE)
        long = packet.pts - file.began.pts >= self._place.length_s * VIDEO_SCALE
        was_set = abs(time.time() - time.monotonic() - file.wall_offset) > _STEP_S
        gone = file.path is not None and _moved(file)
        if was_set and self._after is None:
            self._after = "the system clock was changed"
        other_sound = file.path is not None and file.sound is not self._sound
        return gap or long or was_set or gone or other_sound or parameters_of(packet) != file.parameters

    def _note_gap(self, packet: CodedPacket, last: CodedPacket | None) -> None:
        if last is None or self._after is not None:
            return
        if packet.arrived_at - last.arrived_at > GAP_S:
            self._after = "the camera sent no data"
        elif packet.pts - last.pts > GAP_S * VIDEO_SCALE:
            self._after = "frames were lost in transit"

    def _take_sound(self, packet: AudioPacket) -> None:
        with self._lock:
            self._waiting -= len(packet.data)
        if self._sound is None or not self._sound.fits(packet):
            try:
                self._sound = AudioWriter(packet)
            except ValueError as error:
                self._complain(f"audio is not recorded: {error}")
                return
        self._sound.push(packet)

    def _write(self, file: _OpenFile, packets: list[TimedPacket]) -> None:
        if not packets:
            return
        head = b""
        if file.path is None:
            try:
                head = self._begin(file, packets)
            except (av.error.FFmpegError, ValueError) as error:
                self._complain(f"a new file could not be started: {error}")
                self._file = None
                return
        frames = [Sample(length_prefixed(one.packet.data), one.duration, one.offset, one.packet.key) for one in packets]
        start, sound = 0, list[Sample]()
        if file.sound is not None:
            start, sound = file.sound.take(file.origin, packets[-1].decode + packets[-1].duration)
        fragment = fragment_of(file.fragments + 1, [(VIDEO, packets[0].decode, frames), (SOUND, start, sound)])
        data = memoryview(head + fragment)
        written = 0
        while written < len(data):
            written += os.write(file.descriptor, data[written:])
        if not file.fragments:
            assert file.path is not None
            part = file.path
            file.path = part.with_name(part.name.removesuffix(SUFFIX))
            part.replace(file.path)
            log.info("stream %s: recording to %s", self._stream, file.path)
        file.fragments += 1
        file.size += len(data)
        self.bytes += len(data)
        if self._place.retention and time.monotonic() - self._pruned_at > _PRUNE_S:
            self._prune()

    def _begin(self, file: _OpenFile, packets: list[TimedPacket]) -> bytes:
        """Create the MP4 file on disk and return its header (initialization segment)."""
        root = self._place.names.root
        if not root.is_dir():  # not created again: it may be where a disk was mounted
            raise FileNotFoundError(2, f"the folder {root} no longer exists")
        file.origin = packets[0].packet.pts - packets[0].decode - packets[0].offset
        file.sound = self._sound
        # A server sends what it has stored in a burst: the frame that came soonest tells when the file began.
        delay = min(one.packet.arrived_at - (one.packet.pts - file.origin) / VIDEO_SCALE for one in packets)
        began = file.wall_offset + delay
        track = file.sound.track if file.sound else None
        form = hashlib.sha256(repr((file.parameters[0], sorted(file.parameters[1]), track)).encode()).hexdigest()[:16]
        note = {"began": round(began, 3), "number": self._number, "after": file.after, "form": form}
        self._number += 1
        newest = packets[-1].packet
        first = file.began.parameter_sets + b"".join(one.packet.data for one in packets[:2])
        head = head_of(
            newest.codec,
            first,
            sound=track,
            note=note,
            display_matrix=newest.display_matrix,
            pixel_aspect=newest.pixel_aspect,
        )
        path = free_path(self._place.names.at(datetime.fromtimestamp(began).astimezone()))
        path.parent.mkdir(parents=True, exist_ok=True)
        file.path = path.with_name(path.name + SUFFIX)
        file.descriptor = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        status = os.fstat(file.descriptor)
        file.identity = status.st_dev, status.st_ino
        if self._place.retention:
            self._prune()
        return head

    def _end_file(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            self._write(file, file.cutter.close())
        except OSError:
            self._file = file  # for `_failed`
            raise
        if file.descriptor >= 0:
            os.close(file.descriptor)

    def _failed(self, error: Exception) -> None:
        """Handle a write error: truncate the file after its last complete fragment, and schedule a retry."""
        file, self._file = self._file, None
        if file is not None and file.descriptor >= 0:
            with suppress(OSError):
                os.ftruncate(file.descriptor, file.size)
                if not file.size and file.path is not None:
                    file.path.unlink(missing_ok=True)
            os.close(file.descriptor)
        why = write_failure(self._place.names.root / "file", error)
        if not self._failures:
            trace = None if isinstance(error, OSError) else error
            root = self._place.names.root
            log.warning("stream %s: cannot record to %s: %s; retrying", self._stream, root, why, exc_info=trace)
        self._failures += 1
        self._failed_at = time.monotonic()
        self._retry_at = self._failed_at + backoff_s(self._failures)
        self._reason, self._after = why, f"it could not be written: {why}"
        with suppress(OSError):
            self._prune()

    def _settle(self) -> None:
        if self._failures and self._file and self._file.fragments and time.monotonic() - self._failed_at > _SETTLE_S:
            log.warning("stream %s: recording works again; frames dropped so far: %d", self._stream, self._dropped)
            self._failures, self._reason = 0, None

    def _prune(self) -> None:
        self._pruned_at = time.monotonic()
        if not self._place.retention:
            return
        current = self._file.path if self._file else None
        for path in self._place.retention.prune(self._place.files(), current):
            for folder in list(path.parents)[: self._place.names.depth]:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()

    def _complain(self, text: str) -> None:
        """Log a warning, unless the same warning was logged before."""
        if text not in self._complained:
            self._complained.add(text)
            self._reason = text
            log.warning("recording of stream %s: %s", self._stream, text)


def _moved(file: _OpenFile) -> bool:
    """Return whether another program has deleted, moved or replaced the file."""
    try:
        status = os.stat(file.path or "")
    except OSError:
        return True
    return (status.st_dev, status.st_ino) != file.identity
