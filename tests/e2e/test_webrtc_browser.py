from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Route

from benchmarks.ingest import burnt_in_age_ms
from saccade.sources.frame import Frame
from saccade.sources.webrtc.peer import choose_addresses
from saccade.sources.webrtc.source import WebRtcSource
from saccade.sources.webrtc.whip_server import WebRtcServer
from saccade.web.auth import HttpAuth
from saccade.web.guard import Guard
from saccade.web.server import AppServer
from tests.support import REPO
from tests.support.browser import browsing, kill, needs_chromium
from tests.support.webrtc import LOOPBACK

PAGE = REPO / "tests" / "data" / "webrtc.html"
TOKEN = "sesame"

pytestmark = [pytest.mark.e2e, needs_chromium]


def age_ms(image: NDArray[np.uint8]) -> float:
    """How old the time is that the page burnt into the frame; below 0 where it is not legible."""
    age = burnt_in_age_ms(image, time.time())
    return -1.0 if age is None else age


class _OfWhip(Guard):
    def admit(self, request: Request, route: BaseRoute | None) -> None:
        if request.url.path.startswith("/whip"):
            super().admit(request, route)


class Site:
    """The page, our endpoint at /whip, and one of stock aiortc at /stock."""

    def __init__(self) -> None:
        self.server = WebRtcServer(self._read, media_hosts=LOOPBACK, silence_s=3)
        self.frames: list[Frame] = []
        self.ages: list[float] = []
        self.reported_ages: list[float] = []  # by `captured_at`
        self.stock_ages: list[float] = []
        self.reports: list[str] = []
        self._readers: list[threading.Thread] = []
        self._stock: list[RTCPeerConnection] = []
        self._tasks: list[Any] = []

    def _read(self, source: WebRtcSource) -> None:
        def read() -> None:
            for frame in source:
                self.ages.append(age_ms(frame.image))
                self.reported_ages.append((time.time() - frame.captured_at) * 1000)
                self.frames.append(frame)

        self._readers.append(threading.Thread(target=read))
        self._readers[-1].start()

    def open(self) -> str:
        own = [
            Route("/", self._page),
            Route("/stock", self._publish_stock, methods=["POST"]),
            Route("/reports", self._hear, methods=["POST"]),
        ]
        guard = _OfWhip([*self.server.routes(), *own], HttpAuth(TOKEN))
        self._web = AppServer(guard, "127.0.0.1", 0, "site", on_cleanup=[self.server.close, self._close])
        return f"{self._web.url}/?token={TOKEN}"

    def close(self) -> None:
        self._web.close()

    async def _close(self) -> None:
        for connection in self._stock:
            await connection.close()

    async def _page(self, _: Request) -> Response:
        return FileResponse(PAGE)

    async def _hear(self, request: Request) -> Response:
        self.reports.append((await request.body()).decode())
        return Response()

    async def _publish_stock(self, request: Request) -> Response:
        connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self._stock.append(connection)

        async def read(track: Any) -> None:
            try:
                while True:
                    frame = await track.recv()
                    self.stock_ages.append(age_ms(frame.to_ndarray(format="rgb24")))
            except MediaStreamError:
                pass

        connection.on("track", lambda track: self._tasks.append(asyncio.ensure_future(read(track))))
        await connection.setRemoteDescription(RTCSessionDescription((await request.body()).decode(), "offer"))
        choose_addresses(connection.getTransceivers()[0], LOOPBACK)
        await connection.setLocalDescription(await connection.createAnswer())
        return Response(connection.localDescription.sdp, 201, media_type="application/sdp")

    def until(self, done: Any, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < deadline, f"not within {seconds} s; the page reports {self.reports}"
            assert set(self.reports) <= {"done"}, self.reports
            time.sleep(0.05)


@pytest.fixture
def site() -> Iterator[tuple[Site, str]]:
    site = Site()
    yield site, site.open()
    site.close()
    for reader in site._readers:
        reader.join(5)
        assert not reader.is_alive()


@pytest.mark.parametrize("codec", ["VP8", "H264"])
def test_a_browser_publishes_its_camera_and_is_killed(codec: str, site: tuple[Site, str], tmp_path: Path) -> None:
    here, url = site
    with browsing(f"{url}&to=/whip&codec={codec}", tmp_path) as browser:
        here.until(lambda: len(here.frames) >= 60)
        kill(browser)
        here.until(lambda: here.server.peers == 0, seconds=10)
    frames = here.frames
    assert all((frame.width, frame.height) == (640, 480) for frame in frames[30:60])
    assert all(a.pts < b.pts for a, b in itertools.pairwise(frames))
    assert all(frame.image.std() > 10 for frame in frames)  # a frame, no grey
    assert frames[-1].capture_clock == "rtcp"
    assert abs(frames[-1].captured_at - time.time()) < 10


@pytest.mark.parametrize("codec", ["VP8", "H264"])
def test_the_camera_changes_its_size(codec: str, site: tuple[Site, str], tmp_path: Path) -> None:
    here, url = site
    with browsing(f"{url}&to=/whip&codec={codec}&shrink=1&seconds=3", tmp_path):
        here.until(lambda: here.reports)
    sizes = [(frame.width, frame.height) for frame in here.frames]
    assert (640, 480) in sizes
    assert sizes[-1] == (320, 240)
    assert here.server.peers == 0  # the page has ended its session with DELETE


@pytest.mark.parametrize("codec", ["VP8", "H264"])
def test_frames_are_younger_than_from_stock_aiortc(codec: str, site: tuple[Site, str], tmp_path: Path) -> None:
    here, url = site
    with browsing(f"{url}&to=/whip,/stock&codec={codec}&clock=1&seconds=4", tmp_path):
        here.until(lambda: here.reports)
    ours, stock = ([age for age in ages[30:] if age >= 0] for ages in (here.ages, here.stock_ages))
    assert min(len(ours), len(stock)) > 40
    median, stock_median = statistics.median(ours), statistics.median(stock)
    print(f"\n{codec} at 30 fps from Chromium: {median:.1f} ms old, with stock aiortc {stock_median:.1f} ms")
    reported = statistics.median(here.reported_ages[30:])
    print(f"by the sender's reports {reported:.1f} ms, which counts the camera and the page as well")
    assert median < stock_median
