"""An aiortc peer that publishes numbered frames from its own thread, and a server for it; over 127.0.0.1 only."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import av
import httpx
import numpy as np
from aiortc import RTCConfiguration, RTCPeerConnection, RTCRtpSender, RTCSessionDescription, VideoStreamTrack
from numpy.typing import NDArray

from saccade.sources.webrtc.peer import choose_addresses
from saccade.sources.webrtc.source import WebRtcSource
from saccade.sources.webrtc.whip_server import WebRtcServer
from saccade.web.auth import HttpAuth
from saccade.web.guard import Guard
from saccade.web.server import AppServer, end_tasks
from tests.support.clips import numbered_image

Draw = Callable[[int], NDArray[np.uint8]]
LOOPBACK = ("127.0.0.1",)


def asked(method: str, url: str, headers: Mapping[str, str] | None = None, **how: Any) -> tuple[int, str, Any]:
    """Status, text and headers of a response."""
    given = {key: value.encode() for key, value in (headers or {}).items()}
    response = httpx.request(method, url, headers=given, timeout=20, **how)
    return response.status_code, response.text, response.headers


class Drawn(VideoStreamTrack):
    """A track whose frames are drawn on the spot, 30 a second."""

    def __init__(self, draw: Draw) -> None:
        super().__init__()
        self._draw = draw
        self._number = 0
        self._start = time.monotonic()

    async def recv(self) -> av.VideoFrame:
        await asyncio.sleep(max(0.0, self._start + self._number / 30 - time.monotonic()))
        frame = av.VideoFrame.from_ndarray(self._draw(self._number), format="rgb24")
        frame.pts, frame.time_base = self._number * 3000, Fraction(1, 90000)
        self._number += 1
        return frame


def small(number: int) -> NDArray[np.uint8]:
    return numbered_image(number % 256, 320, 240)


async def offer_of(connection: RTCPeerConnection, codec: str, track: VideoStreamTrack) -> str:
    connection.addTrack(track)
    wanted = [c for c in RTCRtpSender.getCapabilities("video").codecs if c.mimeType == f"video/{codec}"]
    transceiver = connection.getTransceivers()[0]
    transceiver.setCodecPreferences(wanted)
    choose_addresses(transceiver, LOOPBACK)
    await connection.setLocalDescription(await connection.createOffer())
    return connection.localDescription.sdp


class Publisher:
    """What `publishing` yields: a connected peer, and ways to end it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.connection: RTCPeerConnection
        self.location = ""

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    def vanish(self) -> None:
        """Fall silent without a word, as a killed browser does: no socket sends or hears any more."""

        async def cut() -> None:
            gathering: Any = self.connection.getTransceivers()[0].receiver.transport.transport.iceGatherer._connection
            for protocol in gathering._protocols:
                protocol.transport.pause_reading()
                protocol.transport.sendto = lambda data, address=None: None

        self.do(cut())


async def _publish(publisher: Publisher, url: str, codec: str, draw: Draw, headers: dict[str, str]) -> None:
    publisher.connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    offer = await offer_of(publisher.connection, codec, Drawn(draw))
    headers = {"Content-Type": "application/sdp", **headers}
    async with httpx.AsyncClient(timeout=20) as http:
        response = await http.post(url, content=offer, headers=headers)
    answer = response.text
    assert response.status_code == 201, answer
    publisher.location = response.headers["Location"]
    await publisher.connection.setRemoteDescription(RTCSessionDescription(sdp=answer, type="answer"))


@contextmanager
def own_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="test-loop")
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(end_tasks(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def publishing(
    url: str, codec: str = "VP8", draw: Draw = small, headers: dict[str, str] | None = None
) -> Iterator[Publisher]:
    """Publish to a WHIP endpoint for as long as the block lasts."""
    with own_loop() as loop:
        publisher = Publisher(loop)
        try:
            publisher.do(_publish(publisher, url, codec, draw, headers or {}))
            yield publisher
        finally:
            publisher.do(publisher.connection.close())


class Served:
    """A `WebRtcServer` on an application of its own, and a client to ask it."""

    def __init__(self, loop: Any, token: str | None = None, origins: Sequence[str] = (), **settings: Any) -> None:
        self.sources: list[WebRtcSource] = []
        self._loop = loop
        self.server = WebRtcServer(self.sources.append, media_hosts=LOOPBACK, **settings)
        guarded = Guard(self.server.routes(), HttpAuth(token, origins))
        self._web = AppServer(guarded, "127.0.0.1", 0, "served", on_cleanup=[self.server.close])
        self.url = self._web.url

    def do(self, work: Any) -> Any:
        return Publisher(self._loop).do(work)

    def close(self) -> None:
        self._web.close()

    def ask(self, method: str, path: str = "/whip", **how: Any) -> tuple[int, str, Any]:
        """Status, text and headers of a response."""
        return asked(method, self.url + path, **how)

    def ask_raw(self, request: bytes) -> bytes:
        """The first bytes of the response to something that no client would send."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=5) as client:
            client.sendall(request)
            return client.recv(1000)

    def post(self, offer: str | bytes, headers: dict[str, str] | None = None) -> tuple[int, str, Any]:
        return self.ask("POST", content=offer, headers={"Content-Type": "application/sdp", **(headers or {})})


@contextmanager
def serving() -> Iterator[Callable[..., Served]]:
    """Makes servers, and ends them with the block."""
    with own_loop() as loop:
        opened: list[Served] = []

        def make(**settings: Any) -> Served:
            served = Served(loop, **settings)
            opened.append(served)
            return served

        yield make
        for served in opened:
            served.close()


@contextmanager
def leaving_no_thread() -> Iterator[None]:
    """Sees to it that no thread begun in the block outlives it."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    # A shared engine begins those that prepare images with its first requests, and ends them when it is closed.
    while (left := {one for one in set(threading.enumerate()) - before if "prepare" not in one.name}) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.02)
    assert left == set(), [thread.name for thread in left]


def an_offer(served: Served, codec: str = "VP8") -> str:
    async def made() -> str:
        connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        try:
            return await offer_of(connection, codec, Drawn(small))
        finally:
            await connection.close()

    offer: str = served.do(made())
    return offer


def until(done: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
