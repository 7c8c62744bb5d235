"""Compares the time to decode a 1080p H.264 file to RGB frames in Saccade, PyAV and OpenCV.

For latency, see `python -m benchmarks ingest` (live streams) and `against aiortc` (WebRTC).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np

from benchmarks.against.harness import OURS, Comparison, Measured, begin, in_rounds
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.bench.common import images_of
from saccade.sources import open_source

_NOTE = (
    "Each side decodes the whole file in software and reads one pixel of every RGB frame (BGR with OpenCV). PyAV runs "
    "with thread_type AUTO. OpenCV and PyAV decode ahead on all cores, so CPU time tells more than frames per second."
)


def compare(rounds: int, seconds: float) -> Comparison:
    """Decode a clip of `seconds` seconds at 25 frames/s, once per round with each library."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "clip.mp4")
        frames = write_clip(path, round(25 * seconds))
        sides: dict[str, Callable[[], Measured]] = {
            OURS: lambda: _measure(_with_saccade(path), frames),
            "PyAV": lambda: _measure(_with_pyav(path), frames),
            "OpenCV": lambda: _measure(_with_opencv(path), frames),
        }
        units = {"throughput": "frames/s", "CPU time": "ms per frame"}
        made = begin("readers", "Decoding 1080p H.264 to RGB", _NOTE, units, ("av", "opencv-python"))
        return in_rounds(made, sides, rounds)


def write_clip(path: str, frames: int, size: tuple[int, int] = (1920, 1080)) -> int:
    """Write a synthetic H.264 test clip at 25 frames/s. Return its number of frames."""
    images = images_of(str(DEMO_CLIP), *size, count=4)
    with av.open(path, "w") as container:
        stream: Any = container.add_stream("libx264", rate=25, options={"preset": "veryfast", "g": "50"})
        stream.width, stream.height, stream.pix_fmt, stream.time_base = *size, "yuv420p", Fraction(1, 25)
        for number in range(frames):
            image = np.roll(images[number // 10 % len(images)], 4 * number, axis=1)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return frames


def _measure(pixels: Iterator[int], frames: int) -> Measured:
    used, begun = time.process_time(), time.perf_counter()
    count = sum(1 for _ in pixels)
    took, used = time.perf_counter() - begun, time.process_time() - used
    if count != frames:
        raise RuntimeError(f"a video reader decoded {count} of the {frames} frames of the clip")
    return {"throughput": count / took, "CPU time": 1000 * used / count}


def _with_saccade(path: str) -> Iterator[int]:
    with open_source(path) as source:
        for frame in source:
            yield int(frame.image[0, 0, 0])


def _with_pyav(path: str) -> Iterator[int]:
    with av.open(path) as container:
        container.streams.video[0].thread_type = "AUTO"
        for frame in container.decode(video=0):
            yield int(frame.to_ndarray(format="rgb24")[0, 0, 0])


def _with_opencv(path: str) -> Iterator[int]:
    capture = cv2.VideoCapture(path)
    try:
        while True:
            read, image = capture.read()
            if not read:
                return
            yield int(image[0, 0, 0])
    finally:
        capture.release()
