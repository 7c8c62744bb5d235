"""What rules see of a stream whose gate keeps back frames on which nothing moves."""

from __future__ import annotations

from saccade.engine.results import Box, Detections, Points, Result
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.pipeline.events.scene import SceneReader
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
