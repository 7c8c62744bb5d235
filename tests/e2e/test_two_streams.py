"""A camera with a small stream to analyse and a large one to record: what is kept is large, and of the same moments."""

from __future__ import annotations

import itertools
import threading
import time
import urllib.request
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config.file import load
from saccade.pipeline.run import opened_run
from saccade.sinks.recording import Archive, RecordingPlace
from saccade.sources import open_source
from tests.support import cameras
from tests.support.cameras import Camera, free_port
from tests.support.cameras.onvif_device import MediaProfile, OnvifCamera, serving_camera
from tests.support.cameras.rtsp import burnt_in_number

pytestmark = pytest.mark.e2e

LONG_S = 240  # far beyond what any of these needs; only so that a hang fails
RATE = 5
COUNT = 50  # images, which are played for ever
SMALL, LARGE = (480, 270), (960, 540)
BEFORE_S = 2  # what a clip shows before its event
KINDS = ("clip", "snapshot")
RULE = {"zones": "table=.4,.5,.75,.5,.75,1,.4,1", "rules": ["visitor=person in table"]}


def raw_clip(folder: Path, name: str, size: tuple[int, int]) -> str:
    """The demo clip in a size, with the number of each image burnt in; nobody is there for 4 s, then one comes."""
    path, due, number = folder / f"{name}.yuv", Fraction(4), 0
    with av.open(str(DEMO_CLIP)) as container, path.open("wb") as file:
        for frame in container.decode(video=0):
            if frame.time is None or frame.time < due or number == COUNT:
                continue
            due += Fraction(1, RATE)
            image = cv2.resize(frame.to_ndarray(format="rgb24"), size, interpolation=cv2.INTER_AREA)
            image[20:40] = np.repeat([number >> bit & 1 for bit in range(32)], size[0] // 32)[:, None] * 255
            file.write(cv2.cvtColor(image, cv2.COLOR_RGB2YUV_I420).tobytes())
            number += 1
    return f"{name}={path},{size[0]},{size[1]}"


@pytest.fixture(scope="module")
def camera(tmp_path_factory: pytest.TempPathFactory) -> Any:
    cameras.need_servers()
    folder = tmp_path_factory.mktemp("camera")
    raws = [raw_clip(folder, "small", SMALL), raw_clip(folder, "large", LARGE)]
    with Camera("--fps", RATE, "--gop", RATE, "--raw", raws[0], "--raw", raws[1]) as one:
        yield one


Event = dict[str, Any]


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=LONG_S) as answer:
        return bytes(answer.read())


def until(what: object) -> None:
    deadline = time.monotonic() + LONG_S
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Truth(threading.Thread):
    """When the camera took which image, read from its small stream."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.seen: list[tuple[float, int]] = []
        self.source = open_source(url)
        self.start()

    def run(self) -> None:
        for frame in self.source:
            if frame.capture_clock == "rtcp":
                self.seen.append((frame.captured_at, burnt_in_number(frame.image)))

    def number_at(self, time: float) -> int:
        """The newest image at a time."""
        return max((at, number) for at, number in self.seen if at <= time + 0.005)[1]


def run_until_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accept: Callable[[Event], bool] = lambda event: True, **values: Any
) -> Event:
    """Run until an accepted event has ended and its files are there; its record, with `clip` and `snapshot` fetched."""
    monkeypatch.chdir(tmp_path)
    common = {"name": "room", "clip_before": BEFORE_S, "clip_after": 1, "store": "kept", "http": "127.0.0.1:0"}
    ended: list[Event] = []
    done: set[tuple[str, str]] = set()

    def hear(event: Any) -> None:
        if event["type"] == "end" and event["capture_clock"] == "rtcp":
            ended.append(dict(event))
        if event["type"] == "media":
            done.add((event["event"], event["kind"]))

    with opened_run(load(None, {**RULE, **common, **values})) as opened:
        opened.controller.local.events.hub.add(hear)
        opened.controller.start()

        def whole(one: Event) -> bool:
            return {(one["id"], kind) for kind in KINDS if one[kind]} <= done and accept(one)

        until(lambda: any(map(whole, ended)))
        event = next(filter(whole, ended))
        assert opened.url is not None
        return {**event, **{kind: event[kind] and fetch(f"{opened.url}{event[kind]}") for kind in KINDS}}


def between(number: int, later: int) -> int:
    """By how many images the second is later than the first."""
    return (later - number + COUNT // 2) % COUNT - COUNT // 2


def numbers_of(path: Path) -> list[int]:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height) == LARGE
        return [burnt_in_number(frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]


def test_what_is_kept_is_large_and_of_the_moments_that_were_analysed(
    camera: Camera, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = Archive(RecordingPlace.parse(str(tmp_path / "video"), "room"))

    def recorded_before(event: Event) -> bool:
        """Whether the large stream ran long enough: it may connect when somebody is already there."""
        return any(one.began < event["since"] - BEFORE_S for one in archive.files(0.0, 1e12))

    large = {"record_source": camera.url("large"), "record": "video"}
    truth = Truth(camera.url("small"))
    until(lambda: len(truth.seen) > 2 * RATE + 2)  # it reaches back to the clip's beginning
    try:
        event = run_until_end(tmp_path, monkeypatch, recorded_before, source=camera.url("small"), **large)
    finally:
        truth.source.close()
        truth.join(LONG_S)
    assert (event["width"], event["height"]) == SMALL
    (tmp_path / "clip.mp4").write_bytes(event["clip"])
    numbers = numbers_of(tmp_path / "clip.mp4")
    first, last = (truth.number_at(event[key] + by) for key, by in (("since", -BEFORE_S), ("end_time", 1)))
    assert abs(between(last, numbers[-1])) <= 1
    assert -RATE - 1 <= between(first, numbers[0]) <= 1  # the key frame before it
    assert {between(*pair) for pair in itertools.pairwise(numbers)} == {1}
    image = cv2.imdecode(np.frombuffer(event["snapshot"], np.uint8), cv2.IMREAD_COLOR)
    assert image.shape[1::-1] == LARGE
    assert burnt_in_number(image) in numbers
    recorded = [number for one in archive.files(0.0, 1e12) for number in numbers_of(one.path)]
    assert set(numbers) <= set(recorded)


def test_an_onvif_camera_is_analysed_small_and_recorded_large(
    camera: Camera, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("onvif")
    caplog.set_level("INFO", "saccade")
    profiles = [MediaProfile("large", 3840, 2160, "H265"), MediaProfile("small", 1280, 720)]  # the sizes that it states
    device = OnvifCamera(camera.url("small").rpartition("/")[0], profiles, media2=True)
    with serving_camera(device) as port:
        source = f"onvif://bob:secret@127.0.0.1:{port}"
        event = run_until_end(tmp_path, monkeypatch, source=source, record="video")
    assert (event["width"], event["height"]) == SMALL
    image = cv2.imdecode(np.frombuffer(event["snapshot"], np.uint8), cv2.IMREAD_COLOR)
    assert image.shape[1::-1] == LARGE
    (tmp_path / "clip.mp4").write_bytes(event["clip"])
    numbers = numbers_of(tmp_path / "clip.mp4")
    assert burnt_in_number(image) in numbers
    files = Archive(RecordingPlace.parse(str(tmp_path / "video"), "room")).files(0.0, 1e12)
    assert set(numbers) <= {number for one in files for number in numbers_of(one.path)}
    assert {one for one in caplog.messages if "ONVIF profile" in one} == {
        "stream room: uses ONVIF profile 'small' (H264 1280x720) for analysis",
        "stream room (record source): uses ONVIF profile 'large' (H265 3840x2160) for recordings",
    }
    assert "secret" not in caplog.text


def test_a_lost_record_source_stops_no_detection(
    camera: Camera, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = f"rtsp://127.0.0.1:{free_port()}/large"
    event = run_until_end(tmp_path, monkeypatch, source=camera.url("small"), record_source=nowhere)
    image = cv2.imdecode(np.frombuffer(event["snapshot"], np.uint8), cv2.IMREAD_COLOR)
    assert image.shape[1::-1] == SMALL
    assert event["clip"] is None
