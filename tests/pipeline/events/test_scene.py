"""What rules see of a stream: tracks while a gate keeps frames back, and the time of day."""

from __future__ import annotations

from datetime import datetime, time
from pathlib import Path

import pytest

from saccade.engine.results import Box, Detections, Points, Result
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.pipeline.events.scene import SceneReader
from saccade.sources import FileSource
from tests.support.clips import MakeClip
from tests.support.remux import moved_by, remux
from tests.support.sinks.results import live_frame


def test_a_track_not_found_on_one_frame_of_a_still_time_stays() -> None:
    times = [number / 10 for number in range(20)] + [7.0, 12.0, 17.0]  # then a frame each 5 s
    stage = AnalyzeStage(AnalyticsSettings(track=True), lambda index: 4.9 if index >= 20 else 0.0)
    reader = SceneReader(0.0)
    seen = []
    for index, seconds in enumerate(times):
        boxes = () if seconds == 12.0 else (Box("person", 0.9, 0.4, 0.3, 0.6, 0.8),)
        frame = live_frame(seconds).changed(index=index)
        scene = reader.read(frame, stage.process(frame, Result(Detections(boxes, 200, 100), Points((), 200, 100))))
        seen.append({number: track.first_s for number, track in scene.tracks.items()})
    assert seen[-3:] == [{1: 0.0}] * 3


@pytest.mark.parametrize("name", ["moved.ts", "moved.mkv", "moved.mp4"])
@pytest.mark.parametrize("begins", [0, 7, 50_000])
def test_the_time_of_day_counts_from_the_beginning_of_a_file(
    make_clip: MakeClip, tmp_path: Path, name: str, begins: float
) -> None:
    """Whatever the container's clock shows there."""
    path = remux(make_clip("clip.mp4", frames=30), tmp_path / name, moved_by(begins))
    reader = SceneReader(datetime(2026, 1, 1, 12).timestamp())  # noqa: DTZ001: local time, as rules have it
    nothing = Result(Detections((), 160, 120), Points((), 160, 120))
    clocks = [reader.read(frame, nothing).clock for frame in FileSource(path)]
    assert clocks[0] == time(12)
    assert time(12, 0, 1) < clocks[-1] < time(12, 0, 2)
