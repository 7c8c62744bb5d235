"""Compares the latency from a WebRTC sender to the decoded frame in Saccade and in aiortc.

Both programs receive the same video at the same time.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.against.harness import OURS, Comparison, begin
from benchmarks.webrtc import time_webrtc

_NOTE = "Both receive the same packets at the same time over 127.0.0.1. The age includes the sender's encoding."


def compare(rounds: int, seconds: float) -> Comparison:
    """Measure the frame latency of Saccade and aiortc with VP8 and with H.264, in each of `rounds` rounds."""
    values: dict[str, dict[str, list[float]]] = {OURS: {}, "aiortc": {}}
    for _ in range(rounds):
        for codec in ("VP8", "H264"):
            one = time_webrtc(codec, seconds=seconds)
            pairs = {"median": (one.median_ms, one.aiortc_median_ms), "p95": (one.p95_ms, one.aiortc_p95_ms)}
            for name, both in pairs.items():
                for side, value in zip(values, both, strict=True):
                    values[side].setdefault(f"{codec}, {name}", []).append(value)
    units = dict.fromkeys(values[OURS], "ms old")
    made = begin("aiortc", "Age of WebRTC frames, 640×480 at 30 fps", _NOTE, units, ("aiortc", "av"))
    return replace(made, values=values)
