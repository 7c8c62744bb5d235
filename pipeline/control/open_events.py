"""The events that go on in each stream, as known outside its worker: what the next one needs if that is lost.

An event is stored where it began, to its end: on the machine of the worker that began it, wherever its stream goes on.

The worker that has a stream begins, changes and ends its events. Between two workers they are left as they are: the
next one is given their records, and goes on with them or ends them. Where there is none, they are ended here. So each
event has one beginning and one end. Knows records of events; not who makes them, nor who takes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from saccade.pipeline.events.storage.store_reader import MEDIA

Record = Mapping[str, Any]

_MOST_OVER = 10_000
MISSED = 5
"""Reports of a worker, of which one comes each second, without an event that is taken to go on."""


class OpenEvents:
    """Passes records on, and keeps those of events that go on. Every method is callable from any thread.

    Args:
        publish: takes each record, and the name of the machine that stores it.
    """

    def __init__(self, publish: Callable[[Record, str], None]) -> None:
        self._publish = publish
        self._lock = threading.Lock()
        self._open: dict[str, dict[str, Record]] = {}  # by stream and id: those that go on, as they were last
        self._files: dict[str, set[tuple[str, str]]] = {}  # by stream: id and kind of the files that are not whole yet
        self._homes: dict[str, str] = {}  # by id, of events that go on or have such files: the machine that stores it
        self._last: dict[str, dict[str, Record]] = {}  # by stream and rule: the end of the last one, for cooldowns
        self._over: dict[str, None] = {}  # by id: the last ones that have ended; what comes of them later is dropped
        self._missed: dict[str, int] = {}  # by id: reports in a row that do not have it

    @property
    def streams(self) -> set[str]:
        """Those that have events that go on."""
        with self._lock:
            return {stream for stream, events in self._open.items() if events}

    def load(self, records: Iterable[Record], machine: str = "") -> None:
        """Take over events that a store has, and that went on when the process ended which was here before.

        Those that no worker reports soon are ended.

        Args:
            records: of them, as they were last.
            machine: that stores them.
        """
        with self._lock:
            for record in records:
                if record["id"] not in self._homes and record["id"] not in self._over:
                    self._note_begin(record, machine)

    def take(self, record: Record, machine: str = "") -> None:
        """Take the next record of a stream, from a worker on a machine."""
        kind, stream = record["type"], record["stream"]
        replaced: list[tuple[Record, str]] = []
        with self._lock:
            home = self._homes.get(record["event"] if kind == "media" else record.get("id", ""), machine)
            events = self._open.setdefault(stream, {})
            if kind in ("update", "end") and record["id"] in self._over:
                return
            if kind == "begin":
                # A rule has one event at a time: its end was lost.
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
        """Take the report of the worker that has a stream: when each event that goes on was seen last, by its id.

        What it does not have `MISSED` times in a row has an end that was lost, and is ended.
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
        """The last event of each rule of a stream, for the worker that is to have it: those that go on, and ends."""
        with self._lock:
            going = list(self._open.get(stream, {}).values())
            rules = {record["rule"] for record in going}
            return [*going, *(one for rule, one in self._last.get(stream, {}).items() if rule not in rules)]

    def leave(self, stream: str) -> None:
        """The stream has lost its worker, and another will have it: report the files of events that have ended.

        What was not whole could not be written.
        """
        with self._lock:
            going = self._open.get(stream, {})
            files = self._take_files(stream, lambda event: event not in going)
        self._report(stream, files)

    def end(self, stream: str) -> int:
        """The stream runs no more: end its events where they were seen last; returns how many."""
        with self._lock:
            events = [self._drop(record) for record in list(self._open.get(stream, {}).values())]
            files = self._take_files(stream, lambda event: True)
            for known in (self._open, self._files, self._last):
                known.pop(stream, None)
        for record, machine in events:
            self._publish(record, machine)
        self._report(stream, files)
        return len(events)

    def _note_begin(self, record: Record, machine: str) -> None:
        self._open.setdefault(record["stream"], {})[record["id"]] = record
        self._homes[record["id"]] = machine
        pending = {(record["id"], name) for name in MEDIA if record[f"has_{name}"]}
        self._files.setdefault(record["stream"], set()).update(pending)

    def _drop(self, record: Record) -> tuple[Record, str]:
        """An event goes on no more: the record of its end where it was seen last, and the machine that stores it."""
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
        """Forget where an event is stored, once nothing more comes of it."""
        if event in self._open.get(stream, {}) or any(one == event for one, _ in self._files.get(stream, ())):
            return
        self._homes.pop(event, None)

    def _take_files(self, stream: str, of: Callable[[str], bool]) -> list[tuple[str, str, str]]:
        """The id, kind and machine of files that are not whole, of those events; they are expected no more."""
        files = self._files.get(stream, set())
        taken = [(event, kind, self._homes.get(event, "")) for event, kind in files if of(event)]
        for event, kind, _ in taken:
            files.discard((event, kind))
            self._forget(stream, event)
        return taken

    def _report(self, stream: str, files: Iterable[tuple[str, str, str]]) -> None:
        for event, kind, machine in files:
            self._publish({"type": "media", "stream": stream, "event": event, "kind": kind, "path": None}, machine)
