"""The event, and its record: one JSON for files, WebSocket, MQTT, webhooks and the store. Knows no rules."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA = "saccade/event/1"

Kind = Literal["begin", "update", "end"]
_LETTERS = string.ascii_lowercase + string.digits
_SAME = (
    *("id", "rule", "stream", "label", "since", "start_time", "end_time", "frame_time", "capture_clock", "score"),
    *("top_score", "width", "height", "speed", "count", "p_yes", "answers", "attributes", "snapshot", "clip"),
)  # which a record has as an event does
_STILL = 0.02  # widths and heights of the image a second, below which an object stands


@dataclass(slots=True, frozen=True)
class Event:
    """What a rule has found, from its beginning to its end.

    Attributes:
        id: as Frigate's: the time of its beginning and six letters.
        rule: name of the rule.
        stream: name of the stream.
        label: of the best object; that of the rule where there is none.
        tracks: numbers of the objects that have fulfilled the condition so far, the newest 1000 of them.
        zones: those in which they are now.
        entered_zones: those in which they have been.
        since: when the condition began to hold, on the capture clock, in seconds.
        start_time: when it had held for long enough, and the event began.
        end_time: when it held last; None while it goes on.
        frame_time: of the newest frame that shows it.
        capture_clock: `rtcp` or `arrival` (Unix time), or `file` (seconds from its start).
        score: of the best object now.
        top_score: the best so far.
        box: of the best object, x1, y1, x2, y2 as fractions of the image; None where there is none.
        width, height: of the image, in pixels.
        speed: of the best object, in widths and heights of the image a second.
        count: how many objects fulfil the condition now.
        p_yes: the model's probability of `yes` to the rule's question; None where none was asked or answered.
        answers: question → answer, as the model gave it.
        attributes: what was asked once a track, by its name: of the newest track that has it.
        snapshot, clip: the paths of both over HTTP; None where there is none.
        since_at, start_at, frame_at: of `since`, `start_time` and `frame_time` on the clock of `Frame.steady_at`, which
            nobody sets; they are in no record. Minus infinity where the event began elsewhere.
    """

    id: str
    rule: str
    stream: str
    label: str
    tracks: tuple[int, ...]
    zones: tuple[str, ...]
    entered_zones: tuple[str, ...]
    since: float
    start_time: float
    end_time: float | None
    frame_time: float
    capture_clock: str
    score: float
    top_score: float
    box: tuple[float, float, float, float] | None
    width: int
    height: int
    speed: float = 0.0
    count: int = 0
    p_yes: float | None = None
    answers: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    snapshot: str | None = None
    clip: str | None = None
    since_at: float = field(default=float("-inf"), compare=False)
    start_at: float = field(default=float("-inf"), compare=False)
    frame_at: float = field(default=float("-inf"), compare=False)


@dataclass(slots=True, frozen=True)
class Change:
    """A step of an event."""

    kind: Kind
    event: Event


@dataclass(slots=True, frozen=True)
class RuleList:
    """Which rules a stream has from now on, and for how many seconds their events are stored where not as all are."""

    stream: str
    rules: tuple[str, ...]
    keep_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class TrackPath:
    """Where a track has been, from its first frame to its last; `path` has times and places as fractions."""

    stream: str
    number: int
    label: str
    first_time: float
    last_time: float
    top_score: float
    path: tuple[tuple[float, float, float], ...]


@dataclass(slots=True, frozen=True)
class MinuteCounts:
    """What was counted in a minute of a stream; `counts` is plain values for JSON."""

    stream: str
    start: int
    counts: Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class MediaDone:
    """A file of an event, its `clip` or `snapshot`, is whole, or could not be written: then `path` is None."""

    stream: str
    event: str
    kind: str
    path: str | None = None


History = TrackPath | MinuteCounts | MediaDone
_HISTORY = {TrackPath: "track", MinuteCounts: "minute", MediaDone: "media"}


def make_history_record(part: History) -> dict[str, Any]:
    """The record of a part of a stream's history, ready for `json.dumps`."""
    return {"type": _HISTORY[type(part)], **asdict(part)}


def new_id(start_time: float, chance: Callable[[], float] = random.random) -> str:
    """An id for an event that begins at a time."""
    letters = "".join(_LETTERS[int(chance() * len(_LETTERS)) % len(_LETTERS)] for _ in range(6))
    return f"{start_time:.6f}-{letters}"


def read_event(record: Mapping[str, Any]) -> Event:
    """The event of a record that `make_event_record` has made; raises KeyError or TypeError if it is another."""
    values = {name: record[name] for name in _SAME}
    values |= {name: tuple(record[name]) for name in ("tracks", "zones", "entered_zones")}
    return Event(**values, box=None if record["box_norm"] is None else tuple(record["box_norm"]))


def make_event_record(change: Change | RuleList) -> dict[str, Any]:
    """The record of a change, ready for `json.dumps`. Boxes in pixels and as fractions, as in the record of a frame."""
    if isinstance(change, RuleList):
        listed = {"rules": list(change.rules), "keep_s": dict(change.keep_s)}
        return {"schema": SCHEMA, "type": "rules", "stream": change.stream, **listed}
    event = change.event
    pixels = None
    if event.box is not None:
        x1, y1, x2, y2 = event.box
        pixels = [
            round(value, 1) for value in (x1 * event.width, y1 * event.height, x2 * event.width, y2 * event.height)
        ]
    return {
        "schema": SCHEMA,
        "type": change.kind,
        "id": event.id,
        "rule": event.rule,
        "stream": event.stream,
        "label": event.label,
        "sub_label": next(iter(event.attributes.values()), None),
        "tracks": list(event.tracks),
        "count": event.count,
        "zones": list(event.zones),
        "current_zones": list(event.zones),
        "entered_zones": list(event.entered_zones),
        "since": round(event.since, 3),
        "start_time": round(event.start_time, 3),
        "end_time": None if event.end_time is None else round(event.end_time, 3),
        "frame_time": round(event.frame_time, 3),
        "capture_clock": event.capture_clock,
        "score": round(event.score, 3),
        "top_score": round(event.top_score, 3),
        "width": event.width,
        "height": event.height,
        "box": pixels,
        "box_norm": None if event.box is None else [round(value, 5) for value in event.box],
        "area": 0 if pixels is None else round((pixels[2] - pixels[0]) * (pixels[3] - pixels[1])),
        "speed": round(event.speed, 4),
        "stationary": event.box is not None and event.speed < _STILL,
        "p_yes": None if event.p_yes is None else round(event.p_yes, 3),
        "answers": dict(event.answers),
        "attributes": dict(event.attributes),
        "has_snapshot": event.snapshot is not None,
        "has_clip": event.clip is not None,
        "snapshot": event.snapshot,
        "clip": event.clip,
    }
