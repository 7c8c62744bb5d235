"""A bounded queue between two threads.

If the queue is full, the producer waits, or the oldest item is dropped and counted.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from saccade.pipeline.config.queue_policy import QueuePolicy

T = TypeVar("T")

DropCause = Literal["full", "closed"]
"""Cause of a drop: the queue was full, or it was closed with items inside."""


class QueueClosed(Exception):  # noqa: N818 - the normal end of the queue, not an error
    """Raised by `put` if the queue is closed, and by `get` and `take` if the queue is closed and empty."""


@dataclass(slots=True, frozen=True)
class Taken(Generic[T]):
    """An item from the queue, with the number of items that were dropped just before it."""

    item: T
    lost_before: int


class BoundedQueue(Generic[T]):
    """A bounded FIFO queue for any number of producers and consumers.

    A producer calls `close` after its last item; queued items can still be taken. A consumer that stops early calls
    `discard`, which drops the queued items and wakes a waiting producer.
    """

    def __init__(self, policy: QueuePolicy) -> None:
        if policy.size < 1:
            raise ValueError(f"the queue size of a stream must be at least 1 frame; got {policy.size}")
        self._policy = policy
        self._items: deque[Taken[T]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._lost = 0  # dropped since the last item was taken; older than all queued items
        self._drops: Counter[DropCause] = Counter()

    def __len__(self) -> int:
        with self._changed:
            return len(self._items)

    @property
    def drops(self) -> dict[DropCause, int]:
        """The number of dropped items so far, by cause."""
        with self._changed:
            return dict(self._drops)

    def put(self, item: T, lost_before: int = 0) -> None:
        """Add an item. If the queue is full, wait or drop the oldest item, according to the queue policy.

        Args:
            item: the item.
            lost_before: number of items that the producer dropped since its previous item.

        Raises:
            QueueClosed: if the queue is closed before the item could be added.
        """
        with self._changed:
            while self._policy.when_full == "wait" and len(self._items) >= self._policy.size and not self._closed:
                self._changed.wait()
            if self._closed:
                raise QueueClosed
            if len(self._items) >= self._policy.size:
                self._drop_oldest("full")
            self._items.append(Taken(item, lost_before))
            self._changed.notify_all()

    def get(self) -> Taken[T]:
        """Remove the oldest item and return it. Wait while the queue is empty.

        Raises:
            QueueClosed: if the queue is closed and empty.
        """
        with self._changed:
            while (taken := self._take()) is None:
                self._changed.wait()
            return taken

    def take(self) -> Taken[T] | None:
        """Remove the oldest item and return it, without waiting. Return None if the queue is empty.

        Raises:
            QueueClosed: if the queue is closed and empty.
        """
        with self._changed:
            return self._take()

    def close(self) -> None:
        """Close the queue for new items. The queued items can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def discard(self) -> None:
        """Close the queue for new items, and drop the queued items. They are counted under the cause `closed`."""
        with self._changed:
            self._closed = True
            while self._items:
                self._drop_oldest("closed")
            self._changed.notify_all()

    def _take(self) -> Taken[T] | None:
        if not self._items:
            if self._closed:
                raise QueueClosed
            return None
        oldest = self._items.popleft()
        lost, self._lost = self._lost + oldest.lost_before, 0
        self._changed.notify_all()
        return Taken(oldest.item, lost)

    def _drop_oldest(self, cause: DropCause) -> None:
        self._lost += 1 + self._items.popleft().lost_before
        self._drops[cause] += 1
