"""The wall clock is set while a stream runs: rules, paths, minutes, stored events and files go on as if it were not."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.engine.results import Detections, Points, Result
from saccade.pipeline.analytics.counts import CountLog, Totals
from saccade.pipeline.events.machine import RuleMachine
from saccade.pipeline.events.record import Change, TrackPath, make_history_record
from saccade.pipeline.events.scene import SceneReader
from saccade.pipeline.events.settings import RuleSettings
from saccade.pipeline.events.storage.store import EventStore
from saccade.sinks.retention import FileAges, Retention
from tests.pipeline.events.scripted import scene, straight, walk
from tests.pipeline.events.storage.test_store import event, ids

HOUR = 3600.0
SETTINGS: dict[str, Callable[[float], float]] = {
    "forwards": lambda second: HOUR if second > 3 else 0.0,
    "backwards": lambda second: -HOUR if second > 3 else 0.0,
    "again and again": lambda second: HOUR * (round(second) % 3 - 1),
}


@pytest.fixture(params=SETTINGS)
def set_by(request: pytest.FixtureRequest) -> Callable[[float], float]:
    """By how much the clock is wrong at a second."""
    return SETTINGS[request.param]


def test_an_event_begins_and_ends_when_it_should(set_by: Callable[[float], float]) -> None:
    rule = RuleSettings.model_validate({"name": "visitor", "when": "person for 2s", "cooldown": 1})
    machine, changes = RuleMachine(rule, "door"), list[tuple[float, Change]]()
    for tenth in range(120):
        seconds = tenth / 10
        one = scene(seconds, {7: "person"} if 1 <= seconds <= 6 else {}, first_s=1.0)
        one = replace(one, captured_at=one.captured_at + set_by(seconds))
        changes += [(seconds, change) for change in machine.step(one)]
    assert [(seconds, change.kind) for seconds, change in changes] == [(3.0, "begin"), (6.1, "end")]
    ended = changes[-1][1].event
    assert ended.end_time is not None
    assert ended.end_time - ended.start_time == pytest.approx(3.0)
    assert (ended.since_at, ended.start_at, ended.frame_at) == (1.0, 3.0, 6.0)


def test_a_path_has_all_its_places(set_by: Callable[[float], float]) -> None:
    reader = SceneReader(0.0)
    for frame, result in walk({"person": straight((0.1, 0.5), (0.9, 0.5), 0, 8)}, 8):
        seconds = frame.pts / 90000
        boxes = tuple(replace(box, track_id=1) for box in result.detections.boxes)
        numbered = Result(Detections(boxes, 200, 100), Points((), 200, 100))
        reader.read(frame.changed(captured_at=frame.captured_at + set_by(seconds)), numbered)
    reader.end("door")
    [path] = reader.take_ended()
    assert isinstance(path, TrackPath)
    assert len(path.path) == 16


def test_every_count_is_in_a_minute(set_by: Callable[[float], float]) -> None:
    log, taken = CountLog(), []
    for second in range(600):
        captured_at = 1e6 + second + set_by(second / 60)
        if log.due(captured_at):
            log.turn(captured_at, Totals({"person": second}))
        taken += log.take()
    taken += log.take(Totals({"person": 600}))
    assert sum(minute.counts.objects["person"] for minute in taken) == 600
    assert log.take(Totals({"person": 600})) == []


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the wall clock of this process, by so much away from the right time."""
    right, wrong_by = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: right() + wrong_by[0])
    return lambda by: wrong_by.__setitem__(0, by)


def test_a_store_keeps_and_lists_what_it_should(tmp_path: Path, wall: Callable[[float], None]) -> None:
    with closing(EventStore(tmp_path, keep_s=HOUR / 2)) as store:
        store.write({"type": "rules", "stream": "door", "rules": ["brief"], "keep_s": {"brief": HOUR / 4}})
        for number, by in enumerate((0.0, HOUR, -HOUR, 2 * HOUR, 0.0)):
            wall(by)
            now = time.time()
            times = {"start_time": now, "since": now, "frame_time": now, "end_time": now}
            store.write({**event(2 * number), **times, "rule": "brief"})
            store.write({**event(2 * number + 1), **times})
            store.write(make_history_record(TrackPath("door", number, "person", now, now, 0.9, ())))
            store.flush()
            assert store.prune() == 0
            assert set(ids(store, since=now - 1)) >= {f"e{2 * number}", f"e{2 * number + 1}"}
        assert ids(store) == [f"e{number}" for number in reversed(range(10))]
    with closing(EventStore(tmp_path, keep_s=1e-9)) as store:
        store.prune()
        assert set(ids(store)) <= {f"e{number}" for number in range(0, 10, 2)}


def test_files_of_a_recording_are_kept_and_the_oldest_goes_first(tmp_path: Path, wall: Callable[[float], None]) -> None:
    retention, made = Retention(max_age_s=HOUR / 2), []
    for number, by in enumerate((0.0, HOUR, -HOUR, 2 * HOUR, 0.0)):
        wall(by)
        made.append(tmp_path / f"{number}.mp4")
        made[-1].write_bytes(b"x" * 100)
        os.utime(made[-1], (time.time(), time.time()))  # as a machine with that clock would
        assert retention.prune(tmp_path.iterdir()) == []
        time.sleep(0.01)
    retention.max_bytes = 250
    assert retention.prune(tmp_path.iterdir()) == made[:3]


# A file has changed if its time has: the times are whole seconds, which a thousandth for each write keeps apart.
WRITES = st.lists(st.tuples(st.integers(0, 3), st.integers(-100_000, 100_000), st.floats(0.01, 100.0)), min_size=1)


@given(WRITES)
def test_no_age_is_more_than_what_has_passed(writes: list[tuple[int, int, float]]) -> None:
    ages, now, changed = FileAges(), 1000.0, dict[int, float]()
    written: dict[int, float] = {}
    ages.update({}, 0.0, now)
    for (file, wall, passed), unique in zip(writes, itertools.count(), strict=False):
        changed[file] = wall + unique * 1e-3
        written[file] = now
        found = ages.update(changed, wall, now)
        assert found == {one: pytest.approx(now - at) for one, at in written.items()}
        now += passed


def test_files_of_an_earlier_run_are_as_old_as_the_clock_says_at_first() -> None:
    ages = FileAges()
    assert ages.update({1: 1000.0, 2: 5000.0}, wall=2000.0, now=50.0) == {1: 1000.0, 2: 0.0}
    assert ages.update({1: 1000.0, 2: 5000.0, 3: 1.0}, wall=9e9, now=60.0) == {1: 1010.0, 2: 10.0, 3: 0.0}
