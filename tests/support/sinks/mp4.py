"""What is inside an MP4: its boxes, the times of its frames, its audio packets."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av

from saccade.sources import FileSource


def top_boxes(path: Path) -> list[str]:
    """The types of the top level boxes."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        size = int.from_bytes(data[at : at + 4])
        found.append(data[at + 4 : at + 8].decode())
        at += size or len(data)
    return found


def frame_times(path: Path) -> list[Fraction]:
    """The time of each frame, in seconds."""
    return [frame.pts * frame.time_base for frame in FileSource(path)]


def audio_packets(path: Path) -> list[tuple[float, int]]:
    """Time in seconds and size in bytes of each audio packet, without ADTS headers."""
    with av.open(str(path)) as container:
        stream = container.streams.audio[0]
        header = 7 if path.suffix == ".ts" else 0
        return [(float((p.pts or 0) * p.time_base), p.size - header) for p in container.demux(stream) if p.size]
