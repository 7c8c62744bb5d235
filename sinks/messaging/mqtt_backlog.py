"""Queue of messages for an MQTT broker, by priority: topic states, then events, then records.

Not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass

from saccade.sinks.outbox import Message, Outbox

MAX_EVENTS = 1000


@dataclass(slots=True, frozen=True)
class Item:
    """An MQTT message to publish, with its `qos` and `retain` flags."""

    topic: str
    payload: bytes
    qos: int
    retain: bool


class Backlog:
    """Queue of MQTT messages: states of retained topics, events, and records of frames.

    A message stays queued until `published` is called, so that an unacknowledged message is sent again.

    Args:
        over: payloads that mean "nothing present", such as 0. Topics with such a payload are not published again.
    """

    def __init__(self, over: frozenset[str]) -> None:
        self._over = over
        self._state: dict[str, str] = {}
        self._stale: dict[str, None] = {}  # topics whose state the broker may not have; a set that keeps its order
        self._events = Outbox(max_records=MAX_EVENTS)
        self._event: Item | None = None  # the one being published
        self._records = Outbox()
        self._record: Item | None = None  # the same

    def __len__(self) -> int:
        """Return the number of topic states and events to publish. Records do not count."""
        return len(self._stale) + len(self._events) + (self._event is not None)

    def __contains__(self, topic: str) -> bool:
        return topic in self._state

    @property
    def dropped(self) -> int:
        """Number of events and records that were dropped because the queue was full."""
        return self._events.dropped + self._records.dropped

    def set(self, topic: str, payload: str) -> None:
        """Set the payload of a retained MQTT topic. It is queued for publication if it has changed."""
        if self._state.get(topic) != payload:
            self._state[topic] = payload
            self._stale[topic] = None

    def event(self, topic: str, payload: bytes) -> None:
        """Queue an event for publication."""
        self._events.put(Message(topic, payload))

    def record(self, topic: str, payload: bytes) -> None:
        """Queue a frame's record for publication."""
        self._records.put(Message(topic, payload))

    def refresh(self) -> None:
        """Queue the states of all topics for publication again, because the broker may have lost them."""
        self._stale = dict.fromkeys(self._state)

    def next(self, *, records: bool = True) -> Item | None:
        """Return the next message to publish, or None. If `records` is False, frame records are skipped."""
        if self._stale:
            topic = next(iter(self._stale))
            return Item(topic, self._state[topic].encode(), qos=1, retain=True)
        if self._event is None and (taken := self._events.take()) is not None:
            self._event = Item(taken[0].stream, taken[0].text, qos=1, retain=False)
        if self._event is not None:
            return self._event
        if not records:
            return None
        if self._record is None and (taken := self._records.take()) is not None:
            self._record = Item(taken[0].stream, taken[0].text, qos=0, retain=False)
        return self._record

    def published(self, item: Item) -> None:
        """Remove a message that the broker has acknowledged."""
        if item is self._event:
            self._event = None
        elif item is self._record:
            self._record = None
        elif item.retain and self._state.get(item.topic) == (payload := item.payload.decode()):  # else it has changed
            self._stale.pop(item.topic, None)
            if payload in self._over:
                del self._state[item.topic]
