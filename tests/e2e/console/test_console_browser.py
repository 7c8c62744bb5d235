"""The console in a real browser: the first second, the wall, a failing stream, zones by mouse and keys, an image."""

from __future__ import annotations

import base64
import json
import threading
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from saccade.engine import Engine, Outline, Result, Timings
from saccade.pipeline.api.demo import Demo
from saccade.pipeline.api.whep_sink import ViewerSink
from saccade.pipeline.asset_files import DEMO_CLIP, PAGES
from saccade.pipeline.config import Prompts, StreamConfig
from saccade.pipeline.config.file import load
from saccade.pipeline.run import opened_run
from saccade.sinks import color_of
from saccade.sinks.overlay.draw import draw
from saccade.sources import open_source
from saccade.sources.webrtc.signaling import SILENCE_S
from tests.e2e.console.test_demo_browser import SEEN, look_for, press, words
from tests.support.browser import Tab, needs_chromium, tab
from tests.support.cameras import Camera, free_port, need_servers
from tests.support.cameras.onvif_device import MediaProfile, OnvifCamera, serving_camera
from tests.support.clips import MakeClip
from tests.support.engine.material import write_enclosing_model
from tests.support.webrtc import until
from tests.support.whep import feed

pytestmark = [pytest.mark.e2e, needs_chromium]

PHOTO = PAGES.parent / "demo.jpg"
HALL = "document.querySelector('#tiles [data-stream=hall]')"


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    """A demo with a stream that runs and one whose camera is not there."""
    with (
        Engine.load("nano", device="cpu") as engine,
        Demo(engine, Prompts(detect=["person"]), port=0) as opened,
    ):
        opened.controller.add(
            StreamConfig(source=str(DEMO_CLIP), name="hall", detect=["person"], vid_stride=4, loop=True)
        )
        opened.controller.add(StreamConfig(source="rtsp://127.0.0.1:1/roof", name="roof", detect=["person"]))
        yield opened


@pytest.fixture(scope="module")
def browser(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab(demo.url, tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Tab, demo: Demo) -> Tab:
    """The page as it is when it is opened."""
    browser.do("Page.navigate", url="about:blank")
    browser.shape(1440, 900)
    browser.do("Page.navigate", url=demo.url)
    browser.until("!!window.saccade")
    return browser


def violations(page: Tab) -> list[str]:
    """What axe-core finds wrong with the page as it is, for people who use it with other means than mouse and eyes."""
    found = find_spec("axe_core_python")
    if found is None or found.origin is None:
        pytest.skip("axe-core is not installed: pip install axe-core-python")
    page.eval(Path(found.origin).with_name("axe.min.js").read_text() + "; 0")
    result = page.eval("axe.run().then(({violations}) => violations)")
    return [f"{one['id']}: {[node['html'][:120] for node in one['nodes']]}" for one in result]


def test_the_first_second_shows_boxes_on_people(page: Tab, demo: Demo) -> None:
    page.until("document.getElementById('intro').matches('.seen')")
    assert page.eval("document.getElementById('use-camera').checkVisibility()")
    assert demo.whip.peers == 0  # nothing is sent anywhere for it
    shown = json.loads((PAGES / "clip.json").read_text())
    with open_source(DEMO_CLIP) as clip:
        assert len(shown["frames"]) == clip.info.frames
    assert sum(map(bool, shown["frames"])) > 100


def test_streams_are_listed_with_their_light_and_cause(page: Tab) -> None:
    page.until("document.querySelectorAll('#streams a').length === 2")
    page.until("document.querySelector('#streams').innerText.includes('connection failed')")
    lights = page.eval("[...document.querySelectorAll('#streams i')].map((one) => one.className)")
    assert lights == ["ok", ""]
    green = page.eval("getComputedStyle(document.querySelector('#streams i.ok')).backgroundColor")
    assert green != page.eval("getComputedStyle(document.querySelectorAll('#streams i')[1]).backgroundColor")


def test_the_wall_is_live_and_leads_to_one_stream(page: Tab, demo: Demo) -> None:
    press(page, "[data-view=wall]")
    page.until(f"{HALL}?.querySelector('video')?.videoWidth === 480", seconds=25)
    page.until(f"{HALL}?.innerText.includes('person')", seconds=25)
    page.until("document.querySelector('#tiles [data-stream=roof]')?.innerText.includes('connection failed')")
    assert violations(page) == []
    press(page, "#tiles [data-stream=hall] a")
    page.until(f"{SEEN}?.objects", seconds=25)
    assert page.eval("location.hash") == "#/stream/hall"
    until(lambda: demo.whep.n_open == 1)  # the wall's own are gone
    page.eval("history.back()")
    page.until("document.getElementById('wall').checkVisibility()")


@pytest.mark.parametrize(
    "without",
    [
        "delete window.RTCPeerConnection;",
        # As behind a firewall: the offer names no address, and no packet arrives.
        "RTCPeerConnection.prototype.setRemoteDescription = async () => {};"
        "const later = setTimeout; window.setTimeout = (work, ms) => later(work, ms === 10_000 ? 300 : ms);",
    ],
    ids=["no WebRTC in the browser", "no packet arrives"],
)
def test_a_page_without_webrtc_shows_the_same_over_http(page: Tab, demo: Demo, without: str) -> None:
    script = page.do("Page.addScriptToEvaluateOnNewDocument", source=without)
    try:
        page.do("Page.navigate", url="about:blank")
        # A page that was left while it connected counts until its silence is noticed.
        until(lambda: demo.whep.n_open == 0, seconds=SILENCE_S + 10)
        page.do("Page.navigate", url=f"{demo.url}#/wall")
        page.until(f"{HALL}?.querySelector('video')?.videoWidth === 480", seconds=25)
        page.until(f"{HALL}?.innerText.includes('person')", seconds=25)
        page.eval("location.hash = '#/stream/hall'")
        page.until(f"{SEEN}?.objects.length > 0", seconds=25)  # a frame with its own record
        assert page.eval("saccade.stage.shown.bitmap.width") == 640
        assert page.eval("document.getElementById('chips').textContent").startswith("person")
        until(lambda: demo.whep.n_open == 1)
        assert not demo.whep._peers
        press(page, "[name=view][value=burnt]")
        page.until(
            "document.getElementById('theirs').matches('.seen') && saccade.stage.theirs.currentTime > 1", seconds=25
        )
        press(page, "[name=view][value=here]")
        page.do("Page.navigate", url="about:blank")
        until(lambda: demo.whep.n_open == 0, seconds=25)
    finally:
        page.do("Page.removeScriptToEvaluateOnNewDocument", identifier=script["identifier"])


def test_a_failing_stream_says_why_and_leads_back(page: Tab) -> None:
    page.eval("location.hash = '#/stream/roof'")
    page.until("document.getElementById('message').checkVisibility()")
    page.until("document.getElementById('message').innerText.includes('connection failed')")
    assert "reconnects automatically" in words(page, "#message")
    assert page.eval("document.getElementById('retry').checkVisibility()")
    press(page, "#retry")
    page.until("document.getElementById('message').innerText.includes('connection failed')")
    press(page, "#dismiss")
    page.until("document.getElementById('start').checkVisibility()")
    assert words(page, "#message") == ""


def test_a_missing_video_is_reported_in_the_words_of_the_server(page: Tab) -> None:
    problem = page.eval(
        "import(new URL('video/link.js', document.baseURI)).then(({ask}) => ask('streams/cellar/live.mp4'))"
        ".catch(({message, final}) => ({message, final}))"
    )
    assert problem == {"message": "The server returned an error: this stream does not exist.", "final": False}


def test_zones_are_drawn_moved_named_and_removed(page: Tab, demo: Demo) -> None:
    def regions() -> dict[str, dict[str, dict[str, list[list[float]]]]]:
        with urllib.request.urlopen(f"{demo.url}streams/hall/zones") as response:
            answer: dict[str, dict[str, dict[str, list[list[float]]]]] = json.load(response)
        return answer

    def mouse(kind: str, x: float, y: float, buttons: int = 1) -> None:
        box = page.eval("JSON.stringify(document.getElementById('stage').getBoundingClientRect())")
        room = json.loads(box)
        place = {"x": room["x"] + x * room["width"], "y": room["y"] + y * room["height"]}
        page.do("Input.dispatchMouseEvent", type=kind, button="left", buttons=buttons, clickCount=1, **place)

    def click(x: float, y: float) -> None:
        mouse("mousePressed", x, y)
        mouse("mouseReleased", x, y, 0)

    def key(name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            page.do("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    page.eval("location.hash = '#/stream/hall'")
    page.until(f"{SEEN}?.objects", seconds=25)
    page.until("document.getElementById('regions').checkVisibility()")
    place = json.loads(page.eval("JSON.stringify(document.getElementById('add-zone').getBoundingClientRect())"))
    for kind, buttons in (("mousePressed", 1), ("mouseReleased", 0)):
        at = {"x": place["x"] + 10, "y": place["y"] + 10, "button": "left", "buttons": buttons, "clickCount": 1}
        page.do("Input.dispatchMouseEvent", type=kind, **at)
    for corner in ((0.2, 0.2), (0.8, 0.2), (0.8, 0.9), (0.2, 0.2)):  # the first again ends it
        click(*corner)
    until(lambda: list(regions()["zones"]) == ["zone"])
    assert regions()["zones"]["zone"]["polygon"] == [
        pytest.approx([x, y], abs=0.01) for x, y in ((0.2, 0.2), (0.8, 0.2), (0.8, 0.9))
    ]
    mouse("mousePressed", 0.2, 0.2)
    mouse("mouseMoved", 0.1, 0.15)
    mouse("mouseReleased", 0.1, 0.15, 0)
    until(lambda: regions()["zones"]["zone"]["polygon"][0] == pytest.approx([0.1, 0.15], abs=0.01))
    page.eval("document.querySelector('[data-corner=\"zones zone 0\"]').focus()")
    key("ArrowRight")
    until(lambda: regions()["zones"]["zone"]["polygon"][0] == pytest.approx([0.11, 0.15], abs=0.01))
    page.eval("""(() => { const name = document.querySelector('#region-list input');
        name.value = 'door'; name.dispatchEvent(new Event('change')); })()""")
    until(lambda: list(regions()["zones"]) == ["door"])
    page.until("document.querySelector('#region-list [data-counts]').textContent.includes('now')", seconds=25)
    press(page, "#add-line")  # as a key does: it needs no place
    until(lambda: list(regions()["lines"]) == ["line"])
    assert violations(page) == []
    page.eval("document.querySelector('#region-list .cross').click()")
    until(lambda: regions()["zones"] == {})


def test_freeze_holds_a_frame_and_its_boxes(page: Tab) -> None:
    press(page, "#use-clip")
    page.until(f"{SEEN}?.objects.length > 0", seconds=25)
    press(page, "#freeze")
    held = page.eval(f"JSON.stringify({SEEN})")
    assert "the boxes belong to this frame" in words(page, "#caption")
    page.eval("new Promise((done) => setTimeout(done, 600))")
    assert page.eval(f"JSON.stringify({SEEN})") == held
    page.eval("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'f', bubbles: true}))")
    page.until("!document.getElementById('caption').checkVisibility()")
    page.until(f"JSON.stringify({SEEN}) !== {held!r}", seconds=25)
    # Both at one moment, since the page shows new figures all the time.
    total, *numbers = page.eval(
        "['#total', '#parts dd:not(.dim)'].flatMap((which) => [...document.querySelectorAll(which)])"
        ".map((one) => parseFloat(one.textContent))"
    )
    assert len(numbers) == 5
    assert sum(numbers) == pytest.approx(total, rel=0.1, abs=5)  # one number, and it is the sum of its parts
    assert violations(page) == []


def test_the_share_of_dropped_frames_is_shown_with_its_causes(page: Tab) -> None:
    assert not page.eval("document.getElementById('dropped').checkVisibility()")
    press(page, "#use-clip")
    page.until("/^\\d+%/.test(document.getElementById('dropped').innerText)", seconds=40)
    press(page, "#stop")
    shown = page.eval("""import("./speed.js").then(({Figures}) => {
        const figures = new Figures();
        figures.drops({frames_in: 100, dropped: {full: 60}});
        figures.drops({frames_in: 190, dropped: {full: 80, lost: 10, "sink full": 7}});
        const {textContent, title} = document.getElementById("dropped");
        figures.clear();
        return [textContent, title];
    })""")
    assert shown == [
        "30%of the frames dropped",
        "10: lost between the source and Saccade (lost)\n20: the model was busy (full)",
    ]
    assert violations(page) == []


def drop(page: Tab, path: Path, kind: str) -> None:
    """Drop a file on the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    page.eval(f"""(() => {{
        const bytes = Uint8Array.from(atob({data!r}), (one) => one.charCodeAt(0));
        const files = new DataTransfer();
        files.items.add(new File([bytes], {path.name!r}, {{type: {kind!r}}}));
        document.body.dispatchEvent(new DragEvent("drop", {{bubbles: true, dataTransfer: files}}));
    }})()""")


def test_a_dropped_file_without_video_is_refused(page: Tab, make_clip: MakeClip) -> None:
    drop(page, make_clip("song.webm", video=False, audio="libopus"), "video/webm")
    page.until("document.getElementById('message').innerText.includes('only audio')")


def test_a_dropped_image_gets_its_boxes(page: Tab) -> None:
    drop(page, PHOTO, "image/jpeg")
    page.until(f"{SEEN}?.objects.length === 2", seconds=25)
    assert "2 × person" in words(page, "#found")
    look_for(page, "chair")
    page.until("document.getElementById('status').innerText === 'done'", seconds=25)
    assert page.eval("document.getElementById('message').hidden")


def test_an_unknown_name_is_no_flood(page: Tab) -> None:
    look_for(page, "zebra crossing")
    page.until("!document.getElementById('unknown').hidden")
    assert len(words(page, "#unknown")) < 120
    press(page, "#unknown .link")
    assert page.eval("document.querySelector('#all').open")
    look_for(page, "persn")
    page.until("document.getElementById('unknown').innerText.includes('Find person')")


@pytest.mark.parametrize(("width", "phone"), [(360, True), (1440, False), (3840, False)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_size_and_scheme_is_without_violations(page: Tab, width: int, phone: bool, scheme: str) -> None:
    page.shape(width, 800 if phone else width * 9 // 16, scheme, phone=phone)
    page.until("document.getElementById('intro').matches('.seen')")
    assert violations(page) == []
    assert page.eval("document.documentElement.scrollWidth <= innerWidth")  # nothing sticks out


def test_events_are_listed_searched_and_played(tmp_path: Path) -> None:
    path, port = tmp_path / "camera.yaml", free_port()
    rules = "[{name: visitor, when: person in door for 1s}]"
    stream = f"{{name: hall, source: '{DEMO_CLIP}', end: 3, zones: {{door: '0,0,1,0,1,1,0,1'}}, rules: {rules}}}"
    path.write_text(f"http: '{port}'\nstore: '{tmp_path / 'store'}'\ndetect: [person]\nstreams: [{stream}]\n")
    with opened_run(load(path, {})) as opened:
        (run,) = opened.controller.start()
        assert run.join(60)
        with tab(f"http://127.0.0.1:{port}/#/events", tmp_path / "profile") as page:
            page.until("document.querySelectorAll('#event-list li').length === 1")
            assert "visitor" in words(page, "#event-list")
            page.until("document.querySelector('#event-list img').naturalWidth > 0")
            assert violations(page) == []
            press(page, "#event-list button")
            page.until("document.getElementById('player-video')?.videoWidth === 640")
            page.until("document.getElementById('player-video').currentTime > 0")
            for pressed in ("true", "false"):  # a false alarm, and not
                page.until("document.getElementById('false-alarm').checkVisibility()")
                assert page.eval("document.querySelector('#false-alarm svg').getBoundingClientRect().width") == 18
                press(page, "#false-alarm")
                page.until(f"document.getElementById('false-alarm').getAttribute('aria-pressed') === '{pressed}'")
                assert bool(opened.controller.runner.store.verdicts("hall")) == (pressed == "true")
            press(page, "#close-player")
            page.eval("""document.getElementById('event-words').value = 'elephant';
                         document.getElementById('event-filters').requestSubmit()""")
            page.until("document.getElementById('no-events').checkVisibility()")
            assert page.console == []


def test_an_onvif_camera_is_turned_to_a_preset(tmp_path: Path) -> None:
    pytest.importorskip("onvif")
    need_servers()
    path, port = tmp_path / "camera.yaml", free_port()
    with Camera("--fps", "4") as camera:
        profiles = [MediaProfile("live", 1280, 720, ptz=True)]
        device = OnvifCamera(camera.url("live").rpartition("/")[0], profiles, presets={"1": "Gate", "a/b": "Car park"})
        with serving_camera(device) as onvif:
            source = f"onvif://bob:secret@127.0.0.1:{onvif}"
            path.write_text(f"http: '{port}'\ndetect: [person]\nstreams: [{{name: gate, source: '{source}'}}]\n")
            with opened_run(load(path, {})) as opened:
                opened.controller.start()
                with tab(f"http://127.0.0.1:{port}/#/stream/gate", tmp_path / "profile") as page:
                    page.until("document.getElementById('presets').checkVisibility()", seconds=25)
                    options = "[...document.querySelectorAll('#presets option')].map((one) => one.textContent)"
                    assert page.eval(options) == ["Turn to preset…", "Gate", "Car park"]
                    page.until("saccade.stage.shown", seconds=25)
                    assert violations(page) == []
                    page.eval("""const select = document.querySelector('#presets select');
                                 select.value = 'a/b';
                                 select.dispatchEvent(new Event('change'))""")
                    until(lambda: device.position == "a/b")
                    assert not [line for line in page.console if "ptz" in line]


def test_a_video_sink_has_the_same_wall(tmp_path: Path) -> None:
    sink, over = ViewerSink(port=0), threading.Event()
    feeder = threading.Thread(target=feed, args=(sink.write, over))
    feeder.start()
    try:
        with tab(sink.url, tmp_path) as page:
            page.until("document.querySelector('#tiles [data-stream=door] video')?.videoWidth > 0", seconds=25)
            press(page, "#tiles a")
            page.until("saccade.stage.shown")
            assert not page.eval("document.getElementById('find').checkVisibility()")  # it only shows
    finally:
        over.set()
        feeder.join()
        sink.close()


OUTLINE = {
    "label": "cat",
    "path": "M 0.000 0.000 C 0.500 -0.200 0.500 1.200 1.000 1.000 L 0.000 1.000 Z M .2 .6 L.2 .9 L.4 .9 L.4 .6 Z",
    "bbox": {"x_min": 0.2, "y_min": 0.3, "x_max": 0.8, "y_max": 0.9},
}


def test_an_outline_is_drawn_as_the_server_draws_it(page: Tab) -> None:
    color = "#{:02x}{:02x}{:02x}".format(*color_of("cat"))
    pixels = page.eval(f"""import(new URL("video/paint.js", document.baseURI)).then(({{paint}}) => {{
        const [frame, canvas] = [0, 1].map(() => new OffscreenCanvas(640, 360));
        frame.getContext("2d").fillStyle = "#404040";
        frame.getContext("2d").fillRect(0, 0, 640, 360);
        paint(canvas, frame, {{objects: [], points: [], segments: [{json.dumps(OUTLINE)}]}}, () => "{color}");
        return Array.from(canvas.getContext("2d").getImageData(0, 0, 640, 360).data);
    }})""")
    drawn = np.array(pixels, np.uint8).reshape(360, 640, 4)[..., :3].astype(int)
    box = tuple(OUTLINE["bbox"].values())  # type: ignore[attr-defined]
    found = Outline("cat", str(OUTLINE["path"]), box, True)
    served = draw(np.full((360, 640, 3), 64, np.uint8), Result.of([found], 640, 360, Timings())).astype(int)
    for one in (drawn, served):
        assert np.abs(one[216, 166] - (0.35 * np.array(color_of("cat")) + 0.65 * 64)).max() < 3  # inside
        assert np.abs(one[270, 240] - 64).max() < 3  # in the hole
        assert np.abs(one[100, 600] - 64).max() < 3
    assert (np.abs(drawn - served).max(axis=2) > 40).mean() < 0.02  # lines and labels are smoothed otherwise


def test_a_watched_stream_shows_outlines(tmp_path: Path) -> None:
    folder = write_enclosing_model(tmp_path / "tiny")
    with Engine.load(str(folder), "cpu") as engine, Demo(engine, Prompts(segment=["200"]), port=0) as opened:
        opened.controller.add(
            StreamConfig(source=str(DEMO_CLIP), name="hall", segment=["200"], vid_stride=10, loop=True)
        )
        until(lambda: "hall" in opened.videos.streams)
        with tab(opened.url, tmp_path / "profile") as page:
            page.until("!!window.saccade")
            page.shape(1440, 900)
            page.until("!!document.querySelector('#tiles [data-stream=hall] a')")
            press(page, "#tiles [data-stream=hall] a")
            page.until(f"{SEEN}?.segments?.length > 0", seconds=60)
            (outline,) = page.eval(f"{SEEN}.segments")
            assert (outline["label"], outline["refined"]) == ("200", False)
            page.until("document.getElementById('found').innerText.replace(/\\s+/g, ' ').trim() === '200 outline'")
            assert page.console == []
