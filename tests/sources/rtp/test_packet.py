"""RTP and RTCP: what a reference packetizer takes apart comes back whole, in time and never torn."""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.sources.rtp.depacketizer import AccessUnit
from saccade.sources.rtp.h26x import Codec, H26xDepacketizer
from saccade.sources.rtp.nal import START_CODE
from saccade.sources.rtp.packet import RtpPacket, parse_rtp
from saccade.sources.rtp.reorder_buffer import ReorderBuffer
from saccade.sources.rtp.rtcp import parse_rtcp, receiver_report

STEP = 3600
HEADERS = {  # what each codec's NAL units begin with
    "h264": {"key": b"\x65", "slice": b"\x41", "sps": b"\x67", "pps": b"\x68", "sei": b"\x06"},
    "hevc": {
        "key": b"\x26\x01",
        "slice": b"\x02\x01",
        "sps": b"\x40\x01",
        "pps": b"\x44\x01",
        "sei": b"\x4e\x01",
    },
}

Unit = list[bytes]


def unit_of(codec: Codec, key: bool, sizes: Iterable[int], seed: int = 0) -> Unit:
    """An access unit of slices of the given sizes, with parameter sets when it is a key."""
    header = HEADERS[codec]
    dice = random.Random(seed)
    nals = [header["sps"] + dice.randbytes(8), header["pps"] + dice.randbytes(4)] if key else []
    for number, size in enumerate(sizes):  # the first slice of a frame begins with a set bit
        slice_header = b"\x00" if number else b"\x80"
        nals.append(header["key" if key else "slice"] + slice_header + dice.randbytes(size))
    return nals


def packetize(codec: Codec, units: list[Unit], mtu: int, *, first: int = 0, marker: str = "right") -> list[RtpPacket]:
    """A reference packetizer: single NAL units, aggregates of small ones, fragments of large ones."""
    head = 2 if codec == "hevc" else 1
    packets: list[RtpPacket] = []
    for number, unit in enumerate(units):
        payloads: list[bytes] = []
        together: list[bytes] = []

        def flush(payloads: list[bytes] = payloads, together: list[bytes] = together) -> None:
            if len(together) == 1:
                payloads.append(together[0])
            elif together:
                lead = b"\x60\x01" if codec == "hevc" else b"\x78"
                payloads.append(lead + b"".join(struct.pack(">H", len(nal)) + nal for nal in together))
            together.clear()

        for nal in unit:
            if len(nal) <= mtu:
                if sum(map(len, together)) + len(nal) + 2 * len(together) + 4 > mtu:
                    flush()
                together.append(nal)
                continue
            flush()
            body, room = nal[head:], max(1, mtu - head - 1)
            pieces = [body[at : at + room] for at in range(0, len(body), room)]
            for place, piece in enumerate(pieces):
                flags = 0x80 * (place == 0) | 0x40 * (place == len(pieces) - 1)
                if codec == "hevc":
                    lead = bytes((nal[0] & 0x81 | 49 << 1, nal[1], flags | nal[0] >> 1 & 63))
                else:
                    lead = bytes((nal[0] & 0xE0 | 28, flags | nal[0] & 31))
                payloads.append(lead + piece)
        flush()
        for place, payload in enumerate(payloads):
            last = place == len(payloads) - 1
            marked = {"right": last, "never": False, "always": True}[marker]
            stamp = (STEP * number) % (1 << 32)
            packets.append(RtpPacket(marked, 96, (first + len(packets)) % 65536, stamp, 1, payload))
    return packets


def depacketize(codec: Codec, packets: Iterable[RtpPacket], room: int = 0) -> list[AccessUnit]:
    reorder, depacketizer = ReorderBuffer(room), H26xDepacketizer(codec)
    units: list[AccessUnit] = []
    for number, packet in enumerate(packets):
        for one, gap, at in reorder.push(packet, number / 1000):
            units += depacketizer.push(one, gap, at)
    return units


def joined(unit: Unit) -> bytes:
    return b"".join(START_CODE + nal for nal in unit)


def wire(packet: RtpPacket) -> bytes:
    head = struct.pack(
        ">BBHII", 0x80, packet.marker << 7 | packet.payload_type, packet.sequence, packet.timestamp, packet.ssrc
    )
    return head + packet.payload


codecs = st.sampled_from(["h264", "hevc"])
streams = st.lists(st.lists(st.integers(1, 400), min_size=1, max_size=4), min_size=4, max_size=12)


@given(codec=codecs, sizes=streams, mtu=st.integers(20, 300), first=st.integers(0, 65535))
def test_what_was_taken_apart_comes_back_whole(codec: Codec, sizes: list[list[int]], mtu: int, first: int) -> None:
    units = [unit_of(codec, number == 0, slices, number) for number, slices in enumerate(sizes)]
    packets = packetize(codec, units, mtu, first=first)
    found = depacketize(codec, packets)
    assert [unit.data for unit in found] == [joined(unit) for unit in units]
    assert [unit.timestamp for unit in found] == [STEP * number for number in range(len(units))]
    assert [unit.fresh for unit in found] == [True] + [False] * (len(units) - 1)
    assert {unit.dropped_before for unit in found} == {0}


@given(codec=codecs, sizes=streams, mtu=st.integers(20, 300), marker=st.sampled_from(["never", "always"]))
def test_a_misused_marker_falls_back_to_timestamps(codec: Codec, sizes: list[list[int]], mtu: int, marker: str) -> None:
    units = [unit_of(codec, number == 0, [*slices, 500], number) for number, slices in enumerate(sizes)]
    found = depacketize(codec, packetize(codec, units, mtu, marker=marker))
    assert [unit.data for unit in found] == [joined(unit) for unit in units[:-1]]


@pytest.mark.parametrize("trust", [False, True])
def test_with_a_right_marker_a_frame_does_not_wait_for_the_next(trust: bool) -> None:
    units = [unit_of("h264", number == 0, [900], number) for number in range(6)]
    depacketizer = H26xDepacketizer("h264", trust_marker=trust)
    closed_by = []
    for packet in packetize("h264", units, 100):
        for unit in depacketizer.push(packet, False, 0.0):
            closed_by.append((unit.timestamp // STEP, packet.timestamp // STEP))
    late = [] if trust else [(0, 1), (1, 2)]  # until the marker is trusted
    assert closed_by == [*late, *((number, number) for number in range(len(late), 6))]


def test_a_marker_that_goes_wrong_later_tears_one_frame_at_most() -> None:
    good = [unit_of("h264", number == 0, [50], number) for number in range(5)]
    bad = [unit_of("h264", number in (2, 4), [300, 300], 10 + number) for number in range(6)]
    packets = packetize("h264", good, 100)
    packets += [
        replace(packet, sequence=len(packets) + at, timestamp=packet.timestamp + 5 * STEP)
        for at, packet in enumerate(packetize("h264", bad, 100, marker="always"))
    ]
    found = [unit.data for unit in depacketize("h264", packets)]
    whole = [joined(unit) for unit in (*good, *bad)]
    assert len([data for data in found if data not in whole]) <= 1
    assert found[-1] == whole[-2]


@given(
    codec=codecs,
    lost=st.sets(st.integers(0, 200), min_size=1, max_size=20),
    keys=st.integers(2, 8),
    room=st.sampled_from([0, 32]),
)
def test_after_a_loss_nothing_passes_before_the_next_key(codec: Codec, lost: set[int], keys: int, room: int) -> None:
    units = [unit_of(codec, number % keys == 0, [120, 40], number) for number in range(40)]
    packets = packetize(codec, units, 60)
    lost = {at for at in lost if at < len(packets) and packets[at].timestamp > 0}
    found = depacketize(codec, [p for at, p in enumerate(packets) if at not in lost], room)
    hurt = {packets[at].timestamp // STEP for at in lost}
    whole = {joined(unit): number for number, unit in enumerate(units)}
    assert all(unit.data in whole for unit in found)
    numbers = [unit.timestamp // STEP for unit in found]
    assert numbers == [whole[unit.data] for unit in found]
    assert not hurt & set(numbers)
    for number in numbers:  # whatever it is predicted from was handed on as well
        assert set(range(number - number % keys, number)) <= set(numbers)
    for before, after in itertools.pairwise(found):
        missing = after.timestamp // STEP - before.timestamp // STEP - 1
        assert after.fresh == (missing > 0)
        assert after.dropped_before <= missing


@given(codec=codecs, seed=st.integers(0, 1000))
def test_packets_overtaken_or_doubled_on_the_way_do_no_harm(codec: Codec, seed: int) -> None:
    units = [unit_of(codec, number == 0, [200, 40], number) for number in range(20)]
    packets = packetize(codec, units, 60, first=65500)
    dice = random.Random(seed)
    delayed = sorted(range(1, len(packets)), key=lambda at: at + dice.choice([0, 0, 0, dice.uniform(0, 6)]))
    arrived = [packets[0]]
    for at in delayed:
        arrived += [packets[at]] * dice.choice([1, 1, 2])
    found = depacketize(codec, arrived, room=32)
    assert [unit.data for unit in found][: len(units) - 1] == [joined(unit) for unit in units[:-1]]


@settings(max_examples=300)
@given(codec=codecs, datagrams=st.lists(st.binary(max_size=60), max_size=30), keep=st.booleans())
def test_garbage_never_raises(codec: Codec, datagrams: list[bytes], keep: bool) -> None:
    reorder, depacketizer = ReorderBuffer(), H26xDepacketizer(codec)
    for number, data in enumerate(datagrams):
        parse_rtcp(data, 0.0)
        packet = parse_rtp(data)
        if keep:
            packet = RtpPacket(number % 3 == 0, 96, number, number // 3, 1, data)
        if packet:
            for one, gap, at in reorder.push(packet, float(number)):
                depacketizer.push(one, gap, at)


def test_joining_in_the_middle_starts_at_a_key_without_loss() -> None:
    units = [unit_of("h264", number == 5, [40], number) for number in range(10)]
    found = depacketize("h264", packetize("h264", units, 100))
    assert [unit.timestamp // STEP for unit in found] == [5, 6, 7, 8, 9]
    assert found[0].dropped_before == 0


@pytest.mark.parametrize(("missing", "begins_at"), [(0, 0), (2, 4)])
@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_joining_within_a_frame_skips_the_rest_of_it(codec: Codec, missing: int, begins_at: int) -> None:
    # Parameter sets come with the session description here.
    units = [unit_of(codec, number % 4 == 0, [300, 300], number)[-2:] for number in range(8)]
    found = depacketize(codec, packetize(codec, units, 100)[missing:])
    assert [unit.timestamp // STEP for unit in found] == list(range(begins_at, 8))


def test_decoding_may_start_at_a_recovery_point() -> None:
    recovery = HEADERS["h264"]["sei"] + b"\x05\x02\xaa\xbb\x06\x01\x80\x80"
    units = [[HEADERS["h264"]["slice"] + bytes(40)] for _ in range(8)]
    units[3].insert(0, recovery)
    found = depacketize("h264", packetize("h264", units, 100))
    assert found[0].timestamp // STEP == 3


def test_a_unit_without_end_does_not_fill_the_memory() -> None:
    depacketizer = H26xDepacketizer("h264")
    for number in range(40_000):
        flags = 0x80 if number == 0 else 0
        depacketizer.push(RtpPacket(False, 96, number, 0, 1, bytes((0x7C, flags | 5)) + bytes(1000)), False, 0.0)
    assert depacketizer.damaged_packets > 0


def test_a_sender_that_begins_again_starts_over_with_a_key() -> None:
    units = [unit_of("h264", number == 0, [40], number) for number in range(4)]
    packets = packetize("h264", units, 100)
    again = [replace(packet, sequence=packet.sequence + 30_000, ssrc=2) for packet in packets]
    found = depacketize("h264", [*packets, *again])
    assert [unit.fresh for unit in found] == [True, False, False, False] + [True] + [False] * (len(found) - 5)


@pytest.mark.parametrize(
    ("data", "payload"),
    [
        (b"", None),
        (bytes(40), None),  # version 0
        (wire(RtpPacket(True, 96, 1, 2, 3, b"abc")), b"abc"),
        (b"\x81" + wire(RtpPacket(True, 96, 1, 2, 3, b"csrcabc"))[1:], b"abc"),
        (b"\x90" + wire(RtpPacket(True, 96, 1, 2, 3, b"\xbe\xde\0\x01extnabc"))[1:], b"abc"),
        (b"\xa0" + wire(RtpPacket(True, 96, 1, 2, 3, b"abc\0\0\x03"))[1:], b"abc"),
        (b"\xa0" + wire(RtpPacket(True, 96, 1, 2, 3, b"abc\xff"))[1:], None),  # more padding than packet
        (b"\x9f" + wire(RtpPacket(True, 96, 1, 2, 3, b"abc"))[1:], None),  # 15 sources announced
    ],
)
def test_headers(data: bytes, payload: bytes | None) -> None:
    packet = parse_rtp(data)
    assert (packet.payload if packet else None) == payload


def test_a_sender_report_gives_capture_time_across_the_wrap() -> None:
    unix_s, stamp = 1_795_262_111.5, (1 << 32) - 45_000
    ntp = int((unix_s + 2_208_988_800) * (1 << 32))
    data = struct.pack(">BBHIQIII", 0x80, 200, 6, 7, ntp, stamp, 0, 0)
    report, bye = parse_rtcp(data + struct.pack(">BBHI", 0x81, 203, 1, 7), at=5.0)
    assert report is not None
    assert bye == {7}
    assert report.captured_at(45_000) == pytest.approx(unix_s + 1)
    assert report.captured_at(stamp - 90_000) == pytest.approx(unix_s - 1)
    assert parse_rtcp(struct.pack(">BBHIQIII", 0x80, 200, 6, 7, 0, 1, 0, 0), 0.0) == (
        None,
        frozenset(),
    )  # no wall clock


def test_a_receiver_report_is_whole() -> None:
    data = receiver_report(7, 70_000, 3, None, 0.0)
    lengths, at = [], 0
    while at < len(data):
        lengths.append((data[at + 1], 4 + 4 * int.from_bytes(data[at + 2 : at + 4], "big")))
        at += lengths[-1][1]
    assert lengths[0] == (201, 32)
    assert lengths[1][0] == 202
    assert at == len(data)
