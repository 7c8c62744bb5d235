"""A running saccade records cameras as they send, with sound; it is killed, its clock is set, cameras fail."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

import av
import numpy as np
import pytest
import yaml

from benchmarks.ingest import burnt_in_age_ms
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.sinks.recording import Archive, RecordingPlace
from saccade.sinks.recording.archive import RecordedFile
from tests.support import REPO, cameras
from tests.support.browser import needs_chromium, tab
from tests.support.cameras import Camera
from tests.support.cameras.faulty import FAULTS, FaultyCamera, coded_clip
from tests.support.cameras.rtsp import burnt_in_number
from tests.support.command import environment, start_saccade

pytestmark = pytest.mark.e2e

LONG_S = 180  # far beyond what any of these needs; only so that a hang fails
ALWAYS = (0.0, 1e12)
SOUNDS = {"aac": "aac", "opus": "opus", "pcma": "aac", "hevc-pcmu": "aac"}
SOAK_S = float(os.environ.get("SACCADE_SOAK_S", "40"))


def files_of(folder: Path, stream: str) -> list[RecordedFile]:
    return Archive(RecordingPlace.parse(str(folder), stream)).files(*ALWAYS)


def until(what: object, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LONG_S
    while not what():  # type: ignore[operator]
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what was recorded of four cameras by a process that was killed."""
    cameras.need_servers()
    folder = tmp_path_factory.mktemp("recorded")
    with Camera("--fps", 15, "--gop", 15) as camera:
        streams = [{"name": name, "source": camera.url(name)} for name in SOUNDS]
        config = {"streams": streams, "record": f"{folder}/video?segment=3"}
        (folder / "saccade.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        process = start_saccade("run", "--config", "saccade.yaml", "-q", cwd=folder)
        try:
            until(lambda: all(len(files_of(folder / "video", name)) >= 4 for name in SOUNDS), process)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    return folder / "video"


@pytest.mark.parametrize("name", SOUNDS)
def test_every_frame_of_a_camera_is_recorded_at_its_time(recorded: Path, name: str) -> None:
    numbers, files = [], files_of(recorded, name)
    assert [one.after for one in files] == ["the recording began", *[None] * (len(files) - 1)]
    for one in files:
        with av.open(str(one.path)) as container:
            for frame in container.decode(video=0):
                image = frame.to_ndarray(format="rgb24")
                numbers.append(burnt_in_number(image))
                age_ms = burnt_in_age_ms(image, one.began + (frame.time or 0.0))
                assert age_ms is not None
                assert -200 < age_ms < 3000  # the machine has other things to do
    assert len(numbers) > 120
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    gaps = [after.began - before.ended for before, after in itertools.pairwise(files)]
    assert gaps == pytest.approx([0] * len(gaps), abs=1.5)


@pytest.mark.parametrize(("name", "codec"), SOUNDS.items())
def test_the_sound_of_a_camera_is_recorded(recorded: Path, tmp_path: Path, name: str, codec: str) -> None:
    archive = Archive(RecordingPlace.parse(str(recorded), name))
    files = archive.files(*ALWAYS)[1:]
    assert all(one.codecs.endswith("opus" if codec == "opus" else "mp4a.40.2") for one in files)
    archive.write(files[0].began, files[-1].ended, tmp_path / "all.mp4")
    with av.open(str(tmp_path / "all.mp4")) as whole:
        assert whole.streams.audio[0].codec_context.name == codec
        frames = list(whole.decode(audio=0))
        rate = frames[0].sample_rate
        loud = [
            (frame.time or 0.0) + at / rate
            for frame in frames
            for at in np.flatnonzero(np.abs(frame.to_ndarray()[0]) > 0.2).tolist()
        ]
    ticks = [at for before, at in itertools.pairwise([-1.0, *loud]) if at - before > 0.5]
    assert len(ticks) >= 5
    assert np.diff(ticks) == pytest.approx(1.0, abs=0.15)  # one each second, without a break between files


@needs_chromium
@pytest.mark.parametrize("name", ["aac", "opus", "pcma"])
def test_chromium_plays_what_was_recorded_even_the_file_that_was_cut_off(
    recorded: Path, tmp_path: Path, name: str
) -> None:
    page = tmp_path / "page.html"
    page.write_text("<!doctype html><video muted></video>", encoding="utf-8")
    files = files_of(recorded, name)
    with tab(page.as_uri(), tmp_path / "profile", "--allow-file-access-from-files") as browser:
        for one in (files[1], files[-1]):
            kind = json.dumps(f'video/mp4; codecs="{one.codecs}"')
            assert browser.eval(f"MediaSource.isTypeSupported({kind})"), kind
            browser.eval(
                f"window.v = document.querySelector('video'); v.src = {json.dumps(one.path.as_uri())}; v.play()"
            )
            length = one.ended - one.began
            browser.until(f"v.ended || v.currentTime > {length - 0.3}", 60)
            assert browser.eval("v.videoWidth") == 640
            assert browser.eval("v.webkitAudioDecodedByteCount") > 0
            assert browser.eval("v.getVideoPlaybackQuality().totalVideoFrames") > 0


def numbered_frames(rate: int) -> list[list[bytes]]:
    return coded_clip(DEMO_CLIP, (640, 360), rate=rate, seconds=10)


def has_begun(folder: Path, number: int) -> bool:
    """Whether there are as many files, and the last has some seconds."""
    files = files_of(folder, "door")
    return len(files) == number and len(files[-1].fragments) > 2


def test_a_clock_that_is_set_deletes_and_mixes_up_nothing(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("stepping the clock of one process takes gcc")
    library, step = tmp_path / "step.so", tmp_path / "step"
    source = REPO / "tests" / "support" / "clock_step.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    step.write_bytes(struct.pack("<q", 0))
    camera = FaultyCamera(numbered_frames(10), rate=10)
    url, folder = f"rtsp://127.0.0.1:{camera.port}/live", tmp_path / "video"
    env = {**environment(), "LD_PRELOAD": str(library), "CLOCK_STEP": str(step)}
    process = start_saccade(
        "run", url, "--name", "door", "--record", f"{folder}?keep=30m&segment=1h", "-q", cwd=tmp_path, env=env
    )
    steps_s = (0, -7200, 7200, 86400)
    try:
        for number, step_s in enumerate(steps_s):
            with step.open("r+b") as file:
                file.write(struct.pack("<q", step_s * 10**9))
            until(partial(has_begun, folder, number + 1), process)
        process.terminate()
        assert process.wait(LONG_S) in (0, 130)
    finally:
        process.kill()
        process.communicate()
        camera.close()
    files = files_of(folder, "door")
    assert [one.number for one in files] == [1, 2, 3, 4], "in the order in which they were written; none is deleted"
    truly = [one.began - step_s for one, step_s in zip(files, steps_s, strict=True)]
    lengths = [one.ended - one.began for one in files]
    assert np.diff(truly) == pytest.approx(lengths[:-1], abs=1.0), "nothing is missing in between"


def test_every_second_is_recorded_or_its_gap_explained(tmp_path: Path) -> None:
    """Faults as in the half-hour soak; SACCADE_SOAK_S makes it longer."""
    frames = numbered_frames(10)
    resized = coded_clip(DEMO_CLIP, (320, 240), rate=10, seconds=10)
    folder, names = tmp_path / "video", ("door", "gate")
    played = [FaultyCamera(frames, rate=10, resized=resized, clock=True) for _ in names]
    urls = [f"rtsp://127.0.0.1:{camera.port}/live" for camera in played]
    streams = [{"name": name, "source": url} for name, url in zip(names, urls, strict=True)]
    config = {"streams": streams, "record": f"{folder}?segment=5&max_gb=0.05&keep=1h"}
    (tmp_path / "saccade.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    process = start_saccade("run", "--config", "saccade.yaml", "-q", cwd=tmp_path)
    suffered: dict[str, list[tuple[float, float, str]]] = {name: [] for name in names}
    chance = random.Random(36)

    def trouble(name: str, camera: FaultyCamera) -> None:
        until_s = time.monotonic() + SOAK_S
        while time.monotonic() < until_s:
            time.sleep(chance.uniform(3, 6))
            fault, begin = chance.choice([*FAULTS, "resize"]), time.time()
            camera.suffer(fault, chance.uniform(0.5, 4))
            suffered[name].append((begin, time.time(), fault))

    try:
        until(lambda: all(files_of(folder, name) for name in names), process)
        threads = [threading.Thread(target=trouble, args=one) for one in zip(names, played, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(8)
        process.terminate()
        assert process.wait(LONG_S) in (0, 130)
    finally:
        process.kill()
        process.communicate()
        for camera in played:
            camera.close()
    for name in names:
        spans = Archive(RecordingPlace.parse(str(folder), name)).spans(*ALWAYS)
        assert spans[-1].end > suffered[name][-1][1], "it goes on after the last fault"
        for before, after in itertools.pairwise(spans):
            # A gap is at a fault, or a connection later: with the longest back-off of a camera that comes back.
            near = [fault for begin, end, fault in suffered[name] if begin < after.begin and end > before.end - 15]
            assert near, (name, before, after, suffered[name])
            assert after.after or after.begin - before.end < 3.5, (before, after, near)
        for one in files_of(folder, name):
            with av.open(str(one.path)) as container:
                assert sum(1 for _ in container.decode(video=0)) > 0
