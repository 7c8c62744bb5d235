"""Changes the timestamps of clips without coding them again."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av

Change = Callable[[Any, int], None]
"""Is given a packet and its number in its stream, and sets its times."""


def remux(source: Path, path: Path, change: Change | None = None, *, only: str | None = None) -> Path:
    """Write a clip again, with other times; `only` takes one type of stream."""
    options = {"mpegts_copyts": "1"} if path.suffix == ".ts" else {}
    with av.open(str(source)) as read, av.open(str(path), "w", options=options) as written:
        taken = [one for one in read.streams if only is None or one.type == only]
        streams = {one.index: written.add_stream_from_template(one) for one in taken}
        counts = dict.fromkeys(streams, 0)
        for packet in read.demux(taken):
            if packet.dts is None:
                continue
            if change is not None:
                change(packet, counts[packet.stream_index])
            counts[packet.stream_index] += 1
            packet.stream = streams[packet.stream_index]
            written.mux(packet)
    return path


def moved_by(seconds: float) -> Change:
    """Moves every packet."""

    def change(packet: Any, number: int) -> None:
        units = round(Fraction(seconds) / packet.time_base)
        packet.pts, packet.dts = packet.pts + units, packet.dts + units

    return change


def joined(path: Path, *parts: Path) -> Path:
    """The bytes of files, one behind the other, as `cat` writes them."""
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    return path


def retimed(source: Path, path: Path, change: Callable[[int, int], int], *, video: bool = False) -> Path:
    """An MPEG-TS whose packets have other times of presentation, which no muxer would write.

    Args:
        source: the file.
        path: of the new file.
        change: is given the number of a packet and its time in units of 1/90000 s, and returns another.
        video: whether to change packets of video as well as those of sound.
    """
    data, number = bytearray(source.read_bytes()), 0
    for at in range(0, len(data), 188):
        if not data[at + 1] & 0x40:  # not the beginning of a packet
            continue
        begin = at + 4 + (data[at + 4] + 1 if data[at + 3] & 0x20 else 0)
        if data[begin : begin + 3] != b"\0\0\1" or not 0xC0 <= data[begin + 3] < (0xF0 if video else 0xE0):
            continue
        stamp = data[begin + 9 : begin + 14]
        pts = (stamp[0] >> 1 & 7) << 30 | stamp[1] << 22 | (stamp[2] >> 1) << 15 | stamp[3] << 7 | stamp[4] >> 1
        pts = change(number, pts) % 2**33
        data[begin + 9 : begin + 14] = bytes(
            (
                (stamp[0] & 0xF1) | (pts >> 30) << 1,
                pts >> 22 & 0xFF,
                (pts >> 15 & 0x7F) << 1 | 1,
                pts >> 7 & 0xFF,
                (pts & 0x7F) << 1 | 1,
            )
        )
        number += 1
    path.write_bytes(data)
    return path
