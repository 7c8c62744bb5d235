"""What a real browser plays of what we make: the video of a stream as it goes on, and a recording of it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from saccade.engine.results import Detections, Points, Result
from saccade.pipeline.api.whep_sink import ViewerSink
from saccade.sinks import Latency, Mp4Sink, Sink
from saccade.sources import Frame
from saccade.web.server import AppServer
from tests.support.browser import needs_chromium, tab
from tests.support.clips import numbered_image
from tests.support.webrtc import until

pytestmark = [pytest.mark.e2e, needs_chromium]

WIDTH, HEIGHT = 640, 360
NOTHING = Result(Detections((), WIDTH, HEIGHT), Points((), WIDTH, HEIGHT))

# The number that `numbered_image` burnt into what a video shows now.
NUMBER = """(() => {
    const video = document.querySelector("video"), canvas = document.createElement("canvas");
    if (!video?.videoWidth) return -1;
    [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
    const context = canvas.getContext("2d", {willReadFrequently: true});
    context.drawImage(video, 0, 0);
    let number = 0;
    for (let bit = 0; bit < 8; bit++) {
        const at = (2 * bit + 1) * canvas.width / 16;
        if (context.getImageData(at, canvas.height * 3 / 4, 1, 1).data[0] > 128) number += 2 ** bit;
    }
    return number;
})()"""
SIZE = "(({videoWidth, videoHeight}) => [videoWidth, videoHeight])(document.querySelector('video'))"


def write(sink: Sink, number: int, stream: str = "door") -> None:
    image = numbered_image(number % 256, WIDTH, HEIGHT)
    frame = Frame(image, stream, number, number, Fraction(1, 30), time.time(), "arrival", time.monotonic(), 1.0)
    sink.write(frame, NOTHING, Latency())


@contextmanager
def feeding(sink: Sink) -> Iterator[list[int]]:
    """Write thirty frames a second; yields the number of the newest."""
    over, newest = threading.Event(), [0]

    def feed() -> None:
        for number in itertools.count():
            if over.wait(1 / 30):
                return
            write(sink, number)
            newest[0] = number

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        yield newest
    finally:
        over.set()
        feeder.join()


def test_chromium_plays_a_stream_as_it_goes_on(tmp_path: Path) -> None:
    sink = ViewerSink(port=0)
    tile = "#tiles [data-stream=door] video"
    number_now = NUMBER.replace('"video"', f'"{tile}"')
    try:
        with feeding(sink) as newest, tab(sink.url, tmp_path) as page:

            def fresh() -> bool:
                """Half a second old at most, with the test's own way to the page."""
                number = page.eval(number_now)
                return number >= 0 and (newest[0] - number) % 256 < 15

            page.until(f"document.querySelector('{tile}')?.videoWidth > 0")
            time.sleep(1)
            seen, ages = [], []
            for _ in range(10):
                number = page.eval(number_now)
                seen.append(number)
                ages.append((newest[0] - number) % 256)
                time.sleep(0.15)
            assert page.eval(SIZE.replace("'video'", f"'{tile}'")) == [480, 270]
            assert all(0 < (b - a) % 256 < 100 for a, b in itertools.pairwise(seen)), seen  # it goes on, and on
            assert sorted(ages)[5] < 15, ages
            sink.end("door")
            until(lambda: not fresh())  # the video stands still
            until(fresh)  # and it comes back by itself
            assert all("404" in line for line in page.console), page.console  # while there was no stream of that name
            page.do("Page.navigate", url="about:blank")
            until(lambda: not sink._videos._streams["door"]._renditions)
    finally:
        sink.close()


def test_chromium_plays_a_recording(tmp_path: Path) -> None:
    film = tmp_path / "film.mp4"
    sink = Mp4Sink(film, rate=Fraction(30))
    for number in range(60):
        write(sink, number)
    sink.close()

    async def show(_: Request) -> Response:
        return HTMLResponse("<!doctype html><link rel=icon href='data:,'><video src='/film.mp4' muted></video>")

    async def send(_: Request) -> Response:
        return FileResponse(film)

    site = AppServer(Starlette(routes=[Route("/", show), Route("/film.mp4", send)]), "127.0.0.1", 0, "site")
    try:
        with tab(f"{site.url}/", tmp_path / "profile") as page:
            page.until("document.querySelector('video')?.readyState >= 2")
            assert page.eval("document.querySelector('video').duration") == pytest.approx(2.0, abs=0.04)
            for second in (0.5, 1.5, 1.0):
                page.eval(f"document.querySelector('video').currentTime = {second + 1 / 60}")
                page.until("!document.querySelector('video').seeking")
                assert page.eval(NUMBER) == pytest.approx(30 * second, abs=1)
            page.eval("document.querySelector('video').play()")
            page.until("document.querySelector('video').ended")
            assert page.eval(NUMBER) == 59
            assert page.eval("document.querySelector('video').error") is None
    finally:
        site.close()
