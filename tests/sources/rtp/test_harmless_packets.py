"""What real cameras send beside slices must cost nothing: padding, delimiters, other formats, stray packets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sources.rtp.depacketizer import AccessUnit
from saccade.sources.rtp.h26x import Codec, H26xDepacketizer
from saccade.sources.rtp.nal import START_CODE
from saccade.sources.rtp.packet import RtpPacket, parse_rtp
from saccade.sources.rtp.reorder_buffer import ReorderBuffer
from tests.sources.rtp.test_packet import HEADERS, STEP, depacketize, joined, packetize, unit_of

CODECS: list[Codec] = ["h264", "hevc"]
FRAMES = 12
ALONE: dict[str, dict[Codec, bytes]] = {  # payloads that carry no part of a frame
    "padding": {"h264": b"", "hevc": b""},
    "end of sequence": {"h264": b"\x0a", "hevc": b"\x48\x01"},
    "end of stream": {"h264": b"\x0b", "hevc": b"\x4a\x01"},
    "filler": {"h264": b"\x0c\xff\xff\x80", "hevc": b"\x4c\x01\xff\x80"},
    "undefined": {"h264": b"\x1f\x01\x02", "hevc": b"\x7e\x01\x02"},
    "undefined zero": {"h264": b"\x00\x01\x02", "hevc": b"\x5e\x01\x02"},
}
DELIMITERS: dict[Codec, bytes] = {"h264": b"\x09\xf0", "hevc": b"\x46\x01\x50"}


def numbered(packets: list[RtpPacket]) -> list[RtpPacket]:
    return [replace(packet, sequence=number) for number, packet in enumerate(packets)]


def stream(codec: Codec, mtu: int = 100) -> tuple[list[bytes], list[RtpPacket]]:
    units = [unit_of(codec, number % 4 == 0, [150, 30], number) for number in range(FRAMES)]
    return [joined(unit) for unit in units], packetize(codec, units, mtu)


def data_of(units: list[AccessUnit]) -> list[bytes]:
    return [unit.data for unit in units]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("kind", ALONE)
@pytest.mark.parametrize("place", ["before the first", "within each", "after each"])
def test_what_carries_no_slice_costs_nothing(codec: Codec, kind: str, place: str) -> None:
    whole, packets = stream(codec)
    mixed: list[RtpPacket] = []
    for packet in packets:
        extra = replace(packet, payload=ALONE[kind][codec], marker=False)
        before = place == "before the first" and not mixed
        within = place == "within each" and not packet.marker
        mixed += [extra, packet] if before else [packet, extra] if within or place == "after each" else [packet]
    found = depacketize(codec, numbered(mixed))
    assert data_of(found) == whole
    assert {unit.dropped_before for unit in found} == {0}


@pytest.mark.parametrize("codec", CODECS)
def test_the_marker_on_an_end_of_sequence_ends_the_frame(codec: Codec) -> None:
    whole, packets = stream(codec)
    mixed: list[RtpPacket] = []
    for packet in packets:
        end = replace(packet, payload=ALONE["end of sequence"][codec])
        mixed += [replace(packet, marker=False), end] if packet.marker else [packet]
    assert data_of(depacketize(codec, numbered(mixed))) == whole


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("lead", ["delimiter", "sei"])
def test_the_first_frames_pass_whatever_leads_them(codec: Codec, lead: str) -> None:
    # Parameter sets are in the session description only; each frame begins with a packet of its own.
    first = DELIMITERS[codec] if lead == "delimiter" else HEADERS[codec]["sei"] + b"\x05\x02\xaa\xbb\x80"
    units = [unit_of(codec, number == 0, [150, 30], number)[-2:] for number in range(FRAMES)]
    mixed: list[RtpPacket] = []
    for packet in packetize(codec, units, 100):
        begins = not mixed or mixed[-1].timestamp != packet.timestamp
        mixed += [replace(packet, payload=first, marker=False), packet] if begins else [packet]
    found = depacketize(codec, numbered(mixed))
    assert data_of(found) == [joined([first, *unit]) for unit in units]


@pytest.mark.parametrize("codec", CODECS)
def test_other_payload_types_of_the_sender_are_no_gap(codec: Codec) -> None:
    whole, packets = stream(codec)
    mixed = numbered([p for packet in packets for p in (packet, replace(packet, payload_type=100))])
    reorder, depacketizer, found = ReorderBuffer(0), H26xDepacketizer(codec), []
    for packet in mixed:
        for one, gap, _ in reorder.push(packet, 0.0):
            if one.payload_type == 96:
                found += depacketizer.push(one, gap, 0.0)
            else:
                depacketizer.skip(gap)
    assert data_of(found)[: FRAMES - 1] == whole[: FRAMES - 1]


@pytest.mark.parametrize("codec", CODECS)
def test_fragments_without_data_are_harmless(codec: Codec) -> None:
    whole, packets = stream(codec, mtu=60)
    header = 2 if codec == "hevc" else 1
    kind = 49 if codec == "hevc" else 28
    mixed: list[RtpPacket] = []
    for packet in packets:
        own = packet.payload[0] >> 1 & 63 if codec == "hevc" else packet.payload[0] & 31
        if own == kind and not packet.payload[header] & 0xC0:  # a middle part: an empty one before it
            flags = bytes((packet.payload[header],))
            mixed.append(replace(packet, payload=packet.payload[:header] + flags, marker=False))
        mixed.append(packet)
    assert len(mixed) > len(packets)
    assert data_of(depacketize(codec, numbered(mixed))) == whole


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("mtu", [100, 5000])
@pytest.mark.parametrize("leading", [b"", START_CODE, START_CODE[1:]])
def test_start_codes_inside_a_payload_separate_nal_units(codec: Codec, mtu: int, leading: bytes) -> None:
    units = [unit_of(codec, number % 4 == 0, [150, 30], number) for number in range(FRAMES)]
    if leading and mtu == 100:
        leading = b""  # a fragment's first byte is the type, so that none of them can begin with a start code
    together = [[leading + START_CODE.join(unit)] for unit in units]  # as V380 cameras send it
    found = depacketize(codec, packetize(codec, together, mtu))
    assert data_of(found) == [joined(unit) for unit in units]


@pytest.mark.parametrize("stray", [{"ssrc": 9}, {"sequence": 40_000}, {"ssrc": 9, "sequence": 40_000}])
def test_a_stray_packet_of_another_sender_is_left_out(stray: dict[str, int]) -> None:
    whole, packets = stream("h264")
    mixed = [
        p for n, packet in enumerate(packets) for p in ([packet, replace(packet, **stray)] if n == 9 else [packet])
    ]
    assert data_of(depacketize("h264", mixed)) == whole


@given(sent=st.lists(st.integers(0, 199), max_size=150), late_s=st.floats(0, 0.5))
def test_a_gap_holds_packets_back_no_longer_than_the_limit(sent: list[int], late_s: float) -> None:
    reorder = ReorderBuffer(32, wait_s=0.2)
    passed: list[int] = []
    now = 0.0
    for place, number in enumerate(sent):
        now = place * 0.01 + late_s * (place > 20)
        for step in (reorder.expire(now), reorder.push(RtpPacket(False, 96, number, 0, 1, b"x"), now)):
            passed += [one.sequence for one, _, _ in step]
        assert all(now - at <= 0.2 + 1e-9 for _, at in reorder._held.values())
    passed += [one.sequence for one, _, _ in reorder.expire(now + 0.2001)]
    assert reorder._held == {}
    assert passed == sorted(set(passed))


def test_at_5_fps_a_loss_costs_a_fifth_of_a_second() -> None:
    units = [unit_of("h264", number % 2 == 0, [40], number) for number in range(10)]
    packets = [p for p in packetize("h264", units, 5000) if p.timestamp != 3 * STEP]
    reorder, depacketizer = ReorderBuffer(), H26xDepacketizer("h264")
    closed: dict[int, float] = {}
    for tick in range(200):
        now = tick * 0.01
        passed = list(reorder.expire(now))
        for packet in packets:
            if round(packet.timestamp / STEP * 0.2, 3) == round(now, 3):
                passed += reorder.push(packet, now)
        for one, gap, _ in passed:
            for unit in depacketizer.push(one, gap, now):
                closed.setdefault(unit.timestamp // STEP, now - unit.timestamp / STEP * 0.2)
    assert set(closed) == {0, 1, 2, *range(4, 10)}
    assert closed[4] == pytest.approx(0.2, abs=0.011)  # 3.2 s when only 32 packets ended the wait


@pytest.mark.parametrize("codec", CODECS)
def test_damaged_units_pass_flagged_until_the_next_key(codec: Codec) -> None:
    units = [unit_of(codec, number % 4 == 0, [150, 30], number) for number in range(FRAMES)]
    packets = packetize(codec, units, 100)
    lost = next(at for at, packet in enumerate(packets) if packet.timestamp == 5 * STEP)
    reorder, depacketizer, found = ReorderBuffer(0), H26xDepacketizer(codec, show_damaged=True), []
    for packet in packets[:lost] + packets[lost + 1 :]:
        for one, gap, _ in reorder.push(packet, 0.0):
            found += depacketizer.push(one, gap, 0.0)
    assert [unit.timestamp // STEP for unit in found] == list(range(FRAMES))
    assert [unit.timestamp // STEP for unit in found if unit.damaged] == [5, 6, 7]
    assert not any(unit.fresh for unit in found)


def test_padding_alone_is_a_packet_without_payload() -> None:
    packet = parse_rtp(b"\xa0\x60\x00\x01" + bytes(8) + b"\0\0\0\x04")
    assert packet is not None
    assert packet.payload == b""
