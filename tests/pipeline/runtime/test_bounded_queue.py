from __future__ import annotations

import threading
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from saccade.pipeline.config.queue_policy import NEWEST, WAIT, QueuePolicy
from saccade.pipeline.runtime.bounded_queue import BoundedQueue, QueueClosed, Taken

JOIN_S = 20  # far beyond what any of these needs; only so that a deadlock fails instead of hanging

policies = st.builds(QueuePolicy, st.integers(1, 5), st.sampled_from(["wait", "drop oldest"]))


class QueueMachine(RuleBasedStateMachine):
    """One thread drives the real queue beside a list; whatever would block is left to the threaded tests below."""

    @initialize(policy=policies)
    def start(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self.queue: BoundedQueue[int] = BoundedQueue(policy)
        self.inside: deque[tuple[int, int]] = deque()
        self.closed = False
        self.next = 0
        self.accepted = self.taken = self.lost_upstream = self.reported = self.lost = 0
        self.drops = {"full": 0, "closed": 0}

    def drop(self, cause: str) -> None:
        self.lost += 1 + self.inside.popleft()[1]
        self.drops[cause] += 1

    def full(self) -> bool:
        return len(self.inside) == self.policy.size

    @precondition(lambda self: self.closed or self.policy.when_full == "drop oldest" or not self.full())
    @rule(lost_before=st.integers(0, 3))
    def put(self, lost_before: int) -> None:
        if self.closed:
            with pytest.raises(QueueClosed):
                self.queue.put(self.next, lost_before)
            return
        if self.full():
            self.drop("full")
        self.queue.put(self.next, lost_before)
        self.inside.append((self.next, lost_before))
        self.next += 1
        self.accepted += 1
        self.lost_upstream += lost_before

    @precondition(lambda self: self.closed or self.inside)
    @rule()
    def get(self) -> None:
        if not self.inside:
            with pytest.raises(QueueClosed):
                self.queue.get()
            return
        item, lost_before = self.inside.popleft()
        assert self.queue.get() == Taken(item, self.lost + lost_before)
        self.taken += 1
        self.reported += self.lost + lost_before
        self.lost = 0

    @rule()
    def close(self) -> None:
        self.queue.close()
        self.closed = True

    @rule()
    def discard(self) -> None:
        self.queue.discard()
        self.closed = True
        while self.inside:
            self.drop("closed")

    @invariant()
    def agrees(self) -> None:
        assert len(self.queue) == len(self.inside) <= self.policy.size
        assert self.queue.drops == {cause: n for cause, n in self.drops.items() if n}
        assert self.accepted == self.taken + len(self.inside) + sum(self.drops.values())
        upstream_inside = sum(lost for _, lost in self.inside)
        assert self.reported + self.lost + upstream_inside == self.lost_upstream + sum(self.drops.values())


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@settings(max_examples=40, deadline=None)
@given(policy=policies, count=st.integers(0, 60))
def test_across_threads_every_loss_is_reported_in_order(policy: QueuePolicy, count: int) -> None:
    queue: BoundedQueue[int] = BoundedQueue(policy)

    def produce() -> None:
        for item in range(count):
            queue.put(item)
        queue.close()

    producer = threading.Thread(target=produce)
    producer.start()
    taken: list[Taken[int]] = []
    try:
        while True:
            taken.append(queue.get())
    except QueueClosed:
        producer.join(JOIN_S)
    assert not producer.is_alive()
    expected = -1
    for got in taken:
        expected += got.lost_before + 1
        assert got.item == expected
    assert expected == count - 1
    if policy.when_full == "wait":
        assert len(taken) == count


@pytest.mark.parametrize("end", ["close", "discard"])
def test_closing_wakes_a_waiting_producer(end: str) -> None:
    queue: BoundedQueue[int] = BoundedQueue(QueuePolicy(1, "wait"))
    queue.put(0)
    refused = threading.Event()

    def produce() -> None:
        try:
            queue.put(1)
        except QueueClosed:
            refused.set()

    producer = threading.Thread(target=produce)
    producer.start()
    getattr(queue, end)()
    producer.join(JOIN_S)
    assert refused.is_set()
    assert len(queue) == (1 if end == "close" else 0)


@pytest.mark.parametrize("end", ["close", "discard"])
def test_closing_wakes_every_waiting_consumer(end: str) -> None:
    queue: BoundedQueue[int] = BoundedQueue(WAIT)
    ended = threading.Semaphore(0)

    def consume() -> None:
        try:
            queue.get()
        except QueueClosed:
            ended.release()

    consumers = [threading.Thread(target=consume) for _ in range(3)]
    for consumer in consumers:
        consumer.start()
    getattr(queue, end)()
    for consumer in consumers:
        consumer.join(JOIN_S)
    assert all(ended.acquire(blocking=False) for _ in consumers)


@settings(max_examples=20, deadline=None)
@given(policy=policies, producers=st.integers(1, 3), each=st.integers(0, 20))
def test_many_producers_each_keep_their_own_order(policy: QueuePolicy, producers: int, each: int) -> None:
    queue: BoundedQueue[tuple[int, int]] = BoundedQueue(policy)

    def produce(who: int) -> None:
        for item in range(each):
            queue.put((who, item))

    threads = [threading.Thread(target=produce, args=(who,)) for who in range(producers)]

    def close_when_done() -> None:
        for thread in threads:
            thread.join(JOIN_S)
        queue.close()

    closer = threading.Thread(target=close_when_done)
    for thread in [*threads, closer]:
        thread.start()
    taken: list[tuple[int, int]] = []
    lost = 0
    try:
        while True:
            got = queue.get()
            taken.append(got.item)
            lost += got.lost_before
    except QueueClosed:
        closer.join(JOIN_S)
    assert len(taken) + lost == producers * each
    for who in range(producers):
        mine = [item for owner, item in taken if owner == who]
        assert mine == sorted(mine)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("wait", WAIT),
        ("newest", NEWEST),
        (" Newest ", NEWEST),
        ("keep 8", QueuePolicy(8, "drop oldest")),
        ("keep  64", QueuePolicy(64, "drop oldest")),
    ],
)
def test_policies_are_read(text: str, policy: QueuePolicy) -> None:
    assert QueuePolicy.parse(text) == policy


@pytest.mark.parametrize(
    "text", ["", "oldest", "keep", "keep 0", "keep -1", "keep 1001", "keep 99999999999", "keep many", "keep 3 dropping"]
)
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="unknown queue policy"):
        QueuePolicy.parse(text)


def test_a_queue_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 frame; got 0"):
        BoundedQueue(QueuePolicy(0, "wait"))
