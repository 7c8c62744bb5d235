"""The events that go on in each stream, as seen from outside its worker, so that none stays open when that is lost.

Knows records of events; not who makes them, nor who takes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from saccade.pipeline.events.store_reader import MEDIA

Record = Mapping[str, Any]


class OpenEvents:
    """Passes records on, and ends what a stream leaves open. Every method is callable from any thread.

    Args:
        publish: takes each record.
    """

    def __init__(self, publish: Callable[[Record], None]) -> None:
        self._publish = publish
        self._lock = threading.Lock()
        self._open: dict[str, dict[str, Record]] = {}  # by stream and id: those that go on, as they were last
        self._files: dict[str, set[tuple[str, str]]] = {}  # by stream: id and kind of the files that are not whole yet

    def take(self, record: Record) -> None:
        """Take the next record of a stream."""
        kind, stream = record["type"], record["stream"]
        with self._lock:
            if kind in ("begin", "update"):
                self._open.setdefault(stream, {})[record["id"]] = record
            elif kind == "end":
                self._open.get(stream, {}).pop(record["id"], None)
            elif kind == "media":
                self._files.get(stream, set()).discard((record["event"], record["kind"]))
            if kind == "begin":
                pending = {(record["id"], name) for name in MEDIA if record[f"has_{name}"]}
                self._files.setdefault(stream, set()).update(pending)
        self._publish(record)

    def end(self, stream: str) -> int:
        """The stream runs no more where it did: end its events where they were seen last; returns how many.

        A file of an event that was not whole by then is reported as one that could not be written.
        """
        with self._lock:
            events = self._open.pop(stream, {})
            files = self._files.pop(stream, set())
        for record in events.values():
            self._publish({**record, "type": "end", "end_time": record["frame_time"], "count": 0})
        for event, kind in files:
            self._publish({"type": "media", "stream": stream, "event": event, "kind": kind, "path": None})
        return len(events)
