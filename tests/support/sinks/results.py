"""Frames, results and the record that belongs to them, as sinks are given them."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from saccade.engine.results import Box, Detections, Points, Result, Spot, Text
from saccade.sinks import Latency
from saccade.sources import Frame
from tests.support.clips import numbered_image

FRAME = Frame(
    image=np.zeros((720, 1280, 3), np.uint8),
    stream="door",
    index=1042,
    pts=3751200,
    time_base=Fraction(1, 90000),
    captured_at=1795262111.4821,
    capture_clock="rtcp",
    decoded_at=12.0,
    decode_ms=2.5,
    dropped_before=3,
)
RESULT = Result(
    Detections((Box("person", 0.9312, 0.25, 0.5, 0.75, 1.0),), 1280, 720),
    Points((Spot("cup", 0.5, 1 / 3, 0.125),), 1280, 720),
    (Text("what is it", "ein Fuß"),),
)
LATENCY = Latency(decode=2.5, queue=0.126, prefill=12.0, decode_tokens=9.5, total=24.126)
RECORD = {
    "schema": "saccade/2",
    "stream": "door",
    "frame": 1042,
    "pts": 3751200,
    "time_base": "1/90000",
    "captured_at": 1795262111.482,
    "capture_clock": "rtcp",
    "width": 1280,
    "height": 720,
    "latency_ms": {"decode": 2.5, "queue": 0.13, "prefill": 12.0, "decode_tokens": 9.5, "track": 0.0, "total": 24.13},
    "dropped_since_last": 3,
    "objects": [
        {"label": "person", "score": 0.931, "box": [320.0, 360.0, 960.0, 720.0], "box_norm": [0.25, 0.5, 0.75, 1.0]}
    ],
    "points": [{"label": "cup", "score": 0.5, "x": 426.7, "y": 90.0, "x_norm": 0.33333, "y_norm": 0.125}],
    "answers": [{"prompt": "what is it", "text": "ein Fuß"}],
}
"""`make_record(FRAME, RESULT, LATENCY)`, written out."""

NOTHING = Result(Detections((), 1, 1), Points((), 1, 1))


def showing(*labels: str, score: float = 0.9) -> Result:
    """A result with one box for each label, on a frame of 200 × 100 pixels."""
    boxes = tuple(Box(label, score, 0.1, 0.1, 0.5, 0.5) for label in labels)
    return Result(Detections(boxes, 200, 100), Points((), 200, 100))


def live_frame(second: float, stream: str = "door") -> Frame:
    """A black frame of 200 × 100 pixels at that second of a live stream; its index is ten times that."""
    image, pts = np.zeros((100, 200, 3), np.uint8), round(second * 90000)
    return Frame(image, stream, round(second * 10), pts, Fraction(1, 90000), 1.7e9 + second, "arrival", 0.0, 1.0)


def file_frame(pts: int, base: Fraction, number: int = 0, size: tuple[int, int] = (160, 120)) -> Frame:
    """A frame of a file whose image shows `number`."""
    image = numbered_image(number, *size)
    return Frame(image, "test", number, pts, base, float(pts * base), "file", decoded_at=0.0, decode_ms=0.0)
