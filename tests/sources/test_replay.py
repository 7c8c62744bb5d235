from __future__ import annotations

import itertools
import threading
import time

import pytest

from saccade.sources import open_source
from saccade.sources.replay import ReplaySource
from tests.support.clips import MakeClip, number_of


def test_it_goes_on_and_on_at_the_pace_of_the_file(make_clip: MakeClip) -> None:
    clip = make_clip(frames=5, rate=25)
    begun = time.monotonic()
    with ReplaySource(open_source(clip, stream="door", paced=True)) as source:
        assert (source.name, source.info.live, source.info.frames) == ("door", True, None)
        frames = list(itertools.islice(source, 13))
    took = time.monotonic() - begun
    assert [number_of(frame.image) for frame in frames] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]
    assert [frame.index for frame in frames] == list(range(13))
    steps = {b.pts - a.pts for a, b in itertools.pairwise(frames)}
    assert {float(step * frames[0].time_base) for step in steps} == {0.04}
    assert took >= 0.48  # and not as fast as it can be read
    assert {frame.capture_clock for frame in frames} == {"arrival"}
    assert all(abs(frame.captured_at - time.time()) < 60 for frame in frames)


@pytest.mark.parametrize("frames", [1, 2])
def test_a_file_of_hardly_any_frames_keeps_its_pace(make_clip: MakeClip, frames: int) -> None:
    with ReplaySource(open_source(make_clip(frames=frames, rate=25), stream="door", paced=True)) as source:
        seconds = [float(frame.pts * frame.time_base) for frame in itertools.islice(source, 6)]
    assert seconds == pytest.approx([0, 0.04, 0.08, 0.12, 0.16, 0.2])


def test_closing_ends_it_at_once_even_between_two_far_frames(make_clip: MakeClip) -> None:
    clip = make_clip(frames=3, pts=[0, 1000, 2000], rate=25)
    source = ReplaySource(open_source(clip))
    seen: list[int] = []
    reader = threading.Thread(target=lambda: seen.extend(frame.index for frame in source))
    reader.start()
    time.sleep(0.1)
    source.close()
    reader.join(5)
    assert not reader.is_alive()
    assert seen in ([], [0])
