"""One rule as a state machine: tables of scenes, and the events that they make."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import time

import pytest

from saccade.pipeline.events.machine import GAP_S, RuleMachine
from saccade.pipeline.events.record import Change, make_event_record
from saccade.pipeline.events.scene import Scene
from saccade.pipeline.events.settings import RuleSettings
from tests.pipeline.events.scripted import scene
from tests.support.sinks.rule_events import BEGIN


def machine(when: str, **settings: object) -> RuleMachine:
    rule = RuleSettings.model_validate({"name": "rule", "when": when, **settings})
    return RuleMachine(rule, "door", {"people": ("person",)}, chance=lambda: 0.0)


def steps(rule: RuleMachine, scenes: Iterable[Scene]) -> list[tuple[float, str, tuple[int, ...]]]:
    """Time of the scene, kind of the change and tracks of the event."""
    return [(one.seconds, change.kind, change.event.tracks) for one in scenes for change in rule.step(one)]


def visit(seconds: float, *tracks: int, zone: str = "hall", since: float = 0.0, label: str = "person") -> Scene:
    return scene(seconds, dict.fromkeys(tracks, label), inside={zone: dict.fromkeys(tracks, seconds - since)})


def gate(seconds: float, crossed: dict[int, str] | None = None) -> Scene:
    return scene(seconds, {1: "person", 2: "person", 3: "dog"}, crossed={"gate": crossed or {}})


def test_an_event_without_end_lists_its_newest_tracks() -> None:
    watched = machine("person")
    changes = [change for n in range(1500) for change in watched.step(scene(n / 10, {n: "person"}, first_s=n / 10))]
    assert len(changes) == 1500
    assert changes[-1].event.tracks == tuple(range(500, 1500))


TABLE = {
    "begins after its time and ends when it holds no more": (
        machine("person in hall for 2s"),
        [visit(0, 1), visit(1, 1), visit(2, 1), visit(3, 1), scene(4), scene(5)],
        [(2, "begin", (1,)), (4, "end", (1,))],
    ),
    "another label or zone is none": (
        machine("person in hall"),
        [visit(0, 1, label="dog"), visit(1, 1, zone="yard"), scene(2, {1: "person"})],
        [],
    ),
    "a label is what the model calls it": (machine("people in hall"), [visit(0, 1)], [(0, "begin", (1,))]),
    "a second object joins the event": (
        machine("person in hall"),
        [visit(0, 1), visit(1, 1, 2), visit(2, 2), scene(3)],
        [(0, "begin", (1,)), (1, "update", (1, 2)), (3, "end", (1, 2))],
    ),
    "a cooldown begins with the end": (
        machine("person in hall", cooldown="10s"),
        [visit(0, 1), scene(2), visit(5, 1, since=5), visit(11.9, 1), visit(12, 1), scene(13)],
        [(0, "begin", (1,)), (2, "end", (1,)), (12, "begin", (1,)), (13, "end", (1,))],
    ),
    "presence counts from the first frame": (
        machine("person for 3s"),
        [scene(t, {1: "person"}) for t in (0, 1, 2, 3)] + [scene(4)],
        [(3, "begin", (1,)), (4, "end", (1,))],
    ),
    "a crossing lasts for a frame": (
        machine("person crosses gate"),
        [gate(0), gate(1, {1: "forward"}), gate(2), gate(3, {1: "backward", 3: "forward"}), gate(4)],
        [(1, "begin", (1,)), (2, "end", (1,)), (3, "begin", (1,)), (4, "end", (1,))],
    ),
    "a crossing in the other direction is none": (
        machine("person crosses gate outward"),
        [gate(0), gate(1, {1: "forward"}), gate(2, {2: "backward"}), gate(3)],
        [(2, "begin", (2,)), (3, "end", (2,))],
    ),
    "a count must hold for its time without a break": (
        machine("count of person in hall > 1 for 2s"),
        [visit(0, 1, 2), visit(1, 1, 2), visit(1.5, 1), visit(2, 1, 2), visit(4, 1, 2), visit(5, 1, 2, 3), visit(6, 1)],
        [(4, "begin", (1, 2)), (5, "update", (1, 2, 3)), (6, "end", (1, 2, 3))],
    ),
    "a count of none has no tracks": (
        machine("count < 1 for 1s"),
        [scene(0), scene(1), scene(2, {1: "cat"})],
        [(1, "begin", ()), (2, "end", ())],
    ),
    "absence counts from when one was seen last": (
        machine("person absent from hall for 3s"),
        [visit(0, 1), visit(1, 1), scene(2), scene(3), scene(4), scene(5), visit(6, 2, since=6)],
        [(4, "begin", ()), (6, "end", ())],
    ),
    "absence counts from the first frame where nobody was": (
        machine("absent for 3s"),
        [scene(5), scene(7), scene(8)],
        [(8, "begin", ())],
    ),
    "nobody is absent from a zone that is removed": (
        machine("person absent from hall for 3s"),
        [visit(0, 1), *(scene(t, inside={}) for t in (1, 3, 5, 7)), scene(8), scene(10), scene(11)],
        [(11, "begin", ())],
    ),
    "an event ends when its zone is removed": (
        machine("count in hall < 2"),
        [visit(0, 1), visit(1, 1), scene(2, inside={}), scene(3, inside={})],
        [(0, "begin", (1,)), (2, "end", (1,))],
    ),
    "a signal of the camera begins and ends an event": (
        machine("camera reports motion for 1s"),
        [
            visit(0, 1),
            *(scene(t, {1: "person"}, signals=["motion"]) for t in (1, 1.5)),
            scene(1.8, signals=["input"]),
            *(scene(t, signals=["motion"]) for t in (2, 2.5, 3, 3.5)),
            scene(4),
        ],
        [(3, "begin", ()), (4, "end", ())],
    ),
    "what is hidden for a moment is still there": (
        machine("person in hall"),
        [visit(0, 1), scene(1, {1: "person"}, inside={"hall": {1: 1.0}}, hidden=[1]), visit(2, 1)],
        [(0, "begin", (1,))],
    ),
    "only at night": (
        machine("any between 22:00 and 06:00"),
        [
            scene(0, {1: "cat"}, clock=time(21, 59, 59)),
            scene(1, {1: "cat"}, clock=time(22)),
            scene(2, {1: "cat"}, clock=time(5, 59, 59)),
            scene(3, {1: "cat"}, clock=time(6)),
        ],
        [(1, "begin", (1,)), (3, "end", (1,))],
    ),
    "what was before a gap counts no more": (
        machine("count > 0 for 2s"),
        [scene(0, {1: "cat"}), scene(1 + GAP_S, {1: "cat"}), scene(3 + GAP_S, {1: "cat"})],
        [(3 + GAP_S, "begin", (1,))],
    ),
    "an event ends in a gap": (
        machine("count > 0"),
        [scene(0, {1: "cat"}), scene(1 + GAP_S, {2: "cat"})],
        [(0, "begin", (1,)), (1 + GAP_S, "end", (1,)), (1 + GAP_S, "begin", (2,))],
    ),
    "a clock that begins again ends an event": (
        machine("count > 0", cooldown="1h"),
        [scene(50, {1: "cat"}), scene(0, {2: "cat"})],
        [(50, "begin", (1,)), (0, "end", (1,)), (0, "begin", (2,))],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_scenes_make_events(case: str) -> None:
    rule, scenes, expected = TABLE[case]
    fresh = RuleMachine(rule.rule, "door", {"people": ("person",)})
    assert steps(fresh, scenes) == expected


def test_a_hidden_track_begins_an_event_as_sure_as_before() -> None:
    rule = machine("person in hall for 2s")
    assert rule.step(visit(0, 7)) == []
    hidden = scene(2, {7: "person"}, inside={"hall": {7: 2.0}}, score=0.9, hidden=[7])
    (change,) = rule.step(hidden)
    event = change.event
    assert (event.label, event.score, event.top_score, event.box) == ("person", 0.9, 0.9, None)


def test_the_record_of_an_event() -> None:
    rule = machine("person in hall for 2s")
    changes: list[Change] = []
    for t in (0, 1, 2):
        changes += rule.step(visit(t, 7))
    inside = {"hall": {7: 3.0}, "door": {7: 1.0}}
    changes += rule.step(scene(3, {7: "person"}, inside=inside, score=0.96))
    changes += rule.step(scene(3.5, {7: "person"}, inside=inside, hidden=[7]))
    changes += rule.end()
    first, second, last = (make_event_record(change) for change in changes)
    assert first == {
        **BEGIN,  # what the tests of sinks are given
        "rule": "rule",
        "box": [80.0, 20.0, 120.0, 80.0],
        "box_norm": [0.4, 0.2, 0.6, 0.8],
        "area": 2400,
    }
    assert (second["type"], second["top_score"], second["entered_zones"]) == ("update", 0.96, ["hall", "door"])
    assert (last["type"], last["id"], last["start_time"], last["end_time"]) == ("end", first["id"], 1002.0, 1003.0)
    assert rule.end() == []
