"""Which streams and workers there are, for any thread that asks. The supervisor changes them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from saccade.pipeline.workers.protocol import Message
from saccade.pipeline.workers.states import StreamState, WorkerSeat
from saccade.pipeline.workers.stream_table import StreamTable


class Roster:
    """The streams and workers of a supervisor.

    Args:
        names: of the workers.
        table: of the streams.
    """

    def __init__(self, names: Sequence[str], table: StreamTable) -> None:
        self._lock = threading.RLock()  # over what follows
        self._seats = {name: WorkerSeat(name) for name in names}
        self._table = table

    def streams(self) -> dict[str, StreamState]:
        """Every stream, also those that have failed, by its name. They are the supervisor's own: read only."""
        with self._lock:
            return dict(self._table.streams)

    def finished(self) -> dict[str, Message]:
        """What each stream that has ended by itself, or failed, has counted: the message `gone`."""
        with self._lock:
            return dict(self._table.finished)

    def seats(self) -> list[WorkerSeat]:
        """The workers. They are the supervisor's own: read only."""
        with self._lock:
            return list(self._seats.values())

    def url_of(self, stream: str) -> str | None:
        """The HTTP API of the worker that has a stream; None while none has."""
        with self._lock:
            found = self._table.streams.get(stream)
            if found is None or found.worker is None or found.phase not in ("open", "closing"):
                return None
            return self._seats[found.worker].url

    def any_url(self) -> str | None:
        """The HTTP API of a worker that is ready: the one that had the least to do."""
        with self._lock:
            ready = [seat for seat in self._seats.values() if seat.ready]
        return min(ready, key=lambda seat: seat.report.busy if seat.report else 0.0).url if ready else None
