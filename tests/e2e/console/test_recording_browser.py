"""The recording of a camera in the console: Chromium plays it over files and gaps, and goes where one presses."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from saccade.engine import Engine
from saccade.pipeline import Streams
from saccade.pipeline.api.http_server import serve
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import StreamConfig
from tests.support.browser import needs_chromium, tab
from tests.support.cameras.faulty import FaultyCamera, coded_clip
from tests.support.control import controller_of

pytestmark = [pytest.mark.e2e, needs_chromium]

LONG_S = 90  # far beyond what any of these needs; only so that a hang fails
VIDEO = "document.getElementById('recording-video')"


def test_a_day_is_looked_through(tmp_path: Path) -> None:
    camera = FaultyCamera(coded_clip(DEMO_CLIP, (640, 360), rate=10, seconds=6), rate=10)
    with Engine.load("nano", device="cpu") as engine, Streams(engine) as streams:
        controller = controller_of(streams)
        source = f"rtsp://127.0.0.1:{camera.port}/live"
        controller.add(StreamConfig(name="door", source=source, record=f"{tmp_path}/video?segment=5"))
        server = serve(controller, port=0)
        try:
            time.sleep(8)
            camera.suffer("freeze", 6)
            with tab(f"{server.url}/", tmp_path / "profile") as page:
                page.shape(1280, 900)
                page.until("!document.querySelector('[data-view=recording]').hidden", LONG_S)
                page.eval("document.querySelector('[data-view=recording]').click()")
                page.until("document.querySelectorAll('#recording-strip i').length == 2", LONG_S)
                titles = page.eval("[...document.querySelectorAll('#recording-strip i')].map((one) => one.title)")
                assert "the recording began" in titles[0]
                assert "before: " in titles[1]
                begin = page.eval(
                    "fetch('streams/door/recording/spans').then((one) => one.json()).then((one) => one.spans[0].begin)"
                )
                page.eval(f"location.hash = '#/recording/door/{begin + 1:.2f}'")
                page.until(f"{VIDEO}.currentTime > 0 && !{VIDEO}.seeking", LONG_S)
                # Over the end of the first files, and over the gap.
                page.until(f"{VIDEO}.currentTime > 9", LONG_S)
                page.until(f"{VIDEO}.videoWidth === 640", LONG_S)
                assert page.eval(f"{VIDEO}.error") is None
                shown = page.eval("document.getElementById('recording-time').textContent")
                assert shown
                page.shoot(tmp_path / "recording.png")
                page.eval("document.getElementById('recording-strip').focus()")
                pressed = "new KeyboardEvent('keydown', {key: 'ArrowLeft', bubbles: true})"
                page.eval(f"document.activeElement.dispatchEvent({pressed})")
                page.until(f"document.getElementById('recording-time').textContent != {shown!r}", LONG_S)
                for number in range(20):  # to leave the recording stops what is being loaded
                    page.eval(f"location.hash = '#/recording/door/{begin + 1 + number % 3:.2f}'")
                    time.sleep(0.01 * number)
                    page.eval("location.hash = '#/stream/door'")
                page.eval(f"location.hash = '#/recording/door/{begin + 1:.2f}'")
                page.until(f"{VIDEO}.currentTime > 0.2 && !{VIDEO}.paused", LONG_S)
                # "Live" is the user's stream, never the sample clip.
                page.eval("document.querySelector('[data-view=live]').click()")
                page.until("location.hash === '#/stream/door'", LONG_S)
                page.until("document.getElementById('live').checkVisibility()", LONG_S)
                assert not page.eval("document.getElementById('intro').matches('.seen')")
                problems = [line for line in page.console if "/whep/" not in line]  # of the wall, which was left
                assert problems == []
        finally:
            server.close()
            camera.close()
