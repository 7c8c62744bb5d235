"""Objects that move, stand, appear and are removed: tables of boxes, and rules that watch them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.engine.results import Box, Detections, Points, Result
from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.settings import AnalyticsSettings, Regions
from saccade.pipeline.events.machine import RuleMachine
from saccade.pipeline.events.places import MAX_PLACES, Places, has_moved, overlap
from saccade.pipeline.events.scene import SceneReader
from saccade.pipeline.events.settings import RuleSettings, check_places
from saccade.pipeline.settings import PlacedError
from tests.support.sinks.results import live_frame

YARD = AnalyticsSettings.model_validate({"zones": {"yard": "0,0,1,0,1,1,0,1"}})
Scenery = Callable[[float], dict[str, tuple[float, float]]]
"""Centres of objects at a time, by label, or label and number."""


def begins(when: str, where: Scenery, seconds: float, fps: float = 4, pace: float = 1, **more: object) -> list[float]:
    """When events of a rule begin, in seconds; objects are 0.1 wide and 0.2 high, tracked as in a stream.

    The clock begins at 12:00 and is `pace` times as fast as the stream.
    """
    machine = RuleMachine(RuleSettings.model_validate({"name": "rule", "when": when, **more}), "yard")
    began = datetime.fromisoformat("2026-01-01 12:00").timestamp()
    stage, reader, found = AnalyzeStage(YARD, track=True), SceneReader(0.0), []
    for number in range(round(seconds * fps)):
        t = number / fps
        boxes = tuple(
            Box(name.rstrip(" 0123456789"), 0.9, x - 0.05, y - 0.1, x + 0.05, y + 0.1)
            for name, (x, y) in where(t).items()
        )
        frame = live_frame(t).changed(index=number, captured_at=began + pace * t)
        result = stage.process(frame, Result(Detections(boxes, 200, 100), Points((), 200, 100)))
        found += [t for change in machine.step(reader.read(frame, result)) if change.kind == "begin"]
    return found


def parks(t: float) -> dict[str, tuple[float, float]]:
    """A car drives in for 10 s and stands from then on."""
    return {"car": (0.1 + 0.05 * min(t, 10), 0.5)}


def blinks(t: float) -> dict[str, tuple[float, float]]:
    """A car stands, and is not detected for 10 s of every minute, so that it gets a new track ID each time."""
    return {"car": (0.5, 0.5)} if t % 60 < 50 else {}


def leaves(t: float) -> dict[str, tuple[float, float]]:
    """It drives off after 30 s and comes back after 60 s, to stand at the same place."""
    x = 0.2 if t < 30 else 0.2 + 0.05 * (t - 30) if t < 40 else max(0.2, 0.7 - 0.05 * (t - 60)) if t >= 60 else 0.7
    return {"car": (x, 0.5)} if t < 40 or t >= 60 else {}


def taken(t: float) -> dict[str, tuple[float, float]]:
    """A parcel is put down at 10 s and taken away at 60 s."""
    return {"parcel": (0.5, 0.5)} if 10 <= t < 60 else {}


def hidden(t: float) -> dict[str, tuple[float, float]]:
    """A person stands in front of a parcel from 20 s to 60 s."""
    return {"person": (0.5, 0.5)} if 20 <= t < 60 else {"parcel": (0.5, 0.5)}


TABLE = {
    "a car that drives moves": ("car moving", parks, 60, {}, [2.0]),
    "a car that stands does not move": ("car moving in yard", blinks, 150, {}, []),
    "a car that parks is stationary 10 s after its last move": ("car stationary in yard", parks, 60, {}, [18.25]),
    "the time counts from its arrival": ("car stationary for 30s", parks, 60, {}, [38.25]),
    "a car that gets new track IDs alarms once": ("car stationary in yard for 20s", blinks, 130, {}, [20.0]),
    "a cooldown does not repeat it": ("car stationary for 20s", blinks, 130, {"cooldown": "1s"}, [20.0]),
    "a car that comes back alarms again": ("car stationary", leaves, 100, {}, [10.0, 78.5]),
    "what was there at the beginning has not appeared": ("car appeared", blinks, 150, {}, []),
    "a parcel appears once": ("parcel appeared in yard", taken, 100, {}, [10.25]),
    "a parcel appears for a time": ("parcel appeared in yard for 8s", taken, 100, {}, [18.25]),
    "a parcel is removed": ("parcel removed from yard", taken, 100, {}, [65.0]),
    "a parcel is removed for longer": ("parcel removed for 20s", taken, 100, {}, [80.0]),
    "one that is covered is not removed": ("parcel removed", hidden, 100, {}, []),
    "a car that drives off is removed at once": ("car removed from yard", leaves, 50, {}, [32.0]),
    "a passer-by is not removed": ("person removed", lambda t: {"person": (0.02 * t, 0.5)}, 60, {}, []),
    "another label is not removed": ("person removed", taken, 100, {}, []),
}


@pytest.mark.parametrize("name", TABLE)
def test_rules_know_what_moves_and_stands(name: str) -> None:
    when, where, seconds, more, expected = TABLE[name]
    found = begins(when, where, seconds, **more)
    assert found == pytest.approx(expected, abs=0.6), found


def test_a_parked_car_alarms_once_and_not_every_night() -> None:
    """In two days of 240 s: `in` repeats, `stationary` does not."""
    night, days = "between 22:00 and 06:00", 2 * 240
    car = lambda t: {"car": (0.5, 0.5)}  # noqa: E731
    assert len(begins(f"car in yard {night}", car, days, fps=2, pace=360)) == 2
    assert len(begins(f"car stationary in yard for 20s {night}", car, days, fps=2, pace=360)) == 1


@pytest.mark.parametrize(("confirm", "expected"), [(None, 1), ("2 of 5", 1), ("3 of 5", 0), ("3 of 30", 1)])
def test_a_flicker_is_not_confirmed(confirm: str | None, expected: int) -> None:
    """A person that is detected on every third frame, as a curtain in the wind may be."""
    flickers = lambda t: {"person": (0.5, 0.5)} if round(4 * t) % 3 == 0 else {}  # noqa: E731
    assert len(begins("person", flickers, 20, confirm=confirm)) == expected


def test_what_is_confirmed_stays_so() -> None:
    late = lambda t: {} if 10 <= t < 10.5 else {"person": (0.5, 0.5)}  # noqa: E731
    assert begins("person for 2s", late, 20, confirm="4 of 4") == [2.0]


@pytest.mark.parametrize("text", ["3", "0 of 3", "4 of 3", "3 of 65", "three of five"])
def test_a_wrong_confirmation_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="confirm must be N of M frames"):
        RuleSettings(name="rule", when="person", confirm=text)


@pytest.mark.parametrize("key", ["ask", "verify"])
def test_nothing_is_asked_about_a_removed_object(key: str) -> None:
    with pytest.raises(ValueError, match="cannot be used with the condition 'removed'"):
        RuleSettings.model_validate({"name": "rule", "when": "parcel removed", key: "Is it there?"})


corners = st.tuples(*[st.floats(0, 0.8), st.floats(0, 0.8), st.floats(0.01, 0.2), st.floats(0.01, 0.2)]).map(
    lambda one: (one[0], one[1], one[0] + one[2], one[1] + one[3])
)


@given(corners, corners)
def test_an_object_has_moved_when_its_boxes_are_apart(old: tuple, new: tuple) -> None:  # type: ignore[type-arg]
    assert not has_moved(old, old)
    assert overlap(old, old) == pytest.approx(1)
    assert not (has_moved(old, new) and overlap(old, new) > 0.6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.dictionaries(st.integers(1, 200), corners, max_size=100), min_size=2, max_size=12))
def test_places_are_bounded_and_belong_to_one_object_each(frames: list[dict]) -> None:  # type: ignore[type-arg]
    places = Places()
    for number, boxes in enumerate(frames):
        seen = {track: ("car", box) for track, box in boxes.items()}
        places.update(6.0 * number, seen, seen)
        assert len(places.places) <= MAX_PLACES
        rests = [places.of(track) for track in seen]
        assert all(rest is not None and rest.since_s <= 6.0 * number for rest in rests)
        standing = [rest.place for rest in rests if rest is not None]
        assert len(set(standing)) == len(standing)


def test_a_rule_in_a_zone_that_excludes_is_refused() -> None:
    zones = {"bush": {"polygon": "0,0,1,0,1,1,0,1", "exclude": True}}
    rules = [RuleSettings(name="visitor", when="person in bush")]
    with pytest.raises(PlacedError, match="zone 'bush' excludes objects, so the rule can never match"):
        check_places(rules, Regions.model_validate({"zones": zones}))
