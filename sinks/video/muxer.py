"""Writes packets into a media container, with timestamps that FFmpeg accepts."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import av
from av.container import OutputContainer

from saccade.sinks.video.packet_times import PacketTimes


class Muxer:
    """Writes packets into a media container. Add all streams to the container before the first packet.

    Args:
        container: the container; the caller opens and closes it.
    """

    def __init__(self, container: OutputContainer) -> None:
        self._container = container
        self._streams: dict[int, PacketTimes] = {}

    def mux(self, packet: av.Packet[Any], stream: av.stream.Stream) -> bool:
        """Write a packet in decoding order. Return False if its timestamps do not fit into the file.

        Args:
            packet: packet to write. Its timestamps are replaced by those of the file.
            stream: stream of the container.

        Raises:
            FFmpegError, OSError: if writing fails.
        """
        times = self._streams.get(stream.index)
        if times is None:
            self._container.start_encoding()  # which decides on the time bases
            times = self._streams[stream.index] = PacketTimes(Fraction(stream.time_base or 1))
        placed = times.place(packet.pts, packet.dts, packet.duration, packet.time_base)
        if placed is None:
            return False
        packet.stream, packet.time_base = stream, times.base
        packet.pts, packet.dts, packet.duration = placed.pts, placed.dts, placed.duration
        self._container.mux_one(packet)
        return True
