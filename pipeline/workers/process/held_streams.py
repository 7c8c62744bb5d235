"""In a worker: the streams that are open before another worker lets go of them. Knows no outputs and no engine."""

from __future__ import annotations

import threading
from collections.abc import Callable

from saccade.pipeline.errors import StreamError, one_line
from saccade.pipeline.runtime.stream import OpenedStream
from saccade.pipeline.workers.protocol import Message


class HeldStreams:
    """By the key of their opening. Every method is callable from any thread.

    Args:
        send: sends a message to the supervisor.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._changed = threading.Condition()
        self._streams: dict[int, OpenedStream | None] = {}  # None while it is being opened

    def expect(self, key: int) -> None:
        """One is about to be opened: from now on `drop` and `take` know it."""
        with self._changed:
            self._streams[key] = None

    def add(self, name: str, key: int, stream: OpenedStream) -> None:
        """Have its source run, unless it was dropped meanwhile."""
        answer = {"stream": name, "key": key}

        def ended(error: Exception | None) -> None:
            reason = one_line(str(error)) if error else "its source has ended"
            if self.drop(key):
                self._send({**answer, "is": "refused", "kind": "SourceError", "error": reason})

        with self._changed:
            if key in self._streams:
                self._streams[key] = stream
                if stream.source.info.live:
                    stream.hold(lambda: self._send({**answer, "is": "held"}), ended)
                else:
                    self._send({**answer, "is": "held"})
                self._changed.notify_all()
                return
        stream.close()

    def take(self, key: int) -> OpenedStream:
        """The stream, which is the caller's from then on; waits while it is being opened.

        Raises:
            StreamError: if it could not be opened, or was dropped.
        """
        with self._changed:
            while (stream := self._streams.get(key)) is None:
                if key not in self._streams:
                    raise StreamError("its source could not be opened")
                self._changed.wait()
            del self._streams[key]
            return stream

    def drop(self, key: int) -> bool:
        """Close it; False if there is none."""
        with self._changed:
            known = key in self._streams
            stream = self._streams.pop(key, None)
            self._changed.notify_all()
        if stream is not None:
            stream.close()
        return known

    def close(self) -> None:
        """Close all."""
        with self._changed:
            keys = list(self._streams)
        for key in keys:
            self.drop(key)
