"""The wall clock of a running saccade is set forwards, backwards and again: each event keeps its clip."""

from __future__ import annotations

import shutil
import struct
import subprocess
import time
from pathlib import Path

import av
import pytest

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.events.storage.store_reader import EventQuery, EventReader
from tests.support import REPO
from tests.support.cameras.faulty import FaultyCamera, coded_clip
from tests.support.command import environment, start_saccade

pytestmark = pytest.mark.e2e

LONG_S = 90  # far beyond what any of these needs; only so that a hang fails
RATE = 5
STEPS_S = (-3600, 3600, 0, -3600)


def seconds_of(clip: Path) -> float:
    with av.open(str(clip)) as container:
        stream = container.streams.video[0]
        return float((stream.duration or 0) * stream.time_base)


def test_a_clock_that_is_set_loses_no_clip(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("stepping the clock of one process takes gcc")
    library, step = tmp_path / "step.so", tmp_path / "step"
    source = REPO / "tests" / "support" / "clock_step.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    step.write_bytes(struct.pack("<q", 0))
    frames = coded_clip(DEMO_CLIP, (640, 360), rate=RATE, seconds=11)[5 * RATE :]  # nobody until 8 s, then one comes
    camera = FaultyCamera(frames, rate=RATE, clock=True)
    clips = ["--clip-before", "1", "--clip-after", "1", "--store", "kept", "--store-keep", "30m", "-q"]
    url = f"rtsp://127.0.0.1:{camera.port}/live"
    env = {**environment(), "LD_PRELOAD": str(library), "CLOCK_STEP": str(step)}
    process = start_saccade(
        "run", url, "--name", "room", "--rule", "visitor=person for 0.4s", *clips, cwd=tmp_path, env=env
    )
    media = tmp_path / "kept" / "media"

    def until_more(suffix: str, than: int) -> None:
        deadline = time.monotonic() + LONG_S
        while len(list(media.glob(f"*{suffix}"))) <= than:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)

    try:
        for number, step_s in enumerate(STEPS_S):
            until_more(".jpg", len(list(media.glob("*.jpg"))))  # an event goes on
            with step.open("r+b") as file:
                file.write(struct.pack("<q", step_s * 10**9))
            until_more(".mp4", number)
        until_more(".mp4", len(list(media.glob("*.mp4"))) + 1)
        process.terminate()
        assert process.wait(LONG_S) in (0, 130)
    finally:
        process.kill()
        process.communicate()
        camera.close()
    reader = EventReader.open(tmp_path / "kept")
    events = reader.search(EventQuery())
    reader.close()
    assert len(events) > len(STEPS_S)
    for event in events[1:]:  # the last one had just begun, perhaps
        clip = media / f"{event['id']}.mp4"
        lasted = event["end_time"] - event["start_time"]
        assert 0 <= lasted < 60, event
        assert lasted + 1.5 < seconds_of(clip) < lasted + 6, event
