"""The events that go on in each stream, as known outside its worker: what the next one needs if that is lost.

The worker that has a stream begins, changes and ends its events. Between two workers they are left as they are: the
next one is given their records, and goes on with them or ends them. Where there is none, they are ended here. So each
event has one beginning and one end. Knows records of events; not who makes them, nor who takes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from saccade.pipeline.events.store_reader import MEDIA

Record = Mapping[str, Any]


class OpenEvents:
    """Passes records on, and keeps those of events that go on. Every method is callable from any thread.

    Args:
        publish: takes each record.
    """

    def __init__(self, publish: Callable[[Record], None]) -> None:
        self._publish = publish
        self._lock = threading.Lock()
        self._open: dict[str, dict[str, Record]] = {}  # by stream and id: those that go on, as they were last
        self._files: dict[str, set[tuple[str, str]]] = {}  # by stream: id and kind of the files that are not whole yet

    @property
    def streams(self) -> set[str]:
        """Those that have events that go on."""
        with self._lock:
            return {stream for stream, events in self._open.items() if events}

    def load(self, records: Iterable[Record], is_whole: Callable[[str, str], bool]) -> None:
        """Take over events that went on when the last process ended.

        Args:
            records: of them, as they were last.
            is_whole: whether a file of an event is there; given its id and kind.
        """
        with self._lock:
            for record in records:
                self._note_begin(record)
                self._files[record["stream"]] -= {
                    (record["id"], kind) for kind in MEDIA if is_whole(record["id"], kind)
                }

    def take(self, record: Record) -> None:
        """Take the next record of a stream."""
        kind, stream = record["type"], record["stream"]
        replaced: list[Record] = []
        with self._lock:
            events = self._open.setdefault(stream, {})
            if kind == "begin":
                # A rule has one event at a time: its end was lost.
                replaced = [one for one in events.values() if one["rule"] == record["rule"]]
                for one in replaced:
                    del events[one["id"]]
                self._note_begin(record)
            elif kind == "update":
                events[record["id"]] = record
            elif kind == "end":
                events.pop(record["id"], None)
            elif kind == "media":
                self._files.get(stream, set()).discard((record["event"], record["kind"]))
        for one in replaced:
            self._publish(_ended(one))
        self._publish(record)

    def see(self, stream: str, times: Mapping[str, float]) -> None:
        """Note when events of a stream were seen last, by their ids."""
        with self._lock:
            events = self._open.get(stream, {})
            for event, seen in times.items():
                if event in events and events[event]["frame_time"] < seen:
                    events[event] = {**events[event], "frame_time": round(seen, 3)}

    def of(self, stream: str) -> list[Record]:
        """The events of a stream that go on, for the worker that is to have it."""
        with self._lock:
            return list(self._open.get(stream, {}).values())

    def leave(self, stream: str) -> None:
        """The stream has lost its worker, and another will have it: report the files of events that have ended.

        What was not whole could not be written.
        """
        with self._lock:
            files, going = self._files.get(stream, set()), self._open.get(stream, {})
            lost = {file for file in files if file[0] not in going}
            files -= lost
        self._report(stream, lost)

    def end(self, stream: str) -> int:
        """The stream runs no more: end its events where they were seen last; returns how many."""
        with self._lock:
            events = self._open.pop(stream, {})
            files = self._files.pop(stream, set())
        for record in events.values():
            self._publish(_ended(record))
        self._report(stream, files)
        return len(events)

    def _note_begin(self, record: Record) -> None:
        self._open.setdefault(record["stream"], {})[record["id"]] = record
        pending = {(record["id"], name) for name in MEDIA if record[f"has_{name}"]}
        self._files.setdefault(record["stream"], set()).update(pending)

    def _report(self, stream: str, files: Iterable[tuple[str, str]]) -> None:
        for event, kind in files:
            self._publish({"type": "media", "stream": stream, "event": event, "kind": kind, "path": None})


def _ended(record: Record) -> Record:
    return {**record, "type": "end", "end_time": max(record["start_time"], record["frame_time"]), "count": 0}
