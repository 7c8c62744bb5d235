"""Events that go on from one worker to the next: rules that are watched here, then there, with the records between."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.pipeline.control.open_events import MISSED, OpenEvents
from saccade.pipeline.events.machine import RESUME_S, SETTLE_S, RuleMachine
from saccade.pipeline.events.record import make_event_record, read_event
from saccade.pipeline.events.scene import Scene
from saccade.pipeline.events.settings import RuleSettings
from tests.pipeline.events.scripted import scene

SEEN_S = 1.0  # between two reports of when events were seen


class Desk:
    """A rule in a stream that one worker after the other has, and what became of its events."""

    def __init__(self, when: str, **values: Any) -> None:
        self.rule = RuleSettings.model_validate({"name": "rule", "when": when, **values})
        self.records: list[dict[str, Any]] = []
        self.known = OpenEvents(lambda record, machine: self.records.append(dict(record)))
        self.made = 0
        self.machine = self._open()

    def _open(self) -> RuleMachine:
        def chance() -> float:
            self.made += 1
            return self.made % 36 / 36

        resumed = [read_event(record) for record in self.known.of("door")]  # of one rule, the last one
        assert len(resumed) <= 1
        return RuleMachine(self.rule, "door", chance=chance, resumed=next(iter(resumed), None))

    def show(self, one: Scene) -> None:
        for change in self.machine.step(one):
            self.known.take(make_event_record(change))
        event = self.machine.event
        self.known.see("door", {} if event is None else {event.id: event.frame_time})

    def move(self) -> None:
        """The worker is killed, and another has the stream."""
        self.known.leave("door")
        self.machine = self._open()

    def steps(self) -> list[tuple[str, float]]:
        return [(one["type"], one["end_time"] or one["frame_time"]) for one in self.records]

    def ids(self) -> int:
        return len({one["id"] for one in self.records})


def there(t: float, present: bool = True, number: int = 1, since: float = 0.0) -> Scene:
    """At a time of capture, whatever the stream's own time is: that begins with each worker."""
    return scene(t, {number: "person"} if present else {}, inside={"hall": {number: t - since} if present else {}})


WHEN = ["person in hall for 5s", "person for 5s", "count of person > 0 for 5s", "absent for 5s"]


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("away_s", [1, RESUME_S - 1])
def test_an_event_goes_on_under_its_id(when: str, away_s: float) -> None:
    holds = "absent" not in when
    desk = Desk(when)
    for t in range(10):
        desk.show(there(t, holds))
    desk.move()
    begin = 9 + away_s
    for t in range(12):
        desk.show(there(begin + t, holds, number=5, since=begin))
    desk.show(there(begin + 12, not holds))
    assert desk.steps() == [("begin", 1005), ("update", 1000 + begin), ("end", 1000 + begin + 11)]
    assert desk.ids() == 1


TABLE = {
    "it was away for too long": ([RESUME_S + 1], [], [("end", 1009)]),
    "it came back, and nobody was there": ([], [1, 3, 5, 6.5, 7], [("end", 1009)]),
    "one was found after a while": ([4], [1, 3], [("update", 1013)]),
    "one was found too late": ([1 + SETTLE_S + 2], [1, 1 + SETTLE_S + 1], [("end", 1009)]),
    "its clock is a little behind": ([-2], [], [("update", 1007)]),
    "its clock is another": ([-500], [], [("end", 1009)]),
}


@pytest.mark.parametrize("case", TABLE)
def test_what_becomes_of_an_event_on_another_worker(case: str) -> None:
    seen, empty, expected = TABLE[case]
    desk = Desk("person in hall for 5s", cooldown="1h")
    for t in range(10):
        desk.show(there(t))
    desk.move()
    for t in sorted([*seen, *empty]):
        desk.show(there(9 + t, t in seen, since=9 + min(seen, default=0)))
    assert desk.steps()[1:] == expected


def test_a_crossing_goes_on_nowhere() -> None:
    desk = Desk("person crosses gate")
    desk.show(scene(0, {1: "person"}, crossed={"gate": {1: "forward"}}))
    desk.move()
    desk.show(scene(1, {1: "person"}))
    desk.show(scene(2, {1: "person"}, crossed={"gate": {1: "forward"}}))
    assert [kind for kind, _ in desk.steps()] == ["begin", "end", "begin"]


def test_what_was_found_and_answered_is_kept() -> None:
    desk = Desk("person in hall")
    desk.show(there(0))
    (record,) = desk.known.of("door")
    kept = {"answers": {"q?": "yes"}, "attributes": {"colour": "red"}, "sub_label": "red", "top_score": 0.99}
    desk.known.take({**record, **kept, "type": "update", "snapshot": "/s.jpg", "clip": "/c.mp4"})
    desk.move()
    desk.show(there(1, number=7))
    last = desk.records[-1]
    assert {name: last[name] for name in kept} == kept
    assert (last["type"], last["tracks"], last["snapshot"], last["clip"]) == ("update", [1, 7], "/s.jpg", "/c.mp4")


def test_a_record_is_read_as_it_was_written() -> None:
    desk = Desk("person in hall")
    desk.show(there(0))
    record = desk.records[0]
    assert make_event_record(desk.machine.end()[0])["id"] == record["id"]
    again = desk.machine
    again.step(there(1))
    assert again.event is not None
    assert read_event(make_event_record(again.step(there(9, number=2))[0])) == again.event


def test_a_stream_that_ends_leaves_nothing_open() -> None:
    desk = Desk("person in hall")
    desk.show(there(0))
    desk.show(there(7))  # no update, but seen
    assert desk.known.streams == {"door"}
    assert desk.known.end("door") == 1
    assert desk.known.end("door") == 0
    assert desk.steps() == [("begin", 1000), ("end", 1007)]
    assert desk.known.of("door") == []


@pytest.mark.parametrize(("back_s", "kinds"), [(9, []), (10, ["begin"])])
def test_a_cooldown_goes_on(back_s: float, kinds: list[str]) -> None:
    desk = Desk("person in hall", cooldown="10s")
    desk.show(there(0))
    desk.show(there(1))
    desk.show(there(2, False))  # it has ended at 1
    desk.move()
    desk.show(there(3))
    desk.show(there(1 + back_s))
    assert [kind for kind, _ in desk.steps()[2:]] == kinds


def test_files_that_were_not_whole_are_reported_once() -> None:
    heard: list[dict[str, Any]] = []
    known = OpenEvents(lambda record, machine: heard.append(dict(record)))
    desk = Desk("person in hall")
    desk.show(there(0))
    first = {**desk.records[0], "has_snapshot": True, "has_clip": True}
    known.take({**first, "id": "ended"})
    known.take({**first, "id": "ended", "type": "end", "end_time": 1001})
    known.take({"type": "media", "stream": "door", "event": "ended", "kind": "snapshot", "path": "x"})
    known.take({**first, "id": "open"})
    del heard[:]
    known.leave("door")
    assert heard == [{"type": "media", "stream": "door", "event": "ended", "kind": "clip", "path": None}]
    known.end("door")
    assert [(one["type"], one.get("event"), one.get("kind")) for one in heard[1:2]] == [("end", None, None)]
    assert {(one["event"], one["kind"]) for one in heard[2:]} == {("open", "snapshot"), ("open", "clip")}


def test_a_lost_end_leaves_one_event_of_a_rule() -> None:
    desk = Desk("person in hall")
    desk.show(there(0))
    desk.known.take({**desk.records[0], "id": "next"})
    assert [(one["type"], one["id"] == "next") for one in desk.records[1:]] == [("end", False), ("begin", True)]
    assert [one["id"] for one in desk.known.of("door")] == ["next"]


def test_events_of_the_last_process_are_taken_over() -> None:
    desk = Desk("person in hall")
    desk.show(there(0))
    heard: list[dict[str, Any]] = []
    known = OpenEvents(lambda record, machine: heard.append(dict(record)))
    known.load([{**desk.records[0], "has_snapshot": True}], "north")
    known.load([{**desk.records[0], "has_snapshot": True}], "south")
    assert known.streams == {"door"}
    assert len(known.of("door")) == 1
    known.end("door")
    assert [(one["type"], one.get("kind")) for one in heard] == [("end", None), ("media", "snapshot")]


def test_an_event_is_stored_where_it_began() -> None:
    heard: list[tuple[str, str, str]] = []
    known = OpenEvents(lambda record, machine: heard.append((record["type"], record.get("id", ""), machine)))
    desk = Desk("person in hall")
    desk.show(there(0))
    one = {**desk.records[0], "has_snapshot": True}
    media = {"type": "media", "stream": "door", "event": "a", "kind": "snapshot", "path": None}
    known.load([{**one, "id": "b", "rule": "other"}], "east")
    known.take({**one, "id": "a"}, "north")
    known.take({**one, "id": "a", "type": "update"}, "south")
    known.take({**one, "id": "a", "type": "end", "end_time": 1001}, "south")
    known.take(media, "south")
    known.take({**one, "id": "a2"}, "south")
    known.take({"type": "minute", "stream": "door"}, "south")
    known.end("door")
    places = [("begin", "a"), ("update", "a"), ("end", "a"), ("media", "")]
    assert heard[:4] == [(*place, "north") for place in places]
    assert heard[4:6] == [("begin", "a2", "south"), ("minute", "", "south")]
    assert set(heard[6:8]) == {("end", "b", "east"), ("end", "a2", "south")}
    assert set(heard[8:]) == {("media", "", "east"), ("media", "", "south")}
    assert known._homes == {}


def test_an_event_of_the_last_process_stays_in_its_store() -> None:
    """Its worker tells of it before the store that has its begin was loaded."""
    heard: list[tuple[str, str, str]] = []
    stores = {"a": "north", "b": ""}
    known = OpenEvents(lambda record, machine: heard.append((record["type"], record["id"], machine)), stores.get)
    desk = Desk("person in hall")
    desk.show(there(0))
    for name in ("a", "b", "c"):
        one = {**desk.records[0], "id": name, "rule": name}
        known.take({**one, "type": "update"}, "south")
        known.load([one], stores.get(name, "south"))
        known.take({**one, "type": "end", "end_time": 1001}, "south")
    homes = {"a": "north", "b": "", "c": "south"}
    assert heard == [(kind, name, home) for name, home in homes.items() for kind in ("update", "end")]


def test_a_begin_that_is_sent_twice_begins_one_event() -> None:
    heard: list[tuple[str, str, str]] = []
    known = OpenEvents(lambda record, machine: heard.append((record["type"], record["id"], machine)))
    desk = Desk("person in hall")
    desk.show(there(0))
    one = {**desk.records[0], "id": "a"}
    known.take(one, "north")
    known.take(one, "south")
    known.take({**one, "type": "end", "end_time": 1001}, "south")
    assert heard == [("begin", "a", "north"), ("begin", "a", "north"), ("end", "a", "north")]


def test_an_event_that_its_worker_does_not_report_is_ended() -> None:
    desk = Desk("person in hall")
    desk.show(there(0))
    (record,) = desk.known.of("door")
    for _ in range(MISSED - 1):
        desk.known.see("door", {})
    desk.known.see("door", {record["id"]: 1007.0})
    for _ in range(MISSED - 1):
        desk.known.see("door", {})
    assert len(desk.records) == 1
    desk.known.see("door", {})
    assert desk.steps() == [("begin", 1000), ("end", 1007)]
    assert desk.known.streams == set()


STEP = st.tuples(st.sampled_from(["frame", "frame", "frame", "move", "stop"]), st.floats(0.05, 8.0), st.booleans())


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=40), st.sampled_from([*WHEN, "person crosses gate", "person in hall"]), st.booleans())
def test_each_event_begins_and_ends_once(steps: list[tuple[str, float, bool]], when: str, cooled: bool) -> None:
    desk = Desk(when, cooldown="3s" if cooled else 0)
    t, since = 0.0, 0.0
    for what, passed, present in steps:
        t += passed
        if what == "frame":
            crossed = {"gate": {1: "forward"}} if present else {}
            one = there(t, present, since=since)
            since = since if present else t
            desk.show(scene(t, {1: "person"}, crossed=crossed) if "crosses" in when else one)
        elif what == "move":
            since = t
            desk.move()
        else:  # its stream is removed, and added again
            desk.known.end("door")
            desk.machine = desk._open()
    desk.known.end("door")
    kinds: dict[str, list[str]] = {}
    for record in desk.records:
        kinds.setdefault(record["id"], []).append(record["type"])
    for of_one in kinds.values():
        assert (of_one[0], of_one[-1]) == ("begin", "end")
        assert Counter(of_one)["begin"] == Counter(of_one)["end"] == 1
    ends = [one for one in desk.records if one["type"] == "end"]
    assert all(one["end_time"] >= one["start_time"] for one in ends)
    began = [one["start_time"] for one in ends]
    assert began == sorted(began)
    rest_s = 3.0 if cooled and not any(what == "stop" for what, _, _ in steps) else 0.0
    for first, second in itertools.pairwise(ends):
        assert first["end_time"] + rest_s <= second["start_time"] + 0.002
