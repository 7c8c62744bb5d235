"""What is stored and found again, what is deleted when, and what is left after a process was killed."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.pipeline.events.record import MinuteCounts, TrackPath, make_history_record
from saccade.pipeline.events.storage.database import migrate
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import LADDER, EventQuery, StoreError
from tests.support import REPO
from tests.support.command import environment
from tests.support.sinks.broker import wait_for
from tests.support.sinks.disk import full_disk
from tests.support.sinks.rule_events import BEGIN, RULES

LONG_S = 60  # far beyond what any of these needs; only so that a hang fails


def event(number: int, kind: str = "end", **values: Any) -> dict[str, Any]:
    times = {"start_time": 1000.0 + number, "end_time": 1001.0 + number if kind == "end" else None}
    return {**BEGIN, **times, "type": kind, "id": f"e{number}", **values}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EventStore]:
    with_events = EventStore(tmp_path / "store")
    yield with_events
    with_events.close()


def ids(store: EventStore, **query: Any) -> list[str]:
    return [one["id"] for one in store.search(EventQuery(**query))]


EVENTS = [
    event(0, label="person", stream="door", rule="visitor", entered_zones=["hall"]),
    event(1, label="truck", stream="yard", rule="parked", entered_zones=["gate", "hall"], attributes={"c": "dark red"}),
    event(2, label="truck", stream="yard", rule="parked", entered_zones=[], answers={"q?": "It is a blue-green one."}),
    event(3, label="dog", stream="yard-2", rule="visitor", entered_zones=["hall_2"], sub_label="Bello"),
]

FOUND = {
    "everything, newest first": ({}, [3, 2, 1, 0]),
    "a stream, exactly": ({"stream": "yard"}, [2, 1]),
    "a rule": ({"rule": "visitor"}, [3, 0]),
    "a label": ({"label": "truck"}, [2, 1]),
    "a zone, exactly": ({"zone": "hall"}, [1, 0]),
    "a zone with a dash": ({"zone": "hall_2"}, [3]),
    "a word of an attribute": ({"words": "RED"}, [1]),
    "a word of an answer": ({"words": "green"}, [2]),
    "a name": ({"words": "bello"}, [3]),
    "the beginning of the last word": ({"words": "truck re"}, [1]),
    "one letter is a word": ({"words": "truck r"}, []),
    "a label is a word, too": ({"words": "truck"}, [2, 1]),
    "two conditions": ({"stream": "yard", "zone": "gate"}, [1]),
    "conditions that no event has both": ({"stream": "door", "label": "truck"}, []),
    "since a time": ({"since": 1002.0}, [3, 2]),
    "since a time to come": ({"since": time.time() + 1e6}, []),
    "so many": ({"limit": 2}, [3, 2]),
    "after all": ({"after": 1.0}, []),
    "what would be syntax": ({"words": 'red" OR label:* NOT ('}, []),
    "nothing but syntax": ({"words": '"*()'}, [3, 2, 1, 0]),
}


@pytest.mark.parametrize("case", FOUND)
def test_events_are_found(store: EventStore, case: str) -> None:
    for one in EVENTS:
        store.write(one)
    store.flush()
    query, numbers = FOUND[case]
    assert ids(store, **query) == [f"e{number}" for number in numbers]


def test_events_with_media_are_found(store: EventStore) -> None:
    for number in range(4):
        store.write(
            event(number, "begin" if number == 3 else "end", has_snapshot=number in (1, 3), has_clip=number == 2)
        )
    put(store, "e2.mp4")
    for name in ("e1.jpg", "e1.mp4"):
        put(store, name)
        store.note_media("e1", "snapshot")
    store.note_media("e2", "clip")
    store.flush()
    assert ids(store, media=True) == ids(store, media=True, words="person") == ["e3", "e2", "e1"]


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=20), st.text(max_size=8))
def test_any_words_are_searched_for(words: str, stream: str) -> None:
    with sqlite3.connect(":memory:") as db:
        migrate(db, LADDER)
        with suppress(UnicodeEncodeError):  # half a character, which no request can hold
            assert db.execute(*EventQuery(words=words, stream=stream, label=words).to_sql()).fetchall() == []


def test_a_file_that_failed_is_not_expected_again(store: EventStore) -> None:
    both = {"has_snapshot": True, "snapshot": "/s", "has_clip": True, "clip": "/c"}
    store.write(event(1, "begin", **both))
    store.note_media("e1", "snapshot")  # which could not be written
    store.write(event(1, **both))
    put(store, "e1.mp4")
    store.note_media("e1", "clip")
    store.flush()
    found = store.get("e1")
    assert found is not None
    assert (found["has_snapshot"], found["snapshot"], found["has_clip"]) == (False, None, True)


def test_an_event_is_brought_up_to_date(store: EventStore) -> None:
    store.write(event(1, "begin", label="person"))
    store.write(event(1, "update", label="rider", attributes={"colour": "yellow"}, entered_zones=["hall", "door"]))
    store.write(event(1, label="rider", attributes={"colour": "yellow"}, entered_zones=["hall", "door"]))
    store.flush()
    assert ids(store, words="yellow", label="rider", zone="door") == ["e1"]
    assert ids(store, label="person") == []
    found = store.get("e1")
    assert found is not None
    assert (found["type"], found["end_time"]) == ("end", 1002.0)
    assert store.get("e2") is None


def test_paths_and_counts_are_kept(store: EventStore) -> None:
    path = ((1003.0, 0.5, 0.9), (1003.5, 0.6, 0.9))
    for begins in (900.0, 1002.0):  # numbers begin again with each run
        track = TrackPath("door", 7, "person", begins, begins + 5, 0.9, path)
        store.write(make_history_record(track))
    counts = {"objects": {"person": 1}, "zones": {}, "lines": {}}
    store.write(make_history_record(MinuteCounts("door", 960, counts)))
    store.write({**event(1), "since": 1001.0})
    store.flush()
    found = store.get("e1")
    assert found is not None
    assert found["paths"] == [{"track_id": 7, "label": "person", "path": [list(place) for place in path]}]
    assert store.counts("door", 0) == [{"start": 960, **counts}]
    assert store.counts("door", 961) == store.counts("yard", 0) == []
    assert asdict(track)["number"] == 7


def put(store: EventStore, name: str, size: int = 10) -> Path:
    path = store.media_folder / name
    path.write_bytes(b"x" * size)
    return path


def test_media_belong_to_their_event(store: EventStore) -> None:
    store.write(event(1, has_clip=True, clip="/events/e1/clip.mp4"))
    clip = put(store, "e1.mp4")
    store.note_media("e1", "clip")
    store.flush()
    assert store.media("e1", "clip") == clip
    assert store.media("e1", "snapshot") is None
    assert store.media("../events", "clip") is None
    assert store.delete("e1")
    assert not store.delete("e1")
    assert not clip.exists()
    assert ids(store) == ids(store, words="person") == []
    put(store, "e1.mp4")  # a clip that was being written when its event was deleted
    store.note_media("e1", "clip")
    store.flush()
    assert list(store.media_folder.iterdir()) == []


def test_retention_by_age_and_rule(tmp_path: Path) -> None:
    store = EventStore(tmp_path, keep_s=0.2)
    store.write({**RULES, "keep_s": {"no helmet": 3600.0}})
    store.write(event(1, rule="visitor"))
    store.write(event(2, rule="no helmet"))
    store.write(event(3, "begin", rule="visitor"))  # goes on
    store.write(make_history_record(TrackPath("door", 7, "person", 0, 1, 0.9, ())))
    store.flush()
    time.sleep(0.3)
    assert store.prune() == 1
    assert ids(store) == ["e3", "e2"]
    store.close()


def test_retention_holds_for_what_was_stored_before_it(tmp_path: Path) -> None:
    with closing(EventStore(tmp_path)) as store:
        store.write({**RULES, "keep_s": {"no helmet": 3600.0, "visitor": 3600.0}})
        store.write(event(1, rule="no helmet"))
        store.write({**RULES, "keep_s": {"no helmet": 3600.0}})
        store.write(event(2, rule="visitor"))
        store.flush()
    time.sleep(0.1)
    with closing(EventStore(tmp_path, keep_s=0.05)) as store:
        store.prune()  # the store does so by itself, too
        assert ids(store) == ["e1"]


def test_retention_by_size_deletes_the_oldest(tmp_path: Path) -> None:
    store = EventStore(tmp_path, max_bytes=250)
    for number in range(5):
        store.write(event(number))
        if number != 1:
            put(store, f"e{number}.jpg", 100)
            store.note_media(f"e{number}", "snapshot")
    assert store.prune() <= 2  # the store does so by itself, too
    assert ids(store) == ["e4", "e3", "e1"]
    assert sorted(path.name for path in store.media_folder.iterdir()) == ["e3.jpg", "e4.jpg"]
    store.close()


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    store = EventStore(tmp_path)
    with pytest.raises(StoreError, match="another process is using this event store"):
        EventStore(tmp_path)
    store.close()
    store.close()
    EventStore(tmp_path).close()


def test_one_bad_record_costs_no_other(store: EventStore, caplog: pytest.LogCaptureFixture) -> None:
    store.write({"type": "end", "rule": "x", "stream": "y"})
    for number in range(3):
        store.write(event(number))
    store.flush()
    assert len(ids(store)) == 3
    assert "could not be stored" in caplog.text


WRITER = """
import json, sys, time
from pathlib import Path
from saccade.pipeline.events.storage.database import migrate
from saccade.pipeline.events.storage.store import EventStore
from tests.pipeline.events.storage.test_store import event, put
store = EventStore(Path(sys.argv[1]))
number = 0
while True:
    store.write(event(number, "begin", has_clip=True, clip="x"))
    (store.media_folder / f"e{number}.mp4.part").write_bytes(b"x" * 9999)
    if number % 3:
        (store.media_folder / f"e{number}.mp4.part").rename(store.media_folder / f"e{number}.mp4")
    if number % 3 == 2:
        store.note_media(f"e{number}", "clip")
    if number % 2:
        store.write(event(number, has_clip=True, clip="x"))
    if number % 7 == 3:
        store.delete(f"e{number - 1}")
    store.flush()
    print(number, flush=True)
    number += 1
"""


@pytest.mark.parametrize("after", [1, 4, 11])
def test_a_kill_loses_nothing_that_was_stored(tmp_path: Path, after: int) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPO, env=environment(), text=True) as process:
        assert process.stdout is not None
        stored = -1
        while stored < after:
            stored = int(process.stdout.readline())
        time.sleep(0.0007 * after)  # wherever it is then
        os.kill(process.pid, signal.SIGKILL)
        stored = max([stored, *map(int, process.stdout.read().split())])
    # What the loop did when it was killed may be stored, or not: the next event, and the deletion of the last.
    deleted = {f"e{number - 1}" for number in range(stored + 1) if number % 7 == 3}
    written = {f"e{number}" for number in range(stored + 1)} - deleted
    kept = written - ({f"e{stored}"} if (stored + 1) % 7 == 3 else set())
    with closing(EventStore(tmp_path)) as store:
        found = {one["id"]: one for one in store.search(EventQuery(limit=500))}
        media = {path.name for path in store.media_folder.iterdir()}
    assert kept <= found.keys() <= written | {f"e{stored + 1}"}
    assert all(one["end_time"] is not None for one in found.values())
    assert media == {f"{name}.mp4" for name, one in found.items() if one["has_clip"]}
    assert {f"{name}.mp4" for name in kept if int(name[1:]) % 3} <= media
    assert json.loads(json.dumps(found))


def test_events_that_may_go_on_are_left_open(tmp_path: Path) -> None:
    with closing(EventStore(tmp_path)) as store:
        store.write(event(1))
        store.write(event(2, "begin", has_clip=True, clip="x"))
        store.write(event(3, "begin"))
    (tmp_path / "media" / "e2.mp4.part").write_bytes(b"x")  # which a worker is writing
    with closing(EventStore(tmp_path, keep_open=True)) as store:
        assert [(one["id"], one["end_time"]) for one in store.going_on()] == [("e2", None), ("e3", None)]
        assert store.going_on()[0]["has_clip"]
    assert (tmp_path / "media" / "e2.mp4.part").exists()
    with closing(EventStore(tmp_path)) as store:
        assert store.going_on() == []
        assert not store.search(EventQuery())[1]["has_clip"]
    assert not (tmp_path / "media" / "e2.mp4.part").exists()


class SmallDisk(EventStore):
    """A store on a disk that is full at some pages, of which there may be more later."""

    def __init__(self, folder: Path) -> None:
        self.connections: list[sqlite3.Connection] = []
        super().__init__(folder)

    def _connect(self) -> sqlite3.Connection:
        self.connections.append(super()._connect())
        self.connections[-1].execute("PRAGMA max_page_count = 64")
        return self.connections[-1]


def test_a_full_disk_is_waited_for_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.pipeline.events.storage.store._RETRY_S", 0.05)
    store = SmallDisk(tmp_path)
    for number in range(300):
        store.write(event(number))
        store.write({**event(number), "type": "update", "top_score": 0.5})
    with pytest.raises(StoreError, match="the store cannot be written"):
        store.flush()
    stored = len(ids(store, limit=500))
    assert stored < 300
    for connection in store.connections:
        with suppress(sqlite3.ProgrammingError):  # some are closed
            connection.execute("PRAGMA max_page_count = 100000")
    deadline = time.monotonic() + LONG_S
    while len(ids(store, limit=500)) < 300:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    store.flush()
    assert store.get("e299")["top_score"] == 0.5  # type: ignore[index]
    store.close()
    warned = [record.message for record in caplog.records]
    assert warned == [
        f"{tmp_path}/events.db: cannot store events: database or disk is full; "
        "events stay in memory until the disk is writable again",
        f"{tmp_path}/events.db: the disk is writable again; 0 event changes were dropped",
    ]


def test_a_full_disk_is_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with full_disk(tmp_path / "disk") as disk, closing(EventStore(disk.folder, max_bytes=100_000)) as store:
        if not disk.mounted:
            pytest.skip("no disk can be mounted here")
        store.flush()  # it is pruned after the first batch, and not for a minute then
        for number in range(5):
            store.write(event(number))
            put(store, f"e{number}.jpg", 50_000)
            store.note_media(f"e{number}", "snapshot")
        store.flush()
        disk.fill()
        monkeypatch.setattr("saccade.pipeline.events.storage.store.PRUNE_S", 0.0)
        store.write(event(5))  # which waits
        wait_for(lambda: ids(store) == ["e5", "e4", "e3"])
        assert sorted(path.name for path in store.media_folder.iterdir()) == ["e3.jpg", "e4.jpg"]


def test_what_a_full_disk_keeps_out_to_the_end_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SmallDisk(tmp_path)
    for number in range(300):
        store.write(event(number))
    store.close()
    kept = EventStore(tmp_path)
    stored = len(ids(kept, limit=500))
    kept.close()
    assert caplog.records[-1].message == f"{tmp_path}/events.db: {300 - stored} event changes could not be stored"
