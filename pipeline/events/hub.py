"""Hands events to all that take them, in their order, in a thread of its own: a slow one delays no frame.

Changes beyond a limit are lost and counted, in such a way that who is told of a beginning is told of the end. Knows
records of events, and nothing of who takes them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

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
_LOG_EVERY_S = 60.0  # while changes are lost

Listener = Callable[[Mapping[str, Any]], None]
"""Is given the record of each change. What it raises is logged, and keeps nothing from the others."""


class ChangeQueue:
    """The changes that wait, oldest first. Pure data, for one thread at a time.

    Beyond its limit a change is refused, but for two: rules, which say for how long events are kept, and the end of an
    event whose beginning was taken, so there are never more of those than there were beginnings. Where a beginning was
    refused, the next update that is taken becomes one; without any, the event is refused whole.

    Args:
        limit: how many wait before others are refused.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Change | RuleList | History | threading.Event] = deque()
        self._begun: set[str] = set()  # events that were taken, and whose end was not yet
        self._refused: set[str] = set()  # events whose beginning was refused, and which go on

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, item: Change | RuleList | History | threading.Event) -> bool:
        """Add a change, or a mark that is always taken; False if it is refused."""
        full = len(self._waiting) >= self._limit
        if isinstance(item, Change):
            return self._put_change(item, full)
        if full and isinstance(item, History):
            return False
        self._waiting.append(item)
        return True

    def take(self) -> Change | RuleList | History | threading.Event:
        """Remove the oldest; raises IndexError if there is none."""
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
    """Where events come together. Every method is callable from any thread.

    Up to 10,000 changes wait; what is lost beyond that is counted and logged, see `ChangeQueue`.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()  # over what follows
        self._waiting = ChangeQueue(MAX_WAITING)
        self._listeners: list[tuple[Listener, str | None, bool]] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failing: set[int] = set()
        self._lost = 0  # since the last line about it
        self._logged_at = float("-inf")
        self.dropped = 0
        """Changes lost because too many were waiting."""

    def add(self, listener: Listener, stream: str | None = None, *, history: bool = False) -> Callable[[], None]:
        """Have a listener called for every change, or for those of one stream; return what ends that.

        With `history` it is called for the paths of tracks and the counts of minutes as well.
        """
        entry = listener, stream, history
        with self._changed:
            self._listeners.append(entry)

        def remove() -> None:
            with self._changed:
                self._listeners = [one for one in self._listeners if one is not entry]

        return remove

    def publish(self, change: Change | RuleList | History) -> None:
        """Hand a change on; returns at once."""
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
        """Wait until everything published so far has been handed on; False if that takes too long."""
        done = threading.Event()
        with self._changed:
            if self._thread is None or self._closed:
                return True
            self._waiting.put(done)
            self._changed.notify_all()
        return done.wait(timeout_s)

    def close(self) -> None:
        """Hand on what waits, for some seconds at most, and end. A second call does nothing."""
        self.flush()
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
            log.warning("events: changes lost because too many wait for an output: %d", self._lost)
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
            try:
                listener(record)
            except Exception as error:
                if id(listener) not in self._failing:  # once until it works again
                    log.warning(
                        "events of %s: %s", record["stream"], " ".join(str(error).split()) or type(error).__name__
                    )
                self._failing.add(id(listener))
            else:
                self._failing.discard(id(listener))
