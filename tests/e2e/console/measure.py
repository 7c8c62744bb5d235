"""Figures of the console for docs/benchmarks.md, measured in a real browser on a quiet machine.

python -m tests.e2e.console.measure first-box [TIMES]    from a press to the first box that is painted, in ms
python -m tests.e2e.console.measure wall [SECONDS]       frames a second in each tile of nine streams of 10 fps
python -m tests.e2e.console.measure requests [SECONDS]   p99 of eight streams without and with 100 API clients
"""

from __future__ import annotations

import base64
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import av

from saccade.engine import Engine
from saccade.engine.results import Box, Detections, Points, Result
from saccade.pipeline import Output, Streams, serve
from saccade.pipeline.api.demo import Demo
from saccade.pipeline.api.whep_sink import ViewerSink
from saccade.pipeline.asset_files import DEMO_CLIP, PAGES
from saccade.pipeline.config import Prompts, StreamConfig
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.control.local import Local
from saccade.sinks import CallbackSink, Latency
from saccade.sources import open_source
from tests.support.browser import Tab, tab

PRESS = """new Promise((done) => {
    const begun = performance.now(), marks = {};
    const mark = (name) => { marks[name] ??= performance.now() - begun; };
    const painted = () => {
        if (saccade.stage.shown) mark('frame');
        if (!saccade.stage.shown?.record?.objects?.length) return requestAnimationFrame(painted);
        mark('box');
        done(marks);
    };
    setTimeout(() => done(marks), 15_000);
    document.querySelector(WHAT).click();
    mark('click');
    requestAnimationFrame(painted);
})"""


@contextmanager
def demo(*streams: StreamConfig) -> Iterator[Demo]:
    with Engine.load("nano", device="cpu") as engine, Demo(engine, Prompts(detect=["person"]), port=0) as opened:
        for stream in streams:
            opened.controller.add(stream)
        yield opened


def film(folder: Path) -> Path:
    """Frames of the demo clip with a person in each, for Chromium's camera: 640×360 at 30 a second."""
    path = folder / "people.mjpeg"
    with av.open(str(DEMO_CLIP)) as clip, av.open(str(path), "w", format="mjpeg") as out:
        stream = out.add_stream("mjpeg", rate=30)
        stream.width, stream.height, stream.pix_fmt = 640, 360, "yuvj420p"
        stream.codec_context.flags |= 2
        stream.codec_context.global_quality = 2 * 118
        for number, frame in enumerate(clip.decode(video=0)):
            if 85 <= number < 145:
                for _ in range(3):
                    image = av.VideoFrame.from_ndarray(frame.to_ndarray(format="rgb24"), format="rgb24")
                    out.mux(stream.encode(image))
        out.mux(stream.encode(None))
    return path


def first_box(times: int) -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        room = StreamConfig(source=str(DEMO_CLIP), name="room", detect=["person"], conf=0.4, start=8.5, end=14.5)
        served = stack.enter_context(demo())
        page = stack.enter_context(tab("about:blank", Path(folder) / "profile", camera=film(Path(folder))))
        for name, what in (("camera", "#use-camera"), ("clip", "#use-clip"), ("stream", "#streams a[href$=room]")):
            if name == "stream":
                served.add(room)
            marks = [_press(page, served, what) for _ in range(times + 1)][1:]  # the first compiles scripts
            for mark in sorted({key for one in marks for key in one}, key=lambda key: marks[0].get(key, 0)):
                values = sorted(one[mark] for one in marks if mark in one)
                print(
                    f"{name:8} {mark:12} least {values[0]:5.0f}  median {statistics.median(values):5.0f}"
                    f"  most {values[-1]:5.0f} ms",
                    flush=True,
                )


def _press(page: Tab, served: Demo, what: str) -> dict[str, float]:
    page.do("Page.navigate", url="about:blank")
    page.do("Page.navigate", url=served.url)
    page.until("!!window.saccade")
    page.until(f"!!document.querySelector({what!r})")
    time.sleep(2)
    marks: dict[str, float] = page.eval(PRESS.replace("WHAT", repr(what)))
    return marks


def wall(seconds: float) -> None:
    """Frames come with the boxes that the model found once: nine streams of 10 fps are more than it does on a CPU."""
    found = json.loads((PAGES / "clip.json").read_text())["frames"]
    with open_source(DEMO_CLIP) as clip:
        frames = list(clip)
    results = [
        Result(
            Detections(tuple(Box("person", s / 100, *(v / 1000 for v in box)) for *box, s in boxes), 640, 360),
            Points((), 640, 360),
        )
        for boxes in found
    ]
    sink, over = ViewerSink(port=0), threading.Event()

    def feed(name: str, first: int) -> None:
        begun = time.monotonic()
        for number in itertools.count():
            if over.wait(max(0.0, begun + number / 10 - time.monotonic())):
                return
            at = (first + number) % len(frames)
            sink.write(replace(frames[at], stream=name, index=number), results[at], Latency())

    feeders = [threading.Thread(target=feed, args=(f"camera-{number}", 20 * number)) for number in range(9)]
    for feeder in feeders:
        feeder.start()
    qualities = "[...document.querySelectorAll('#tiles video')].map((one) => one.getVideoPlaybackQuality())"
    count = f"{qualities}.map((one) => [one.totalVideoFrames, one.droppedVideoFrames])"
    try:
        with tempfile.TemporaryDirectory() as folder, tab(f"{sink.url}#/wall", Path(folder)) as page:
            playing = "[...document.querySelectorAll('#tiles video')].filter((one) => one.videoWidth).length === 9"
            page.shape(1440, 900)  # a tile that is out of sight is not sent
            page.until(playing, 90)
            time.sleep(5)
            before, used, begun = page.eval(count), time.process_time(), time.monotonic()
            skipped = _skipped(sink)
            time.sleep(seconds)
            after, passed = page.eval(count), time.monotonic() - begun
            rates = [(b[0] - a[0]) / passed for a, b in zip(before, after, strict=True)]
            lost = sum(b[1] - a[1] for a, b in zip(before, after, strict=True))
            print(f"frames a second in each tile: {', '.join(f'{rate:.2f}' for rate in rates)}")
            print(f"lost by the browser {lost}, not sent to a viewer {_skipped(sink) - skipped}")
            print(f"the server took {(time.process_time() - used) / passed:.2f} of a core")
    finally:
        over.set()
        for feeder in feeders:
            feeder.join()
        sink.close()


def _skipped(sink: ViewerSink) -> int:
    """The frames that were not sent, since a viewer was too slow."""
    streams = sink._videos._streams.values()
    viewers = [one for stream in streams for rendition in stream._renditions.values() for one in rendition.viewers]
    return sum(viewer.skipped for viewer in viewers)


def requests(seconds: float) -> None:
    streams = [
        StreamConfig(source=str(DEMO_CLIP), name=f"camera-{number}", detect=["person"], max_fps=1, loop=True)
        for number in range(8)
    ]
    image = base64.b64encode((PAGES.parent / "demo.jpg").read_bytes()).decode()
    body = json.dumps({"image_url": f"data:image/jpeg;base64,{image}", "object": "person"}).encode()
    heard: list[float] = []
    note = CallbackSink(lambda frame, result, latency: heard.append(latency.total))
    with Engine.load("nano", device="cpu") as engine, Streams(engine, [Output(note)]) as those:
        controller = Controller(Local(those))
        for stream in streams:
            controller.add(stream)
        with closing(serve(controller, port=0)) as server:
            time.sleep(10)
            for turn in range(3):
                alone = _p99(heard, seconds)
                with asking(f"{server.url}/v1/detect", body) as done:
                    time.sleep(5)
                    beside = _p99(heard, seconds)
                print(
                    f"turn {turn + 1}: p99 {alone:.0f} ms alone, {beside:.0f} beside 100 clients "
                    f"({100 * (beside / alone - 1):+.1f} %), {len(done)} answers, {len(heard)} frames",
                    flush=True,
                )


def _p99(heard: list[float], seconds: float) -> float:
    """The 99th percentile of the latency of all streams' frames of some seconds, in ms."""
    heard.clear()
    time.sleep(seconds)
    return statistics.quantiles(list(heard), n=100)[98]


@contextmanager
def asking(url: str, body: bytes) -> Iterator[list[float]]:
    """A hundred clients that ask without end; yields when each answer came."""
    over, done = threading.Event(), list[float]()

    def ask() -> None:
        while not over.is_set():
            try:
                asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(asked, timeout=120) as response:
                    response.read()
                done.append(time.monotonic())
            except OSError:
                over.wait(0.5)

    clients = [threading.Thread(target=ask) for _ in range(100)]
    for client in clients:
        client.start()
    try:
        yield done
    finally:
        over.set()
        for client in clients:
            client.join()


if __name__ == "__main__":
    name, *given = sys.argv[1:] or ["help"]
    if name == "first-box":
        first_box(int(given[0]) if given else 7)
    elif name in ("wall", "requests"):
        {"wall": wall, "requests": requests}[name](float(given[0]) if given else 60)
    else:
        print(__doc__)
