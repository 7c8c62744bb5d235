"""`saccade probe` and the bench `ingest` on what needs no camera: a file, the burnt-in clock, wrong words."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ingest import burnt_in_age_ms, time_ingest
from saccade.pipeline.cli.commands.probe import examine
from saccade.pipeline.errors import ConfigError
from saccade.sinks import SinkError
from saccade.sources import SourceError
from tests.support.clips import MakeClip


def test_a_file_is_probed_by_its_first_frames(make_clip: MakeClip) -> None:
    path = make_clip(frames=30, rate=25)
    seen = examine(str(path), seconds=1, hwaccel="auto", transport="tcp", out=str(path.with_suffix(".jpg")))
    assert (seen.codec, seen.width, seen.height, seen.frames, seen.live) == ("h264", 160, 120, 30, False)
    assert seen.fps == pytest.approx(25)
    assert path.with_suffix(".jpg").stat().st_size > 0
    assert json.loads(seen.as_json())["age_ms"] is None
    assert seen.as_text().startswith(f"{path}: h264 160x120, 25.00 fps\n→ ")


@pytest.mark.parametrize(("hwaccel", "transport"), [("gpu", "tcp"), ("auto", "carrier pigeon")])
def test_invalid_choices_are_named(hwaccel: str, transport: str) -> None:
    with pytest.raises(ConfigError, match=r"--(hwaccel|rtsp-transport): should be"):
        examine("x.mp4", seconds=1, hwaccel=hwaccel, transport=transport, out=None)


def test_the_bench_refuses_an_unknown_transport() -> None:
    with pytest.raises(
        ConfigError, match="--rtsp-transport: should be auto or tcp or udp or multicast or http, got 'x'"
    ):
        time_ingest("rtsp://127.0.0.1/live", seconds=1, transport="x")


def test_an_image_that_cannot_be_written_is_an_error(make_clip: MakeClip) -> None:
    path = make_clip(frames=2)
    with pytest.raises(SinkError, match="cannot write"):
        examine(str(path), seconds=1, hwaccel="auto", transport="tcp", out=str(path.with_suffix(".nothing")))


def test_a_file_has_no_age(make_clip: MakeClip) -> None:
    with pytest.raises(SourceError, match="is not a live source"):
        time_ingest(str(make_clip(frames=2)), seconds=1, transport="tcp")


@given(st.integers(-20_000, 20_000))
def test_the_burnt_in_clock_is_read(age_ms: int) -> None:
    now = 1_795_262_111.0
    clock_ms = (int(now * 1000) - age_ms) % (1 << 32)
    image = np.zeros((60, 640, 3), np.uint8)
    for bit in range(32):
        image[:20, 20 * bit : 20 * bit + 20] = 235 if clock_ms >> bit & 1 else 16
    assert burnt_in_age_ms(image, now) == age_ms


def test_a_frame_without_a_clock_has_no_age() -> None:
    assert burnt_in_age_ms(np.full((60, 640, 3), 90, np.uint8), 1_795_262_111.0) is None
    assert burnt_in_age_ms(np.zeros((5, 5, 3), np.uint8), time.time()) is None
