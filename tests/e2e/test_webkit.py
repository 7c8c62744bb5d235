"""The console of a real run in WebKit, the engine of Safari. Debian's WebKit has no WebRTC: the video is live MP4."""

from __future__ import annotations

import io
import json
import urllib.request
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.sinks import color_of
from tests.support.cameras import free_port, wait_for
from tests.support.command import start_saccade
from tests.support.webkit import LONG_S, needs_webkit, webkit

pytestmark = [pytest.mark.e2e, needs_webkit]

VIDEO = "document.getElementById('theirs')"
DISCARD = """(() => {
    const append = SourceBuffer.prototype.appendBuffer;
    let discarding = null;
    SourceBuffer.prototype.appendBuffer = function (bytes) {
        discarding ??= this;
        if (discarding !== this) append.call(this, bytes);
        else setTimeout(() => this.dispatchEvent(new Event("updateend")));
    };
})()"""


def test_the_console_shows_live_video_with_boxes_in_webkit(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    options = (
        "--name",
        "hall",
        "--loop",
        "--vid-stride",
        3,
        "--detect",
        "person",
        "--http",
        url.removeprefix("http://"),
    )
    with start_saccade("run", DEMO_CLIP, *options, cwd=tmp_path) as run:
        try:
            with webkit(tmp_path) as page:
                wait_for(lambda: is_running(url), LONG_S)
                page.go(f"{url}/#/stream/hall")
                assert page.eval("typeof RTCPeerConnection") == "undefined"
                page.until(f"{VIDEO}.currentTime > 1")
                assert page.eval(f"{VIDEO}.videoWidth") == 640
                page.until("window.saccade?.stage.shown?.record?.objects.length")
                shown = np.asarray(Image.open(io.BytesIO(page.shoot())).convert("RGB")).astype(int)
                # WebKitGTK discards frames until a keyframe, if a frame comes later than it expects.
                connection = page.eval(f"{VIDEO}.src")
                page.eval(DISCARD)
                page.until(f"{VIDEO}.src !== '{connection}' && {VIDEO}.currentTime > 0.5")
                assert page.faults == []
        finally:
            run.terminate()
            run.communicate()
    image = shown[60:430, 20:680]
    assert image.std() > 20
    assert (np.abs(image - color_of("person")).max(axis=2) < 8).sum() > 300  # the box and its label


def is_running(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/streams", timeout=5) as answer:
        return [one["state"] for one in json.load(answer)["streams"]] == ["running"]
    return False
