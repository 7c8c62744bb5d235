"""The demo's page in a real browser, whose camera shows the demo clip."""

from __future__ import annotations

import base64
import io
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from saccade.engine import Engine
from saccade.pipeline.api.demo import Demo
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import Prompts, StreamConfig
from saccade.sinks import color_of
from tests.support.browser import Tab, needs_chromium, tab
from tests.support.webrtc import until

pytestmark = [pytest.mark.e2e, needs_chromium]

SEEN = "saccade.stage.shown?.record"
PEOPLE = slice(85, 145)  # frames of the demo clip in each of which a person is found


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("nano", device="cpu") as loaded:
        yield loaded


@pytest.fixture
def demo(engine: Engine) -> Iterator[Demo]:
    with Demo(engine, Prompts(detect=["person"]), port=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Chromium's fake camera shows, 10 frames a second: it would show Motion JPEG at 30."""
    path = tmp_path_factory.mktemp("film") / "people.y4m"
    with av.open(str(DEMO_CLIP)) as clip, av.open(str(path), "w", format="yuv4mpegpipe") as out:
        stream = out.add_stream("wrapped_avframe", rate=10)
        stream.width, stream.height, stream.pix_fmt = 640, 360, "yuv420p"
        for frame in itertools.islice(clip.decode(video=0), PEOPLE.start, PEOPLE.stop):
            out.mux(stream.encode(frame.reformat(format="yuv420p")))
        out.mux(stream.encode(None))
    return path


def press(page: Tab, what: str) -> None:
    page.eval(f"document.querySelector({what!r}).click()")


def look_for(page: Tab, name: str) -> None:
    page.eval(f"document.getElementById('name').value = {name!r}; document.getElementById('find').requestSubmit()")


def words(page: Tab, what: str) -> str:
    """The text of a part of the page; "" while it is hidden."""
    text: str = page.eval(
        f"document.querySelector({what!r}).checkVisibility() ? {what!r} && "
        f"document.querySelector({what!r}).innerText : ''"
    )
    return text


def image_of(page: Tab, make: str) -> Any:
    """The PNG that a promise in the page comes to, as an array."""
    script = f"""{make}.then((png) => new Promise((done) => {{
        const reader = new FileReader();
        reader.onload = () => done(reader.result.split(",")[1]);
        reader.readAsDataURL(png);
    }}))"""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(page.eval(script)))).convert("RGB"))


def overlap(a: list[float], b: tuple[float, ...]) -> float:
    """Intersection over union of two boxes."""
    inner = max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    return inner / (sum((one[2] - one[0]) * (one[3] - one[1]) for one in (a, b)) - inner)


def test_boxes_are_there_soon_and_on_their_own_frame(demo: Demo, engine: Engine, film: Path, tmp_path: Path) -> None:
    with tab(demo.url, tmp_path, camera=film) as page:
        page.until("!!window.saccade")
        begun = time.monotonic()
        press(page, "#use-camera")
        page.until(f"{SEEN}?.objects.length > 0")
        assert time.monotonic() - begun < 10  # how soon exactly says the README; two tests beside this one take seconds
        page.until("saccade.stage.shown && document.getElementById('status').dataset.state === 'live'")
        agreed = []
        for _ in range(6):
            time.sleep(0.3)
            page.until(f"{SEEN}?.objects.length > 0")
            # The image on the screen and the boxes on it, taken at the same instant.
            page.eval(f"""(() => {{
                const {{bitmap}} = saccade.stage.shown, canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
                canvas.getContext("2d").drawImage(bitmap, 0, 0);
                window.taken = {{png: canvas.convertToBlob(), boxes: {SEEN}.objects.map((one) => one.box_norm)}};
            }})()""")
            image = image_of(page, "taken.png")
            assert image.shape == (360, 640, 3)
            here = [(box.x1, box.y1, box.x2, box.y2) for box in engine.detect(image, "person").boxes]
            agreed += [max((overlap(box, one) for one in here), default=0.0) for box in page.eval("taken.boxes")]
        assert np.median(agreed) > 0.8, agreed
        assert page.console == []  # not a word on the console: nothing missing, nothing refused by the policy
    until(lambda: demo.whip.peers == 0 and not demo.streams.names, seconds=30)  # one that is killed does not


def test_what_is_looked_for_changes_while_it_runs(demo: Demo, film: Path, tmp_path: Path) -> None:
    with tab(demo.url, tmp_path, camera=film) as page:
        page.until("!!window.saccade")
        press(page, "#use-camera")
        page.until(f"{SEEN}?.objects.length > 0")
        look_for(page, "zebra crossing")
        page.until("!document.getElementById('unknown').hidden")
        assert "zebra crossing" in words(page, "#unknown")
        look_for(page, "dogs")
        page.until("document.getElementById('chips').innerText.includes('dog')")
        assert words(page, "#unknown") == ""
        press(page, "#chips button[aria-label='Remove the label person']")
        page.until(f"{SEEN}?.objects.length === 0")
        (name,) = demo.streams.names
        until(lambda: [task.label for task in demo.streams.get(name).tasks] == ["dog"])  # type: ignore[union-attr]
        look_for(page, "people")
        press(page, "[name=skill][value=point]")
        page.until(f"{SEEN}?.points.some((one) => one.label === 'person') && {SEEN}.objects.length === 0")
        # Not asked at once: the next frame may show no person.
        page.until("document.getElementById('found').innerText.includes('person')")


def test_a_clip_is_sent_back_with_the_boxes_burnt_in(demo: Demo, tmp_path: Path) -> None:
    with tab(demo.url, tmp_path) as page:
        page.until("!!window.saccade")
        press(page, "#use-clip")
        page.until(f"{SEEN}?.objects.length > 0")
        press(page, "[name=view][value=burnt]")
        page.until("document.getElementById('theirs').matches('.seen')")
        green, ours = np.array(color_of("person")), []
        deadline = time.monotonic() + 20
        while not (ours and ours[-1] > 300) and time.monotonic() < deadline:
            image = image_of(page, "saccade.stage.snapshot()")
            ours.append(int((np.abs(image.astype(int) - green).max(axis=2) < 60).sum()))
        assert image.shape == (360, 640, 3)
        assert ours[-1] > 300  # pixels in the colour of a person's box, which the clip does not have
        press(page, "[name=view][value=here]")
        page.until(f"{SEEN}?.objects.length > 0")
        press(page, "#stop")
        until(lambda: not demo.streams.names)
        assert demo.whep.n_open == 0


def test_a_running_stream_is_watched_either_way(demo: Demo, tmp_path: Path) -> None:
    demo.controller.add(StreamConfig(source=str(DEMO_CLIP), detect=["person"], name="room", conf=0.4, loop=True))
    with tab(demo.url, tmp_path) as page:
        page.until("!!window.saccade")
        page.until("!!document.querySelector('#streams a')")
        press(page, "#streams a")
        page.until(f"{SEEN}?.objects.length > 0", seconds=25)
        assert page.eval("document.getElementById('conf').value") == "40"  # the stream's own
        first = page.eval("saccade.stage.shown.bitmap.width")
        assert first == 640
        press(page, "[name=view][value=burnt]")
        page.until("document.getElementById('theirs').matches('.seen')")
        frames = []
        for _ in range(4):
            frames.append(image_of(page, "saccade.stage.snapshot()").astype(int))
            time.sleep(0.4)
        assert max(np.abs(a - b).max() for a, b in itertools.pairwise(frames)) > 40  # it moves
        assert demo.whep.n_open == 1
        page.do("Page.navigate", url="about:blank")  # a page that is left disconnects
        until(lambda: demo.whep.n_open == 0)


def test_a_lost_server_is_found_again(engine: Engine, film: Path, tmp_path: Path) -> None:
    with Demo(engine, Prompts(detect=["person"]), port=0) as first:
        port = int(first.url.rstrip("/").rpartition(":")[2])
        with tab(first.url, tmp_path, camera=film) as page:
            page.until("!!window.saccade")
            press(page, "#use-camera")
            page.until(f"{SEEN}?.objects.length > 0")
            first.close()
            page.until("document.getElementById('status').dataset.state === 'lost'")
            page.until("!document.getElementById('message').hidden")
            assert "Reconnecting" in words(page, "#message")
            with Demo(engine, Prompts(detect=["person"]), port=port) as second:
                page.until("document.getElementById('status').dataset.state === 'live'", seconds=25)
                until(lambda: second.streams.names == ["camera"])
                page.until("document.getElementById('message').hidden")


@pytest.mark.parametrize(
    ("error", "message"),
    [("NotAllowedError", "blocked"), ("NotFoundError", "No camera"), ("NotReadableError", "other program")],
)
def test_a_camera_error_is_shown_in_plain_words(error: str, message: str, demo: Demo, tmp_path: Path) -> None:
    with tab(demo.url, tmp_path) as page:
        page.until("!!window.saccade")
        refuse = f"() => Promise.reject(new DOMException('no', '{error}'))"
        page.eval(f"navigator.mediaDevices.getUserMedia = {refuse}; 0")
        press(page, "#use-camera")
        page.until("!document.getElementById('message').hidden")
        assert message in words(page, "#message")
        assert error not in words(page, "#message")
        assert page.eval("document.getElementById('start').checkVisibility()")  # and something else can be chosen
        assert demo.whip.peers == 0
