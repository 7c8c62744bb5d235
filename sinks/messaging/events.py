"""Converts detections on single frames to events per label, with begin, update and end messages."""

from __future__ import annotations

import random
import string
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from saccade.engine.results import Result

HOLD_S = 3.0
SILENT_S = 30.0  # a stream without a frame for so long has its events ended
_RISE = 0.05  # of the best score, that makes an update
_ID_LETTERS = string.ascii_lowercase + string.digits

Kind = Literal["new", "update", "end"]


@dataclass(slots=True, frozen=True)
class Observation:
    """One detected object: its label, its score from 0 to 1, and its box (x1, y1, x2, y2) in pixels."""

    label: str
    score: float
    box: tuple[int, int, int, int]


def observations_of(result: Result, width: int, height: int) -> list[Observation]:
    """Return the detected objects of a result, with boxes in pixels. A detected point has a box of size zero.

    Args:
        result: the analysis result.
        width: width of the frame in pixels.
        height: height of the frame in pixels.
    """
    found = [
        Observation(box.label, round(box.score, 3), _whole(box.pixels(width, height)))
        for box in result.detections.boxes
        if not box.predicted
    ]
    boxed = {observation.label for observation in found}
    for spot in result.points.points:
        if spot.label not in boxed:
            found.append(Observation(spot.label, round(spot.score, 3), _whole(spot.pixels(width, height) * 2)))
    return found


@dataclass(slots=True, frozen=True)
class Event:
    """An event: the time during which a stream shows objects of one label.

    Attributes:
        id: identifier in Frigate's format: the begin time and six letters.
        stream: name of the stream.
        label: class of the objects.
        start_time, end_time: times of the first and last frame with the label, in seconds; end_time is None while
            the event is open.
        score: highest score in the last frame that shows the label.
        top_score: highest score of the whole event so far.
        box: box of the object that has `score`.
        count: current number of objects; 0 at the end.
    """

    id: str
    stream: str
    label: str
    start_time: float
    end_time: float | None
    score: float
    top_score: float
    box: tuple[int, int, int, int]
    count: int


@dataclass(slots=True, frozen=True)
class Change:
    """A begin, update or end of an event.

    Attributes:
        kind: kind of the change.
        before: the event as last published. For a new event, it equals `after`.
        after: the event after the change.
    """

    kind: Kind
    before: Event
    after: Event

    def as_json(self) -> dict[str, Any]:
        """Return the webhook message about the event in Frigate's format, as JSON values."""
        return {
            "type": self.kind,
            "before": {"camera": self.before.stream, **asdict(self.before)},
            "after": {"camera": self.after.stream, **asdict(self.after)},
        }


class EventTracker:
    """Finds events in the detections of all streams. Not thread-safe.

    An event begins at the first detection of a label, and ends when the label has not been detected for `hold_s`
    seconds. The event is updated if its number of objects changes, or if its highest score rises by 0.05 or more.

    Args:
        hold_s: seconds for which an object is still counted after its last detection.
        chance: returns random numbers from 0 to 1, for event IDs.
    """

    def __init__(self, hold_s: float = HOLD_S, chance: Callable[[], float] = random.random) -> None:
        self._hold_s = hold_s
        self._chance = chance
        self._streams: dict[str, dict[str, _Label]] = {}

    def update(self, stream: str, at_s: float, time: float, observations: Iterable[Observation]) -> list[Change]:
        """Process the detections of a stream's next frame. Return the changed events.

        Args:
            stream: name of the stream.
            at_s: time of the frame on the stream's monotonic clock, in seconds.
            time: capture time of the frame in seconds, for the start and end times of events.
            observations: detected objects.
        """
        seen: dict[str, list[Observation]] = {}
        for observation in observations:
            seen.setdefault(observation.label, []).append(observation)
        labels = self._streams.setdefault(stream, {})
        changes = []
        for name in [*labels, *(name for name in seen if name not in labels)]:
            label = labels.get(name)
            if label is None:
                label = labels[name] = _Label(self._first(stream, time, seen[name]))
            change = label.update(at_s, time, seen.get(name, []), self._hold_s)
            if change is not None:
                changes.append(change)
                if change.kind == "end":
                    del labels[name]
        if not labels:
            del self._streams[stream]
        return changes

    def end(self, stream: str) -> list[Change]:
        """End all open events of a stream. Return one `Change` per event."""
        return [label.end() for label in self._streams.pop(stream, {}).values()]

    def _first(self, stream: str, time: float, observations: list[Observation]) -> Event:
        best = _best(observations)
        letters = "".join(_ID_LETTERS[int(self._chance() * len(_ID_LETTERS)) % len(_ID_LETTERS)] for _ in range(6))
        return Event(f"{time:.6f}-{letters}", stream, best.label, time, None, best.score, best.score, best.box, 0)


class ActiveStreams:
    """Tracks the active streams: those that have had a frame and have not ended. Not thread-safe."""

    def __init__(self) -> None:
        self._last_at: dict[str, float] = {}

    def note(self, stream: str, now: float) -> bool:
        """Mark a stream as active, because it has a frame at time `now` in seconds.

        Return True if the stream was not active before.
        """
        new = stream not in self._last_at
        self._last_at[stream] = now
        return new

    def end(self, stream: str) -> bool:
        """Mark a stream as ended. Return False if the stream was not active."""
        return self._last_at.pop(stream, None) is not None

    def names(self) -> list[str]:
        """Return the names of the streams that have had a frame and have not ended."""
        return list(self._last_at)

    def silent(self, now: float) -> list[str]:
        """Return the names of streams that have not ended, but have had no frame for `SILENT_S` seconds."""
        return [stream for stream, at in self._last_at.items() if now - at > SILENT_S]


class _Label:
    """The open event of one label on one stream, with its recent counts."""

    __slots__ = ("_last_time", "_now", "_published", "_recent")

    def __init__(self, first: Event) -> None:
        self._now = first
        self._published: Event | None = None
        self._last_time = first.start_time
        # (time, count) of frames, times growing and counts falling: the first is the most of the last `hold_s`
        # seconds, and what is followed by as many or more can never be that again.
        self._recent: deque[tuple[float, int]] = deque()

    def update(self, at_s: float, time: float, observations: list[Observation], hold_s: float) -> Change | None:
        if observations:
            while self._recent and self._recent[-1][1] <= len(observations):
                self._recent.pop()
            self._recent.append((at_s, len(observations)))
            best = _best(observations)
            top = max(self._now.top_score, best.score)
            self._now = replace(self._now, score=best.score, top_score=top, box=best.box)
            self._last_time = time
        while self._recent and not 0 <= at_s - self._recent[0][0] <= hold_s:  # below 0: a clock that restarted
            self._recent.popleft()
        if not self._recent:
            return self.end()
        self._now = replace(self._now, count=self._recent[0][1])
        published = self._published
        if published is None:
            return self._change("new")
        if self._now.count != published.count or self._now.top_score >= published.top_score + _RISE:
            return self._change("update")
        return None

    def end(self) -> Change:
        self._now = replace(self._now, count=0, end_time=self._last_time)
        return self._change("end")

    def _change(self, kind: Kind) -> Change:
        change = Change(kind, self._published or self._now, self._now)
        self._published = self._now
        return change


def _best(observations: list[Observation]) -> Observation:
    return max(observations, key=lambda observation: observation.score)


def _whole(box: tuple[float, float, float, float]) -> tuple[int, int, int, int]:
    x1, y1, x2, y2 = box
    return round(x1), round(y1), round(x2), round(y2)
