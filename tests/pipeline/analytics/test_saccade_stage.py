"""The saccades of one stream: windows out, results in, and how many windows a live stream can afford."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from saccade.engine.results import Box, Detections, Points, Result
from saccade.pipeline.analytics.saccades.auto import MOST, AutoCount
from saccade.pipeline.analytics.saccades.planner import Look
from saccade.pipeline.analytics.saccades.stage import Looked, SaccadeSettings, SaccadeStage
from saccade.sources import Frame
from tests.support.sinks.results import live_frame

DICE = np.random.default_rng(0)
ROOM = np.clip(DICE.normal(120, 20, (54, 96, 1)).repeat(3, 2), 0, 255).astype(np.uint8).repeat(20, 0).repeat(20, 1)


def frame_at(number: int, x: int | None = None, shift: int = 0) -> Frame:
    """A 1080p frame at 10 fps of a room, with a person of 80 pixels at `x` in it."""
    image = np.roll(ROOM, shift, axis=1).copy()
    if x is not None:
        image[500:580, x : x + 30] = 255
    return replace(live_frame(number / 10), image=image, index=number)


def result_of(*boxes: Box) -> Result:
    return Result(Detections(boxes, 1920, 1080), Points((), 1920, 1080))


def person(x: int) -> Box:
    return Box("person", 0.9, x / 1920, 500 / 1080, (x + 30) / 1920, 580 / 1080)


def stage(count: int | None = 2, *, live: bool = True) -> SaccadeStage:
    return SaccadeStage(SaccadeSettings(count), lambda width, height: (416, 288), live=live)


def run(made: SaccadeStage, frame: Frame, x: int | None) -> tuple[list[Look], Result]:
    """Choose windows, and answer as a model that finds the person where a window shows it."""
    looks = made.choose(frame)
    shown = x is not None and any(
        w.x < x and x + 30 < w.x + w.width and w.y < 500 < 580 < w.y + w.height for w in looks
    )
    return looks, made.process(frame, result_of(*([person(x)] if shown and x is not None else [])))


def test_no_windows_leave_a_result_as_it_is() -> None:
    made, found = stage(0), result_of(person(900))
    assert made.choose(frame_at(0)) == []
    assert made.process(frame_at(0), found) is found
    assert made.counts == {}


def test_who_walks_far_away_is_found_and_stays_in_the_list_between_looks() -> None:
    made, listed = stage(1), []
    for number in range(60):
        x = 900 + 4 * number
        looks, result = run(made, frame_at(number, x), x)
        assert len(looks) <= 1
        assert [one.reason for one in result.extras.get(Looked.key, ()) if isinstance(one, Looked)] == [
            look.reason for look in looks
        ]
        listed.append(len(result.detections.boxes))
    assert max(listed) == 1
    assert sum(listed[20:]) >= 38
    assert {"track", "sweep"} <= set(made.counts)


def test_a_box_that_is_only_expected_says_so() -> None:
    made = stage(2)
    for number in range(40):
        run(made, frame_at(number, 900), 900)
    last = frame_at(40, 900)
    made.choose(last)
    held = made.process(last, result_of()).detections.boxes
    assert all(box.predicted for box in held)


def test_a_shaking_camera_gets_no_windows_after_its_first_frame() -> None:
    made = stage(2)
    counts = [len(made.choose(frame_at(number, shift=40 * (number % 5)))) for number in range(1, 30)]
    assert max(counts) <= 2
    assert sum(counts[3:]) == 0


def test_settings_change_while_it_runs() -> None:
    made = stage(0)
    made.configure(SaccadeSettings(3))
    assert 0 < len(made.choose(frame_at(0))) <= 3
    made.configure(SaccadeSettings(0))
    assert made.choose(frame_at(1)) == []


def test_a_record_has_the_window_in_pixels() -> None:
    assert Looked("sweep", 0.1, 0.2, 0.3, 0.4).to_record(1000, 500) == {
        "reason": "sweep",
        "box": [100, 100, 300, 200],
        "box_norm": [0.1, 0.2, 0.3, 0.4],
    }


@pytest.mark.parametrize(
    ("most_done", "max_fps", "count"),
    [(25.0, None, MOST), (30.0, None, MOST), (10.0, None, 0), (10.0, 8.0, MOST), (10.0, 20.0, 0)],
)
def test_auto_takes_windows_as_long_as_no_frames_are_lost(most_done: float, max_fps: float | None, count: int) -> None:
    """A camera of 25 fps, and an engine that answers so many."""
    auto, done = AutoCount(max_fps), 0.0
    for number in range(25 * 60):
        auto.note_offered(number / 25)
        done += min(1.0, most_done / 25)
        while done >= 1:
            auto.note_done()
            done -= 1
    assert auto.count == count


def test_auto_settles_where_the_engine_can_follow() -> None:
    """An engine that follows with one window, and loses frames with two."""
    auto, lost, counts = AutoCount(), 0, []
    for number in range(25 * 600):
        auto.note_offered(number / 25)
        if auto.count <= 1 or number % 2:
            auto.note_done()
        else:
            lost += 1
        counts.append(auto.count)
    assert np.mean(np.array(counts[25 * 60 :]) == 1) > 0.8
    assert lost < 0.05 * len(counts)


@pytest.mark.parametrize(("busy_of_a_window", "least", "most"), [(0.05, MOST, MOST), (0.2, 2, 3), (0.5, 0, 1)])
def test_auto_takes_what_the_engine_has_idle_time_for(busy_of_a_window: float, least: int, most: int) -> None:
    """No frame is lost: the engine idles for what a glance and windows leave of its time."""
    auto, idle, counts = AutoCount(), 0.0, []
    for number in range(25 * 120):
        auto.note_offered(number / 25, (number / 25, idle))
        auto.note_done()
        idle += max(0.0, 1 - busy_of_a_window * (1 + auto.count)) / 25
        counts.append(auto.count)
    assert least <= np.mean(counts[25 * 60 :]) <= most


def test_auto_does_not_raise_all_streams_at_once() -> None:
    autos, idle, raised = [AutoCount(seed=seed) for seed in range(32)], 0.0, []
    for number in range(10 * 60):
        before = sum(auto.count for auto in autos)
        for auto in autos:
            auto.note_offered(number / 10, (number / 10, idle))
            auto.note_done()
        idle += max(0.0, 1 - 0.01 * sum(1 + auto.count for auto in autos)) / 10
        raised.append(sum(auto.count for auto in autos) - before)
    assert max(raised) <= 16
    assert 0 < 0.01 * sum(1 + auto.count for auto in autos) <= 1.0
