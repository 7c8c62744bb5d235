"""Coded frames and sound of a live source, to be kept as they came. Knows nothing of who keeps them."""

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
"""A sender's clock that runs ahead of ours by more was set."""

_NAL_CODECS = ("h264", "hevc")
_REORDERED_S = 1.0  # a packet is at most so much before the one that is decoded before it
_PARAMETER_SETS: dict[str, tuple[Callable[[int], int], frozenset[int]]] = {
    "h264": (lambda head: head & 31, frozenset({7})),
    "hevc": (lambda head: head >> 1 & 63, frozenset({33})),
}
"""How the kind of a NAL unit is read from its first byte, and the kinds that tell size and profile."""


@dataclass(slots=True, frozen=True)
class CodedPacket:
    """One coded frame, in the order of decoding.

    Attributes:
        codec: FFmpeg's name, such as `h264`, `hevc`, `mjpeg` or `vp8`.
        parameter_sets: what must be known before the first frame and may not be in `data`; of H.264 and H.265 behind
            start codes.
        data: of H.264 and H.265 NAL units, each behind a start code (Annex B); of others as FFmpeg has it.
        pts: time of presentation, in units of 1/90000 s that grow over one connection.
        arrived_at: `time.monotonic()` when it arrived, in seconds: the clock of `Frame.steady_at`.
        key: whether decoding may begin here.
        display_matrix: how the container says that frames are to be turned, 9 numbers; None for not at all.
        pixel_aspect: width of a pixel by its height, as the container says; None where only `data` can say it.
    """

    codec: str
    parameter_sets: bytes
    data: bytes
    pts: int
    arrived_at: float
    key: bool
    display_matrix: tuple[int, ...] | None = None
    pixel_aspect: Fraction | None = None


@dataclass(slots=True, frozen=True)
class SoundPacket:
    """One coded piece of sound.

    Attributes:
        codec: FFmpeg's name, such as `aac`, `opus` or `pcm_alaw`.
        config: of AAC its AudioSpecificConfig; empty for others.
        rate: samples a second.
        channels: how many.
        data: of AAC without an ADTS header.
        pts: when it begins, on the clock of the video's packets.
        samples: how many it holds of each channel; 0 where that is not known.
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
    """Who takes the packets of a live source: each is called in the thread that receives, and returns at once.

    Attributes:
        video: called with each coded frame, whether or not anybody decodes it in time.
        sound: called with each piece of sound. Without any, no sound is asked of the camera.
    """

    video: list[Callable[[CodedPacket], None]] = field(default_factory=list)
    sound: list[Callable[[SoundPacket], None]] = field(default_factory=list)

    def take(self, packet: CodedPacket | SoundPacket) -> None:
        """Hand a packet on."""
        if isinstance(packet, CodedPacket):
            for take_video in self.video:
                take_video(packet)
        else:
            for take_sound in self.sound:
                take_sound(packet)


def jumps(time: int, before: CodedPacket, packet: CodedPacket) -> bool:
    """Whether a packet's clock is not that of the one before, whose `time` of presentation may have been moved."""
    passed = max(0.0, packet.arrived_at - before.arrived_at)
    ahead_s = float((packet.pts - time) * LIVE_BASE)
    return packet.codec != before.codec or not -_REORDERED_S < ahead_s < passed + JUMP_S


def parameters_of(packet: CodedPacket) -> tuple[str, frozenset[bytes]]:
    """What a key frame says about the video: two that differ do not fit into one file."""
    kinds = _PARAMETER_SETS.get(packet.codec)
    if kinds is None:
        return packet.codec, frozenset((packet.parameter_sets,))
    units = (packet.parameter_sets + packet.data).split(b"\0\0\1")
    sets = {unit.rstrip(b"\0") for unit in units[1:] if unit and kinds[0](unit[0]) in kinds[1]}
    return packet.codec, frozenset(sets)


class PacketTap:
    """Makes `CodedPacket`s of what FFmpeg demuxes, wherever its containers keep parameter sets and lengths.

    Args:
        stream: of any codec.
    """

    def __init__(self, stream: VideoStream) -> None:
        self._codec = stream.codec_context.name
        self._sets = stream.codec_context.extradata or b""
        self._pixel_aspect = stream.sample_aspect_ratio
        self._filter: BitStreamFilterContext | None = None
        # A record of MP4 and FLV: lengths before units, and sets only there.
        if self._codec in _NAL_CODECS and self._sets[:1] == b"\x01":
            self._filter = BitStreamFilterContext(f"{self._codec}_mp4toannexb", stream)
            self._sets = b""  # the filter puts them before each key frame

    def packets(
        self, packet: av.Packet[VideoStream], arrived_at: float, display_matrix: tuple[int, ...] | None = None
    ) -> Iterator[CodedPacket]:
        """The packet as it is kept, which empties it. One without a time gets that of its arrival."""
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


class SoundTap:
    """Makes `SoundPacket`s of what FFmpeg demuxes.

    Args:
        stream: of any codec.
    """

    def __init__(self, stream: AudioStream) -> None:
        context = stream.codec_context
        self._codec = context.name
        self._config = context.extradata or b"" if self._codec == "aac" else b""
        self._rate, self._channels = context.sample_rate, context.layout.nb_channels

    def packets(self, packet: av.Packet[AudioStream]) -> Iterator[SoundPacket]:
        """The packet as it is kept; none of one without a time."""
        if not packet.size or packet.pts is None:
            return
        pts, lasts = round(packet.pts * packet.time_base / LIVE_BASE), packet.duration or 0
        samples = round(lasts * packet.time_base * self._rate)
        config = self._config
        data = bytes(packet)
        if self._codec == "aac" and not config:  # of MPEG-TS, with a header before each packet
            config, data = adts_config(data)
            if not config:
                return
        yield SoundPacket(self._codec, config, self._rate, self._channels, data, pts, samples)


def adts_config(data: bytes) -> tuple[bytes, bytes]:
    """The AudioSpecificConfig of a packet of AAC with an ADTS header, and what follows that; empty without a header."""
    if len(data) < 7 or data[0] != 0xFF or data[1] & 0xF6 != 0xF0:
        return b"", b""
    kind, rate, channels = (data[2] >> 6) + 1, data[2] >> 2 & 15, (data[2] & 1) << 2 | data[3] >> 6
    return (kind << 11 | rate << 7 | channels << 3).to_bytes(2), data[7 if data[1] & 1 else 9 :]
