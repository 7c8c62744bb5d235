"""A file as a stream: as fast as it goes, at its own pace, and over and over."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from saccade.engine import Engine
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import ListedStream
from saccade.pipeline.config.text import text_of_stream
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.runtime.stream import open_source_of, open_stream
from saccade.sources import LiveSource

RATE, FRAMES = 10, 5  # of the clip's first half second


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load("nano", device="cpu") as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("how", "live", "rounds"),
    [
        ({}, False, 1),
        ({"realtime": True}, True, 1),
        ({"loop": True}, True, 3),
        ({"loop": True, "realtime": True}, True, 3),
    ],
)
def test_a_file_plays_as_it_is_configured(how: dict[str, bool], live: bool, rounds: int) -> None:
    config = ListedStream.model_validate({"source": str(DEMO_CLIP), "detect": "person", "end": 0.5, **how})
    with open_source_of(config) as source:
        assert (source.info.live, source.info.frames is None) == (live, live)
        begun = time.monotonic()
        frames = list(itertools.islice(source, FRAMES * rounds))
        took_s = time.monotonic() - begun
    assert len(frames) == FRAMES * rounds
    assert [frame.index for frame in frames] == list(range(FRAMES * rounds))
    times = [float(frame.pts * frame.time_base) for frame in frames]
    assert times == pytest.approx([times[0] + number / RATE for number in range(len(times))], abs=0.01)
    assert took_s >= (len(frames) - 1) / RATE - 0.05 or not live


def test_a_file_that_plays_once_ends() -> None:
    config = ListedStream.model_validate({"source": str(DEMO_CLIP), "detect": "person", "end": 0.3, "realtime": True})
    with open_source_of(config) as source:
        assert len(list(source)) == 3


def test_a_live_source_is_as_it_is() -> None:
    config = ListedStream.model_validate({"source": "rtsp://127.0.0.1:1/x", "detect": "person", "loop": True})
    with open_source_of(config) as source, open_source_of(config.model_copy(update={"loop": False})) as other:
        assert type(source) is type(other)


@pytest.mark.parametrize("other", [str(DEMO_CLIP), "webrtc:0", "rtsp://user:secret@/x"])
def test_a_record_source_is_the_address_of_a_camera(engine: Engine, other: str, tmp_path: Path) -> None:
    values = {"source": "rtsp://127.0.0.1:1/x", "detect": "person", "record": str(tmp_path), "record_source": other}
    with pytest.raises(ConfigError, match=r"^record_source: ") as error:
        open_stream(ListedStream.model_validate(values), engine)
    assert "secret" not in str(error.value)


def test_a_file_is_not_recorded_and_the_message_says_what_is(engine: Engine, tmp_path: Path) -> None:
    values = {"source": str(DEMO_CLIP), "loop": True, "detect": "person", "record": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"^record: .+ is not live, .+ --loop, .+/live\.mp4\?overlay=off$"):
        open_stream(ListedStream.model_validate(values), engine)


def test_a_record_source_is_opened_only_for_a_recording_or_clips(engine: Engine, tmp_path: Path) -> None:
    values = {"source": "rtsp://127.0.0.1:1/x", "detect": "person", "record_source": "rtsp://u:secret@127.0.0.1:1/y"}
    config = ListedStream.model_validate(values)
    assert "secret" not in text_of_stream(config)
    with open_stream(config, engine) as idle:
        assert idle.record_source is None
    with open_stream(config.model_copy(update={"record": str(tmp_path)}), engine) as recorded:
        assert isinstance(recorded.source, LiveSource)
        assert recorded.record_source is not None
        assert recorded.record_source.source.taps.video
        assert not recorded.source.taps.video


@pytest.mark.parametrize(
    ("source", "other", "second"),
    [
        ("onvif://u:secret@127.0.0.1:1", None, "onvif://127.0.0.1:1"),
        ("onvif://u:secret@127.0.0.1:1/sub", None, None),
        ("onvif://u:secret@127.0.0.1:1", "rtsp://127.0.0.1:1/y", "rtsp://127.0.0.1:1/y"),
    ],
)
def test_an_onvif_camera_without_a_profile_is_also_its_record_source(
    engine: Engine, source: str, other: str | None, second: str | None, tmp_path: Path
) -> None:
    config = ListedStream.model_validate({"source": source, "record_source": other, "record": str(tmp_path)})
    with open_stream(config, engine) as stream:
        assert isinstance(stream.source, LiveSource)
        found = stream.record_source.source if stream.record_source is not None else None
        assert (found.info.url if found is not None else None) == second
        assert bool(stream.source.taps.video) == (second is None)
    with open_stream(config.model_copy(update={"record": None, "detect": ["person"]}), engine) as idle:
        assert idle.record_source is None
