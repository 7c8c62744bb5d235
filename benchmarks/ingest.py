"""`python -m benchmarks ingest`: measures the latency from the sender of a live stream to the decoded frame.

Saccade and a plain PyAV decoding loop read the stream at the same time.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import av
import av.error
import numpy as np

from saccade.pipeline.bench.common import Measurement
from saccade.pipeline.runtime.stream import open_once
from saccade.sources import RgbImage, Source, SourceError

CLOCK_BITS = 32
_CLOCK_ROWS = 20
_PLAUSIBLE_MS = 30_000  # a clock that differs by more than this is no clock


@dataclass(slots=True, frozen=True)
class IngestBench(Measurement):
    """Latencies from the sender to the decoded frame in milliseconds; None if the send time is unknown.

    Attributes:
        source: address of the source, without credentials.
        clock: origin of the send times: "burnt in" (a clock in the image) or "rtcp" (RTCP sender reports).
        frames, fps: number of frames, and frames per second, in Saccade.
        median_ms, p95_ms: median and 95th percentile of the frame latency in Saccade.
        pyav_frames, pyav_median_ms, pyav_p95_ms: number of frames, and median and 95th percentile of the frame latency,
            in PyAV.
    """

    source: str
    clock: str
    frames: int
    fps: float
    median_ms: float | None
    p95_ms: float | None
    pyav_frames: int
    pyav_median_ms: float | None
    pyav_p95_ms: float | None

    def as_text(self) -> str:
        """Return the frame latencies of Saccade and PyAV as text for the terminal."""

        def ages(median: float | None, p95: float | None) -> str:
            return "age unknown" if median is None or p95 is None else f"median {median:.1f} ms old, p95 {p95:.1f}"

        return (
            f"{self.source}, {self.fps:.1f} fps, clock {self.clock}\n"
            f"saccade  {self.frames:>5} frames, {ages(self.median_ms, self.p95_ms)}\n"
            f"PyAV     {self.pyav_frames:>5} frames, {ages(self.pyav_median_ms, self.pyav_p95_ms)}"
        )


def burnt_in_age_ms(image: RgbImage, now: float) -> float | None:
    """Return the latency of a frame in milliseconds, or None if the send time in the image is unreadable.

    The sender draws the Unix time in milliseconds into the top 20 rows: 32 bright or dark fields, lowest bit first.

    Args:
        image: (height, width, 3) uint8 RGB.
        now: current Unix time in seconds.
    """
    height, width = image.shape[:2]
    if height < _CLOCK_ROWS or width < CLOCK_BITS:
        return None
    centres = [(2 * bit + 1) * width // (2 * CLOCK_BITS) for bit in range(CLOCK_BITS)]
    row = image[_CLOCK_ROWS // 2, centres].mean(axis=1)
    clock_ms = sum(1 << bit for bit in range(CLOCK_BITS) if row[bit] > 128)
    age = (now * 1000 - clock_ms + (1 << 31)) % (1 << 32) - (1 << 31)
    return age if abs(age) < _PLAUSIBLE_MS else None


def time_ingest(target: str, *, seconds: float, transport: str) -> IngestBench:
    """Read a live source for `seconds` after its first frame, and measure the latency of its frames.

    Raises:
        SourceError: if the source cannot be read or is not live.
        ConfigError: if the transport is unknown.
    """
    stop = threading.Event()
    theirs: list[float | None] = []
    other = threading.Thread(target=_watch_with_pyav, args=(target, transport, stop, theirs), daemon=True)
    with open_once(target, "none", transport) as source:
        if not source.info.live:
            raise SourceError(
                f"{source.info.url} is not a live source; use a camera, because files have no capture timestamps"
            )
        other.start()
        try:
            ages, clock, passed = _watch(source, seconds)
        finally:
            stop.set()
        other.join(seconds)
        median, p95 = _figures(ages)
        pyav_median, pyav_p95 = _figures(theirs)
        fps = (len(ages) - 1) / passed if passed > 0 else 0.0
        return IngestBench(source.info.url, clock, len(ages), fps, median, p95, len(theirs), pyav_median, pyav_p95)


def _watch(source: Source, seconds: float) -> tuple[list[float | None], str, float]:
    """Read a source. Return the latencies in milliseconds, their clock ("burnt in" or "rtcp"), and the duration."""
    burnt: list[float | None] = []
    reported: list[float | None] = []
    begun = now = 0.0
    for frame in source:
        now = time.monotonic()
        decoded = time.time() - (now - frame.decoded_at)
        burnt.append(burnt_in_age_ms(frame.image, decoded))
        reported.append(1000 * (decoded - frame.captured_at) if frame.capture_clock == "rtcp" else None)
        begun = begun or now
        if now - begun >= seconds:
            break
    has_clock = sum(age is not None for age in burnt) > len(burnt) / 2
    return (burnt, "burnt in", now - begun) if has_clock else (reported, "rtcp", now - begun)


def _watch_with_pyav(url: str, transport: str, stop: threading.Event, ages: list[float | None]) -> None:
    """Decode a live source with PyAV's low-latency options. Append the frame latencies in milliseconds to `ages`."""
    options = {"rtsp_transport": "tcp" if transport == "auto" else transport} if url.startswith("rtsp") else {}
    try:
        with av.open(url, options=options, timeout=5.0) as container:
            container.streams.video[0].thread_type = "SLICE"
            for frame in container.decode(video=0):
                age = burnt_in_age_ms(np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8), time.time())
                ages.append(age)
                if stop.is_set():
                    return
    except (av.error.FFmpegError, OSError, IndexError):
        return  # the table then shows that it had no frames


def _figures(ages: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Return the median and the 95th percentile of the frame latencies, or None if there are none."""
    known = [age for age in ages if age is not None]
    return (statistics.median(known), float(np.percentile(known, 95))) if known else (None, None)
