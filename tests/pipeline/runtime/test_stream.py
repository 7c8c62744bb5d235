"""A file as a stream: as fast as it goes, at its own pace, and over and over."""

from __future__ import annotations

import itertools
import time

import pytest

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import ListedStream
from saccade.pipeline.runtime.stream import open_source_of

RATE, FRAMES = 10, 5  # of the clip's first half second


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
