"""`python -m benchmarks webrtc`: measures the latency from a WebRTC sender to the decoded frame, in Saccade and aiortc.

A sender in this process shows a clock in the video. Both receivers get the same video at the same time over 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import fractions
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import av
import httpx
import numpy as np
from aiortc import RTCConfiguration, RTCPeerConnection, RTCRtpSender, RTCSessionDescription, VideoStreamTrack
from aiortc.mediastreams import MediaStreamError

from benchmarks.ingest import CLOCK_BITS, burnt_in_age_ms
from saccade.pipeline.bench.common import Measurement
from saccade.sources import SourceError
from saccade.sources.webrtc.listener import WebRtcListener
from saccade.sources.webrtc.peer import choose_addresses
from saccade.sources.webrtc.source import DECODERS

_LOOPBACK = ("127.0.0.1",)
_WARM_UP_S = 1.0  # the first key frame, and what comes in a burst with it
_CONNECT_S = 10.0
_ENCODERS = {
    "VP8": ("libvpx", {"deadline": "realtime", "cpu-used": "-12", "lag-in-frames": "0"}),
    "H264": ("libx264", {"preset": "ultrafast", "tune": "zerolatency", "profile": "baseline"}),
}


@dataclass(slots=True, frozen=True)
class WebRtcBench(Measurement):
    """Latencies from a WebRTC sender to the decoded frame in milliseconds, including the time for encoding.

    Attributes:
        codec, width, height, fps: format of the video.
        frames, median_ms, p95_ms: number of frames that Saccade received, and their latency.
        aiortc_frames, aiortc_median_ms, aiortc_p95_ms: number of frames that aiortc received, and their latency.
    """

    codec: str
    width: int
    height: int
    fps: int
    frames: int
    median_ms: float
    p95_ms: float
    aiortc_frames: int
    aiortc_median_ms: float
    aiortc_p95_ms: float

    def as_text(self) -> str:
        """Return the frame latencies of Saccade and aiortc as text for the terminal."""
        return (
            f"{self.codec} {self.width}x{self.height}, {self.fps} fps over 127.0.0.1\n"
            f"saccade  {self.frames:>5} frames, median {self.median_ms:.1f} ms old, p95 {self.p95_ms:.1f}\n"
            f"aiortc   {self.aiortc_frames:>5} frames, median {self.aiortc_median_ms:.1f} ms old, "
            f"p95 {self.aiortc_p95_ms:.1f}"
        )


def time_webrtc(codec: str, *, seconds: float, width: int = 640, height: int = 480, fps: int = 30) -> WebRtcBench:
    """Send video over WebRTC to Saccade and to aiortc for `seconds`, and measure the frame latencies.

    Raises:
        SourceError: if the codec is unknown, or if too few frames arrived for a measurement.
    """
    if codec not in DECODERS:
        raise SourceError(f"codec must be {' or '.join(DECODERS)}; got {codec}")
    ours: list[float] = []
    theirs: list[float] = []
    with WebRtcListener("webrtc:0", media_hosts=_LOOPBACK) as source:

        def watch() -> None:
            for frame in source:
                age = burnt_in_age_ms(frame.image, time.time() - (time.monotonic() - frame.decoded_at))
                ours.append(-1 if age is None else age)

        reader = threading.Thread(target=watch, name="bench-webrtc", daemon=True)
        reader.start()
        asyncio.run(_send(source.url, codec, (width, height), fps, seconds, theirs))
    reader.join()
    skip = round(fps * _WARM_UP_S)
    ours, theirs = ([age for age in ages[skip:] if age > 0] for ages in (ours, theirs))
    if not (ours and theirs):
        raise SourceError(f"too few video frames arrived in {seconds:g} s; increase --seconds")
    return WebRtcBench(codec, width, height, fps, *_figures(ours), *_figures(theirs))


class _Coded(VideoStreamTrack):
    """A WebRTC video track of frames that are already encoded."""

    def __init__(self) -> None:
        super().__init__()
        self.packets: asyncio.Queue[av.Packet[Any]] = asyncio.Queue()

    async def recv(self) -> Any:
        return await self.packets.get()


async def _send(url: str, codec: str, size: tuple[int, int], fps: int, seconds: float, ages: list[float]) -> None:
    """Send video to Saccade and to an aiortc receiver. Append aiortc's frame latencies in milliseconds to `ages`."""
    senders = [RTCPeerConnection(RTCConfiguration(iceServers=[])) for _ in range(2)]
    receiver = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    tracks = [_Coded(), _Coded()]
    watching: list[asyncio.Task[None]] = []
    receiver.on("track", lambda track: watching.append(asyncio.create_task(_watch_stock(track, ages))))
    try:
        offer = await _offer(senders[0], tracks[0], codec)
        headers = {"Content-Type": "application/sdp"}
        async with httpx.AsyncClient(trust_env=False) as http:
            response = await http.post(url, content=offer, headers=headers)
        await senders[0].setRemoteDescription(RTCSessionDescription(response.text, "answer"))
        await receiver.setRemoteDescription(RTCSessionDescription(await _offer(senders[1], tracks[1], codec), "offer"))
        choose_addresses(receiver.getTransceivers()[0], _LOOPBACK)
        await receiver.setLocalDescription(await receiver.createAnswer())
        await senders[1].setRemoteDescription(receiver.localDescription)
        async with asyncio.timeout(_CONNECT_S):
            while any(connection.connectionState != "connected" for connection in (*senders, receiver)):
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # until they also listen
        await _pump(tracks, codec, size, fps, seconds + _WARM_UP_S)
    finally:
        await asyncio.gather(*(connection.close() for connection in (*senders, receiver)))
        await asyncio.gather(*watching)


async def _offer(connection: RTCPeerConnection, track: VideoStreamTrack, codec: str) -> str:
    connection.addTrack(track)
    known = RTCRtpSender.getCapabilities("video").codecs
    transceiver = connection.getTransceivers()[0]
    transceiver.setCodecPreferences([c for c in known if c.mimeType == f"video/{codec}"])
    choose_addresses(transceiver, _LOOPBACK)
    await connection.setLocalDescription(await connection.createOffer())
    return connection.localDescription.sdp


async def _pump(tracks: Sequence[_Coded], codec: str, size: tuple[int, int], fps: int, seconds: float) -> None:
    """Encode images that show the current time, and send each to all tracks."""
    name, options = _ENCODERS[codec]
    encoder: Any = av.CodecContext.create(name, "w")
    encoder.width, encoder.height = size
    encoder.pix_fmt, encoder.time_base, encoder.options = "yuv420p", fractions.Fraction(1, 90_000), options
    encoder.framerate, encoder.gop_size, encoder.bit_rate = fps, fps, 2_000_000
    image = np.full((size[1], size[0], 3), 120, np.uint8)
    bits = np.arange(size[0]) * CLOCK_BITS // size[0]
    begun = time.monotonic()
    for number in range(round(seconds * fps)):
        await asyncio.sleep(max(0.0, begun + number / fps - time.monotonic()))
        clock_ms = int(time.time() * 1000) % (1 << CLOCK_BITS)
        image[:32] = np.where(clock_ms >> bits & 1, 235, 20).astype(np.uint8)[None, :, None]
        frame = av.VideoFrame.from_ndarray(image, format="rgb24")
        frame.pts, frame.time_base = number * 90_000 // fps, encoder.time_base
        for packet in encoder.encode(frame):
            packet.time_base = encoder.time_base
            for track in tracks:
                track.packets.put_nowait(packet)


async def _watch_stock(track: Any, ages: list[float]) -> None:
    """Receive frames with aiortc, and append the frame latencies in milliseconds to `ages`."""
    try:
        while True:
            frame = await track.recv()
            age = burnt_in_age_ms(frame.to_ndarray(format="rgb24"), time.time())
            ages.append(-1 if age is None else age)
    except MediaStreamError:
        return


def _figures(ages: Sequence[float]) -> tuple[int, float, float]:
    """Return the number of latencies, their median and their 95th percentile."""
    return len(ages), statistics.median(ages), float(np.percentile(ages, 95))
