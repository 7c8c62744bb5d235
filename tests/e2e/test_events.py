"""The demo clip as an RTSP camera: a person comes, an event begins, its clip plays in a browser and shows them come."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import av
import pytest

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config.file import load
from saccade.pipeline.run import opened_run
from tests.support.browser import needs_chromium, tab
from tests.support.cameras.faulty import FaultyCamera, coded_clip

pytestmark = pytest.mark.e2e

LONG_S = 90  # far beyond what any of these needs; only so that a hang fails
RATE = 5


def fetch(url: str, method: str = "GET") -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=LONG_S) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@needs_chromium
def test_an_event_of_a_camera_has_a_clip_that_plays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frames = coded_clip(DEMO_CLIP, (640, 360), rate=RATE, seconds=12)[5 * RATE :]  # nobody until 8 s, then one comes
    camera = FaultyCamera(frames, rate=RATE)
    config = load(
        None,
        {
            "source": f"rtsp://127.0.0.1:{camera.port}/live",
            "name": "room",
            "zones": "table=.4,.5,.75,.5,.75,1,.4,1",
            "rules": ["visitor=person in table"],
            "clip_before": 2,
            "clip_after": 1,
            "store": "kept",
            "http": "127.0.0.1:0",
        },
    )
    ended: list[dict[str, Any]] = []
    try:
        with opened_run(config) as opened:
            assert opened.server is not None
            opened.controller.local.events.hub.add(
                lambda event: ended.append(dict(event)) if event["type"] == "end" else None
            )
            opened.controller.start()
            deadline = time.monotonic() + LONG_S
            while not ended or fetch(f"{opened.url}{ended[0]['clip']}")[0] != 200:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            event = ended[0]
            url = f"{opened.url}{event['clip']}"
            page = tmp_path / "page.html"
            page.write_text(f"<video src='{url}' autoplay muted></video>")
            with tab(page.as_uri(), tmp_path / "profile") as browser:
                browser.until("document.querySelector('video')?.currentTime > 0.5")
                duration = browser.eval("document.querySelector('video').duration")
                assert browser.eval("document.querySelector('video').videoWidth") == 640
            (tmp_path / "clip.mp4").write_bytes(fetch(url)[1])
            with av.open(str(tmp_path / "clip.mp4")) as container:
                images = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
            found = [
                len(opened.controller.streams.engine.detect(image, "person").boxes)
                for image in (images[0], images[len(images) // 2])
            ]
            assert found == [0, 1]
            assert duration == pytest.approx(event["end_time"] - event["since"] + 3, abs=1.5)
            assert fetch(f"{opened.url}{event['snapshot']}")[1][:2] == b"\xff\xd8"
            listed = json.loads(fetch(f"{opened.url}/events?rule=visitor&zone=table")[1])["events"]
            assert event["id"] in [one["id"] for one in listed]
            assert fetch(f"{opened.url}/events/{event['id']}", "DELETE")[0] == 204
            assert fetch(url)[0] == 404
    finally:
        camera.close()
    assert not list((tmp_path / "kept" / "media").glob(f"{event['id']}*"))
