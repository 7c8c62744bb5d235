"""The motion gate on rendered frames, and what tracks do while it admits none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from saccade.engine.results import Box, Detections, Points, Result
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.motion import CameraGate, MotionGate
from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.sources import Frame
from tests.support.clips import Noise
from tests.support.sinks.results import live_frame

DICE = np.random.default_rng(0)
ROOM = DICE.integers(60, 180, (18, 32, 3)).repeat(20, 0).repeat(20, 1).astype(np.uint8)
NOISE = Noise(3, 640, 360)


def frame_at(number: int, x: float | None = None, light: float = 1.0) -> Frame:
    """A frame at 10 fps of a room, with a person at `x` in it."""
    image = ROOM.astype(np.float32)
    if x is not None:
        left = int(x * 600)
        image[100:300, left : left + 40] = 20
    image = np.clip(image * np.float32(light) + NOISE.part(), 0, 255).astype(np.uint8)
    return replace(live_frame(number / 10), image=image, index=number)


def admitted(frames: list[Frame], **values: object) -> list[int]:
    gate = MotionGate(AnalyticsSettings.model_validate(values))
    return [frame.index for frame in frames if gate.admit(frame)]


def test_a_still_room_is_looked_at_once_in_a_heartbeat() -> None:
    seen = admitted([frame_at(number) for number in range(120)], motion_heartbeat=3)
    assert seen[:11] == list(range(11))
    assert seen[11:] == [40, 70, 100]


def test_who_walks_is_seen_on_every_frame() -> None:
    frames = [frame_at(number, (number - 50) / 50 if 50 <= number < 90 else None) for number in range(150)]
    seen = admitted(frames, motion_heartbeat=100)
    assert set(range(50, 91)) <= set(seen)
    assert not set(range(15, 50)) & set(seen)
    assert len(seen) < 90


def test_a_light_that_dims_slowly_is_no_movement() -> None:
    frames = [frame_at(number, light=1 - 0.3 * number / 200) for number in range(200)]
    assert len(admitted(frames, motion_heartbeat=100)) == 11


def test_movement_under_a_mask_does_not_count() -> None:
    frames = [frame_at(number, 0.5 + 0.1 * (number % 2)) for number in range(60)]
    assert len(admitted(frames)) == 60
    assert len(admitted(frames, motion_mask=[".45,.2,.75,.2,.75,.9,.45,.9"], motion_heartbeat=100)) == 11


def test_a_clock_that_begins_again_is_no_stillness() -> None:
    gate = MotionGate(AnalyticsSettings(motion_heartbeat=100))
    assert [gate.admit(frame_at(number)) for number in [*range(30), 0]][-2:] == [False, True]


@pytest.mark.parametrize("still_s", [3, 30])
def test_a_track_lives_on_while_nothing_moves(still_s: int) -> None:
    gate = MotionGate(AnalyticsSettings(motion_heartbeat=1000))
    stage = AnalyzeStage(AnalyticsSettings.model_validate({"zones": "all=0,0,1,0,1,1,0,1"}), gate.still_before)
    one = Result(Detections((Box("person", 0.9, 0.5, 0.3, 0.6, 0.8),), 640, 360), Points((), 640, 360))
    seen, last = 0, 0
    for number in range(20 + still_s * 10 + 10):
        frame = frame_at(number, 0.5 if number < 20 + still_s * 10 else 0.52)
        if gate.admit(frame):
            result, seen, last = stage.process(frame, one), seen + 1, number
    assert (seen < 40, last) == (True, 29 + still_s * 10)
    assert result.detections.boxes[0].track_id == 1
    assert stage.totals().objects == {"person": 1}
    assert stage.totals().zones["all"]["person"] == {"inside": 1, "entered": 1, "left": 0}
    (zone,) = result.extras["zones"]
    assert zone.to_record(640, 360)["tracks"][0]["dwell_s"] == pytest.approx(last / 10)  # type: ignore[index]


def test_a_gate_of_the_camera_follows_its_reports() -> None:
    reported: frozenset[str] | None = None
    gate = CameraGate(AnalyticsSettings(motion_heartbeat=5.05), lambda: reported)
    seen = []
    for number in range(200):
        if number == 20:
            reported = frozenset({"input"})  # until then, they are unknown
        if number in (100, 110):
            reported = frozenset({"motion"} if number == 100 else ())
        seen += [number] if gate.admit(frame_at(number)) else []
    assert seen == [*range(30), 80, *range(100, 120), 170]
