"""What is kept of events: the best image, and video from before to after; and what a slow or full disk does to it."""

from __future__ import annotations

import threading
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from saccade.engine.results import Outline
from saccade.pipeline.events.record import Change, Event, MediaDone, make_event_record, read_event
from saccade.pipeline.events.storage import recorder
from saccade.pipeline.events.storage.recorder import MOST_S, MediaWriter, Recorder
from saccade.sinks import color_of
from saccade.sources import Frame
from tests.support.clips import number_of
from tests.support.packets import coded, shown
from tests.support.sinks.results import live_frame

EVENT = Event(
    "e1",
    "rule",
    "door",
    "person",
    (1,),
    (),
    (),
    1003.0,
    1003.5,
    None,
    1003.5,
    "rtcp",
    0.9,
    0.9,
    (0.2, 0.2, 0.6, 0.8),
    200,
    100,
    since_at=1003.0,
    start_at=1003.5,
    frame_at=1003.5,
)

FROM_ELSEWHERE = read_event(make_event_record(Change("update", EVENT)))


def at(time: float, image: np.ndarray | None = None, **values: Any) -> tuple[Event, Frame]:
    frame = replace(live_frame(0), captured_at=time, decoded_at=time, decode_ms=0.0)
    if image is not None:
        frame = replace(frame, image=image)
    return seen(time, **values), frame


def seen(time: float, **values: Any) -> Event:
    """The event, seen last at a time."""
    return replace(EVENT, **{"frame_time": time, "frame_at": time} | values)


def texture(contrast: float, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(128, contrast, (100, 200, 1))
    return np.clip(noise, 0, 255).astype(np.uint8).repeat(3, axis=2)


class Desk:
    """A writer, a recorder and what is whole."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.done: list[MediaDone] = []
        self.folder = folder
        self.writer = MediaWriter(folder, self.done.append)
        self.recorder = Recorder(self.writer, **settings)

    def close(self) -> set[str]:
        self.recorder.close()
        self.writer.close()
        self.writer.close()
        assert not [one for one in threading.enumerate() if one.name == "saccade media"]
        return {path.name for path in self.folder.iterdir()}


def test_a_live_event_has_video_from_before_to_after(tmp_path: Path) -> None:
    desk = Desk(tmp_path, before_s=1.0, after_s=0.5)
    assert not desk.recorder.has_clips
    packets = coded(80)
    for number, packet in enumerate(packets):
        desk.recorder.ring.add(packet)
        time = packet.arrived_at
        if number == 35:
            desk.recorder.note(*at(time))
            assert desk.recorder.has_clips
        elif number == 40:
            desk.recorder.note(*at(time))
        elif number == 45:
            desk.recorder.finish(seen(1004.0, end_time=1004.0))
        desk.recorder.advance(time)
    assert desk.close() == {"e1.jpg", "e1.mp4"}
    numbers = [number for _, number in shown(tmp_path / "e1.mp4")]
    assert numbers == list(range(20, 46))  # since 3.0 s, 1 s before that, from the key; 0.5 s after 4.0 s
    assert MediaDone("door", "e1", "clip", str(tmp_path / "e1.mp4")) in desk.done


STEPS = {
    "forwards": [(36, 3600.0)],
    "backwards": [(36, -3600.0)],
    "before it": [(33, -3600.0)],
    "after it": [(47, -3600.0)],
    "repeated": [(30, 3600.0), (36, -3600.0), (38, 3600.0), (41, -3600.0)],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_a_clock_that_is_set_changes_no_clip(tmp_path: Path, steps: list[tuple[int, float]]) -> None:
    desk = Desk(tmp_path, before_s=1.0, after_s=0.5)
    wall = 0.0
    for number, packet in enumerate(coded(80)):
        wall = next((to for since, to in reversed(steps) if number >= since), 0.0)
        desk.recorder.ring.add(packet)
        event, frame = at(packet.arrived_at)
        frame = replace(frame, captured_at=frame.captured_at + wall)
        if 35 <= number <= 40:
            desk.recorder.note(replace(event, frame_time=frame.captured_at), frame)
        elif number == 45:
            desk.recorder.finish(seen(1004.0, end_time=1004.0 + wall, frame_time=1004.0 + wall))
        desk.recorder.advance(frame.steady_at)
    assert desk.close() == {"e1.jpg", "e1.mp4"}
    assert [number for _, number in shown(tmp_path / "e1.mp4")] == list(range(20, 46))


def test_what_there_is_of_a_clip_outlives_the_process(tmp_path: Path) -> None:
    first = Desk(tmp_path, before_s=1.0, after_s=0.5)
    packets = coded(100)
    for packet in packets[:45]:
        first.recorder.ring.add(packet)
        first.recorder.note(*at(packet.arrived_at) if packet.arrived_at >= 1003.5 else at(1003.5))
        first.recorder.advance(packet.arrived_at)
    first.writer.close()  # and nothing else of it: it was killed
    numbers = [number for _, number in shown(tmp_path / "e1.mp4")]
    assert (numbers[0], numbers[-1] in (41, 42)) == (20, True)
    assert [one.kind for one in first.done] == ["snapshot"]  # the clip is not whole
    snapshot = (tmp_path / "e1.jpg").read_bytes()
    second = Desk(tmp_path, before_s=1.0, after_s=0.5)
    second.recorder.resume(FROM_ELSEWHERE)
    for packet in packets[60:]:
        second.recorder.ring.add(packet)
        second.recorder.note(*at(packet.arrived_at, texture(60), score=1.0, box=(0.0, 0.0, 1.0, 1.0)))
        second.recorder.advance(packet.arrived_at)
    second.recorder.finish(seen(1008.0, end_time=1008.0))
    assert second.close() == {"e1.jpg", "e1.mp4"}
    assert (tmp_path / "e1.jpg").read_bytes() == snapshot
    joined = [number for _, number in shown(tmp_path / "e1.mp4")]
    assert joined == [*numbers, *range(60, 86)]
    assert [(one.kind, one.path) for one in second.done] == [("clip", str(tmp_path / "e1.mp4"))]


def test_an_event_that_went_on_nowhere_keeps_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "e1.mp4").write_bytes(b"a clip")
    (tmp_path / "e1.jpg").write_bytes(b"an image")
    desk = Desk(tmp_path)
    desk.recorder.resume(FROM_ELSEWHERE)
    desk.recorder.resume(replace(FROM_ELSEWHERE, id="e2"))
    desk.recorder.ring.add(coded(1, start=1100.0)[0])
    event, frame = at(1004.0, id="e2")
    desk.recorder.note(event, frame)
    for name in ("e1", "e2"):
        desk.recorder.finish(replace(FROM_ELSEWHERE, id=name, end_time=1003.5))
    assert desk.close() == {"e1.mp4", "e1.jpg"}
    done = {(one.event, one.kind, one.path) for one in desk.done}  # of e2, which another machine has, nothing is here
    assert done == {("e1", "clip", str(tmp_path / "e1.mp4")), ("e2", "clip", None), ("e2", "snapshot", None)}


def test_a_long_event_has_its_clip_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.pipeline.events.storage.recorder.MOST_S", 2.0)
    desk = Desk(tmp_path, before_s=0.5, after_s=0.5)
    for packet in coded(80):
        desk.recorder.ring.add(packet)
        if packet.arrived_at >= 1003.5:
            desk.recorder.note(*at(packet.arrived_at))
        desk.recorder.advance(packet.arrived_at)
    assert not desk.recorder.ring._held
    desk.recorder.finish(seen(1008.0, end_time=1008.0))
    assert desk.close() == {"e1.jpg", "e1.mp4"}
    assert [number for _, number in shown(tmp_path / "e1.mp4")] == list(range(20, 61))
    assert [one.kind for one in desk.done].count("clip") == 1


def test_an_event_without_end_has_a_clip_of_limited_length(tmp_path: Path) -> None:
    desk = Desk(tmp_path, before_s=0.0, after_s=0.0)
    desk.recorder.note(*at(1003.5))
    assert desk.recorder._recordings["e1"].end.steady == 1003.5 + MOST_S
    assert desk.close() == {"e1.jpg"}  # no packet ever came


def test_the_sharpest_largest_surest_image_is_kept(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    blurred = cv2.GaussianBlur(texture(60), (0, 0), 4)
    best = texture(60, seed=1)
    seen = [
        (blurred, 0.9, (0.2, 0.2, 0.6, 0.8)),
        (texture(60), 0.3, (0.2, 0.2, 0.6, 0.8)),  # unsure
        (best, 0.9, (0.2, 0.2, 0.6, 0.8)),
        (texture(60), 0.9, (0.2, 0.2, 0.3, 0.4)),  # small
        (blurred, 0.99, (0.1, 0.1, 0.7, 0.9)),
    ]
    for number, (image, score, box) in enumerate(seen):
        desk.recorder.note(*at(1003.5 + number, image, score=score, box=box))
    event, frame = at(1003.5 + 9, texture(60, seed=2), score=1.0, box=(0.0, 0.0, 1.0, 1.0))
    desk.recorder.note(
        replace(event, frame_time=1008.0, frame_at=1008.0), frame
    )  # hidden: an old box, and a frame without it
    assert desk.close() == {"e1.jpg"}
    image = cv2.cvtColor(cv2.imread(str(tmp_path / "e1.jpg")), cv2.COLOR_BGR2RGB).astype(int)
    assert np.abs(image - best).mean() < np.abs(image - blurred).mean()
    assert [(one.kind, one.path) for one in desk.done] == [
        ("snapshot", str(tmp_path / "e1.jpg"))
    ] * 2  # at once, and the best


def test_a_snapshot_has_the_outlines_of_its_frame(tmp_path: Path) -> None:
    desk, image, box = Desk(tmp_path), texture(60), (0.2, 0.2, 0.6, 0.8)
    cat = Outline("cat", "M 0 0 L 1 0 L 1 1 L 0 1 Z M .3 .3 L .7 .3 L .7 .7 L .3 .7 Z", box, True)
    desk.recorder.note(*at(1003.5, image, box=box), [cat])
    assert desk.close() == {"e1.jpg"}
    shown = cv2.cvtColor(cv2.imread(str(tmp_path / "e1.jpg")), cv2.COLOR_BGR2RGB).astype(float)
    wanted = 0.35 * np.array(color_of("cat")) + 0.65 * 128
    assert np.abs(shown[28:36, 50:110].mean((0, 1)) - wanted).max() < 12  # inside of the outline
    for untouched in (shown[44:56, 70:90], shown[5:15]):  # a hole, and what is outside
        assert np.abs(untouched.mean((0, 1)) - 128).max() < 12
    assert np.abs(image.astype(float).mean((0, 1)) - 128).max() < 12, "the frame itself is as it was"


def test_a_slow_disk_delays_no_frame_and_loses_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("saccade.pipeline.events.storage.recorder._MAX_WAITING", 4)
    desk, gate = Desk(tmp_path), threading.Event()
    file = MediaDone("door", "slow", "snapshot")
    desk.writer.write(file, lambda path: gate.wait(30) and path.write_bytes(b"x"))
    for number in range(20):
        event, frame = at(1003.5)
        desk.recorder.note(replace(event, id=f"e{number}"), frame)  # would take minutes
    gate.set()
    names = desk.close()
    assert "slow.jpg" in names
    assert 4 <= len(names) <= 6
    assert "was dropped, because the disk is too slow" in caplog.text
    assert len(desk.done) == 21  # each was noted, whole or not


def test_a_failed_file_leaves_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(tmp_path)

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    for number in range(3):
        desk.writer.write(MediaDone("door", f"e{number}", "clip"), fail)
    assert desk.close() == set()
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}: cannot write snapshots and clips of events: No space left on device"
    ]


def test_a_disk_that_hangs_does_not_keep_the_end_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_MAX_WAITING", 1)
    monkeypatch.setattr(recorder, "_CLOSE_S", 0.05)
    go_on, begun = threading.Event(), threading.Event()
    writer = MediaWriter(tmp_path, lambda done: None)
    writer.write(MediaDone("door", "1", "clip"), lambda path: (begun.set(), go_on.wait()))
    assert begun.wait(20)
    writer.write(MediaDone("door", "2", "clip"), None)
    ending = threading.Thread(target=writer.close, daemon=True)
    ending.start()
    ending.join(20)
    assert not ending.is_alive()
    [working] = [thread for thread in threading.enumerate() if thread.name == "saccade media"]
    go_on.set()
    working.join(20)
    assert not working.is_alive()


@pytest.mark.parametrize(("aspect", "size"), [(Fraction(64, 45), (284, 100)), (Fraction(1, 2), (200, 200))])
def test_a_snapshot_has_square_pixels(tmp_path: Path, aspect: Fraction, size: tuple[int, int]) -> None:
    desk = Desk(tmp_path)
    event, frame = at(1003.5, texture(40))
    desk.recorder.note(event, replace(frame, pixel_aspect=aspect))
    desk.close()
    image = cv2.imread(str(tmp_path / "e1.jpg"))
    assert image is not None
    assert (image.shape[1], image.shape[0]) == size


@pytest.mark.parametrize("late_s", [0.4, -0.4])
@pytest.mark.parametrize("clock", ["rtcp", "arrival"])
def test_a_second_stream_is_aligned_by_its_capture_times(tmp_path: Path, late_s: float, clock: str) -> None:
    desk = Desk(tmp_path, before_s=1.0, after_s=0.5, second=True)
    unix = 1.7e9
    packets = [
        replace(packet, arrived_at=packet.arrived_at + late_s, captured_at=unix + packet.arrived_at)
        for packet in coded(80)
    ]
    times = {"since": unix + 1003.0, "start_time": unix + 1003.5, "capture_clock": clock}
    for number in range(80):
        time = 1000 + number / 10
        if 0 <= (arrived := number - round(late_s * 10)) < len(packets):
            desk.recorder.ring.add(packets[arrived])
        frame = replace(live_frame(0), captured_at=unix + time, decoded_at=time, decode_ms=0.0)
        if 35 <= number <= 40:
            desk.recorder.note(seen(time, **times, frame_time=unix + time), frame)
        elif number == 45:
            desk.recorder.finish(seen(1004.0, **times, frame_time=unix + 1004.0, end_time=unix + 1004.0))
        desk.recorder.advance(time)
    assert desk.close() == {"e1.jpg", "e1.mp4"}
    numbers = [number for _, number in shown(tmp_path / "e1.mp4")]
    off = 0 if clock == "rtcp" else -round(late_s * 10)
    assert numbers == list(range(20 if off >= 0 else 10, 46 + off))
    image = cv2.imread(str(tmp_path / "e1.jpg"))
    assert image.shape == (120, 160, 3)  # of the second stream
    assert abs(number_of(cv2.cvtColor(image, cv2.COLOR_BGR2RGB)) - 35 - off) <= (clock == "arrival")
