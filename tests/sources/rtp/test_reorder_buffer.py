"""RTP packets come out of the reorder buffer in order, once, and in bounded time and memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sources.rtp.packet import RtpPacket
from saccade.sources.rtp.reorder_buffer import ReorderBuffer

WAIT_S = 0.2
Arrival = tuple[int, float]
"""Sequence number and time; a number from 100,000 is of a second sender."""


def packet(number: int) -> RtpPacket:
    return RtpPacket(False, 96, number % 100_000 % 65536, 0, 1 + number // 100_000, b"x")


def feed(buffer: ReorderBuffer, arrivals: Iterable[Arrival]) -> list[tuple[int, bool]]:
    return [
        (100_000 * (one.ssrc - 1) + one.sequence, gap)
        for number, now in arrivals
        for one, gap, _ in buffer.push(packet(number), now)
    ]


def at_once(*numbers: int) -> list[Arrival]:
    return [(number, 0.0) for number in numbers]


def after_first(*numbers: int) -> list[tuple[int, bool]]:
    """In order, and nothing is missing but what was sent before the first."""
    return [(number, place == 0) for place, number in enumerate(numbers)]


@pytest.mark.parametrize(
    ("arrivals", "ordered", "lost"),
    [
        pytest.param(at_once(1, 2, 3), after_first(1, 2, 3), 0, id="in order"),
        pytest.param(at_once(1, 3, 2), after_first(1, 2, 3), 0, id="overtaken"),
        pytest.param(at_once(1, 1, 2, 4, 4, 3, 3, 2), after_first(1, 2, 3, 4), 0, id="duplicates"),
        pytest.param(at_once(65535, 1, 0, 2), after_first(65535, 0, 1, 2), 0, id="wrap-around"),
        pytest.param(at_once(2, 1, 3), after_first(2, 3), 0, id="sent before the first"),
        pytest.param([(1, 0.0), (3, 0.1), (4, 0.29)], after_first(1), 0, id="waits"),
        pytest.param([(1, 0.0), (3, 0.1), (4, 0.3)], [(1, True), (3, True), (4, False)], 1, id="waited in vain"),
        pytest.param([(1, 0.0), (3, 0.1), (2, 0.3)], after_first(1, 2, 3), 0, id="at the last moment"),
        pytest.param([(1, 0.0), (3, 0.1), (4, 0.3), (2, 0.3)], [(1, True), (3, True), (4, False)], 1, id="too late"),
        pytest.param([(1, 0.0), (3, 0.1), (3, 0.29), (4, 0.3)], [(1, True), (3, True), (4, False)], 1, id="no delay"),
        pytest.param([(1, 0.0), (3, 9.0), (2, 9.1)], after_first(1, 2, 3), 0, id="silence is no gap"),
        pytest.param([(1, 0.0), (3, 0.1), (1, 0.3)], [(1, True), (3, True)], 1, id="waited until a duplicate"),
        pytest.param([(1, 0.0), (3, 0.1), (40_000, 0.3)], [(1, True), (3, True)], 1, id="waited until a stray packet"),
        pytest.param(
            [(1, 0.0), (5, 0.1), (3, 0.2), (6, 0.3)],
            [(1, True), (3, True), (5, True), (6, False)],
            2,
            id="two gaps, the second older",
        ),
        pytest.param(at_once(1, 3, 4, 5, 6, 7), [(1, True), *((n, n == 3) for n in range(3, 8))], 1, id="full"),
        pytest.param(at_once(1, 40_000, 2), after_first(1, 2), 0, id="stray number"),
        pytest.param(at_once(1, 100_007, 2), after_first(1, 2), 0, id="stray sender"),
        pytest.param(at_once(1, 40_000, 40_001), [(1, True), (40_000, True), (40_001, False)], 0, id="jump ahead"),
        pytest.param(at_once(9000, 7, 8), [(9000, True), (7, True), (8, False)], 0, id="jump back"),
        pytest.param(at_once(1, 100_002, 100_003), [(1, True), (100_002, True), (100_003, False)], 0, id="new sender"),
        pytest.param(
            at_once(1, 3, 100_002, 4, 100_003),
            [(1, True), (3, True), (4, False), (100_002, True), (100_003, False)],
            1,
            id="new sender after a gap",
        ),
    ],
)
def test_cases(arrivals: list[Arrival], ordered: list[tuple[int, bool]], lost: int) -> None:
    buffer = ReorderBuffer(4, WAIT_S)
    assert feed(buffer, arrivals) == ordered
    assert buffer.lost == lost


def test_over_tcp_a_gap_is_never_waited_for() -> None:
    assert feed(ReorderBuffer(0), at_once(1, 2, 5, 6)) == [(1, True), (2, False), (5, True), (6, False)]


def test_a_held_packet_keeps_its_time_of_arrival() -> None:
    buffer = ReorderBuffer(4, WAIT_S)
    found = [
        (one.sequence, at)
        for number, now in [(1, 0.5), (3, 0.6), (2, 0.7)]
        for one, _, at in buffer.push(packet(number), now)
    ]
    assert found == [(1, 0.5), (2, 0.7), (3, 0.6)]
    buffer.push(packet(5), 1.0)
    assert [at for _, _, at in buffer.expire(2.0)] == [1.0]


def test_the_sender_and_its_highest_number_are_known() -> None:
    buffer = ReorderBuffer(4, WAIT_S)
    assert (buffer.ssrc, buffer.highest, buffer.holds_back) == (None, 0, False)
    feed(buffer, at_once(65534, 65535, 1))
    assert (buffer.ssrc, buffer.highest, buffer.holds_back) == (1, 65537, True)
    feed(buffer, at_once(0))
    assert (buffer.highest, buffer.holds_back) == (65537, False)


def test_there_is_room_for_a_key_frame_of_4k_behind_a_gap() -> None:
    buffer = ReorderBuffer(4096)
    assert feed(buffer, at_once(0, *range(2, 4000))) == [(0, True)]
    assert len(feed(buffer, at_once(1))) == 3999


@given(seed=st.integers(0, 2**32), first=st.integers(0, 65535), window=st.integers(1, 32))
def test_any_order_within_the_window_is_restored(seed: int, first: int, window: int) -> None:
    chance = random.Random(seed)
    delayed = sorted(range(1, 150), key=lambda place: place + chance.uniform(0, window))
    arrivals = [(first + place) % 65536 for place in (0, *delayed) for _ in range(chance.choice((1, 1, 2)))]
    buffer = ReorderBuffer(32)
    assert feed(buffer, at_once(*arrivals)) == after_first(*((first + place) % 65536 for place in range(150)))
    assert buffer.lost == 0


@given(
    capacity=st.integers(0, 8),
    arrivals=st.lists(st.tuples(st.integers(65_500, 65_600), st.floats(0, 0.3)), min_size=1, max_size=150),
)
def test_whatever_arrives_memory_and_time_are_bounded(capacity: int, arrivals: list[Arrival]) -> None:
    buffer, now, came_out = ReorderBuffer(capacity, WAIT_S), 0.0, []
    for number, passed in arrivals:
        now += passed
        for one, gap, at in buffer.push(packet(number), now):
            came_out.append((one.sequence + (65536 if one.sequence < 1000 else 0), gap))
            assert now - at < WAIT_S + passed + 1e-6  # nothing was due at the packet before
        assert len(buffer._held) <= capacity
        assert all(now - at < WAIT_S for _, at in buffer._held.values())
    numbers = [number for number, _ in came_out]
    assert numbers == sorted(set(numbers))
    assert set(numbers) <= {number for number, _ in arrivals}
    missing = [b - a - 1 for a, b in itertools.pairwise(numbers)]
    assert [count > 0 for count in missing] == [gap for _, gap in came_out[1:]]
    assert buffer.lost == sum(missing)


@given(st.lists(st.tuples(st.integers(0, 65535), st.integers(0, 2)), max_size=100))
def test_nothing_from_any_sender_comes_out_twice(arrivals: list[tuple[int, int]]) -> None:
    buffer = ReorderBuffer(8, WAIT_S)
    sent = [RtpPacket(False, 96, number, 0, ssrc, b"x") for number, ssrc in arrivals]
    came_out = [id(one) for one_sent in sent for one, _, _ in buffer.push(one_sent, 0.0)]
    came_out += [id(one) for one, _, _ in buffer.expire(1.0)]
    assert len(came_out) == len(set(came_out))
    assert not buffer.holds_back
