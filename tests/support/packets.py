"""Coded packets of numbered images, as a live source hands them on, and what a file of them shows."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av

from saccade.sources.live.packets import CodedPacket
from tests.support.clips import number_of, numbered_image

RATE, GOP = 10, 10


def coded(
    count: int,
    *,
    frames_ahead: int = 0,
    codec: str = "h264",
    start: float = 1000.0,
    size: tuple[int, int] = (160, 120),
) -> list[CodedPacket]:
    """Packets of numbered images at 10 fps with a key frame a second, captured from a time on."""
    coder = av.CodecContext.create({"h264": "libx264", "hevc": "libx265", "vp8": "libvpx"}.get(codec, codec), "w")
    coder.width, coder.height = size
    coder.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    coder.framerate, coder.time_base = Fraction(RATE), Fraction(1, RATE)
    quiet = {"x265-params": f"log-level=none:keyint={GOP}:bframes={frames_ahead}"} if codec == "hevc" else {}
    coder.options = {"g": str(GOP), "bf": str(frames_ahead), "preset": "ultrafast", "forced-idr": "1", **quiet}
    made = []
    for number in range(count):
        frame = av.VideoFrame.from_ndarray(numbered_image(number, *size), format="rgb24")
        frame.pts = number
        made += coder.encode(frame)
    made += coder.encode(None)
    return [
        CodedPacket(codec, b"", bytes(one), (one.pts or 0) * 9000, start + number / RATE, one.is_keyframe)
        for number, one in enumerate(made)
    ]


def shown(path: Path) -> list[tuple[float, int]]:
    """Time and number of each frame."""
    with av.open(str(path)) as container:
        return [(frame.time or 0.0, number_of(frame.to_ndarray(format="rgb24"))) for frame in container.decode(video=0)]
