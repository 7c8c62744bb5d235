"""Clips of events, cut from coded packets: from a ring of a live stream's, or a file's.

A clip begins at the key frame before its time. What a browser plays from an MP4 is copied; other codecs, such as the
MJPEG of cameras and the VP8 of browsers, are coded again as H.264. Knows packets, times and files; no events.
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
_COPIED = ("h264", "hevc", "av1", "vp9")  # of files, which have what an MP4 needs of them
_COPIED_LIVE = ("h264", "hevc")
_CODED = {"preset": "veryfast", "bf": "0", "g": "50"}
_MOST_BYTES = 256 * 1024 * 1024  # of one stream: two minutes of 16 Mb/s
_OPTIONS = {"movflags": "faststart"}
_NOTHING = "there is no video of that time"


class PacketRing:
    """The newest packets of one live stream. Every method is callable from any thread.

    It holds what arrived in the last `keep_s` seconds, from the key frame before on; more while something is held. All
    times are of `CodedPacket.arrived_at`, a clock that nobody sets.

    Args:
        keep_s: for how long packets are kept that nothing holds.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._lock = threading.Lock()  # over what follows
        self._packets: deque[CodedPacket] = deque()
        self._keys: deque[float] = deque()  # arrival times of the key frames among them
        self._bytes = 0
        self._needs_key = False
        self._held: dict[str, float] = {}

    def add(self, packet: CodedPacket) -> None:
        """Take the next packet.

        Where its time jumps, as after a reconnect, the next key frame is waited for. Video with other parameters
        replaces what was before.
        """
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
            if self._bytes > _MOST_BYTES:  # since one key frame: browsers send the next when one is asked for
                self._clear()

    @property
    def bytes(self) -> int:
        """How much it holds: 256 MB at most."""
        return self._bytes

    @property
    def newest(self) -> float | None:
        """When the newest packet arrived; None if there is none."""
        with self._lock:
            return self._packets[-1].arrived_at if self._packets else None

    def hold(self, name: str, since: float) -> None:
        """Keep what arrived from a time on, until `release`."""
        with self._lock:
            self._held[name] = since

    def release(self, name: str) -> None:
        """Keep it no longer."""
        with self._lock:
            self._held.pop(name, None)

    def cut(self, begin: float, end: float) -> list[CodedPacket]:
        """The packets that arrived between two times, from the key frame before the first on, or the oldest one."""
        with self._lock:
            packets = [packet for packet in self._packets if packet.arrived_at <= end]
        first = 0
        for number, packet in enumerate(packets):
            if packet.key and packet.arrived_at <= begin:
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
    """The times of presentation of packets, jumps of the sender's clock closed by the time that passed here."""
    placed: list[int] = []
    shift, step = 0, round(Fraction(1, 25) / CLOCK)
    before: CodedPacket | None = None  # the one that is shown last so far
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
    """Write packets, the first of which is a key frame, as an MP4 for browsers; return how many seconds it shows.

    Args:
        packets: in the order of decoding.
        path: of the new file.
        before: a clip that was written by this function, which the new one is to begin with; left out where its video
            is of another codec or size, or cannot be read. None for none.

    Raises:
        ValueError: if there is nothing to show.
        OSError, FFmpegError: if it cannot be written.
    """
    if len(packets) < 2:
        raise ValueError(_NOTHING)
    if packets[0].codec not in _COPIED_LIVE:
        return _code(_decoded(packets), path)
    if before is not None:
        packets = [*_packets_before(before, packets), *packets]
    head = packets[0].parameter_sets + b"".join(packet.data for packet in packets[:2])
    with (
        av.open(io.BytesIO(head), format=packets[0].codec) as shown,  # for the size and the parameter sets in it
        av.open(str(path), "w", format="mp4", options=_OPTIONS) as out,
    ):
        stream, muxer = out.add_stream_from_template(shown.streams.video[0]), Muxer(out)
        if (matrix := _matrix_of(packets)) is not None:
            stream.set_display_matrix(matrix)
        if packets[0].pixel_aspect:
            stream.sample_aspect_ratio = packets[0].pixel_aspect
        # In the order of decoding the times of presentation jump where frames are predicted from later ones.
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
    return packets[-1].display_matrix  # of the newest: before the first decoded frame it is not known


def _packets_before(clip: Path, packets: Sequence[CodedPacket]) -> list[CodedPacket]:
    """The packets of a clip, so that they end just before others begin; none if it is another kind of video."""
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
    """Write what a file shows between two times, in seconds as its frames have them; return how many seconds that is.

    The clip is turned and stretched as the file is.

    Raises:
        ValueError: if it cannot be copied, or there is nothing to show.
        OSError, FFmpegError: if one of the files cannot be read or written.
    """
    first, last = (file.origin + round(Fraction(time) / file.base) for time in (begin, end))
    for place in (file.before(first) or KeyFrame(first, first, None, Fraction(0)), None):
        with av.open(f"file:{file.path}", metadata_errors="replace") as read:
            try:
                taken = choose_video(read)
            except NoVideoError as error:
                raise ValueError(f"{file.path} {error}") from None
            if taken.codec_context.codec.canonical_name not in _COPIED:
                break
            if place is not None and not seek(read, taken, place):
                continue
            demuxer = FileDemuxer(read, taken, shift=Fraction(0) if place is None else place.shift)
            packets = _between(demuxer.packets_of(taken), first, last)
            key = next(packets, None)
            if place is not None and (key is None or key.pts is None or key.pts > first):
                continue  # it went too far, as it may where a file has no index
            if key is None:
                raise ValueError(_NOTHING)
            if key.pts is None:
                break  # as in AVI: only a decoder knows when such frames are shown
            with av.open(str(path), "w", format="mp4", options=_OPTIONS) as out:
                return _copy(taken, itertools.chain((key,), packets), out)
    return _code(_frames_between(file, begin, end), path)


def _between(packets: Iterable[Packet[VideoStream]], first: int, last: int) -> Iterator[Packet[VideoStream]]:
    """Those from the last key frame at or before a time up to another, or from the first key frame of all."""
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


@dataclass(slots=True, frozen=True)
class _Shown:
    """An upright image to be coded.

    Attributes:
        image: (height, width, 3) uint8 RGB.
        time: in units of `CLOCK`.
        pixel_aspect: width of a pixel by its height.
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
    """The frames of packets, those that cannot be decoded left out."""
    decoder = av.CodecContext.create(packets[0].codec, "r")
    assert isinstance(decoder, VideoCodecContext)
    if packets[0].parameter_sets:
        decoder.extradata = packets[0].parameter_sets
    converter, orientation = RgbConverter(), orientation_of_matrix(_matrix_of(packets))
    for one, time in [*zip(packets, _on_one_clock(packets), strict=True), (None, 0)]:
        coded = None
        if one is not None:
            coded = av.Packet(one.data)
            coded.pts = coded.dts = time
            coded.time_base = CLOCK
        with suppress(av.error.FFmpegError):
            for frame in decoder.decode(coded):
                if frame.pts is not None:
                    aspect = pixel_aspect_of(packets[0].pixel_aspect, decoder.sample_aspect_ratio)
                    aspect = 1 / aspect if orientation.transpose else aspect
                    yield _Shown(converter.convert(frame, orientation), frame.pts, aspect)


def _code(frames: Iterable[_Shown], path: Path) -> float:
    """Write frames as H.264; return how many seconds it shows."""
    with av.open(str(path), "w", format="mp4", options=_OPTIONS) as out:
        stream: VideoStream | None = None
        muxer, reformatter = Muxer(out), VideoReformatter()
        first = last = -1
        for shown in frames:
            if stream is None:
                first = shown.time
                stream = out.add_stream("libx264", rate=30, options=_CODED)
                height, width = shown.image.shape[:2]
                stream.width, stream.height = width // 2 * 2, height // 2 * 2  # as yuv420p has to be
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
