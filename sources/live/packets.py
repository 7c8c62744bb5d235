"""Coded frames of a live source, to be kept as they came. Knows nothing of who keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol, runtime_checkable

import av
import av.error
from av.bitstream import BitStreamFilterContext
from av.video.stream import VideoStream

from saccade.sources.live.clock import LIVE_BASE

_NAL_CODECS = ("h264", "hevc")


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


PacketListener = Callable[[CodedPacket], None]
"""Takes each packet, in the thread that reads the source, and returns at once."""


@runtime_checkable
class SupportsPackets(Protocol):
    """A connection that hands over what it decodes.

    Attributes:
        on_packet: called with each packet; None for nobody.
    """

    on_packet: PacketListener | None


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
