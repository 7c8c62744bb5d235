"""The hub of events where something that takes them hangs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.pipeline.events import hub
from saccade.pipeline.events.record import Change, Event, Kind, MinuteCounts, RuleList

LONG_S = 20  # far beyond what is needed


def event(name: str) -> Event:
    times = {"since": 0.0, "start_time": 0.0, "end_time": None, "frame_time": 0.0}
    place = {"tracks": (), "zones": (), "entered_zones": (), "box": None, "width": 2, "height": 2}
    return Event(
        id=name, rule="r", stream="door", label="", capture_clock="file", score=0, top_score=0, **times, **place
    )  # type: ignore[arg-type]


def test_a_listener_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MAX_WAITING", 4)
    monkeypatch.setattr(hub, "FLUSH_S", 0.05)
    events, go_on = hub.EventHub(), threading.Event()
    events.add(lambda record: bool(go_on.wait()), history=True)
    for start in range(8):
        events.publish(MinuteCounts("door", start, {}))
    ending = threading.Thread(target=events.close, daemon=True)
    ending.start()
    ending.join(LONG_S)
    assert not ending.is_alive()
    assert events.dropped >= 3
    [working] = [thread for thread in threading.enumerate() if thread.name == "saccade events"]
    go_on.set()
    working.join(LONG_S)
    assert not working.is_alive()


def test_what_is_lost_is_counted_and_logged_and_no_end_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub, "MAX_WAITING", 4)
    events, go_on, hanging = hub.EventHub(), threading.Event(), threading.Event()
    got: list[Mapping[str, Any]] = []

    def take(record: Mapping[str, Any]) -> None:
        got.append(record)
        hanging.set()
        go_on.wait()

    events.add(take)
    events.publish(Change("begin", event("early")))
    assert hanging.wait(LONG_S)
    for number in range(10):
        events.publish(Change("begin", event(f"e{number}")))
    for number in range(10):
        events.publish(Change("end", replace(event(f"e{number}"), end_time=1.0)))
    events.publish(Change("update", event("early")))
    events.publish(Change("end", replace(event("early"), end_time=1.0)))
    events.publish(RuleList("door", ("r",), {"r": 5.0}))
    assert events.dropped == 6 + 6 + 1
    go_on.set()
    events.close()
    begun = [f"e{number}" for number in range(4)]
    told = [("begin", "early"), *(("begin", one) for one in begun), *(("end", one) for one in begun), ("end", "early")]
    assert [(one["type"], one["id"]) for one in got[:-1]] == told
    assert got[-1]["type"] == "rules"
    lost = [
        int(one.getMessage().rsplit(" ", 1)[1]) for one in caplog.records if "dropped event changes" in one.getMessage()
    ]
    assert sum(lost) == events.dropped


STEPS = st.lists(st.tuples(st.sampled_from(["begin", "update", "end", "take", "history"]), st.integers(0, 5)))


@given(STEPS, st.integers(1, 4))
def test_who_is_told_of_a_beginning_is_told_of_the_end(steps: list[tuple[str, int]], limit: int) -> None:
    waiting, going, refused = hub.ChangeQueue(limit), set[int](), 0
    told: list[Change] = []

    def put(kind: Kind, number: int) -> None:
        nonlocal refused
        (going.discard if kind == "end" else going.add)(number)
        refused += not waiting.put(Change(kind, event(str(number))))

    for step, number in steps:
        if step == "take":
            if waiting:
                item = waiting.take()
                told += [item] if isinstance(item, Change) else []
        elif step == "history":
            waiting.put(MinuteCounts("door", number, {}))
        elif step == "begin" and number not in going:
            put("begin", number)
        elif step == "update" and number in going:
            put("update", number)
        elif step == "end" and number in going:
            put("end", number)
        assert len(waiting) <= limit + 6
    for number in list(going):
        put("end", number)
    while waiting:
        item = waiting.take()
        told += [item] if isinstance(item, Change) else []
    open_now: set[str] = set()
    for change in told:
        name = change.event.id
        assert (name in open_now) == (change.kind != "begin"), told
        (open_now.discard if change.kind == "end" else open_now.add)(name)
    assert not open_now
    if not refused:
        assert [one.kind for one in told].count("begin") == [one.kind for one in told].count("end")
