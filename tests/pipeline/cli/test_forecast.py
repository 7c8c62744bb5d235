"""Events per day from a backtest: the exact Poisson interval, times of day, and drafted rules."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.pipeline.cli.commands.draft import draft, draft_text
from saccade.pipeline.cli.commands.forecast import forecast, forecast_text, open_seconds, poisson_interval
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.conditions import parse
from saccade.pipeline.events.settings import RuleSettings

NOON = datetime(2026, 1, 1, 12)


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(0, 0.0, 3.689), (1, 0.0253, 5.572), (3, 0.6187, 8.767), (10, 4.795, 18.39), (100, 81.36, 121.63)],
)
def test_the_interval_is_garwoods(count: int, low: float, high: float) -> None:
    assert poisson_interval(count) == pytest.approx((low, high), rel=1e-3)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 300))
def test_the_interval_holds_the_count_and_grows(count: int) -> None:
    low, high = poisson_interval(count)
    assert low <= count < high
    assert poisson_interval(count + 1)[0] > low
    assert poisson_interval(count + 1)[1] > high


@pytest.mark.parametrize(
    ("when", "began", "hours", "expected"),
    [
        ("any", 12, 5, 5),
        ("any between 22:00 and 06:00", 12, 5, 0),
        ("any between 22:00 and 06:00", 20, 5, 3),
        ("any between 22:00 and 06:00", 3, 5, 3),
        ("any between 22:00 and 06:00", 0, 72, 24),
        ("any between 08:00 and 17:00", 12, 24, 9),
    ],
)
def test_only_the_hours_of_a_rule_count(when: str, began: int, hours: float, expected: float) -> None:
    start = datetime(2026, 1, 1) + timedelta(hours=began)
    assert open_seconds(parse(when), start, 3600 * hours) == pytest.approx(3600 * expected)


def test_a_forecast_is_for_a_day() -> None:
    rules = [RuleSettings(name="a", when="person"), RuleSettings(name="b", when="person between 22:00 and 06:00")]
    two = forecast(rules, ["a", "a", "a"], [(NOON, 3600), (NOON, 7200)])
    assert (two[0].per_day, two[0].low, two[0].high) == pytest.approx((24, 4.95, 70.1), rel=1e-2)
    assert two[1].per_day is None
    assert forecast_text(two).splitlines() == [
        "a: 24 events a day (95 %: 4.95 to 70.1); 3 in 3.00 h",
        "b: no forecast, because no video covers its time of day; set began",
        "The forecast assumes the same event rate at other times as in the videos.",
    ]


@pytest.mark.parametrize(
    ("sentence", "when"),
    [
        ("tell me when someone stands at the door for 10 s", "person in door for 10s"),
        ("Alert me if a car parks in the yard for more than 5 minutes", "car stationary in yard for 5m"),
        ("person crosses the gate", "person crosses gate"),
        (
            "notify me when more than five people are in the lobby for 30 seconds",
            "count of person in lobby > 5 for 30s",
        ),
        ("when nobody is at the desk for an hour", "person absent from desk for 1h"),
        ("let me know when a dog is in the front yard at night", 'dog in "front yard" between 22:00 and 06:00'),
        ("tell me when a suitcase is taken from the hall", "suitcase removed from hall"),
        ("when a suitcase is left in the hall for 2 minutes", "suitcase appeared in hall for 2m"),
        ("tell me if anyone moves between 22 and 6", "person moving between 22:00 and 6:00"),
        ("tell me when there is a cat", "cat"),
    ],
)
def test_a_sentence_becomes_a_rule(sentence: str, when: str) -> None:
    rule = draft(sentence)
    assert rule.when == when
    parse(rule.when)


def test_known_places_are_recognized_and_missing_ones_are_named() -> None:
    rule = draft("tell me when someone is near the Front Door of the house", ["Front Door", "Door"])
    assert rule.when == 'person in "Front Door"'
    assert "Draw the zone" not in draft_text(rule, ["Front Door"], [])
    assert draft_text(rule, [], []).startswith("# Draw the zone 'Front Door' first; it does not exist yet.\n")
    assert "This rule is not active yet" in draft_text(rule, [], [])


@pytest.mark.parametrize("sentence", ["", "tell me", "something is in the yard", "a person crosses"])
def test_a_sentence_without_an_object_is_refused(sentence: str) -> None:
    with pytest.raises(ConfigError, match="the rule text"):
        draft(sentence)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_sentence_gives_a_valid_rule_or_one_line(sentence: str) -> None:
    try:
        complaint, when = "", draft(sentence).when
    except ConfigError as error:
        complaint, when = str(error), "any"
    parse(when)
    assert "\n" not in complaint
