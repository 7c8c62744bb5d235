"""Encoded video and audio packets of a live source, for recording without transcoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import av
import av.error
from av.audio.stream import AudioStream
from av.bitstream import BitStreamFilterContext
from av.video.stream import VideoStream

from saccade.sources.live.clock import LIVE_BASE

JUMP_S = 10.0
"""Seconds. If timestamps advance by more than this relative to the local clock, the sender's clock was set."""

_NAL_CODECS = ("h264", "hevc")
_REORDERED_S = 1.0  # most seconds that a packet's presentation precedes that of the packet decoded before it
_PARAMETER_SETS: dict[str, tuple[Callable[[int], int], frozenset[int]]] = {
    "h264": (lambda head: head & 31, frozenset({7})),
    "hevc": (lambda head: head >> 1 & 63, frozenset({33})),
}
"""Per codec: how to read a NAL unit's type from its first byte, and the types that state size and profile."""


@dataclass(slots=True, frozen=True)
class CodedPacket:
    """One encoded video frame, in decoding order.

    Attributes:
        codec: FFmpeg's name of the codec, such as `h264`, `hevc`, `mjpeg` or `vp8`.
        parameter_sets: parameter sets to decode before the first frame; b"" if the decoder needs none.
        data: the encoded frame. H.264 and H.265 are in Annex B format, with start codes.
        pts: presentation timestamp in units of 1/90000 s, increasing within one connection.
        arrived_at: `time.monotonic()` on arrival, in seconds; the same clock as `Frame.steady_at`.
        key: whether the frame is a keyframe, at which decoding can start.
        display_matrix: the container's display matrix, 9 numbers; None for no rotation.
        pixel_aspect: pixel width divided by pixel height, from the container; None if unknown.
        captured_at: capture time in Unix seconds, from the sender's RTCP report; None without a report.
    """

    codec: str
    parameter_sets: bytes
    data: bytes
    pts: int
    arrived_at: float
    key: bool
    display_matrix: tuple[int, ...] | None = None
    pixel_aspect: Fraction | None = None
    captured_at: float | None = None


@dataclass(slots=True, frozen=True)
class AudioPacket:
    """One encoded audio packet of a live source.

    Attributes:
        codec: FFmpeg's name of the codec, such as `aac`, `opus` or `pcm_alaw`.
        config: the AudioSpecificConfig of AAC; empty for other codecs.
        rate: samples per second.
        channels: number of channels.
        data: the encoded audio; AAC has no ADTS header.
        pts: presentation timestamp in units of 1/90000 s, on the same timeline as the video packets.
        samples: number of samples per channel; 0 if unknown.
    """

    codec: str
    config: bytes
    rate: int
    channels: int
    data: bytes
    pts: int
    samples: int


@dataclass(slots=True)
class Taps:
    """Callbacks for the encoded packets of a live source. They are called in the receiving thread and must not block.

    Attributes:
        video: callbacks for encoded video frames. They receive all frames, even those that are not decoded.
        sound: callbacks for audio packets. If the list is empty, no audio is requested from the camera.
        decode: whether the connection also decodes the video and returns frames.
    """

    video: list[Callable[[CodedPacket], None]] = field(default_factory=list)
    sound: list[Callable[[AudioPacket], None]] = field(default_factory=list)
    decode: bool = True

    def take(self, packet: CodedPacket | AudioPacket) -> None:
        """Pass a packet to the callbacks in `video` or in `sound`."""
        if isinstance(packet, CodedPacket):
            for take_video in self.video:
                take_video(packet)
        else:
            for take_sound in self.sound:
                take_sound(packet)


def jumps(time: int, before: CodedPacket, packet: CodedPacket) -> bool:
    """Return whether the timestamps jump, or the codec changes, between two consecutive packets.

    Args:
        time: presentation timestamp of `before` in units of 1/90000 s, on the same timeline as `packet.pts`.
        before: the previous packet.
        packet: the packet to check.
    """
    passed = max(0.0, packet.arrived_at - before.arrived_at)
    ahead_s = float((packet.pts - time) * LIVE_BASE)
    return packet.codec != before.codec or not -_REORDERED_S < ahead_s < passed + JUMP_S


def parameters_of(packet: CodedPacket) -> tuple[str, frozenset[bytes]]:
    """Return the codec and parameter sets of a keyframe. If they change, a recording must start a new file."""
    kinds = _PARAMETER_SETS.get(packet.codec)
    if kinds is None:
        return packet.codec, frozenset((packet.parameter_sets,))
    units = (packet.parameter_sets + packet.data).split(b"\0\0\1")
    sets = {unit.rstrip(b"\0") for unit in units[1:] if unit and kinds[0](unit[0]) in kinds[1]}
    return packet.codec, frozenset(sets)


class PacketTap:
    """Converts FFmpeg's video packets of a live stream to `CodedPacket`s.

    Args:
        stream: a video stream of any codec.
    """

    def __init__(self, stream: VideoStream) -> None:
        self._codec = stream.codec_context.name
        self._sets = stream.codec_context.extradata or b""
        self._pixel_aspect = stream.sample_aspect_ratio
        self._filter: BitStreamFilterContext | None = None
        # MP4 and FLV: NAL units have lengths instead of start codes, and parameter sets are only in the header.
        if self._codec in _NAL_CODECS and self._sets[:1] == b"\x01":
            self._filter = BitStreamFilterContext(f"{self._codec}_mp4toannexb", stream)
            self._sets = b""  # the filter inserts them before each keyframe

    def packets(
        self, packet: av.Packet[VideoStream], arrived_at: float, display_matrix: tuple[int, ...] | None = None
    ) -> Iterator[CodedPacket]:
        """Convert an FFmpeg packet to a `CodedPacket`. A missing timestamp is replaced by the arrival time.

        Do not use `packet` after this call; it may have become empty.
        """
        if not packet.size:
            return
        pts = round(arrived_at / LIVE_BASE if packet.pts is None else packet.pts * packet.time_base / LIVE_BASE)
        key = packet.is_keyframe
        try:
            ready = self._filter.filter(packet) if self._filter is not None else [packet]
        except av.error.FFmpegError:
            return
        for one in ready:
            yield CodedPacket(
                self._codec, self._sets, bytes(one), pts, arrived_at, key, display_matrix, self._pixel_aspect
            )


class AudioTap:
    """Converts FFmpeg's audio packets of a live stream to `AudioPacket`s.

    Args:
        stream: an audio stream of any codec.
    """

    def __init__(self, stream: AudioStream) -> None:
        context = stream.codec_context
        self._codec = context.name
        self._config = context.extradata or b"" if self._codec == "aac" else b""
        self._rate, self._channels = context.sample_rate, context.layout.nb_channels

    def packets(self, packet: av.Packet[AudioStream]) -> Iterator[AudioPacket]:
        """Convert an FFmpeg packet to an `AudioPacket`. Yield nothing if the packet has no timestamp."""
        if not packet.size or packet.pts is None:
            return
        pts, lasts = round(packet.pts * packet.time_base / LIVE_BASE), packet.duration or 0
        samples = round(lasts * packet.time_base * self._rate)
        config = self._config
        data = bytes(packet)
        if self._codec == "aac" and not config:  # MPEG-TS has an ADTS header before each packet
            config, data = adts_config(data)
            if not config:
                return
        yield AudioPacket(self._codec, config, self._rate, self._channels, data, pts, samples)


def adts_config(data: bytes) -> tuple[bytes, bytes]:
    """Split an AAC packet with an ADTS header into its AudioSpecificConfig and its audio data.

    Returns:
        Both parts; (b"", b"") if the packet has no ADTS header.
    """
    if len(data) < 7 or data[0] != 0xFF or data[1] & 0xF6 != 0xF0:
        return b"", b""
    kind, rate, channels = (data[2] >> 6) + 1, data[2] >> 2 & 15, (data[2] & 1) << 2 | data[3] >> 6
    return (kind << 11 | rate << 7 | channels << 3).to_bytes(2), data[7 if data[1] & 1 else 9 :]
