"""Video files as sources: decodes them through PyAV and keeps the container's timestamps."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import av
import av.error
from av.codec.hwaccel import HWAccel
from av.container import InputContainer

from saccade.sources.base import Source, SourceInfo
from saccade.sources.demux import (
    NOMINAL_RATE,
    FileDemuxer,
    FileIndex,
    KeyFrame,
    clock_may_jump,
    seek,
)
from saccade.sources.errors import SourceError
from saccade.sources.frame import Frame
from saccade.sources.gpu import HwAccel, gpu_decoding, primary_context, running
from saccade.sources.image_file import is_motion_jpeg
from saccade.sources.rgb import RgbConverter, orientation_of, pixel_aspect_of
from saccade.sources.timestamps import Timeline
from saccade.sources.video_stream import NoVideoError, choose_video

_SEEK_BACK_S = (0, 2, 10)
_INDEXED = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")  # formats that reliably seek back to the first frame
_PACED_THREADS = 2  # with one thread per core each, 64 streams on 32 cores had 2,000 threads
_TIMELESS = 32  # most frames to decode in search of one with a timestamp
_DAMAGED_S = 60  # longest undecodable beginning of a file, usually a group of pictures without its keyframe
_MOST_HELD_BYTES = 64 * 1024 * 1024  # of encoded frames between a keyframe and `start`


class FileSource(Source):
    """A video file as a source. Each iteration starts at the beginning of the file.

    Timestamps are those of the file, in units of the stream's time base. Jumps and missing timestamps are repaired; see
    `timestamps`. `captured_at` counts from the beginning of the video.

    Frames are rotated upright by the container's display matrix. Damaged and missing frames are skipped and counted.

    Args:
        path: path of the file.
        stream: name of the stream; the file name without suffix if None.
        vid_stride: yield every `vid_stride`-th frame.
        start: skip frames before this time, in seconds from the beginning of the video.
        end: stop before this time, in seconds from the beginning of the video.
        hwaccel: "auto" to decode on a GPU only if the attribute `gpu` is set, "cuda" to require a GPU, "none" for the
            CPU.
        paced: whether the file is played in a loop, like a camera. The decoder then uses few threads and is reused in
            each iteration.
        index: keyframe index of another source of the same file, used to find `start`; None for a new index.

    Attributes:
        index: the keyframes that have been read so far.

    Raises:
        SourceError: if the file cannot be read as a video, or the range from `start` to `end` is empty.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        stream: str | None = None,
        vid_stride: int = 1,
        start: float | None = None,
        end: float | None = None,
        hwaccel: HwAccel = "none",
        paced: bool = False,
        index: FileIndex | None = None,
    ) -> None:
        self._path = Path(path)
        super().__init__(stream if stream is not None else self._path.stem, vid_stride)
        self._start = start
        self._end = end
        self._hwaccel, self._paced = hwaccel, paced
        self._kept: InputContainer | None = None  # container of the last complete iteration
        if start is not None and start < 0:
            raise SourceError(f"start must be at least 0 s, not {start:g} s")
        if end is not None and end <= (start or 0):
            raise SourceError(f"end ({end:g} s) must be later than start ({start or 0:g} s)")
        check_readable(self._path)
        with self._open() as container:
            self._probe(container)
        self.index = index or FileIndex(self._path, self._info.time_base, self._beginning.pts)
        # If the clock may jump, the stated duration is merely the difference of the first and last timestamp.
        known = None if self._jumps else self._info.duration_s
        if start is not None and known is not None and start >= known:
            raise SourceError(f"start ({start:g} s) is past the end of {self._path} ({known:.1f} s)")

    def __iter__(self) -> Iterator[Frame]:
        """Yield the frames in presentation order.

        `Frame.index` starts at 0 with the first frame at or after `start`.

        Raises:
            SourceError: if the file has become unreadable since construction.
        """
        base = self._info.time_base
        first_pts = _units(self._start, base, self.index.origin) if self._start is not None else None
        places: list[KeyFrame | None] = [None]  # None: decode from the beginning
        if first_pts is not None and (key := self.index.before(first_pts)) is not None:
            places = [key, None]  # an earlier iteration has read this keyframe
        elif first_pts is not None and self._seekable and not self._jumps:
            # Seeking may land after the keyframe that is needed. Then seek further back, and finally decode from the
            # beginning.
            backs = (first_pts - round(back / base) for back in _SEEK_BACK_S)
            places = [*(KeyFrame(pts, pts, None, Fraction(0)) for pts in backs if pts > self.index.origin), None]
        for place in places:
            if self._closed.is_set():
                return
            self._corrupt = 0
            begun = time.perf_counter()
            # The container belongs to this iteration alone: close() must not free what another thread decodes with.
            with self._container() as container:
                stream = _video_of(container, self._path)
                if place is not None and not seek(container, stream, place):
                    continue
                packets = self._packets(container, stream, place.shift if place is not None else Fraction(0))
                if first_pts is not None and self._jumps:
                    packets = _from_key_frame(packets, first_pts)
                frames = self._decode(packets)
                first = next(frames, None)
                if place is not None and not _is_at_or_before(first, first_pts):
                    continue
                if first is not None:
                    self._decoder = running(stream.codec_context, first.format.name)
                    yield from self._frames(itertools.chain((first,), frames), first_pts, begun)
                return

    def _frames(self, frames: Iterable[av.VideoFrame], first_pts: int | None, begun: float) -> Iterator[Frame]:
        base = self._info.time_base
        origin = self.index.origin
        end_pts = _units(self._end, base, origin) if self._end is not None else None

        converter = RgbConverter()
        timeline = Timeline(1 / ((self._info.average_rate or NOMINAL_RATE) * base), origin)
        index, corrupt_before = 0, 0
        for frame in frames:
            pts = timeline.place(frame.pts)
            if first_pts is not None and pts < first_pts:
                continue
            if end_pts is not None and pts >= end_pts:
                return
            number, index = index, index + 1
            if number % self._stride:
                continue
            known = self._orientation if frame.rotation == self._rotation else None
            image = converter.later(frame, known)
            yield Frame.deferred(
                image,
                size=image.size,
                planes=image.planes,
                stream=self._name,
                index=number,
                pts=pts,
                time_base=base,
                captured_at=(pts - origin) * base.numerator / base.denominator,
                capture_clock="file",
                decoded_at=time.monotonic(),
                decode_ms=(time.perf_counter() - begun) * 1e3,
                dropped_before=self._corrupt - corrupt_before,
                pixel_aspect=self._pixel_aspect,
            )
            corrupt_before = self._corrupt
            begun = time.perf_counter()
        if first_pts is not None and not index and not self._closed.is_set():
            raise SourceError(f"start ({self._start:g} s) is past the end of {self._path}")

    def _decode(self, packets: Iterable[av.Packet[av.VideoStream]]) -> Iterator[av.VideoFrame]:
        """Yield decoded frames until the file ends or `close` is called. Count damaged frames."""
        for packet in packets:
            try:
                frames = packet.decode()
            except av.error.EOFError:
                return
            except av.error.FFmpegError:
                self._corrupt += 1
                continue
            for frame in frames:
                if self._closed.is_set():
                    return
                if frame.is_corrupt:
                    self._corrupt += 1
                else:
                    yield frame

    def _packets(
        self, container: InputContainer, stream: av.VideoStream, shift: Fraction
    ) -> Iterator[av.Packet[av.VideoStream]]:
        """Yield the video packets, then an empty packet that flushes the decoder."""
        demuxer = FileDemuxer(container, stream, shift=shift)

        def damaged() -> None:
            self._corrupt += 1

        for packet in demuxer.packets(damaged, self._closed):
            if packet.stream_index != stream.index:
                continue
            if packet.is_keyframe and packet.pts is not None:
                position = None if packet.pos is None or packet.pos < 0 else packet.pos
                moved = demuxer.shift_of(stream)
                raw = packet.pts - round(moved / self._info.time_base)
                self.index.add(KeyFrame(packet.pts, raw, position, moved))
            yield packet
        if not self._closed.is_set():
            self._corrupt += _cut_off(stream, self._path)

    @contextmanager
    def _container(self) -> Iterator[InputContainer]:
        """Open the file and its decoder. A looped file can stay open between iterations."""
        container, self._kept = self._kept, None
        if container is None:
            wanted = self._hwaccel == "cuda" or self.gpu is not None
            container = self._open(gpu_decoding(self._hwaccel, self.gpu) if wanted else None)
            stream = _video_of(container, self._path)
            # Latency does not matter for a file, so both kinds of threading are allowed. Live sources must not use
            # FRAME threading, which delays the output by one frame per thread.
            stream.thread_type = "AUTO"
            if self._paced:
                stream.codec_context.thread_count = 1 if stream.codec_context.is_hwaccel else _PACED_THREADS
        elif not seek(container, _video_of(container, self._path), self._beginning):
            raise SourceError(f"{self._path} cannot be looped: seeking to its beginning failed")
        try:
            yield container
        except BaseException:
            container.close()
            raise
        if self._paced and not self._closed.is_set() and container.format.name in _INDEXED:
            self._kept = container
        else:
            container.close()

    def _open(self, handle: HWAccel | None = None) -> InputContainer:
        try:
            # The prefix "file:" keeps FFmpeg from reading the start of `cam:1.mp4` as a protocol. Old cameras write
            # titles in any encoding, which is no reason to refuse the video.
            with primary_context(self.gpu if handle else None):
                name = f"file:{self._path}"
                container = av.open(name, hwaccel=handle, metadata_errors="replace")
                if container.format.name in ("image2", "jpeg_pipe") and self._is_motion_jpeg():
                    container.close()  # FFmpeg guessed by the file's name or first bytes
                    container = av.open(name, format="mjpeg", hwaccel=handle, metadata_errors="replace")
                return container
        except (av.error.FFmpegError, OSError) as error:
            if isinstance(error, PermissionError | FileNotFoundError):
                check_readable(self._path)
            raise SourceError(
                f"{self._path} cannot be read as a video or an image: it is damaged, truncated, or another kind of file"
            ) from error

    def _is_motion_jpeg(self) -> bool:
        with self._path.open("rb") as file:
            return is_motion_jpeg(file)

    def _probe(self, container: InputContainer) -> None:
        """Fill `info` from the file's headers and its first frame. Raises SourceError if no frame can be decoded."""
        stream = _video_of(container, self._path)
        self._jumps = clock_may_jump(container)
        frames = self._decode(FileDemuxer(container, stream).packets_of(stream))
        first = next(frames, None)
        if first is None and container.format.name == "image2":  # FFmpeg's last guess, made by the file name
            raise SourceError(f"{self._path}: the content is damaged or not an image")
        if first is None:
            raise SourceError(f"{self._path}: no frame could be decoded; is the file damaged or truncated?")
        self._orientation, self._rotation = orientation_of(first), first.rotation
        sideways = self._orientation.transpose
        aspect = pixel_aspect_of(stream.sample_aspect_ratio, stream.codec_context.sample_aspect_ratio)
        self._pixel_aspect = 1 / aspect if sideways else aspect
        width, height = (first.height, first.width) if sideways else (first.width, first.height)
        base = stream.time_base or Fraction(1, av.time_base)
        rate = stream.average_rate or stream.guessed_rate
        duration_s: float | None = None
        if stream.duration:
            duration_s = float(stream.duration * base)
        elif container.duration:
            duration_s = container.duration / av.time_base
        # A first frame without a valid timestamp gets one by counting back from the first frame that has one.
        times = enumerate(one.pts for one in itertools.chain((first,), itertools.islice(frames, _TIMELESS)))
        timed = ((number, pts) for number, pts in times if pts is not None)
        number, pts = next(timed, (0, None))
        begun = None if pts is None else pts - round(number / (Fraction(rate or NOMINAL_RATE) * base))
        origin = _origin(stream.start_time, begun, base)
        self._corrupt = 0
        self._beginning = KeyFrame(origin, origin, None, Fraction(0))
        # Frames without timestamps are counted from the beginning, so decoding must start there.
        self._seekable = first.pts is not None
        self._info = SourceInfo(
            codec=stream.codec_context.name,
            width=width,
            height=height,
            average_rate=Fraction(rate) if rate else None,
            frames=self._expected_frames(stream.frames, rate, duration_s),
            time_base=base,
            duration_s=duration_s,
            live=False,
            audio=bool(container.streams.audio),
            url=str(self._path),
        )

    def _expected_frames(self, counted: int, rate: Fraction | None, duration_s: float | None) -> int | None:
        total = counted or (duration_s * rate if duration_s and rate else None)
        if total is None:
            return None
        if duration_s and (self._start is not None or self._end is not None):
            end = min(self._end if self._end is not None else duration_s, duration_s)
            total = total * (end - (self._start or 0)) / duration_s
        return max(1, math.ceil(round(total) / self._stride))


def check_readable(path: Path) -> None:
    """Raise `SourceError` unless `path` is a readable, non-empty regular file."""
    try:
        if path.is_dir():
            raise SourceError(f"{path} is a folder, not a file")
        if not path.is_file() and path.exists():  # opening a pipe or a terminal could block forever
            raise SourceError(f"{path} is not a regular file")
        if path.stat().st_size == 0:
            raise SourceError(f"{path} is empty (0 bytes)")
    except FileNotFoundError:
        raise SourceError(f"no such file: {path}") from None
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from None
    if not os.access(path, os.R_OK):
        raise SourceError(f"{path} cannot be read: permission denied")


def _video_of(container: InputContainer, path: Path) -> av.VideoStream:
    try:
        return choose_video(container)
    except NoVideoError as error:
        raise NoVideoError(f"{path}: {error}") from None


def _cut_off(stream: av.VideoStream, path: Path) -> int:
    """Return how many packets of a truncated file are listed in its index, but missing from its data."""
    try:
        size = path.stat().st_size
    except OSError:  # the file was deleted meanwhile
        return 0
    behind = itertools.takewhile(lambda entry: entry.pos + entry.size > size, reversed(stream.index_entries))
    return sum(1 for _ in behind)


def _from_key_frame(
    packets: Iterable[av.Packet[av.VideoStream]], first_pts: int
) -> Iterator[av.Packet[av.VideoStream]]:
    """Yield the packets from a keyframe on: the last keyframe at or before the timestamp `first_pts`."""
    held: list[av.Packet[av.VideoStream]] = []
    size = 0
    packets = iter(packets)
    for packet in packets:
        time = packet.pts if packet.dts is None else packet.dts
        if packet.is_keyframe and packet.pts is not None and packet.pts <= first_pts:
            held, size = [], 0
        held.append(packet)
        size += packet.size
        if size > _MOST_HELD_BYTES or not packet.size or (time is not None and time >= first_pts):
            break
    yield from held
    yield from packets


def _is_at_or_before(frame: av.VideoFrame | None, pts: int | None) -> bool:
    return frame is not None and frame.pts is not None and pts is not None and frame.pts <= pts


def _units(seconds: float, base: Fraction, origin: int) -> int:
    """Convert a time to a timestamp, rounded up.

    Args:
        seconds: time in seconds from the beginning of the video.
        base: seconds per unit of the timestamp.
        origin: timestamp of the beginning of the video.
    """
    return origin + math.ceil(Fraction(seconds).limit_denominator(1_000_000) / base)


def _origin(start_time: int | None, first: int | None, base: Fraction) -> int:
    """Return the timestamp of the video's beginning: `start_time` if it is plausible, else `first`.

    Args:
        start_time: start time in the container's header, or None.
        first: timestamp of the first frame, or None.
        base: seconds per unit of the timestamps.
    """
    if start_time is None or (first is not None and not 0 <= (first - start_time) * base <= _DAMAGED_S):
        return first if first is not None else start_time or 0
    return start_time
