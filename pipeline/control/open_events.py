"""Tracks the open events of each stream outside its worker, so that another worker can continue the events.

The worker of a stream begins, updates and ends the stream's events. When the stream moves, the next worker receives
the records of the open events, and continues or ends the events. If there is no next worker, this module ends the
events. Each event therefore has exactly one begin and one end.

An event is stored on the machine of the worker that began it, even after the stream moves to another machine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from saccade.pipeline.events.storage.store_reader import MEDIA

Record = Mapping[str, Any]

_MOST_OVER = 10_000
MISSED = 5
"""Number of consecutive reports, one per second, without an open event, after which the event is ended."""


class OpenEvents:
    """The open events of all streams. Forwards each event record to the store of the event. Thread-safe.

    Args:
        publish: called with each record and the name of the machine that stores the record.
        find: returns the name of the machine that stores an event, by event ID, or None if no reachable machine has
            the event.
    """

    def __init__(
        self, publish: Callable[[Record, str], None], find: Callable[[str], str | None] = lambda event: None
    ) -> None:
        self._publish = publish
        self._find = find
        self._lock = threading.Lock()
        self._open: dict[str, dict[str, Record]] = {}  # by stream and ID: the last record of each open event
        self._files: dict[str, set[tuple[str, str]]] = {}  # by stream: ID and kind of incomplete files
        self._homes: dict[str, str] = {}  # by ID: the machine that stores an open event or one with incomplete files
        self._last: dict[str, dict[str, Record]] = {}  # by stream and rule: the last end, for cooldowns
        self._over: dict[str, None] = {}  # by ID: recently ended events, whose late records are dropped
        self._missed: dict[str, int] = {}  # by ID: number of consecutive reports without the event

    @property
    def streams(self) -> set[str]:
        """The names of streams with open events."""
        with self._lock:
            return {stream for stream, events in self._open.items() if events}

    def load(self, records: Iterable[Record], machine: str = "") -> None:
        """Load the events that were open when the previous process ended.

        A loaded event is ended if no worker reports it within a few seconds.

        Args:
            records: last record of each event.
            machine: name of the machine that stores the events.
        """
        with self._lock:
            for record in records:
                if record["id"] not in self._homes and record["id"] not in self._over:
                    self._note_begin(record, machine)

    def take(self, record: Record, machine: str = "") -> None:
        """Forward an event record that a worker sent, and update the open events."""
        kind, stream = record["type"], record["stream"]
        replaced: list[tuple[Record, str]] = []
        if kind in ("update", "end") and not self._knows(record["id"]):
            found = self._find(record["id"])
            machine = machine if found is None else found
        with self._lock:
            home = self._homes.get(record["event"] if kind == "media" else record.get("id", ""), machine)
            events = self._open.setdefault(stream, {})
            if kind in ("update", "end") and record["id"] in self._over:
                return
            if kind == "begin" and record["id"] in events:
                events[record["id"]] = record  # a worker sends it again if the last controller did not confirm it
            elif kind == "begin":
                # A rule has one event at a time, so the end of the earlier event was lost.
                replaced = [self._drop(one) for one in list(events.values()) if one["rule"] == record["rule"]]
                self._note_begin(record, machine)
            elif kind == "update":
                events[record["id"]] = record
                self._homes.setdefault(record["id"], home)
            elif kind == "end":
                if record["id"] in events:
                    self._drop(record)
                self._note_over(record)
            elif kind == "media":
                self._files.get(stream, set()).discard((record["event"], record["kind"]))
                self._forget(stream, record["event"])
        for one, there in replaced:
            self._publish(one, there)
        self._publish(record, home)

    def see(self, stream: str, times: Mapping[str, float]) -> None:
        """Process a worker's report of a stream's open events. Events that several reports in a row omit are ended.

        Args:
            stream: name of the stream.
            times: capture time of the newest frame that shows the event, by event ID.
        """
        lost: list[tuple[Record, str]] = []
        with self._lock:
            events = self._open.get(stream, {})
            for event, record in list(events.items()):
                if event in times:
                    self._missed.pop(event, None)
                    if record["frame_time"] < times[event]:
                        events[event] = {**record, "frame_time": round(times[event], 3)}
                    continue
                self._missed[event] = self._missed.get(event, 0) + 1
                if self._missed[event] >= MISSED:
                    lost.append(self._drop(record))
        for one, there in lost:
            self._publish(one, there)

    def of(self, stream: str) -> list[Record]:
        """Return the open events of a stream, and the last ended event of each rule without an open event."""
        with self._lock:
            going = list(self._open.get(stream, {}).values())
            rules = {record["rule"] for record in going}
            return [*going, *(one for rule, one in self._last.get(stream, {}).items() if rule not in rules)]

    def leave(self, stream: str) -> None:
        """Mark incomplete media files of a stream's ended events as failed, because their worker has ended."""
        with self._lock:
            going = self._open.get(stream, {})
            files = self._take_files(stream, lambda event: event not in going)
        self._report(stream, files)

    def end(self, stream: str) -> int:
        """End the open events of a stopped stream. Each event ends at its newest frame.

        Return the number of ended events.
        """
        with self._lock:
            events = [self._drop(record) for record in list(self._open.get(stream, {}).values())]
            files = self._take_files(stream, lambda event: True)
            for known in (self._open, self._files, self._last):
                known.pop(stream, None)
        for record, machine in events:
            self._publish(record, machine)
        self._report(stream, files)
        return len(events)

    def _knows(self, event: str) -> bool:
        with self._lock:
            return event in self._homes or event in self._over

    def _note_begin(self, record: Record, machine: str) -> None:
        self._open.setdefault(record["stream"], {})[record["id"]] = record
        self._homes[record["id"]] = machine
        pending = {(record["id"], name) for name in MEDIA if record[f"has_{name}"]}
        self._files.setdefault(record["stream"], set()).update(pending)

    def _drop(self, record: Record) -> tuple[Record, str]:
        """Remove an open event. Return its end record and the name of the machine that stores it."""
        stream, event = record["stream"], record["id"]
        del self._open[stream][event]
        self._missed.pop(event, None)
        home = self._homes[event]
        self._forget(stream, event)
        end_time = max(record["start_time"], record["frame_time"])
        ended = {**record, "type": "end", "end_time": end_time, "count": 0}
        self._note_over(ended)
        return ended, home

    def _note_over(self, record: Record) -> None:
        self._last.setdefault(record["stream"], {})[record["rule"]] = record
        self._over[record["id"]] = None
        if len(self._over) > _MOST_OVER:
            del self._over[next(iter(self._over))]

    def _forget(self, stream: str, event: str) -> None:
        if event in self._open.get(stream, {}) or any(one == event for one, _ in self._files.get(stream, ())):
            return
        self._homes.pop(event, None)

    def _take_files(self, stream: str, of: Callable[[str], bool]) -> list[tuple[str, str, str]]:
        """Remove and return the incomplete media files of selected events, as (event ID, kind, machine).

        Args:
            stream: name of the stream.
            of: returns whether an event is selected, by event ID.
        """
        files = self._files.get(stream, set())
        taken = [(event, kind, self._homes.get(event, "")) for event, kind in files if of(event)]
        for event, kind, _ in taken:
            files.discard((event, kind))
            self._forget(stream, event)
        return taken

    def _report(self, stream: str, files: Iterable[tuple[str, str, str]]) -> None:
        for event, kind, machine in files:
            self._publish({"type": "media", "stream": stream, "event": event, "kind": kind, "path": None}, machine)
