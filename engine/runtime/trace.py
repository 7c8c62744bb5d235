"""What the engine did and when, to be opened in Perfetto: a bounded record of spans and counts.

Times are seconds of `time.perf_counter`. Knows nothing of steps, streams or devices.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

TRACKS = ("host", "compute", "copy")
"""In the order in which they are shown."""
CAPACITY = 200_000  # spans, some minutes of steps: older ones are dropped

_PROCESS = 1


@dataclass(slots=True, frozen=True)
class Span:
    """Something that took time: its track, start, end and arguments."""

    name: str
    track: str
    start: float
    end: float
    args: Mapping[str, object] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(slots=True, frozen=True)
class Count:
    """A number at a time."""

    name: str
    at: float
    value: float


class Trace:
    """Spans and counts, the newest `capacity` of each. Any thread may add and read."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.started = time.perf_counter()
        # Appending to a deque is one operation: no lock.
        self._spans: deque[Span] = deque(maxlen=capacity)
        self._counts: deque[Count] = deque(maxlen=capacity)

    def add(self, span: Span) -> None:
        """Record a span."""
        self._spans.append(span)

    def count(self, name: str, value: float) -> None:
        """Record a number."""
        self._counts.append(Count(name, time.perf_counter(), value))

    def spans(self, track: str) -> list[Span]:
        """Spans of a track, by start."""
        return sorted((span for span in self._spans.copy() if span.track == track), key=lambda span: span.start)

    def counts(self) -> list[Count]:
        """Numbers, in order."""
        return list(self._counts.copy())

    def to_dict(self) -> dict[str, object]:
        """The trace in Chrome's format, in microseconds: complete events (X), counters (C), names of tracks (M)."""
        spans = sorted(self._spans.copy(), key=lambda span: (span.start, -span.end))  # what holds another comes first
        counts = self.counts()
        # Work that was under way when the trace began has begun before it.
        zero = min([self.started, *(span.start for span in spans[:1])])

        def micros(at: float) -> float:
            return round(1e6 * (at - zero), 3)

        tracks = [*TRACKS, *sorted({span.track for span in spans} - {*TRACKS})]
        events: list[dict[str, object]] = [_named("process_name", 0, name="saccade engine")]
        for number, track in enumerate(tracks, start=1):
            events += [
                _named("thread_name", number, name=track),
                _named("thread_sort_index", number, sort_index=number),
            ]
        for span in spans:
            where = {"pid": _PROCESS, "tid": 1 + tracks.index(span.track), "ts": micros(span.start)}
            lasted = round(1e6 * span.seconds, 3)
            events.append({"ph": "X", "name": span.name, **where, "dur": lasted, "args": dict(span.args)})
        for one in counts:
            at = micros(one.at)
            events.append({"ph": "C", "name": one.name, "pid": _PROCESS, "ts": at, "args": {"value": one.value}})
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Write it as a JSON file, which https://ui.perfetto.dev and chrome://tracing open.

        Raises:
            OSError: if it cannot be written.
        """
        Path(path).write_text(json.dumps(self.to_dict(), separators=(",", ":")), encoding="utf-8")


def _named(what: str, track: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": track, "args": args}
