"""What has been counted in a stream: totals since it began, and how much of them came in each minute.

Knows numbers only; the times are those at which frames were captured.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

MINUTE_S = 60
_MINUTES = 24 * 60
MOST_LABELS = 1000
"""Labels that are counted: those of prompts, which may change without end. Objects of later ones are not counted."""

ByLabel = Mapping[str, Mapping[str, int]]
"""Label → what is counted → how often."""


@dataclass(slots=True, frozen=True)
class Totals:
    """Counts since the stream began.

    Attributes:
        objects: tracks that were given a number, by label.
        zones: `entered` and `left`, and `inside` now, by zone and label.
        lines: `forward` and `backward`, by line and label.
    """

    objects: Mapping[str, int] = field(default_factory=dict)
    zones: Mapping[str, ByLabel] = field(default_factory=dict)
    lines: Mapping[str, ByLabel] = field(default_factory=dict)

    def since(self, earlier: Totals) -> Totals:
        """What has been added since; of `inside`, what is inside now. A zone or line that is new counts from 0."""
        objects = {label: count - earlier.objects.get(label, 0) for label, count in self.objects.items()}
        return Totals(
            {label: count for label, count in objects.items() if count},
            _added(self.zones, earlier.zones),
            _added(self.lines, earlier.lines),
        )


@dataclass(slots=True, frozen=True)
class Minute:
    """What was counted in one minute.

    Attributes:
        start: its first second: Unix time for live streams, else seconds from the start of the file.
        counts: what was added in it.
    """

    start: int
    counts: Totals


def add_label(counter: Counter[str], label: str) -> None:
    """Count an object, unless there are too many labels without its own."""
    if label in counter or len(counter) < MOST_LABELS:
        counter[label] += 1


class CountLog:
    """The counts of the last 24 hours, minute by minute."""

    def __init__(self) -> None:
        self._minutes: deque[Minute] = deque(maxlen=_MINUTES)
        self._now: int | None = None  # the minute that goes on
        self._before = Totals()  # what had been counted when it began
        self._untaken = 0  # of the minutes

    def __len__(self) -> int:
        """How many minutes there are: at most those of 24 hours."""
        return len(self._minutes)

    def due(self, captured_at: float) -> bool:
        """Whether a frame of this time is the first of its minute.

        One of the minute before is not: a camera's own clock, once it is known, may be behind that of arrival.
        """
        return self._now is None or not self._now - 1 <= int(captured_at // MINUTE_S) <= self._now

    def turn(self, captured_at: float, totals: Totals) -> None:
        """Begin the minute of a frame that has not been counted yet; `totals` are those before it."""
        if self._now is not None:
            self._end(self._now, totals)
        self._now, self._before = int(captured_at // MINUTE_S), totals

    def take(self, last: Totals | None = None) -> list[Minute]:
        """The minutes that have ended since the last call, in the order in which they did: a clock may be set back.

        Args:
            last: the totals of now, where no frame comes any more: they end the minute that goes on.
        """
        if last is not None and self._now is not None:
            self._end(self._now, last)
            self._now = None
        taken = list(self._minutes)[len(self._minutes) - self._untaken :]
        self._untaken = 0
        return taken

    def since(self, start: float, totals: Totals) -> list[Minute]:
        """The minutes that end after a time, with the one that goes on; `totals` are those of now."""
        minutes = list(self._minutes)
        if self._now is not None:
            minutes.append(Minute(self._now * MINUTE_S, totals.since(self._before)))
        return [minute for minute in minutes if minute.start + MINUTE_S > start]

    def _end(self, minute: int, totals: Totals) -> None:
        self._minutes.append(Minute(minute * MINUTE_S, totals.since(self._before)))
        self._before = totals
        self._untaken = min(self._untaken + 1, _MINUTES)


def _added(now: Mapping[str, ByLabel], earlier: Mapping[str, ByLabel]) -> dict[str, ByLabel]:
    def less(name: str, label: str, what: str, count: int) -> int:
        before = earlier.get(name, {}).get(label, {}).get(what, 0)
        return count if what == "inside" or count < before else count - before  # it has begun anew if it is less

    return {
        name: {
            label: {what: less(name, label, what, count) for what, count in counts.items()}
            for label, counts in labels.items()
        }
        for name, labels in now.items()
    }
