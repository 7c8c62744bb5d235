"""The queue before the decoder stays young and small, whatever falls behind, and counts what it drops."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from saccade.sources.live import coded_queue
from saccade.sources.live.coded_queue import CATCH_UP_S, MAX_AGE_S, CodedQueue
from saccade.sources.rtp.depacketizer import AccessUnit


def unit(number: int, at: float, *, key: bool = False, size: int = 10) -> AccessUnit:
    return AccessUnit(bytes(size), number, key, False, False, 0, at, "h264")


@given(
    gop=st.integers(1, 60),
    steps=st.lists(st.tuples(st.sampled_from(["push", "push", "pop"]), st.floats(0, 0.3)), max_size=200),
    decode_s=st.floats(0.001, 0.5),
)
def test_what_is_popped_is_decodable_and_drops_are_counted(
    gop: int, steps: list[tuple[str, float]], decode_s: float
) -> None:
    queue, now, sent, lost = CodedQueue(), 0.0, 0, 0
    popped: list[AccessUnit] = []
    for _ in range(100):
        queue.note_decode(decode_s)
    for what, passed in steps:
        now += passed
        if what == "push":
            queue.push(unit(sent, now, key=sent % gop == 0), now)
            sent += 1
        elif (one := queue.pop(now)) is not None:
            if popped and one.timestamp != popped[-1].timestamp + 1:
                assert one.key
                assert one.fresh
            assert now - one.arrived_at <= MAX_AGE_S or (len(queue) + 1) * queue._decode_s <= CATCH_UP_S
            popped.append(one)
            lost += one.dropped_before
    waiting = len(queue)
    assert sent == len(popped) + lost + waiting + queue._lost
    assert queue.dropped == lost + queue._lost


def test_a_stopped_reader_resumes_at_the_newest_key_frame() -> None:
    queue = CodedQueue()
    for number in range(250):  # 10 s at 25 fps
        queue.push(unit(number, number / 25, key=number % 25 == 0), number / 25)
    first = queue.pop(10.0)
    assert first is not None
    assert (first.timestamp, first.fresh, first.dropped_before) == (225, True, 225)


def test_memory_is_bounded_within_a_gop_without_end() -> None:
    queue = CodedQueue()
    size = coded_queue.MAX_BYTES // 8
    for number in range(45):
        queue.push(unit(number, 0.0, key=number in (0, 40), size=size), 0.0)
        assert queue._bytes <= coded_queue.MAX_BYTES
    first = queue.pop(0.0)
    assert first is not None
    assert first.key


def test_after_an_undecodable_unit_the_next_key_is_popped() -> None:
    queue = CodedQueue()
    for number in range(10):
        queue.push(unit(number, 0.0, key=number == 5), 0.0)
    queue.need_key()
    first = queue.pop(0.0)
    assert first is not None
    assert (first.timestamp, first.fresh, first.dropped_before) == (5, True, 5)
    queue.need_key()
    assert queue.pop(0.0) is None
    queue.push(unit(10, 0.0), 0.0)
    assert queue.pop(0.0) is None
    queue.push(unit(11, 0.0, key=True), 0.0)
    assert (queue.pop(0.0) or unit(0, 0)).dropped_before == 5
