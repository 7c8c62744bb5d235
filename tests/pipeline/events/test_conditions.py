"""The language of rules: what is read, and which message a mistake gets, and where."""

from __future__ import annotations

from contextlib import suppress
from datetime import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.pipeline.events.conditions import Condition, parse
from saccade.pipeline.settings import PlacedError

READ = {
    "person": Condition("present", ("person",)),
    "any": Condition("present"),
    "person in door for 10s": Condition("inside", ("person",), "door", for_s=10, place_at=10),
    'car or "traffic light" in "front yard"': Condition("inside", ("car", "traffic light"), "front yard", place_at=26),
    "any in door": Condition("inside", (), "door", place_at=7),
    "person crosses gate": Condition("crosses", ("person",), "gate", place_at=15),
    "person crosses gate outward": Condition("crosses", ("person",), "gate", "backward", place_at=15),
    "any crosses gate INWARD": Condition("crosses", (), "gate", "forward", place_at=12),
    "count > 5": Condition("count", number=5),
    "count of car or bus in lobby <= 2 for 1.5m": Condition(
        "count", ("car", "bus"), "lobby", compare="<=", number=2, for_s=90, place_at=23
    ),
    "person absent from desk for 5m": Condition("absent", ("person",), "desk", for_s=300, place_at=19),
    "absent for 500ms": Condition("absent", for_s=0.5),
    "any between 22:00 and 6:00": Condition("present", between=(time(22), time(6))),
    "person in door for 1h between 08:30 and 17:00": Condition(
        "inside", ("person",), "door", for_s=3600, between=(time(8, 30), time(17)), place_at=10
    ),
    "person moving": Condition("present", ("person",), motion="moving"),
    "car STATIONARY in yard for 5m": Condition("inside", ("car",), "yard", for_s=300, place_at=18, motion="stationary"),
    "any appeared in porch": Condition("inside", (), "porch", place_at=16, motion="appeared"),
    "parcel removed from porch": Condition("removed", ("parcel",), "porch", place_at=20),
    "any removed for 1m": Condition("removed", for_s=60),
    "camera reports motion": Condition("reports", signal="motion", place_at=15),
    'CAMERA reports "input DIN 1" for 2s': Condition("reports", signal="input DIN 1", for_s=2, place_at=15),
    "camera in yard": Condition("inside", ("camera",), "yard", place_at=10),
    "car or camera": Condition("present", ("car", "camera")),
    "moving in removed": Condition("inside", ("moving",), "removed", place_at=10),
    "  PERSON   in\ttür  ": Condition("inside", ("PERSON",), "tür", place_at=14),
}


@pytest.mark.parametrize("text", READ)
def test_conditions_are_read(text: str) -> None:
    assert parse(text) == READ[text]


@pytest.mark.parametrize(
    ("text", "offset", "message"),
    [
        ("", 0, "expected 'absent', 'any', 'count' or a name, got the end"),
        ("camera reports person", 15, 'unknown camera signal: use motion, input, or "input ID"'),
        ('camera reports "input"x', 22, "expected 'between', 'for' or the end, got 'x'"),
        ("person in", 9, "expected a name, got the end"),
        (
            "person at door",
            7,
            "expected 'absent', 'between', 'crosses', 'for', 'in', 'moving', 'stationary', 'appeared', 'or', 'removed' "
            "or the end, got 'at' (a name of several words goes in quotes)",
        ),
        (
            "person in front yard",
            16,
            "expected 'between', 'for' or the end, got 'yard' (a name of several words goes in quotes)",
        ),
        (
            "person in hall and dog",
            15,
            "expected 'between', 'for' or the end, got 'and': a rule has one condition; write another rule",
        ),
        ("any between 22:00 and 22:00", 4, "the condition 'between' requires two different times of day"),
        (
            "count of dog in hall < 0",
            21,
            "this condition is never true, because a count is at least 0: use another comparison",
        ),
        ("count >= 0", 6, "this condition is always true, because a count is at least 0: use another comparison"),
        ("person in door for ten", 19, "expected a time such as 10s, 5m or 1h, got 'ten'"),
        ("person in door for 10", 19, "expected a time such as 10s, 5m or 1h, got '10'"),
        ("person in door for 2 secnds", 19, "expected a time such as 10s, 5m or 1h, got '2 secnds'"),
        ("person for 2 s between 8:00 and 9:00", 11, "expected a time such as 10s, 5m or 1h, got '2 s'"),
        ("person in door for 10s please", 23, "expected 'between' or the end, got 'please'"),
        ("count in lobby 5", 15, "expected one of > >= < <= = !=, got '5'"),
        ("count > many", 8, "expected a whole number, got 'many'"),
        ("person between 25:00 and 6:00", 15, "expected a time of day such as 22:00, got '25:00'"),
        ("person between 22:00", 20, "expected 'and', got the end"),
        ("person crosses gate for 3s", 20, "the condition 'crosses' cannot have a duration: remove 'for'"),
        ('"open', 0, "expected 'absent', 'any', 'count' or a name, got '\"open': the quote is not closed"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, offset: int, message: str) -> None:
    with pytest.raises(PlacedError) as raised:
        parse(text)
    assert (str(raised.value), raised.value.offset) == (message, offset)


words = st.sampled_from(
    "person any count of in door crosses gate absent removed moving stationary appeared from for 10s 5 > "  # noqa: SIM905
    'between 22:00 and or " ;'.split()
)


@settings(deadline=None)
@given(st.one_of(st.text(max_size=30), st.lists(words, max_size=8).map(" ".join)))
def test_any_text_is_read_or_refused_with_a_place_in_it(text: str) -> None:
    with suppress(PlacedError):
        parse(text)
        return
    with pytest.raises(PlacedError) as raised:
        parse(text)
    assert 0 <= raised.value.offset <= len(text)


@pytest.mark.parametrize(
    ("between", "now", "is_open"),
    [
        ("22:00 and 06:00", time(23), True),
        ("22:00 and 06:00", time(5, 59), True),
        ("22:00 and 06:00", time(6), False),
        ("08:00 and 17:00", time(12), True),
        ("08:00 and 17:00", time(17), False),
    ],
)
def test_a_time_of_day_may_cross_midnight(between: str, now: time, is_open: bool) -> None:
    assert parse(f"any between {between}").open_at(now) is is_open
