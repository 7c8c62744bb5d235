"""The stage that watches rules, behind the one that tracks and counts."""

from __future__ import annotations

import threading

import pytest

from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.settings import AnalyticsSettings
from saccade.pipeline.events.hub import EventHub
from saccade.pipeline.events.record import Change, RuleList
from saccade.pipeline.events.settings import EventSettings, RuleSettings
from saccade.pipeline.events.stage import EventStage
from tests.pipeline.events.scripted import straight, walk

PLACES = AnalyticsSettings.model_validate({"zones": {"right": "0.6,0,1,0,1,1,0.6,1"}, "lines": {"middle": ".5,1,.5,0"}})
ACROSS = {"person": straight((0.1, 0.9), (0.9, 0.9), 0, 8)}  # at x = 0.6 after 5 s


def rules(*texts: str) -> list[RuleSettings]:
    return EventSettings.model_validate({"rules": list(texts)}).rules


def run(stage: EventStage, ways: dict, seconds: float) -> None:  # type: ignore[type-arg]
    analyze = AnalyzeStage(PLACES)
    for frame, result in walk(ways, seconds):
        stage.process(frame, analyze.process(frame, result))


def test_a_walk_makes_the_events_of_every_rule() -> None:
    heard: list[Change | RuleList] = []
    stage = EventStage(rules("enters=person in right for 1s", "passes=any crosses middle", "dogs=dog"), heard.append)
    run(stage, ACROSS, 12)
    assert stage.begun == 2
    assert EventStage([], heard.append).begun is None
    assert heard[0] == RuleList("door", ("enters", "passes", "dogs"))
    steps = [(one.event.rule, one.kind, one.event.frame_time - 1.7e9) for one in heard[1:] if isinstance(one, Change)]
    assert steps == [
        ("passes", "begin", pytest.approx(4.2, abs=0.11)),
        ("passes", "end", pytest.approx(4.2, abs=0.11)),
        ("enters", "begin", pytest.approx(6.0, abs=0.11)),
        ("enters", "end", pytest.approx(8.0)),
    ]


@pytest.mark.parametrize("settings", [{}, {"confirm": "3 of 5"}])
@pytest.mark.parametrize("when", ["person in right for 1s", "person for 1s"])
def test_an_event_begins_after_for_from_when_its_condition_held(when: str, settings: dict[str, str]) -> None:
    heard: list[Change | RuleList] = []
    rule = RuleSettings.model_validate({"name": "enters", "when": when, **settings})
    run(EventStage([rule], heard.append), {"person": lambda t: (0.8, 0.9)}, 3)
    (event,) = [one.event for one in heard if isinstance(one, Change) and one.kind == "begin"]
    assert event.start_time - event.since == pytest.approx(1.0)


def test_rules_are_replaced_while_it_runs() -> None:
    heard: list[Change | RuleList] = []
    stage = EventStage(rules("a=person", "b=person"), heard.append)
    analyze = AnalyzeStage(PLACES)
    for number, (frame, result) in enumerate(walk(ACROSS, 4)):
        if number == 20:
            stage.configure(EventSettings(rules=rules("b=person", "c=person for 3s")))
        stage.process(frame, analyze.process(frame, result))
    stage.close()
    steps = [(one.event.rule, one.kind) for one in heard if isinstance(one, Change)]
    assert steps == [("a", "begin"), ("b", "begin"), ("a", "end"), ("c", "begin"), ("b", "end"), ("c", "end")]
    assert [one.rules for one in heard if isinstance(one, RuleList)] == [("a", "b"), ("b", "c")]


def test_the_hub_keeps_order_and_survives_a_listener() -> None:
    hub = EventHub()
    heard: list[tuple[str, str]] = []
    elsewhere: list[str] = []

    def fail(record: object) -> None:
        raise OSError("disk full")

    hub.add(fail)
    remove = hub.add(lambda record: heard.append((record["type"], record.get("rule", ""))))
    hub.add(lambda record: elsewhere.append(record["type"]), "yard")
    stage = EventStage(rules("a=person", "b=person for 1s"), hub.publish, flush=hub.flush)
    run(stage, ACROSS, 3)
    stage.close()
    assert heard == [("rules", ""), ("begin", "a"), ("begin", "b"), ("end", "a"), ("end", "b")]
    assert elsewhere == []
    remove()
    run(EventStage(rules("a=person"), hub.publish), ACROSS, 1)
    hub.close()
    hub.close()
    assert len(heard) == 5
    assert not [thread for thread in threading.enumerate() if thread.name == "saccade events"]


def test_a_listener_that_hangs_delays_no_frame() -> None:
    hub, gate = EventHub(), threading.Event()
    hub.add(lambda record: gate.wait(30) and None)
    run(EventStage(rules("a=person"), hub.publish), ACROSS, 3)  # would take half a minute
    assert not hub.flush(0.01)
    gate.set()
    hub.close()


def test_how_each_rule_is_doing_can_be_read() -> None:
    stage = EventStage(rules("enters=person in right for 1s", "dogs=dog"), lambda change: None)
    assert stage.states == []
    run(stage, ACROSS, 5.5)
    assert [(one.name, one.holds, one.event, one.p_yes) for one in stage.states] == [
        ("enters", False, None, None),
        ("dogs", False, None, None),
    ]
    run(stage, ACROSS, 7)
    enters = stage.states[0]
    assert (enters.holds, bool(enters.event)) == (True, True)
    assert enters.since == pytest.approx(1.7e9 + 6, abs=0.2)


def test_events_go_on_from_one_stage_to_the_next() -> None:
    heard: list[Change | RuleList] = []
    first = EventStage(rules("a=person", "b=person"), heard.append)
    run(first, ACROSS, 2)
    going = [one.event for one in heard if isinstance(one, Change)]
    assert [event.rule for event in going] == ["a", "b"]
    first.moves = True
    first.close()
    assert len(heard) == 3  # nothing has ended
    second = EventStage(rules("a=person"), heard.append)
    second.resume(going)
    run(second, ACROSS, 3)
    second.close()
    steps = [(one.kind, one.event.id) for one in heard[4:] if isinstance(one, Change)]
    a, b = (event.id for event in going)
    assert steps == [("end", b), ("update", a), ("end", a)]


def test_events_of_a_stream_without_frames_are_ended() -> None:
    heard: list[Change | RuleList] = []
    first = EventStage(rules("a=person"), heard.append)
    run(first, ACROSS, 2)
    (event,) = [one.event for one in heard if isinstance(one, Change)]
    third = EventStage(rules("a=person"), heard.append)
    third.resume([event])
    third.close()
    last = heard[-1]
    assert isinstance(last, Change)
    assert (last.kind, last.event.id, last.event.end_time) == ("end", event.id, event.frame_time)
