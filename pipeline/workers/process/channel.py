"""A connection between two processes that carries messages as JSON, whole and in order. Knows not what they say."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

from saccade.pipeline.workers.protocol import Message


class Channel:
    """One end. Any thread may send; one receives.

    Args:
        connection: to the other process, which it then owns.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Message) -> bool:
        """Send a message; waits while the other end does not read. False if that end is gone."""
        data = json.dumps(message).encode()
        try:
            with self._lock:
                self._connection.send_bytes(data)
        except (OSError, ValueError):  # the latter once it is closed here
            return False
        return True

    def messages(self) -> Iterator[Message]:
        """What comes, until the other end is gone or this one is closed."""
        while True:
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError, ValueError):
                return
            yield json.loads(data)

    def close(self) -> None:
        """Close this end. A second call does nothing."""
        with self._lock:
            self._connection.close()
