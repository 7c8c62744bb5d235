"""The command `saccade probe`: opens a video source for a short time and reports its properties."""

from __future__ import annotations

import json
import statistics
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from saccade.pipeline.runtime.stream import open_once
from saccade.sinks.still import check_still, save_still
from saccade.sources import Frame, LiveSource, StreamStats
from saccade.sources.rtp import PLAUSIBLE_S

LONG_GOP_S = 4.0
ENOUGH_FRAMES = 100  # for a file, which has no pace of its own


@dataclass(slots=True, frozen=True)
class Probe:
    """The measured properties of a video source.

    Attributes:
        source: path or URL, without credentials.
        live: whether the source is live.
        codec, decoder: codec and decoder; empty if unknown.
        width, height: size of the video in pixels.
        fps: frame rate according to the timestamps of the frames; None if too few frames were read.
        frames: number of frames read.
        age_ms: median latency from the capture of a frame to its decoding, in milliseconds; None if unknown.
        lost: number of frames that were lost or corrupted in transit.
        corrupt_packets: number of packets that were lost or corrupted in transit.
        transport: transport protocol of an RTSP camera; empty for other sources.
        key_interval_s: time between keyframes, in seconds; None if fewer than two keyframes were read.
        clock_off_s: difference between the sender's RTCP clock and the local clock, in seconds; None if unknown.
        advice: recommended changes to the camera or the configuration, one line each.
        image: path of the file that contains the last frame, or None.
    """

    source: str
    live: bool
    codec: str
    decoder: str
    width: int
    height: int
    fps: float | None
    frames: int
    age_ms: float | None
    lost: int
    corrupt_packets: int
    transport: str
    key_interval_s: float | None
    clock_off_s: float | None
    advice: list[str]
    image: str | None

    def as_json(self) -> str:
        """Return the measured properties of the source as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    def as_text(self) -> str:
        """Return the measured properties of the source as text for a terminal."""
        rate = f"{self.fps:.2f} fps" if self.fps else "fps unknown"
        lines = [f"{self.source}: {self.codec} {self.width}x{self.height}, {rate}"]
        if self.live:
            age = f"latency {self.age_ms:.0f} ms" if self.age_ms is not None else "latency unknown (no RTCP report)"
            lines.append(
                f"{self.frames} frames decoded by {self.decoder}, {age}; "
                f"{self.lost} frames and {self.corrupt_packets} packets lost or damaged"
            )
        if self.transport:
            keys = f"every {self.key_interval_s:.1f} s" if self.key_interval_s else "fewer than two received"
            clock = (
                "no camera clock (RTCP)"
                if self.clock_off_s is None
                else f"camera clock (RTCP) off by {self.clock_off_s:z.1f} s"
            )
            lines.append(f"over {self.transport}; keyframes {keys}; {clock}")
        lines += [f"advice: {line}" for line in self.advice]
        return "\n".join(lines + ([f"→ {self.image}"] if self.image else []))


def examine(
    target: str, *, seconds: float, hwaccel: str, transport: str, tls: str = "verify", out: str | None
) -> Probe:
    """Measure the properties of a video source. If `out` is a file name, also write a frame to this image file.

    A live source is read for `seconds` from its first frame. For a file, the first 100 frames are read.

    Raises:
        SourceError: if the source cannot be used. A live source raises its subclass `LiveError`.
        ConfigError: if `hwaccel` or `transport` is not a valid value.
        SinkError: if the image cannot be written.
    """
    with open_once(target, hwaccel, transport, tls) as source:
        if out:
            with suppress(OSError):  # check_still() reports the error
                Path(out).parent.mkdir(parents=True, exist_ok=True)
            check_still(out, source.info.width, source.info.height)
        frames: list[tuple[int, float]] = []
        ages: list[float] = []
        lost = 0
        last: Frame | None = None
        end = 0.0
        for frame in source:
            now = time.monotonic()
            end = end or now + seconds
            if frame.capture_clock == "rtcp":
                # The age at decoding, because the time of this loop is not the camera's fault.
                ages.append(1000 * (time.time() - (now - frame.decoded_at) - frame.captured_at))
            frames.append((frame.pts, now))
            lost, last = lost + frame.dropped_before, frame
            if now >= end if source.info.live else len(frames) >= ENOUGH_FRAMES:
                break
        info = source.info
        if out and last:
            save_still(out, last.image)
        passed = float((frames[-1][0] - frames[0][0]) * info.time_base) if frames else 0.0
        stats = source.stats if isinstance(source, LiveSource) else None
        return Probe(
            source=info.url,
            live=info.live,
            codec=info.codec,
            decoder=source.decoder if isinstance(source, LiveSource) else "",
            width=info.width,
            height=info.height,
            fps=(len(frames) - 1 + lost) / passed if passed > 0 else None,
            frames=len(frames),
            age_ms=statistics.median(ages) if ages else None,
            lost=lost,
            corrupt_packets=source.corrupt_packets,
            transport=stats.transport if stats else "",
            key_interval_s=stats.key_interval_s if stats else None,
            clock_off_s=stats.clock_off_s if stats else None,
            advice=_advice(stats, seconds) if stats else [],
            image=out if last else None,
        )


def _advice(stats: StreamStats, seconds: float) -> list[str]:
    lines = []
    interval = stats.key_interval_s if stats.key_interval_s is not None else seconds if seconds > LONG_GOP_S else 0.0
    if interval > LONG_GOP_S:
        lines.append(
            f"keyframes are {interval:.0f} s or more apart: set the camera's I-frame interval to 1 or 2 s, for "
            "faster recovery from lost packets and faster connections"
        )
    if stats.lost and stats.transport in ("udp", "multicast"):
        share = 100 * stats.lost / (stats.received + stats.lost)
        lines.append(f"{share:.1f} % of the packets are lost: set rtsp_transport: tcp")
    if stats.clock_off_s is not None and abs(stats.clock_off_s) > PLAUSIBLE_S:
        lines.append("the camera's clock is wrong, and Saccade corrects for it: set the camera's NTP server")
    if stats.late:
        lines.append(
            f"{stats.late} frames were dropped because decoding was too slow: lower the resolution or frame rate"
        )
    return lines
