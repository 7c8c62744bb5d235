"""Estimates from a backtest how many events per day each rule creates, with an exact Poisson confidence interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from saccade.pipeline.events.conditions import Condition
from saccade.pipeline.events.settings import RuleSettings

CONFIDENCE = 0.95
_DAY_S = 86400.0


@dataclass(slots=True, frozen=True)
class Forecast:
    """The expected number of events per day of a rule.

    Attributes:
        rule: name of the rule.
        events: number of events in the videos.
        watched_s: duration of the video parts within the rule's time of day (`between`), in seconds.
        per_day: expected events per day, or None if `watched_s` is 0.
        low, high: bounds of the 95 % confidence interval of `per_day`, or None.
    """

    rule: str
    events: int
    watched_s: float
    per_day: float | None
    low: float | None
    high: float | None


def forecast(
    rules: Sequence[RuleSettings], found: Iterable[str], videos: Sequence[tuple[datetime, float]]
) -> list[Forecast]:
    """Estimate the number of events per day of each rule.

    Args:
        rules: rules of the backtest.
        found: name of the rule, for each event.
        videos: local start time and duration in seconds, for each video.
    """
    names = list(found)
    made = []
    for rule in rules:
        count, condition = names.count(rule.name), rule.condition
        watched_s = sum(open_seconds(condition, began, seconds) for began, seconds in videos)
        if not watched_s:
            made.append(Forecast(rule.name, count, 0.0, None, None, None))
            continue
        scale = open_seconds(condition, datetime(2026, 1, 1), _DAY_S) / watched_s
        low, high = poisson_interval(count)
        made.append(Forecast(rule.name, count, watched_s, count * scale, low * scale, high * scale))
    return made


def open_seconds(condition: Condition, began: datetime, seconds: float) -> float:
    """Return how many seconds of a video are within the time of day (`between`) of a condition."""
    if condition.between is None:
        return seconds
    begin, end = condition.between
    ends, total = began + timedelta(seconds=seconds), timedelta()
    day = datetime.combine(began.date(), begin) - timedelta(days=1)  # the window of the night before may still be open
    while day < ends:
        until = datetime.combine(day.date() + timedelta(days=end < begin), end)
        total += max(timedelta(), min(until, ends) - max(day, began))
        day += timedelta(days=1)
    return total.total_seconds()


def poisson_interval(count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the exact (Garwood) confidence interval for the mean of a Poisson distribution, from an observed count."""
    tail = (1 - confidence) / 2
    low = 0.0 if count == 0 else _solve(lambda mean: 1 - _cdf(count - 1, mean) >= tail, count)
    return low, _solve(lambda mean: _cdf(count, mean) <= tail, count)


def _cdf(count: int, mean: float) -> float:
    return math.fsum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))


def _solve(reached: Callable[[float], bool], count: int) -> float:
    """Return the smallest Poisson mean at which the condition `reached` is true, by bisection."""
    low, high = 0.0, 2.0 * count + 20
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def forecast_text(forecasts: Sequence[Forecast]) -> str:
    """Return the expected number of events per day of each rule, one line per rule."""
    lines = []
    for one in forecasts:
        if one.per_day is None:
            lines.append(f"{one.rule}: no forecast, because no video covers its time of day; set began")
        else:
            rate = f"{_short(one.per_day)} events a day (95 %: {_short(one.low or 0)} to {_short(one.high or 0)})"
            lines.append(f"{one.rule}: {rate}; {one.events} in {one.watched_s / 3600:.2f} h")
    return "\n".join([*lines, "The forecast assumes the same event rate at other times as in the videos."])


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
