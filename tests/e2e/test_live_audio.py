"""A running saccade writes annotated MP4s of live sources, whose sound stays with the picture."""

from __future__ import annotations

import signal
import statistics
import time
from pathlib import Path

import av
import pytest

from tests.support import cameras
from tests.support.cameras import Camera
from tests.support.cameras.rtsp import burnt_in_number
from tests.support.clips import clicks_of, render_clicks
from tests.support.command import start_saccade

pytestmark = pytest.mark.e2e

LONG_S = 300  # far beyond what any of these needs; only so that a hang fails
RATE = 5
CODERS = {"aac": "aac", "opus": "libopus", "pcma": "pcm_s16le"}


@pytest.mark.parametrize(
    ("name", "out"), [("aac", "out.mp4"), ("opus", "out-%H%M%S.mp4?segment=6"), ("pcma", "out.mp4")]
)
def test_an_annotated_video_of_a_camera_keeps_its_sound(tmp_path: Path, name: str, out: str) -> None:
    cameras.need_servers()
    render_clicks(tmp_path / "clip.mkv", CODERS[name], rate=RATE)
    with Camera("--clip", f"{name}={tmp_path / 'clip.mkv'}") as camera:
        process = start_saccade("run", camera.url(f"clip-{name}"), "--detect", "person", "--out", out, cwd=tmp_path)
        deadline = time.monotonic() + LONG_S
        while True:
            written = sorted(tmp_path.glob("out*.mp4"))
            if written and sum(length_s(one) for one in written) > 12:
                break
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, errors
    files = sorted(tmp_path.glob("out*.mp4"))
    assert len(files) > (out != "out.mp4")
    for path in files:
        if length_s(path) < 4:
            continue
        with av.open(str(path)) as container:
            assert container.streams.audio[0].codec_context.name == "aac"
            late = [
                (frame.time or 0.0) - burnt_in_number(frame.to_ndarray(format="rgb24")) / RATE
                for frame in container.decode(video=0)
            ]
        video_late = statistics.median(late)
        clicks = clicks_of(path)
        offsets = [at - video_late - round(at - video_late) for at in clicks]
        print(f"{name}: sound is late by {[round(offset * 1e3) for offset in offsets]} ms")
        assert len(clicks) >= length_s(path) - 2
        assert max(map(abs, offsets)) <= 0.04


def length_s(path: Path) -> float:
    try:
        with av.open(str(path)) as container:
            return (container.duration or 0) / 1e6
    except (av.error.FFmpegError, OSError):
        return 0.0
