"""The queue of messages for one receiver: bounded in number and bytes, drops the oldest and counts every loss.

Pure data. Knows nothing of sockets, threads or clocks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_RECORDS = 256  # some seconds of several streams
MAX_BYTES = 2 * 1024 * 1024


@dataclass(slots=True, frozen=True)
class Message:
    """A message for a client, ready to be sent; all clients share it.

    Attributes:
        stream: the stream it belongs to; "" for the client itself.
        text: JSON in UTF-8.
        record: True for the record of a frame, which may be dropped; False for a notice, which is dropped only when the
            outbox is full, and then not counted.
        queued_at: when it was made, on the clock of `drop_before`, in seconds.
    """

    stream: str
    text: bytes
    record: bool = True
    queued_at: float = 0.0


class Outbox:
    """A first-in-first-out queue that always accepts a message and drops the oldest. For one thread at a time.

    Args:
        newest: keep only the newest record of each stream, in the place of the one that it replaces.
        max_records: how many messages it holds.
        max_bytes: how many bytes of text it holds; a longer message is dropped, with all that wait.
    """

    def __init__(self, *, newest: bool = False, max_records: int = MAX_RECORDS, max_bytes: int = MAX_BYTES) -> None:
        self._newest = newest
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[Message, int]] = deque()  # each with the records dropped just before it
        self._bytes = 0
        self._lost: dict[str, int] = {}  # by stream, dropped before everything inside
        self.dropped = 0
        """Records dropped so far, including those that the producer dropped."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def bytes_waiting(self) -> int:
        """Bytes of text inside."""
        return self._bytes

    @property
    def oldest_at(self) -> float | None:
        """When the oldest message was made; None if empty."""
        return self._waiting[0][0].queued_at if self._waiting else None

    @property
    def newest(self) -> bool:
        """Whether only the newest record of each stream is kept. Turning it on drops the others."""
        return self._newest

    @newest.setter
    def newest(self, on: bool) -> None:
        self._newest = on
        waiting, self._waiting, self._bytes = self._waiting, deque(), 0
        for message, lost_before in waiting:
            self._add(message, lost_before)

    def put(self, message: Message, lost_before: int = 0) -> None:
        """Add `message`; drop the oldest where there is no room.

        Args:
            message: to be sent.
            lost_before: how many records of its stream the producer itself dropped just before it.
        """
        self.dropped += lost_before
        self._add(message, lost_before)
        while len(self._waiting) > self._max_records or self._bytes > self._max_bytes:
            self._drop()

    def drop_before(self, time: float) -> None:
        """Drop the messages made before `time`, as far as no younger one waits in front of them."""
        while self._waiting and self._waiting[0][0].queued_at < time:
            self._drop()

    def take(self) -> tuple[Message, int] | None:
        """The oldest message, and how many records of its stream were dropped just before it; None if empty."""
        if not self._waiting:
            return None
        message, lost_before = self._pop()
        return message, lost_before + self._lost.pop(message.stream, 0)

    def _add(self, message: Message, lost_before: int) -> None:
        self._bytes += len(message.text)
        index = self._index_of(message.stream) if self._newest and message.record else None
        if index is None:
            self._waiting.append((message, lost_before))
            return
        old, lost = self._waiting[index]
        self._waiting[index] = message, lost + 1 + lost_before
        self._bytes -= len(old.text)
        self.dropped += 1

    def _drop(self) -> None:
        oldest, lost = self._pop()
        self._lost[oldest.stream] = self._lost.get(oldest.stream, 0) + lost + oldest.record
        self.dropped += oldest.record

    def _pop(self) -> tuple[Message, int]:
        message, lost_before = self._waiting.popleft()
        self._bytes -= len(message.text)
        return message, lost_before

    def _index_of(self, stream: str) -> int | None:
        """The index of the stream's newest record, unless a notice of the stream came after it."""
        for index in range(len(self._waiting) - 1, -1, -1):
            message, _ = self._waiting[index]
            if message.stream == stream:
                return index if message.record else None
        return None
