"""Defines the event and its JSON record. Files, WebSocket, MQTT, webhooks and the event store use the same record."""

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
)  # fields that a record copies from the event
_STILL = 0.02  # in image sizes per second; a slower object is stationary


@dataclass(slots=True, frozen=True)
class Event:
    """An event: a period in which the condition of a rule is fulfilled.

    Attributes:
        id: event ID in Frigate's format: start time and six random letters or digits.
        rule: name of the rule.
        stream: name of the stream.
        label: label of the best object (highest score); without objects, the label of the rule.
        tracks: IDs of the tracks that have fulfilled the condition, at most the newest 1000.
        zones: zones that contain these tracks now.
        entered_zones: zones that these tracks have entered.
        since: time from which the condition was fulfilled, in seconds on the capture clock.
        start_time: time at which the event began, after the condition was fulfilled for `for` seconds.
        end_time: time at which the condition was last fulfilled; None while the event is open.
        frame_time: time of the newest frame that shows the event.
        capture_clock: `rtcp` or `arrival` (Unix time), or `file` (seconds from the start of the file).
        score: current score of the best object, from 0 to 1.
        top_score: highest score so far.
        box: box of the best object as x1, y1, x2, y2 in normalized coordinates, or None.
        width, height: size of the image, in pixels.
        speed: speed of the best object, in image sizes per second.
        count: number of objects that fulfil the condition now.
        p_yes: the model's probability of "yes" to the rule's question; None if the model has not answered.
        answers: the model's answers, by question text.
        attributes: attributes by name, from the newest track that has an answer.
        snapshot, clip: HTTP paths of the media files, or None.
        since_at, start_at, frame_at: `since`, `start_time` and `frame_time` on the monotonic clock of
            `Frame.steady_at`. They are not part of the record. They are minus infinity if the event began on another
            worker.
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
    """A change of an event: its start, an update or its end."""

    kind: Kind
    event: Event


@dataclass(slots=True, frozen=True)
class RuleList:
    """The rules of one stream.

    Attributes:
        stream: name of the stream.
        rules: names of the rules.
        keep_s: retention times of events in seconds, by rule name. Rules without a retention time are not included.
    """

    stream: str
    rules: tuple[str, ...]
    keep_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class TrackPath:
    """The path of an ended track: points (time in seconds, x, y). x and y are normalized coordinates."""

    stream: str
    number: int
    label: str
    first_time: float
    last_time: float
    top_score: float
    path: tuple[tuple[float, float, float], ...]


@dataclass(slots=True, frozen=True)
class MinuteCounts:
    """The object counts of a stream in one minute, as JSON values."""

    stream: str
    start: int
    counts: Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class MediaDone:
    """Reports that a media file of an event was written. If `path` is None, writing the file failed."""

    stream: str
    event: str
    kind: str
    path: str | None = None


@dataclass(slots=True, frozen=True)
class EventLook:
    """The appearance descriptor (embedding) of an event's object, as float16 values; see `Engine.look`."""

    stream: str
    event: str
    look: bytes


History = TrackPath | MinuteCounts | MediaDone | EventLook
_HISTORY = {TrackPath: "track", MinuteCounts: "minute", MediaDone: "media", EventLook: "look"}


def make_history_record(part: History) -> dict[str, Any]:
    """Convert a history item, such as a track path or the object counts of a minute, to a JSON record."""
    return {"type": _HISTORY[type(part)], **asdict(part)}


def new_id(start_time: float, chance: Callable[[], float] = random.random) -> str:
    """Return a new event ID, which contains the start time."""
    letters = "".join(_LETTERS[int(chance() * len(_LETTERS)) % len(_LETTERS)] for _ in range(6))
    return f"{start_time:.6f}-{letters}"


def read_event(record: Mapping[str, Any]) -> Event:
    """Convert a JSON record from `make_event_record` to an event.

    Raises:
        KeyError, TypeError: if the record has another format.
    """
    values = {name: record[name] for name in _SAME}
    values |= {name: tuple(record[name]) for name in ("tracks", "zones", "entered_zones")}
    return Event(**values, box=None if record["box_norm"] is None else tuple(record["box_norm"]))


def make_event_record(change: Change | RuleList) -> dict[str, Any]:
    """Convert an event change or rule list to a JSON record. Boxes are in pixels and in normalized coordinates."""
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
