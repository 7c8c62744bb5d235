"""The only way in which packets get into a file: with times that neither end the file nor the process."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import av
from av.container import OutputContainer

from saccade.sinks.video.packet_times import PacketTimes


class Muxer:
    """Writes packets into a container whose streams have all been added.

    Args:
        container: is neither opened nor closed here.
    """

    def __init__(self, container: OutputContainer) -> None:
        self._container = container
        self._streams: dict[int, PacketTimes] = {}

    def mux(self, packet: av.Packet[Any], stream: av.stream.Stream) -> bool:
        """Write a packet of any times, in order of decoding; False where it has no place in the file.

        Args:
            packet: its times are replaced by those of the file.
            stream: of the container.

        Raises:
            FFmpegError, OSError: if it cannot be written.
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
