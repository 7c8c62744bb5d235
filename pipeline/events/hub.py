"""Hands events to all that take them, in their order, in a thread of its own: a slow one delays no frame.

Knows records of events, and nothing of who takes them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
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

Listener = Callable[[Mapping[str, Any]], None]
"""Is given the record of each change. What it raises is logged, and keeps nothing from the others."""


class EventHub:
    """Where events come together. Every method is callable from any thread.

    Up to 10,000 changes wait; beyond that they are lost, which is counted and logged.
    """

    def __init__(self) -> None:
        self._waiting: queue.Queue[Change | RuleList | History | threading.Event | None] = queue.Queue(MAX_WAITING)
        self._lock = threading.Lock()  # over what follows
        self._listeners: list[tuple[Listener, str | None, bool]] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        self._failing: set[int] = set()
        self.dropped = 0
        """Changes lost because too many were waiting."""

    def add(self, listener: Listener, stream: str | None = None, *, history: bool = False) -> Callable[[], None]:
        """Have a listener called for every change, or for those of one stream; return what ends that.

        With `history` it is called for the paths of tracks and the counts of minutes as well.
        """
        entry = listener, stream, history
        with self._lock:
            self._listeners.append(entry)

        def remove() -> None:
            with self._lock:
                self._listeners = [one for one in self._listeners if one is not entry]

        return remove

    def publish(self, change: Change | RuleList | History) -> None:
        """Hand a change on; returns at once."""
        with self._lock:
            if self._closed:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="saccade events", daemon=True)
                self._thread.start()
        try:
            self._waiting.put_nowait(change)
        except queue.Full:
            self.dropped += 1
            if self.dropped == 1:
                log.warning("events: too many wait to be written; some are lost")

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until everything published so far has been handed on; False if that takes too long."""
        with self._lock:
            if self._thread is None or self._closed:
                return True
        done = threading.Event()
        try:
            self._waiting.put(done, timeout=timeout_s)
        except queue.Full:
            return False
        return done.wait(timeout_s)

    def close(self) -> None:
        """Hand on what waits, for some seconds at most, and end. A second call does nothing."""
        self.flush()
        with self._lock:
            closed, self._closed, thread = self._closed, True, self._thread
        if thread is not None and not closed:
            with suppress(queue.Full):  # a listener hangs, or `flush` would have made room
                self._waiting.put_nowait(None)
                thread.join(FLUSH_S)

    def _work(self) -> None:
        # Where the queue was too full for what ends it, it ends once all is handed on.
        while not (self._closed and self._waiting.empty()) and (item := self._waiting.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            past = not isinstance(item, Change | RuleList | MediaDone)
            record = make_event_record(item) if isinstance(item, Change | RuleList) else make_history_record(item)
            with self._lock:
                entries = [one for one in self._listeners if one[1] in (None, record["stream"])]
            listeners = [listener for listener, _, history in entries if history or not past]
            for listener in listeners:
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
