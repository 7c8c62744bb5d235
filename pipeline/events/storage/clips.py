"""Writes video clips of events from encoded packets. The packets come from a live stream's ring buffer or from a file.

A clip starts at the last keyframe before the requested start. Video in a codec that browsers can play from MP4 is
copied without re-encoding. Video in another codec, such as MJPEG or VP8, is transcoded to H.264.
"""

from __future__ import annotations

import io
import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import av.error
from av.bitstream import BitStreamFilterContext
from av.container import OutputContainer
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.frame import PictureType, VideoFrame
from av.video.reformatter import ColorRange, Colorspace, VideoReformatter
from av.video.stream import VideoStream

from saccade.sinks.video.muxer import Muxer
from saccade.sources import FileSource, SourceError
from saccade.sources.demux import FileDemuxer, FileIndex, KeyFrame, seek
from saccade.sources.frame import RgbImage
from saccade.sources.live.packets import JUMP_S, CodedPacket, jumps, parameters_of
from saccade.sources.rgb import RgbConverter, orientation_of_matrix, pixel_aspect_of
from saccade.sources.video_stream import NoVideoError, choose_video

CLOCK = Fraction(1, 90000)
_COPIED = ("h264", "hevc", "av1", "vp9")  # for files, which contain the parameters that an MP4 needs
_COPIED_LIVE = ("h264", "hevc")
_CODED = {"preset": "veryfast", "bf": "0", "g": "50"}
_MOST_BYTES = 256 * 1024 * 1024  # per stream: two minutes at 16 Mb/s
_OPTIONS = {"movflags": "faststart"}
_NOTHING = "no video of this time is available"
_CLOCKS_S = 10.0  # by more, capture times differ from arrival times only if a clock was set
_ROUNDING_S = 0.002  # the reports of two streams differ by that much for the same frame


@dataclass(slots=True, frozen=True)
class Moment:
    """A point in time on two clocks.

    Attributes:
        steady: monotonic time in seconds, on the clock of `Frame.steady_at` and `CodedPacket.arrived_at`.
        captured: capture time as Unix time in seconds, from the camera's RTCP reports, or None.
    """

    steady: float
    captured: float | None = None

    def later(self, seconds: float) -> Moment:
        """Return a moment that is `seconds` later than this moment. `seconds` can be negative."""
        return Moment(self.steady + seconds, None if self.captured is None else self.captured + seconds)

    def until(self, packet: CodedPacket) -> float:
        """Return the time from this moment to a packet, in seconds."""
        passed = packet.arrived_at - self.steady
        if self.captured is None or packet.captured_at is None:
            return passed
        exact = packet.captured_at - self.captured
        return exact if abs(exact - passed) < _CLOCKS_S else passed


class PacketRing:
    """A ring buffer of the newest packets of one live stream. Thread-safe.

    The buffer contains the packets of the last `keep_s` seconds and starts at a keyframe. `hold` retains older packets
    until `release` is called. All times are `CodedPacket.arrived_at`, in seconds on a monotonic clock.

    Args:
        keep_s: how long packets are retained without a call of `hold`, in seconds.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._lock = threading.Lock()  # guards the attributes below
        self._packets: deque[CodedPacket] = deque()
        self._keys: deque[float] = deque()  # arrival times of the key frames
        self._bytes = 0
        self._needs_key = False
        self._held: dict[str, float] = {}

    def add(self, packet: CodedPacket) -> None:
        """Add the next packet. After a jump of the timestamps, packets are ignored until the next keyframe."""
        with self._lock:
            if self._packets and jumps(self._packets[-1].pts, self._packets[-1], packet):
                self._needs_key = True
            if self._needs_key and not packet.key:
                return
            if self._needs_key and self._packets and parameters_of(packet) != parameters_of(self._packets[0]):
                self._clear()
            self._needs_key = False
            if packet.key:
                self._keys.append(packet.arrived_at)
            elif not self._keys:
                return
            self._packets.append(packet)
            self._bytes += len(packet.data)
            oldest = min([packet.arrived_at - self._keep_s, *self._held.values()])
            while len(self._keys) > 1 and (self._keys[1] <= oldest or self._bytes > _MOST_BYTES):
                self._drop_group()
            if self._bytes > _MOST_BYTES:  # within one group of pictures: browsers send key frames only on request
                self._clear()

    @property
    def bytes(self) -> int:
        """The total size of the buffered packets in bytes. The limit is 256 MB."""
        return self._bytes

    @property
    def newest(self) -> float | None:
        """The arrival time of the newest packet, in seconds. None if the buffer is empty."""
        with self._lock:
            return self._packets[-1].arrived_at if self._packets else None

    def hold(self, name: str, since: float) -> None:
        """Retain packets until `release` is called with the same name.

        Args:
            name: any name, such as an event ID.
            since: arrival time of the oldest packet to retain, on the monotonic clock, in seconds.
        """
        with self._lock:
            self._held[name] = since

    def release(self, name: str) -> None:
        """Release the packets that `hold` retains under this name."""
        with self._lock:
            self._held.pop(name, None)

    def reaches(self, time: Moment) -> bool:
        """Return whether the buffer has received a packet that is later than `time`."""
        with self._lock:
            return bool(self._packets) and time.until(self._packets[-1]) > _ROUNDING_S

    def cut(self, begin: Moment, end: Moment) -> list[CodedPacket]:
        """Return the packets between two times, starting with the last keyframe at or before `begin`."""
        with self._lock:
            packets = list(self._packets)
        while packets and end.until(packets[-1]) > _ROUNDING_S:  # in decode order, which B-frames need
            packets.pop()
        first = 0
        for number, packet in enumerate(packets):
            if packet.key and begin.until(packet) <= _ROUNDING_S:
                first = number
        return packets[first:]

    def _clear(self) -> None:
        self._packets.clear()
        self._keys.clear()
        self._bytes = 0

    def _drop_group(self) -> None:
        self._keys.popleft()
        while True:
            self._bytes -= len(self._packets.popleft().data)
            if self._packets[0].key:
                return


def _on_one_clock(packets: Sequence[CodedPacket]) -> list[int]:
    """Return the presentation timestamps (PTS) of packets, with jumps of the sender's timestamps removed."""
    placed: list[int] = []
    shift, step = 0, round(Fraction(1, 25) / CLOCK)
    before: CodedPacket | None = None  # the packet with the latest presentation time so far
    top = 0
    for packet in packets:
        if before is not None and jumps(top - shift, before, packet):
            passed = round(min(max(0.0, packet.arrived_at - before.arrived_at), JUMP_S) / CLOCK)
            shift = top + max(step, passed) - packet.pts
        time = packet.pts + shift
        if before is None or time > top:
            step = min(time - top, step) if before is not None else step
            before, top = packet, time
        placed.append(time)
    return placed


def write_clip(packets: Sequence[CodedPacket], path: Path, before: Path | None = None) -> float:
    """Write packets to an MP4 file that browsers can play. Return the duration of the file in seconds.

    Args:
        packets: packets in decode order, starting with a keyframe.
        path: path of the new file.
        before: an earlier clip to insert before the packets. It is ignored if it is unreadable or has another codec or
            size.

    Raises:
        ValueError: if there is no video to write.
        OSError, FFmpegError: if the file cannot be written.
    """
    if len(packets) < 2:
        raise ValueError(_NOTHING)
    if packets[0].codec not in _COPIED_LIVE:
        return _code(_decoded(packets), path)
    if before is not None:
        packets = [*_packets_before(before, packets), *packets]
    head = packets[0].parameter_sets + b"".join(packet.data for packet in packets[:2])
    with (
        av.open(io.BytesIO(head), format=packets[0].codec) as shown,  # for the frame size and the parameter sets
        av.open(str(path), "w", format="mp4", options=_OPTIONS) as out,
    ):
        stream, muxer = out.add_stream_from_template(shown.streams.video[0]), Muxer(out)
        if (matrix := _matrix_of(packets)) is not None:
            stream.set_display_matrix(matrix)
        if packets[0].pixel_aspect:
            stream.sample_aspect_ratio = packets[0].pixel_aspect
        # In decode order, presentation times are not sorted if there are B-frames.
        placed = _on_one_clock(packets)
        times = sorted(placed)
        delay = max(time - pts for time, pts in zip(times, placed, strict=True))
        first = times[0]
        for time, pts, packet in zip(times, placed, packets, strict=True):
            coded = av.Packet(packet.data)
            coded.time_base = CLOCK
            coded.pts, coded.dts = pts + delay - first, time - first
            coded.is_keyframe = packet.key
            muxer.mux(coded, stream)
    return float((times[-1] - times[0]) * CLOCK)


def _matrix_of(packets: Sequence[CodedPacket]) -> tuple[int, ...] | None:
    return packets[-1].display_matrix  # of the newest packet; unknown before the first decoded frame


def _packets_before(clip: Path, packets: Sequence[CodedPacket]) -> list[CodedPacket]:
    """Return the packets of an earlier clip, with their timestamps shifted to end just before the first of `packets`.

    Return an empty list if the two videos have different formats.
    """
    head = packets[0].parameter_sets + b"".join(packet.data for packet in packets[:2])
    codec, found = packets[0].codec, []
    with suppress(av.error.FFmpegError, OSError):
        with av.open(io.BytesIO(head), format=codec) as shown:
            size = shown.streams.video[0].width, shown.streams.video[0].height
        with av.open(str(clip)) as old:
            stream = old.streams.video[0]
            if stream.codec_context.name != codec or (stream.width, stream.height) != size:
                return []
            behind_start_codes = BitStreamFilterContext(f"{codec}_mp4toannexb", stream)
            for packet in [*old.demux(stream), None]:
                if packet is None or packet.dts is not None:
                    found += behind_start_codes.filter(packet)
    times = [round(one.pts * one.time_base / CLOCK) for one in found if one.pts is not None and one.time_base]
    if not times or len(times) != len(found):
        return []
    step = max(1, (max(times) - min(times)) // max(1, len(times) - 1))
    shift = min(packet.pts for packet in packets) - max(times) - step
    return [
        CodedPacket(codec, b"", bytes(one), time + shift, 0.0, one.is_keyframe)
        for time, one in zip(times, found, strict=True)
    ]


def copy_clip(file: FileIndex, begin: float, end: float, path: Path) -> float:
    """Copy the part of a video file between two times to a clip. Return the duration of the clip in seconds.

    The times are in seconds from the start of the file. The clip has the rotation and the pixel aspect ratio of the
    file.

    Raises:
        ValueError: if the video cannot be copied, or there is no video to write.
        OSError, FFmpegError: if a file cannot be read or written.
    """
    first, last = (file.origin + round(Fraction(time) / file.base) for time in (begin, end))
    for place in (file.before(first) or KeyFrame(first, first, None, Fraction(0)), None):
        with av.open(f"file:{file.path}", metadata_errors="replace") as read:
            try:
                taken = choose_video(read)
            except NoVideoError as error:
                raise ValueError(f"{file.path}: {error}") from None
            if taken.codec_context.codec.canonical_name not in _COPIED:
                break
            if place is not None and not seek(read, taken, place):
                continue
            demuxer = FileDemuxer(read, taken, shift=Fraction(0) if place is None else place.shift)
            packets = _between(demuxer.packets_of(taken), first, last)
            key = next(packets, None)
            if place is not None and (key is None or key.pts is None or key.pts > first):
                continue  # the seek went too far, as can happen in a file without an index
            if key is None:
                raise ValueError(_NOTHING)
            if key.pts is None:
                break  # no presentation time, as in AVI: only a decoder can tell it
            with av.open(str(path), "w", format="mp4", options=_OPTIONS) as out:
                return _copy(taken, itertools.chain((key,), packets), out)
    return _code(_frames_between(file, begin, end), path)


def _between(packets: Iterable[Packet[VideoStream]], first: int, last: int) -> Iterator[Packet[VideoStream]]:
    """Yield the packets between two timestamps, starting with the last keyframe at or before `first`."""
    held: list[Packet[VideoStream]] | None = []
    for packet in packets:
        time = packet.pts if packet.dts is None else packet.dts
        if not packet.size or (time is not None and time > last):
            break
        if packet.is_keyframe and packet.pts is not None and packet.pts > last:
            break
        if held is None:
            yield packet
            continue
        if packet.is_keyframe and (not held or (packet.pts is not None and packet.pts <= first)):
            held = [packet]
        elif held:
            held.append(packet)
        if held and time is not None and time >= first:
            yield from held
            held = None
    yield from held or ()


def _copy(taken: VideoStream, packets: Iterable[Packet[VideoStream]], out: OutputContainer) -> float:
    stream, muxer = out.add_stream_from_template(taken), Muxer(out)
    first: int | None = None
    last = 0
    for packet in packets:
        if first is None:
            first = packet.pts if packet.dts is None else packet.dts
            assert first is not None
        packet.pts = None if packet.pts is None else packet.pts - first
        packet.dts = None if packet.dts is None else packet.dts - first
        last = max(last, packet.pts or 0)
        muxer.mux(packet, stream)
    return float(last * (taken.time_base or 1))


def image_at(packets: Sequence[CodedPacket], time: Moment) -> tuple[RgbImage, Fraction] | None:
    """Decode the newest frame at or before `time`. Return the image and its pixel aspect ratio, or None on failure.

    Args:
        packets: packets in decode order, starting with a keyframe.
        time: time of the frame.
    """
    if not packets:
        return None
    placed = _on_one_clock(packets)
    wanted = max((at for at, one in zip(placed, packets, strict=True) if time.until(one) <= _ROUNDING_S), default=0)
    found = None
    for frame in _frames_of(packets):
        if frame[0].pts is not None and frame[0].pts <= wanted:
            found = frame
    if found is None:
        return None
    return RgbConverter().convert(found[0], orientation_of_matrix(_matrix_of(packets))), found[1]


@dataclass(slots=True, frozen=True)
class _Shown:
    """A decoded frame to encode, already rotated upright.

    Attributes:
        image: (height, width, 3) uint8 RGB.
        time: time in units of `CLOCK`.
        pixel_aspect: pixel aspect ratio (width / height of a pixel).
    """

    image: RgbImage
    time: int
    pixel_aspect: Fraction


def _frames_between(file: FileIndex, begin: float, end: float) -> Iterator[_Shown]:
    try:
        with FileSource(file.path, start=max(0.0, begin), end=end + 1e-3, index=file) as source:
            for frame in source:
                time = round((frame.pts - file.origin) * file.base / CLOCK)
                yield _Shown(frame.image, time, frame.pixel_aspect)
    except SourceError as error:
        raise ValueError(str(error)) from None


def _decoded(packets: Sequence[CodedPacket]) -> Iterator[_Shown]:
    converter, orientation = RgbConverter(), orientation_of_matrix(_matrix_of(packets))
    for frame, aspect in _frames_of(packets):
        if frame.pts is not None:
            yield _Shown(converter.convert(frame, orientation), frame.pts, aspect)


def _frames_of(packets: Sequence[CodedPacket]) -> Iterator[tuple[VideoFrame, Fraction]]:
    """Decode packets and yield frames, each with its pixel aspect ratio. Packets that cannot be decoded are skipped."""
    decoder = av.CodecContext.create(packets[0].codec, "r")
    assert isinstance(decoder, VideoCodecContext)
    if packets[0].parameter_sets:
        decoder.extradata = packets[0].parameter_sets
    orientation = orientation_of_matrix(_matrix_of(packets))
    for one, time in [*zip(packets, _on_one_clock(packets), strict=True), (None, 0)]:
        coded = None
        if one is not None:
            coded = av.Packet(one.data)
            coded.pts = coded.dts = time
            coded.time_base = CLOCK
        with suppress(av.error.FFmpegError):
            for frame in decoder.decode(coded):
                aspect = pixel_aspect_of(packets[0].pixel_aspect, decoder.sample_aspect_ratio)
                yield frame, 1 / aspect if orientation.transpose else aspect


def _code(frames: Iterable[_Shown], path: Path) -> float:
    """Encode frames to an H.264 file. Return the duration of the file in seconds."""
    with av.open(str(path), "w", format="mp4", options=_OPTIONS) as out:
        stream: VideoStream | None = None
        muxer, reformatter = Muxer(out), VideoReformatter()
        first = last = -1
        for shown in frames:
            if stream is None:
                first = shown.time
                stream = out.add_stream("libx264", rate=30, options=_CODED)
                height, width = shown.image.shape[:2]
                stream.width, stream.height = width // 2 * 2, height // 2 * 2  # yuv420p needs even sizes
                context = stream.codec_context
                stream.pix_fmt, context.time_base = "yuv420p", CLOCK
                context.sample_aspect_ratio = shown.pixel_aspect
                context.colorspace = context.color_primaries = context.color_trc = Colorspace.ITU709
                context.color_range = ColorRange.MPEG
            elif shown.time <= last:
                continue
            image = reformatter.reformat(
                VideoFrame.from_ndarray(shown.image, format="rgb24"),
                stream.width,
                stream.height,
                format="yuv420p",
                dst_colorspace=Colorspace.ITU709,
                dst_color_range=ColorRange.MPEG,
            )
            image.pts, image.time_base, last = shown.time - first, CLOCK, shown.time
            image.pict_type = PictureType.NONE
            for packet in stream.encode(image):
                muxer.mux(packet, stream)
        if stream is None:
            raise ValueError(_NOTHING)
        for packet in stream.encode(None):
            muxer.mux(packet, stream)
    return float((last - first) * CLOCK)
