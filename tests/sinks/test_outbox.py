"""The outbox of one client: it never grows, keeps the order, and tells every loss."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from saccade.sinks.outbox import Message, Outbox


def record(name: str, size: int = 1) -> Message:
    """A record of the stream that its name begins with."""
    return Message(name[0], name.encode().ljust(size))


def drain(outbox: Outbox) -> list[tuple[str, int]]:
    taken = []
    while (one := outbox.take()) is not None:
        taken.append((one[0].text.decode().strip(), one[1]))
    return taken


@pytest.mark.parametrize(
    ("newest", "names", "expected"),
    [
        (False, "", []),
        (False, "a1 b1 a2", [("a1", 0), ("b1", 0), ("a2", 0)]),
        (False, "a1 b1 a2 b2 a3 b3", [("b2", 1), ("a3", 2), ("b3", 0)]),
        (True, "a1 b1 a2 b2 a3", [("a3", 2), ("b2", 1)]),
        (True, "a1 b1 c1 d1 a2", [("c1", 0), ("d1", 0), ("a2", 1)]),
    ],
)
def test_a_full_outbox_drops_the_oldest(newest: bool, names: str, expected: list[tuple[str, int]]) -> None:
    outbox = Outbox(newest=newest, max_records=3)
    for name in names.split():
        outbox.put(record(name))
    assert drain(outbox) == expected


def test_newest_mode_keeps_one_record_of_each_stream() -> None:
    outbox = Outbox()
    for name in ("a1", "b1", "a2", "a3"):
        outbox.put(record(name))
    outbox.newest = True
    assert drain(outbox) == [("a3", 2), ("b1", 0)]


def test_a_notice_keeps_its_place_among_the_records() -> None:
    outbox = Outbox(newest=True)
    for message in (record("a1"), Message("a", b"ended", record=False), record("a2"), record("a3")):
        outbox.put(message)
    assert drain(outbox) == [("a1", 0), ("ended", 0), ("a3", 1)]


def test_a_message_larger_than_the_outbox_is_dropped() -> None:
    outbox = Outbox(max_bytes=10)
    for message in (record("a1", 4), record("a2", 11), record("a3", 4)):
        outbox.put(message)
    assert drain(outbox) == [("a3", 2)]
    assert outbox.dropped == 2


STEPS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from("abc"), st.integers(8, 40), st.booleans(), st.integers(0, 2)),
    st.tuples(st.just("take")),
    st.tuples(st.just("mode"), st.booleans()),
)


@given(st.lists(STEPS, max_size=80))
@example([("put", "a", 8, True, 0), *[("put", "b", 8, False, 0)] * 3, ("mode", True)])
def test_an_outbox_is_bounded_ordered_and_counts_every_loss(steps: list[tuple[object, ...]]) -> None:
    outbox = Outbox(max_records=5, max_bytes=100)
    made: Counter[str] = Counter()  # records of each stream, those lost before the outbox included
    seen: Counter[str] = Counter()  # of them, taken or reported as lost
    notices: defaultdict[str, int] = defaultdict(int)

    def take() -> None:
        one = outbox.take()
        if one is None:
            return
        message, lost_before = one
        number = int(message.text)
        seen[message.stream] += lost_before
        if message.record:
            seen[message.stream] += 1
            assert seen[message.stream] == number  # each record is there, or reported, just before the next
        else:
            assert number > notices[message.stream]
            notices[message.stream] = number

    ends = 0
    for step in steps:
        match step:
            case ("put", str(stream), int(size), bool(is_record), int(lost_before)):
                made[stream] += lost_before + is_record
                ends += not is_record
                number = made[stream] if is_record else ends
                outbox.put(Message(stream, str(number).encode().rjust(size), is_record), lost_before)
            case ("take",):
                take()
            case ("mode", bool(newest)):
                outbox.newest = newest
        assert len(outbox) <= 5
        assert 0 <= outbox.bytes_waiting <= 100
    while len(outbox):  # else one of the last records could be dropped itself
        take()
    for stream in "abc":  # every loss is reported with what comes next
        made[stream] += 1
        outbox.put(Message(stream, str(made[stream]).encode()))
    while len(outbox):
        take()
    assert seen == made
    assert outbox.bytes_waiting == 0
