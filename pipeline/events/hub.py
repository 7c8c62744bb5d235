"""Publishes event changes (start, update or end) to all subscribers, in the order in which they were queued.

A separate thread calls the subscribers, so that a slow subscriber never delays frames.

The queue is bounded. If the queue is full, changes are dropped and counted. A subscriber that receives the start of an
event always receives the end of the event.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from saccade.pipeline.errors import reason_of
from saccade.pipeline.events.record import (
    Change,
    History,
    MediaDone,
    RuleList,
    make_event_record,
    make_history_record,
)

log = logging.getLogger(__name__)

MAX_WAITING = 10_000
FLUSH_S = 5.0
_LOG_EVERY_S = 60.0  # while changes are dropped

Listener = Callable[[Mapping[str, Any]], None]
"""Receives the record of each change. An exception is logged and does not affect other listeners."""


class ChangeQueue:
    """A bounded FIFO queue of event changes that are not published yet. Not thread-safe.

    Args:
        limit: number of changes at which the queue is full.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Change | RuleList | History | threading.Event] = deque()
        self._begun: set[str] = set()  # events whose begin was accepted and whose end is still to come
        self._refused: set[str] = set()  # open events whose begin was refused

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: Change | RuleList | History | threading.Event) -> bool:
        """Add an item to the queue. Return False if the queue is full and the item was rejected."""
        full = len(self._waiting) >= self._limit
        if isinstance(item, Change):
            return self._put_change(item, full)
        if full and isinstance(item, History):
            return False
        self._waiting.append(item)
        return True

    def take(self) -> Change | RuleList | History | threading.Event:
        """Remove the oldest change from the queue and return it.

        Raises:
            IndexError: if the queue is empty.
        """
        return self._waiting.popleft()

    def _put_change(self, change: Change, full: bool) -> bool:
        event = change.event.id
        if change.kind == "end":
            begun, refused = event in self._begun, event in self._refused
            self._begun.discard(event)
            self._refused.discard(event)
            if refused or (full and not begun):
                return False
        elif full:
            if event not in self._begun:
                self._refused.add(event)
            return False
        else:
            if event in self._refused:
                self._refused.remove(event)
                change = replace(change, kind="begin")
            self._begun.add(event)
        self._waiting.append(change)
        return True


class EventHub:
    """Publishes the events of all streams to subscribers. Thread-safe.

    Up to 10,000 changes are queued. If the queue is full, changes are dropped, counted and logged, see `ChangeQueue`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the attributes below
        self._waiting = ChangeQueue(MAX_WAITING)
        self._listeners: list[tuple[Listener, str | None, bool]] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failing: set[int] = set()
        self._lost = 0  # since the last log line
        self._logged_at = float("-inf")
        self.dropped = 0
        """Number of changes dropped because the queue was full."""

    def add(self, listener: Listener, stream: str | None = None, *, history: bool = False) -> Callable[[], None]:
        """Subscribe a listener to events, and return a function that unsubscribes the listener.

        Args:
            listener: called with every change of an event.
            stream: name of a stream, to receive only changes of this stream; None for all streams.
            history: also call the listener with track paths, counts per minute and finished media files.
        """
        entry = listener, stream, history
        with self._changed:
            self._listeners.append(entry)

        def remove() -> None:
            with self._changed:
                self._listeners = [one for one in self._listeners if one is not entry]

        return remove

    def publish(self, change: Change | RuleList | History) -> None:
        """Queue a change for publication without waiting."""
        with self._changed:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="saccade events", daemon=True)
                self._thread.start()
            if self._waiting.put(change):
                self._changed.notify_all()
            else:
                self.dropped += 1
                self._lost += 1
                self._report_lost()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until all queued event changes are published. Return False after a timeout."""
        done = threading.Event()
        with self._changed:
            if self._thread is None or self._closed:
                return True
            self._waiting.put(done)
            self._changed.notify_all()
        return done.wait(timeout_s)

    def close(self) -> None:
        """Publish the queued event changes and stop. Changes that are not published within a few seconds are dropped.

        A second call does nothing.
        """
        self.flush(FLUSH_S)
        with self._changed:
            closed, self._closed, thread = self._closed, True, self._thread
            self._changed.notify_all()
            if not closed:
                self._logged_at = float("-inf")
                self._report_lost()
        if thread is not None and not closed:
            thread.join(FLUSH_S)

    def _report_lost(self) -> None:
        now = time.monotonic()
        if self._lost and now - self._logged_at >= _LOG_EVERY_S:
            log.warning("an event output is too slow; dropped event changes: %d", self._lost)
            self._lost, self._logged_at = 0, now

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._report_lost()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                item = self._waiting.take()
            if isinstance(item, threading.Event):
                item.set()
            else:
                self._hand_on(item)

    def _hand_on(self, item: Change | RuleList | History) -> None:
        past = not isinstance(item, Change | RuleList | MediaDone)
        record = make_event_record(item) if isinstance(item, Change | RuleList) else make_history_record(item)
        with self._changed:
            entries = [one for one in self._listeners if one[1] in (None, record["stream"])]
        for listener in [listener for listener, _, history in entries if history or not past]:
            notify(listener, record, self._failing, id(listener))


def notify(listener: Listener, record: Mapping[str, Any], failing: set[int], key: int) -> None:
    """Call a listener with an event record. Consecutive errors of a listener are logged only once.

    Args:
        listener: the listener.
        record: the event record.
        failing: keys of the listeners whose last call failed.
        key: key of this listener.
    """
    try:
        listener(record)
    except Exception as error:
        if key not in failing:
            log.warning("an event output of stream %s failed: %s", record["stream"], reason_of(error))
        failing.add(key)
    else:
        failing.discard(key)
