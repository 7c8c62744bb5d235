"""Bounded queue of messages for one receiver. If it is full, the oldest messages are dropped and counted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_RECORDS = 256  # some seconds of several streams
MAX_BYTES = 2 * 1024 * 1024


@dataclass(slots=True, frozen=True)
class Message:
    """A message encoded once for all receivers.

    Attributes:
        stream: name of the stream that the message is about; "" for a message about the client itself.
        text: JSON in UTF-8.
        record: whether the message is the record of a frame.
        queued_at: creation time in seconds, for `Outbox.drop_before`.
    """

    stream: str
    text: bytes
    record: bool = True
    queued_at: float = 0.0


class Outbox:
    """Bounded first-in, first-out queue of messages. If it is full, the oldest messages are dropped. Not thread-safe.

    Args:
        newest: whether a new record replaces the queued record of the same stream.
        max_records: maximum number of messages, including those that are not records.
        max_bytes: maximum total size of the messages in bytes.
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
        """Total size of the queued messages in bytes."""
        return self._bytes

    @property
    def oldest_at(self) -> float | None:
        """Creation time of the oldest queued message, in seconds; None if the queue is empty."""
        return self._waiting[0][0].queued_at if self._waiting else None

    @property
    def newest(self) -> bool:
        """Whether the queue keeps only the newest record of each stream, and drops older records."""
        return self._newest

    @newest.setter
    def newest(self, on: bool) -> None:
        self._newest = on
        waiting, self._waiting, self._bytes = self._waiting, deque(), 0
        for message, lost_before in waiting:
            self._add(message, lost_before)

    def put(self, message: Message, lost_before: int = 0) -> None:
        """Append a message. Drop the oldest messages if the queue is full.

        Args:
            message: message to append.
            lost_before: number of records of this stream that the caller dropped since its previous `put`.
        """
        self.dropped += lost_before
        self._add(message, lost_before)
        while len(self._waiting) > self._max_records or self._bytes > self._max_bytes:
            self._drop()

    def drop_before(self, time: float) -> None:
        """Drop all messages whose `queued_at` is less than `time`."""
        while self._waiting and self._waiting[0][0].queued_at < time:
            self._drop()

    def take(self) -> tuple[Message, int] | None:
        """Remove and return the oldest message, or return None if the queue is empty.

        Returns:
            The message, and the number of records of its stream that were dropped just before it.
        """
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
        """Return the queue position of the stream's newest message, or None if that message is not a record."""
        for index in range(len(self._waiting) - 1, -1, -1):
            message, _ = self._waiting[index]
            if message.stream == stream:
                return index if message.record else None
        return None
