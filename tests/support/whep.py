"""A stream of numbered frames to watch over WHEP, and an aiortc viewer; over 127.0.0.1 only."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

from aiortc import RTCConfiguration, RTCPeerConnection, RTCRtpReceiver, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError

from saccade.engine.results import Detections, Points, Result
from saccade.pipeline.api import live_mp4
from saccade.pipeline.api.access import Access
from saccade.pipeline.api.http_server import HttpServer
from saccade.pipeline.api.whep import WhepServer, routes
from saccade.sinks import Latency
from saccade.sinks.video.broadcast import BroadcastSink
from saccade.sources import Frame
from saccade.sources.webrtc.peer import choose_addresses
from tests.support.clips import number_of, numbered_image
from tests.support.webrtc import LOOPBACK, Publisher, asked, own_loop

WIDTH, HEIGHT = 320, 240


class Stage:
    """A server, a stream "door" of 30 frames a second, and a loop for viewers."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        token: str | None = None,
        origins: Sequence[str] = (),
        access: Access | None = None,
        **settings: Any,
    ) -> None:
        self.loop = loop
        self.videos = BroadcastSink()
        self.whep = WhepServer(self.videos, media_hosts=LOOPBACK, **settings)
        parts = {WhepServer: self.whep}
        closing = [self.whep.close]
        how: Any = {"token": token, "origins": origins, "access": access, "on_cleanup": closing}
        self._web = HttpServer([routes, live_mp4.routes], parts, port=0, **how)
        self.url = self._web.url
        self._over = threading.Event()
        self._feeder = threading.Thread(target=feed, args=(self.videos.write, self._over), name="feeder")

    def stop_feeding(self) -> None:
        """Let no more frames come but those that are written."""
        self._over.set()
        self._feeder.join()

    def write(self, number: int) -> None:
        """Write one frame."""
        write_numbered(self.videos.write, number)

    def do(self, work: Any) -> Any:
        return Publisher(self.loop).do(work)

    def close(self) -> None:
        self._web.close()

    def ask(self, method: str, path: str = "/whep/door", **how: Any) -> tuple[int, str, Any]:
        """Status, text and headers of a response."""
        return asked(method, self.url + path, **how)

    def post(self, offer: str | bytes, path: str = "/whep/door", **headers: str) -> tuple[int, str, Any]:
        return self.ask("POST", path, content=offer, headers={"Content-Type": "application/sdp", **headers})


def feed(write: Callable[[Frame, Result, Latency], object], over: threading.Event) -> None:
    """Write 30 frames a second of "door" until it is over."""
    number, begun = 0, time.monotonic()
    while not over.wait(max(0.0, begun + number / 30 - time.monotonic())):
        write_numbered(write, number)
        number += 1


def write_numbered(write: Callable[[Frame, Result, Latency], object], number: int) -> None:
    """Write the frame of that number, of 30 a second."""
    image = numbered_image(number % 256, WIDTH, HEIGHT)
    base = Fraction(1, 90_000)
    frame = Frame(image, "door", number, number * 3000, base, time.time(), "arrival", time.monotonic(), 1.0)
    write(frame, Result(Detections((), WIDTH, HEIGHT), Points((), WIDTH, HEIGHT)), Latency())


@contextmanager
def staging(**settings: Any) -> Iterator[Stage]:
    with own_loop() as loop:
        stage = Stage(loop, **settings)
        stage._feeder.start()
        try:
            while not stage.videos.streams:
                time.sleep(0.01)
            yield stage
        finally:
            stage.stop_feeding()
            stage.videos.close()
            stage.close()


class Watcher:
    """A viewer.

    Attributes:
        numbers: of the frames that came, in order.
        times: theirs, on the RTP clock, from the first one's on.
        records: what came on the data channel.
    """

    def __init__(self, codecs: tuple[str, ...]) -> None:
        self.connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.numbers: list[int] = []
        self.times: list[int] = []
        self.sizes: set[tuple[int, int]] = set()
        self.records: list[dict[str, Any]] = []
        self.location = ""
        self._codecs = codecs
        self._tasks: list[Any] = []

    async def offer(self) -> str:
        transceiver = self.connection.addTransceiver("video", direction="recvonly")
        known = RTCRtpReceiver.getCapabilities("video").codecs
        transceiver.setCodecPreferences([c for c in known if c.mimeType.removeprefix("video/") in self._codecs])
        self.channel = self.connection.createDataChannel("results")
        self.channel.on("message", lambda text: self.records.append(json.loads(text)))
        self.connection.on("track", lambda track: self._tasks.append(asyncio.ensure_future(self._watch(track))))
        choose_addresses(transceiver, LOOPBACK)
        await self.connection.setLocalDescription(await self.connection.createOffer())
        sdp: str = self.connection.localDescription.sdp
        return sdp

    async def take(self, answer: str) -> None:
        await self.connection.setRemoteDescription(RTCSessionDescription(answer, "answer"))

    async def close(self) -> None:
        await self.connection.close()
        await asyncio.gather(*self._tasks)

    async def _watch(self, track: Any) -> None:
        try:
            while True:
                frame = await track.recv()
                image = frame.to_ndarray(format="rgb24")
                self.sizes.add((image.shape[1], image.shape[0]))
                self.numbers.append(number_of(image))
                self.times.append(frame.pts)
        except MediaStreamError:
            return


@contextmanager
def watching(stage: Stage, query: str = "", codecs: tuple[str, ...] = ("VP8", "H264")) -> Iterator[Watcher]:
    async def begun() -> Watcher:
        return Watcher(codecs)

    watcher = stage.do(begun())
    try:
        status, answer, headers = stage.post(stage.do(watcher.offer()), f"/whep/door{query}")
        assert status == 201, answer
        watcher.location = headers["Location"]
        stage.do(watcher.take(answer))
        yield watcher
    finally:
        stage.do(watcher.close())
