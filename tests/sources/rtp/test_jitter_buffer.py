from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from aiortc.rtp import RtpPacket
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.sources.rtp.jitter_buffer import CodedFrame, JitterBuffer, Packet


@dataclass
class Sent:
    sequence_number: int
    timestamp: int
    marker: int
    _data: bytes
    payload_type: int = 97
    ssrc: int = 1


def stream(frames: int, packets: int = 3, first: int = 65_530) -> list[Sent]:
    """`frames` of `packets` packets each; the numbers wrap around early on."""
    return [
        Sent((first + n * packets + part) % 65_536, 3000 * n, int(part == packets - 1), b"%d.%d " % (n, part))
        for n in range(frames)
        for part in range(packets)
    ]


def whole(number: int, packets: int = 3) -> bytes:
    return b"".join(b"%d.%d " % (number, part) for part in range(packets))


def feed(buffer: JitterBuffer, packets: Iterable[Packet], at: float = 0.0) -> list[CodedFrame]:
    return [frame for packet in packets for frame in buffer.add(packet, at)]


def test_a_frame_is_whole_at_its_marker() -> None:
    buffer = JitterBuffer()
    for packet in stream(5):
        assert len(buffer.add(packet, 1.5)) == packet.marker
    (frame,) = feed(JitterBuffer(), stream(1), 1.5)
    assert frame == CodedFrame(whole(0), 0, 97, 1.5, after_loss=False)


def test_without_markers_a_frame_ends_when_the_next_begins() -> None:
    packets = stream(4)
    for packet in packets:
        packet.marker = 0
    assert [p.data for p in feed(JitterBuffer(), packets)] == [whole(n) for n in range(3)]


def test_a_marker_in_mid_frame_is_not_trusted_from_then_on() -> None:
    packets = stream(6)
    for packet in packets:
        packet.marker = 1
    buffer = JitterBuffer()
    frames = feed(buffer, packets)
    assert not buffer.marker_trusted
    # The first was closed too early; the rest of it is no frame, and the next one says so.
    assert [(p.data, p.after_loss) for p in frames] == [
        (b"0.0 ", False),
        (whole(1), True),
        *((whole(n), False) for n in (2, 3, 4)),
    ]


def test_padding_after_the_marker_is_no_misuse_of_it() -> None:
    packets = stream(2, packets=2, first=10)
    padding = Sent(12, packets[1].timestamp, 0, b"")
    for late in packets[2:]:
        late.sequence_number += 1
    buffer = JitterBuffer()
    assert len(feed(buffer, [*packets[:2], padding, *packets[2:]])) == 2
    assert buffer.marker_trusted


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 40))
def test_reordered_and_duplicate_packets_give_the_same_frames(seed: int, window: int) -> None:
    chance = random.Random(seed)
    packets = stream(30)
    shuffled = sorted(range(1, len(packets)), key=lambda place: place + chance.uniform(0, window))
    order = [0, *shuffled]  # the first that arrives is where it all begins
    copies = [place for place in order for _ in range(chance.choice((1, 1, 2)))]
    frames = feed(JitterBuffer(), [packets[place] for place in copies])
    assert [p.data for p in frames] == [whole(n) for n in range(30)]
    assert not any(p.after_loss for p in frames)


def test_a_lost_packet_is_waited_for_then_its_frames_dropped() -> None:
    packets = stream(10)
    del packets[4]  # in the middle of frame 1
    buffer = JitterBuffer(wait_s=0.2)
    before = feed(buffer, packets[:14], at=1.0)
    assert [p.data for p in before] == [whole(0)]
    after = feed(buffer, packets[14:15], at=1.1) + feed(buffer, packets[15:], at=1.3)
    # Which frame the packet belonged to cannot be known for certain, so everything up to the next end goes.
    assert [p.data for p in after] == [whole(n) for n in range(2, 10)]
    assert [p.after_loss for p in after] == [True, *[False] * 7]


def test_a_packet_that_comes_in_time_after_all_loses_nothing() -> None:
    packets = stream(4)
    late = packets.pop(4)
    buffer = JitterBuffer(wait_s=0.2)
    assert len(feed(buffer, packets[:8], at=1.0)) == 1
    assert [p.data for p in feed(buffer, [late], at=1.19)] == [whole(1), whole(2)]


def test_silence_is_no_gap() -> None:
    packets = stream(4)
    buffer = JitterBuffer(wait_s=0.2)
    feed(buffer, packets[:3], at=1.0)
    assert feed(buffer, [packets[4]], at=9.0) == []  # one overtook the other, after eight seconds of nothing
    assert [p.data for p in feed(buffer, [packets[3], packets[5]], at=9.01)] == [whole(1)]


def test_there_is_room_for_a_key_frame_of_4k_behind_a_gap() -> None:
    packets = stream(1, packets=3000)
    late = packets.pop(1)
    buffer = JitterBuffer()
    assert feed(buffer, packets) == []
    assert [p.data for p in feed(buffer, [late])] == [whole(0, packets=3000)]


def test_memory_is_bounded_while_a_packet_is_missing() -> None:
    packets = stream(400)
    del packets[4]
    buffer = JitterBuffer(capacity=64)
    frames = feed(buffer, packets)
    assert frames[-1].data == whole(399)
    assert len(frames) == 399


@pytest.mark.parametrize("jump", [20_000, 40_000])
def test_a_sender_that_begins_anew_is_followed(jump: int) -> None:
    buffer = JitterBuffer()
    feed(buffer, stream(3, first=100))
    frames = feed(buffer, stream(2, first=100 + jump))
    assert [(p.data, p.after_loss) for p in frames] == [(whole(0), True), (whole(1), False)]


def test_another_sender_on_the_same_track_is_followed() -> None:
    buffer = JitterBuffer()
    feed(buffer, stream(3))
    others = stream(2, first=9)
    for packet in others:
        packet.ssrc = 2
    assert [p.after_loss for p in feed(buffer, others)] == [True, False]


def test_aiortc_packets_are_packets() -> None:
    packet = RtpPacket(payload_type=97, marker=1, sequence_number=5, timestamp=9, ssrc=3)
    packet._data = b"frame"  # as aiortc's receiver does
    assert feed(JitterBuffer(), [packet])[0].data == b"frame"
