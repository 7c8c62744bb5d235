"""VP8 over RTP: frames come out whole at their marker, and a damaged one hides all before the next keyframe."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from aiortc.codecs.vpx import VpxPayloadDescriptor
from hypothesis import given
from hypothesis import strategies as st

from saccade.sources.rtp.depacketizer import AccessUnit
from saccade.sources.rtp.packet import RtpPacket
from saccade.sources.rtp.reorder_buffer import ReorderBuffer
from saccade.sources.rtp.vp8 import Vp8Depacketizer

KEY = b"\x10\x02\x00\x9d\x01\x2a\x40\x01"


def frame(number: int, keys: int) -> bytes:
    return (KEY if number % keys == 0 else b"\x11\x02\x00") + b"frame %d" % number * 20


def packets_of(frames: list[bytes], parts: int = 3, first: int = 65_530) -> list[RtpPacket]:
    """`parts` packets a frame."""
    packets = []
    for number, data in enumerate(frames):
        size = -(-len(data) // parts)
        for part in range(parts):
            descriptor = VpxPayloadDescriptor(partition_start=int(part == 0), partition_id=0, picture_id=number)
            payload = bytes(descriptor) + data[part * size : (part + 1) * size]
            sequence = (first + len(packets)) % 65536
            packets.append(RtpPacket(part == parts - 1, 97, sequence, 3000 * number, 1, payload))
    return packets


def depacketize(packets: Iterable[RtpPacket]) -> tuple[list[AccessUnit], Vp8Depacketizer]:
    reorder, depacketizer = ReorderBuffer(0), Vp8Depacketizer(trust_marker=True)
    units = []
    for packet in packets:
        for one, gap, at in reorder.push(packet, 1.5):
            units += depacketizer.push(one, gap, at)
    return units, depacketizer


def test_a_frame_is_whole_at_its_marker() -> None:
    frames = [frame(number, keys=4) for number in range(8)]
    depacketizer = Vp8Depacketizer(trust_marker=True)
    units = []
    for packet in packets_of(frames):
        whole = depacketizer.push(packet, packet.sequence == 65_530, 1.5)
        assert len(whole) == packet.marker
        units += whole
    assert [unit.data for unit in units] == frames
    assert [unit.key for unit in units] == [True, False, False, False] * 2
    assert units[0] == AccessUnit(frames[0], 0, True, True, False, 0, 1.5, "vp8")
    assert not any(unit.fresh or unit.dropped_before for unit in units[1:])


@pytest.mark.parametrize("lost", range(3))
def test_a_damaged_frame_hides_all_before_the_next_key(lost: int) -> None:
    frames = [frame(number, keys=4) for number in range(8)]
    packets = packets_of(frames)
    del packets[3 * 2 + lost]
    units, depacketizer = depacketize(packets)
    assert [unit.data for unit in units] == [*frames[:2], *frames[4:]]
    assert (units[2].fresh, units[2].dropped_before) == (True, 2)
    assert not depacketizer.needs_key


@pytest.mark.parametrize("missing", [1, 2, 3, 4])
def test_a_key_frame_just_after_a_gap_is_used(missing: int) -> None:
    frames = [frame(number, keys=4) for number in range(8)]
    packets = packets_of(frames)
    del packets[3 * 4 - missing : 3 * 4]
    units, _ = depacketize(packets)
    whole = 3 - (missing + 2) // 3 + 1
    assert [unit.data for unit in units] == [*frames[:whole], *frames[4:]]


def test_joining_within_a_frame_skips_the_rest_of_it() -> None:
    frames = [frame(number, keys=2) for number in range(6)]
    units, _ = depacketize(packets_of(frames)[1:])
    assert [unit.data for unit in units] == frames[2:]
    assert units[0].dropped_before == 0


def test_without_markers_a_frame_ends_when_the_next_begins() -> None:
    frames = [frame(number, keys=4) for number in range(4)]
    packets = packets_of(frames)
    for packet in packets:
        packet.marker = False
    assert [unit.data for unit in depacketize(packets)[0]] == frames[:-1]


def test_a_misused_marker_tears_one_frame() -> None:
    frames = [frame(number, keys=2) for number in range(8)]
    packets = packets_of(frames)
    for packet in packets:
        packet.marker = True
    data = [unit.data for unit in depacketize(packets)[0]]
    assert frames[0].startswith(data[0])
    assert data[1:] == frames[2:-1]


def test_padding_is_neither_a_frame_nor_a_misused_marker() -> None:
    frames = [frame(number, keys=4) for number in range(4)]
    padded = []
    for packet in packets_of(frames):
        padded.append(packet)
        for payload in (b"", b"\x00", b"\x90\x80\x05"):
            padded.append(RtpPacket(False, 97, 0, packet.timestamp, 1, payload))
    for number, packet in enumerate(padded):
        packet.sequence = number
    assert [unit.data for unit in depacketize(padded)[0]] == frames


@given(
    data=st.binary(min_size=1, max_size=20),
    starts=st.integers(0, 1),
    partition=st.integers(0, 7),
    picture=st.none() | st.integers(0, 0x7FFF),
    tl0=st.none() | st.integers(0, 255),
    tid=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 1)),
    key=st.none() | st.integers(0, 31),
)
def test_every_descriptor_is_skipped(
    data: bytes,
    starts: int,
    partition: int,
    picture: int | None,
    tl0: int | None,
    tid: tuple[int, int] | None,
    key: int | None,
) -> None:
    descriptor = VpxPayloadDescriptor(starts, partition, picture, tl0, tid, key)
    depacketizer = Vp8Depacketizer()
    assert depacketizer._parse(bytes(descriptor) + data)
    assert depacketizer._parts == [data]
    assert depacketizer._begins_unit(bytes(descriptor)) == (starts == 1 and partition == 0)


@given(st.lists(st.tuples(st.binary(max_size=8), st.booleans(), st.integers(0, 2)), max_size=40))
def test_garbage_never_raises(payloads: list[tuple[bytes, bool, int]]) -> None:
    depacketizer = Vp8Depacketizer(trust_marker=True)
    for number, (payload, marker, timestamp) in enumerate(payloads):
        depacketizer.push(RtpPacket(marker, 97, number, timestamp, 1, payload), marker, 0.0)
