"""The object counts of a stream: total counts since its start, and the counts of each minute.

An object is counted in the minute in which its frame was captured.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

MINUTE_S = 60
_MINUTES = 24 * 60
MOST_LABELS = 1000
"""Maximum number of distinct labels that are counted, because prompts can produce any number of labels. Objects with
further labels are ignored."""

ByLabel = Mapping[str, Mapping[str, int]]
"""Counts by label, then by name of the count."""


@dataclass(slots=True, frozen=True)
class Totals:
    """The object counts since the start of the stream.

    Attributes:
        objects: number of tracks that received a track ID, by label.
        zones: number of objects that `entered`, that `left`, and that are `inside` now, by zone and label.
        lines: number of crossings `forward` and `backward`, by line and label.
    """

    objects: Mapping[str, int] = field(default_factory=dict)
    zones: Mapping[str, ByLabel] = field(default_factory=dict)
    lines: Mapping[str, ByLabel] = field(default_factory=dict)

    def since(self, earlier: Totals) -> Totals:
        """Return the difference between these counts and earlier counts.

        `inside` is the current number of objects, not a difference. If a zone or line is new, its earlier counts are 0.
        """
        objects = {label: count - earlier.objects.get(label, 0) for label, count in self.objects.items()}
        return Totals(
            {label: count for label, count in objects.items() if count},
            _added(self.zones, earlier.zones),
            _added(self.lines, earlier.lines),
        )


@dataclass(slots=True, frozen=True)
class Minute:
    """The object counts of one minute.

    Attributes:
        start: start of the minute, in seconds: Unix time for a live stream, or time since the start of a video file.
        counts: increase of the counts during the minute.
    """

    start: int
    counts: Totals


def add_label(counter: Counter[str], label: str) -> None:
    """Count one object. An object with a new label is ignored if there are already `MOST_LABELS` labels."""
    if label in counter or len(counter) < MOST_LABELS:
        counter[label] += 1


class CountLog:
    """Stores the object counts of a stream for each of the last 1440 minutes with frames."""

    def __init__(self) -> None:
        self._minutes: deque[Minute] = deque(maxlen=_MINUTES)
        self._now: int | None = None  # the current minute
        self._before = Totals()  # the totals at the start of the current minute
        self._untaken = 0  # number of newest minutes that `take` has not returned yet

    def __len__(self) -> int:
        """Return the number of stored minutes, at most 1440."""
        return len(self._minutes)

    def due(self, captured_at: float) -> bool:
        """Return whether a frame with this capture time starts a new minute of object counts.

        A frame of the previous minute does not, because capture times can jump back when the camera's clock becomes
        known.

        Args:
            captured_at: capture time of the frame, in seconds.
        """
        return self._now is None or not self._now - 1 <= int(captured_at // MINUTE_S) <= self._now

    def turn(self, captured_at: float, totals: Totals) -> None:
        """End the current minute of object counts, and start the minute of a new frame.

        Args:
            captured_at: capture time of the new frame, in seconds.
            totals: total counts before the objects of the new frame are counted.
        """
        if self._now is not None:
            self._end(self._now, totals)
        self._now, self._before = int(captured_at // MINUTE_S), totals

    def take(self, last: Totals | None = None) -> list[Minute]:
        """Return the object counts of the minutes that ended since the last call, in the order in which they ended.

        Args:
            last: total counts at the end of the stream, to complete the current minute; otherwise None.
        """
        if last is not None and self._now is not None:
            self._end(self._now, last)
            self._now = None
        taken = list(self._minutes)[len(self._minutes) - self._untaken :]
        self._untaken = 0
        return taken

    def since(self, start: float, totals: Totals) -> list[Minute]:
        """Return the object counts of all minutes that end after the time `start`, including the current minute.

        Args:
            start: capture time, in seconds.
            totals: the current total counts.
        """
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
        # A lower count means that the counter restarted.
        return count if what == "inside" or count < before else count - before

    return {
        name: {
            label: {what: less(name, label, what, count) for what, count in counts.items()}
            for label, counts in labels.items()
        }
        for name, labels in now.items()
    }
