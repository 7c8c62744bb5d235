"""A bounded queue between two threads that either makes the producer wait or drops the oldest, counting every drop.

Knows nothing of what it carries: frames on their way to the engine, results on their way to a sink.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from saccade.pipeline.config.queue_policy import QueuePolicy

T = TypeVar("T")

DropCause = Literal["full", "closed"]
"""Why an item was lost: a newer one took its place, or the queue was closed with the item still inside."""


class QueueClosed(Exception):  # noqa: N818 - the normal end of the queue, not an error
    """Nothing can be put in any more, or nothing is left to take."""


@dataclass(slots=True, frozen=True)
class Taken(Generic[T]):
    """What `get` returns: the item, and how many were lost between it and the item taken before it."""

    item: T
    lost_before: int


class BoundedQueue(Generic[T]):
    """A first-in-first-out queue of limited size for any number of threads on either side.

    The producer ends it with `close`, and the consumer still gets what is inside; the consumer ends it with `discard`,
    which wakes a waiting producer.
    """

    def __init__(self, policy: QueuePolicy) -> None:
        if policy.size < 1:
            raise ValueError(f"a queue needs room for at least one item, not {policy.size}")
        self._policy = policy
        self._items: deque[Taken[T]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._lost = 0  # since the last item taken; older than everything inside
        self._drops: Counter[DropCause] = Counter()

    def __len__(self) -> int:
        with self._changed:
            return len(self._items)

    @property
    def drops(self) -> dict[DropCause, int]:
        """How many items were dropped so far, by cause."""
        with self._changed:
            return dict(self._drops)

    def put(self, item: T, lost_before: int = 0) -> None:
        """Add `item`; when full, wait for room or drop the oldest, as the policy requires.

        Args:
            item: what to hand over.
            lost_before: how many items the producer itself lost just before this one; `get` adds them to its own.

        Raises:
            QueueClosed: if the queue is closed, or is closed while waiting; the item is then not taken in.
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
        """Take the oldest item, waiting for one if there is none.

        Raises:
            QueueClosed: if the queue is closed and empty.
        """
        with self._changed:
            while not self._items:
                if self._closed:
                    raise QueueClosed
                self._changed.wait()
            oldest = self._items.popleft()
            lost, self._lost = self._lost + oldest.lost_before, 0
            self._changed.notify_all()
            return Taken(oldest.item, lost)

    def close(self) -> None:
        """Accept nothing more; what is inside can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def discard(self) -> None:
        """Accept nothing more and drop what is inside, counted as `closed`."""
        with self._changed:
            self._closed = True
            while self._items:
                self._drop_oldest("closed")
            self._changed.notify_all()

    def _drop_oldest(self, cause: DropCause) -> None:
        self._lost += 1 + self._items.popleft().lost_before
        self._drops[cause] += 1
