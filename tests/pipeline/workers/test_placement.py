"""Placement: tables of single decisions, and invariants over random fleets, loads, deaths and returns."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from saccade.pipeline.workers.placement import Placement, StreamNeed, WorkerSlot, demand


def slots(*names: str, **values: object) -> list[WorkerSlot]:
    return [WorkerSlot(name, **values) for name in names]  # type: ignore[arg-type]


def needs(count: int, cost: float | None = None, weight: float = 1.0) -> list[StreamNeed]:
    return [StreamNeed(f"s{number:03}", weight, cost) for number in range(count)]


def counts(places: dict[str, str]) -> dict[str, int]:
    return dict(Counter(places.values()))


def moves(before: dict[str, str], after: dict[str, str]) -> int:
    return sum(after.get(name) != worker for name, worker in before.items())


@pytest.mark.parametrize(
    ("workers", "streams", "expected"),
    [
        (slots("a", "b"), needs(6), {"a": 3, "b": 3}),
        ([WorkerSlot("a", capacity=3), WorkerSlot("b")], needs(8), {"a": 6, "b": 2}),
        (slots("a", "b", max_streams=2), needs(8), {"a": 2, "b": 2}),
        ([WorkerSlot("a", ready=False), WorkerSlot("b")], needs(4), {"b": 4}),
        ([WorkerSlot("a", draining=True), WorkerSlot("b")], needs(4), {"b": 4}),
        ([WorkerSlot("a", draining=True), WorkerSlot("b", max_streams=1)], needs(4), {"a": 3, "b": 1}),
        ([WorkerSlot("a", busy=0.9), WorkerSlot("b")], needs(4, 0.1), {"b": 4}),
        ([], needs(2), {}),
        (slots("a"), [], {}),
        # One heavy stream against four light ones; and the same by weights, before anything is measured.
        (slots("a", "b"), [StreamNeed("big", cost=0.4), *needs(4, 0.1)], {"a": 1, "b": 4}),
        (slots("a", "b"), [StreamNeed("big", weight=4), *needs(4)], {"a": 1, "b": 4}),
    ],
    ids=["equal", "capacity", "full", "unready", "draining", "overflow", "busy", "no-worker", "none", "cost", "weight"],
)
def test_new_streams_go_to_the_least_loaded(
    workers: list[WorkerSlot], streams: list[StreamNeed], expected: dict[str, int]
) -> None:
    assert counts(Placement().place(streams, workers, 0.0)) == expected


def test_streams_of_a_dead_worker_move_and_no_others() -> None:
    placement, streams = Placement(), needs(9, 0.1)
    before = placement.place(streams, slots("a", "b", "c"), 0.0)
    after = placement.place(streams, slots("a", "c"), 1.0)
    assert moves(before, after) == 3
    assert set(after.values()) == {"a", "c"}
    assert len(after) == 9


def test_a_worker_that_returns_takes_no_streams_without_need() -> None:
    placement, streams = Placement(), needs(9, 0.05)
    placement.place(streams, slots("a", "b", "c"), 0.0)
    before = placement.place(streams, slots("a", "c"), 1.0)
    for second in range(2, 100):
        after = placement.place(streams, slots("a", "b", "c"), float(second))
    assert after == before


@pytest.mark.parametrize(("unready_s", "moved"), [(1.0, 0), (3.0, 3)])
def test_a_restarting_worker_keeps_its_streams_for_a_while(unready_s: float, moved: int) -> None:
    placement, streams = Placement(), needs(6, 0.1)
    before = placement.place(streams, slots("a", "b"), 0.0)
    restarting = [WorkerSlot("a", ready=False), WorkerSlot("b")]
    placement.place(streams, restarting, 1.0)
    after = placement.place(streams, restarting, 1.0 + unready_s)
    assert moves(before, after) == moved
    assert len(after) == 6


def test_streams_stay_on_their_only_worker_while_it_restarts() -> None:
    placement, streams = Placement(), needs(3)
    before = placement.place(streams, slots("a"), 0.0)
    for second in range(1, 60):
        assert placement.place(streams, slots("a", ready=False), float(second)) == before


def test_draining_moves_what_others_have_room_for() -> None:
    placement, streams = Placement(), needs(8, 0.05)
    placement.place(streams, slots("a", "b", max_streams=6), 0.0)
    draining = [WorkerSlot("a", max_streams=6, draining=True), WorkerSlot("b", max_streams=6)]
    assert counts(placement.place(streams, draining, 1.0)) == {"a": 2, "b": 6}


def test_adopted_streams_stay_where_they_were_found() -> None:
    placement = Placement()
    found = {"s000": "b", "s001": "b", "s002": "gone"}
    placement.adopt(found)
    after = placement.place(needs(3, 0.1), slots("a", "b"), 0.0)
    assert after == {"s000": "b", "s001": "b", "s002": "a"}


@pytest.mark.parametrize(
    ("cost", "processed", "lost", "expected"), [(0.5, 10, 0, 0.5), (0.5, 10, 15, 1.25), (0.5, 0, 9, 0.5)]
)
def test_demand_counts_the_frames_that_were_lost(cost: float, processed: float, lost: float, expected: float) -> None:
    assert demand(cost, processed, lost) == pytest.approx(expected)


@pytest.mark.parametrize("values", [{"capacity": 0}, {"capacity": float("nan")}, {"max_streams": -1}])
def test_a_slot_refuses_values_that_mean_nothing(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="should be"):
        WorkerSlot("a", **values)  # type: ignore[arg-type]


@given(costs=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=40), workers=st.integers(1, 6), start=st.integers(1, 6))
def test_nothing_moves_from_a_worker_that_is_there(costs: list[float], workers: int, start: int) -> None:
    placement = Placement()
    names = [f"w{number}" for number in range(workers)]
    streams = [StreamNeed(f"s{number}", cost=cost) for number, cost in enumerate(costs)]
    places = {stream.name: names[number % min(start, workers)] for number, stream in enumerate(streams)}
    placement.adopt(places)
    for second in range(0, 300, 30):
        assert placement.place(streams, slots(*names), float(second)) == places


class Fleet(RuleBasedStateMachine):
    """Workers die, return, drain and fill; streams come, go and change, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.placement = Placement()
        self.workers = {"w0": WorkerSlot("w0", max_streams=4), "w1": WorkerSlot("w1", max_streams=4)}
        self.streams: dict[str, StreamNeed] = {}
        self.places: dict[str, str] = {}
        self.now_s = 0.0

    @rule(number=st.integers(0, 4), room=st.integers(0, 5), capacity=st.sampled_from([0.5, 1.0, 2.0]))
    def add_worker(self, number: int, room: int, capacity: float) -> None:
        self.workers[f"w{number}"] = WorkerSlot(f"w{number}", capacity, room)

    @rule(number=st.integers(0, 4))
    def kill_worker(self, number: int) -> None:
        self.workers.pop(f"w{number}", None)

    @rule(number=st.integers(0, 4), ready=st.booleans(), draining=st.booleans(), busy=st.none() | st.floats(0, 1))
    def change_worker(self, number: int, ready: bool, draining: bool, busy: float | None) -> None:
        if slot := self.workers.get(f"w{number}"):
            self.workers[slot.name] = replace(slot, ready=ready, draining=draining, busy=busy)

    @rule(number=st.integers(0, 15), cost=st.none() | st.floats(0, 2), weight=st.floats(0.01, 100))
    def set_stream(self, number: int, cost: float | None, weight: float) -> None:
        self.streams[f"s{number}"] = StreamNeed(f"s{number}", weight, cost)

    @rule(number=st.integers(0, 15))
    def drop_stream(self, number: int) -> None:
        self.streams.pop(f"s{number}", None)

    @rule(passed_s=st.sampled_from([0.0, 1.0, 5.0, 30.0]))
    def wait(self, passed_s: float) -> None:
        self.now_s += passed_s

    @invariant()
    def decides_well(self) -> None:
        workers = list(self.workers.values())
        after = self.placement.place(list(self.streams.values()), workers, self.now_s)
        count = counts(after)
        # Nothing runs that is not wanted, nor where there is no worker, nor on one that is full.
        assert after.keys() <= self.streams.keys()
        assert all(count[name] <= self.workers[name].max_streams for name in count)
        # Nothing is nowhere while a worker that is ready has room.
        room = sum(slot.max_streams - count.get(slot.name, 0) for slot in workers if slot.ready)
        assert len(after) == len(self.streams) or room == 0
        for name, worker in after.items():
            if self.places.get(name) != worker:  # what comes to a worker comes to one that takes streams
                assert self.workers[worker].ready
        # Asked again at once, it decides the same.
        assert self.placement.place(list(self.streams.values()), workers, self.now_s) == after
        self.places = after


Fleet.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestFleet = Fleet.TestCase
