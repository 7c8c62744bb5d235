"""RTP packets of H.264 (RFC 6184) and H.265 (RFC 7798) into access units, the coded pictures a decoder takes.

An access unit is closed at its marker bit, not when the next one begins: waiting for the next makes every picture one
interval old (44 ms at 25 fps). Pure: bytes in, bytes out. Knows nothing of sockets or decoders.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Codec = Literal["h264", "hevc"]

START_CODE = b"\x00\x00\x00\x01"
MAX_UNIT = 16 << 20  # bytes; a key frame of an 8K camera has 2 MB
_REORDER = 32  # packets; 1 % loss at 2 Mbit/s is noticed after 150 ms
_RESTART = 3000  # a sequence number this far off is a sender that began again, as RFC 3550 has it
_TRUST_AFTER = 2  # units; the first come one interval late, but a sender that misuses the marker tears none


@dataclass(slots=True, frozen=True)
class RtpPacket:
    """One RTP packet."""

    marker: bool
    payload_type: int
    sequence: int
    timestamp: int
    ssrc: int
    payload: bytes


def parse_rtp(data: bytes) -> RtpPacket | None:
    """Read a packet; None when it is none, or carries nothing."""
    if len(data) < 12 or data[0] >> 6 != 2:
        return None
    begin = 12 + 4 * (data[0] & 15)
    end = len(data)
    if data[0] & 0x20:
        end -= data[-1]
    if data[0] & 0x10:
        if begin + 4 > len(data):
            return None
        begin += 4 + 4 * int.from_bytes(data[begin + 2 : begin + 4], "big")
    if begin >= end:
        return None
    return RtpPacket(
        marker=bool(data[1] & 0x80),
        payload_type=data[1] & 0x7F,
        sequence=int.from_bytes(data[2:4], "big"),
        timestamp=int.from_bytes(data[4:8], "big"),
        ssrc=int.from_bytes(data[8:12], "big"),
        payload=data[begin:end],
    )


def signed(difference: int, bits: int = 32) -> int:
    """The difference of two numbers that wrap around at `bits` bits, as timestamps do: the shorter of the two ways."""
    half = 1 << (bits - 1)
    return (difference + half) % (2 * half) - half


class Sequencer:
    """Puts packets in order, drops duplicates and counts what never came.

    What comes in order passes at once. Behind a gap at most `room` packets are held back for the missing one.

    Args:
        room: packets held back at most; 0 for TCP, where nothing is overtaken.
    """

    __slots__ = ("_held", "_next", "_room", "_ssrc", "highest", "lost")

    def __init__(self, room: int = _REORDER) -> None:
        self._room = room
        self._held: dict[int, RtpPacket] = {}
        self._next: int | None = None  # extended beyond 16 bits
        self._ssrc = 0
        self.lost = 0
        self.highest = 0
        """Highest sequence number seen, extended beyond 16 bits."""

    def push(self, packet: RtpPacket) -> Iterator[tuple[RtpPacket, bool]]:
        """Take a packet in; yield those whose turn it is, each with whether packets are missing before it."""
        if self._next is None or packet.ssrc != self._ssrc:
            yield from self._restart(packet)
            return
        ahead = signed(packet.sequence - self._next, 16)
        if abs(ahead) > _RESTART:
            yield from self._restart(packet)
            return
        if ahead < 0:
            return  # a duplicate, or too late
        number = self._next + ahead
        self.highest = max(self.highest, number)
        self._held[number] = packet
        while self._held:
            first = min(self._held) if self._next not in self._held else self._next
            missing = first - self._next
            if missing and len(self._held) <= self._room:
                return
            self.lost += missing
            self._next = first + 1
            yield self._held.pop(first), missing > 0

    def _restart(self, packet: RtpPacket) -> Iterator[tuple[RtpPacket, bool]]:
        self._held.clear()
        self._ssrc = packet.ssrc
        self.highest = packet.sequence
        self._next = packet.sequence + 1
        yield packet, True


@dataclass(slots=True, frozen=True)
class AccessUnit:
    """One coded picture.

    Attributes:
        data: NAL units, each behind a start code (Annex B).
        timestamp: RTP timestamp, 32 bits of 1/90000 s.
        fresh: True when units are missing before it, so that the decoder must forget what it knows; it is a key then.
        dropped_before: units left out since the one before, because they were damaged or built on one that was.
        arrived_at: when its first packet came, in seconds on the caller's clock.
    """

    data: bytes
    timestamp: int
    fresh: bool
    dropped_before: int
    arrived_at: float


class Depacketiser:
    """Puts access units together from packets in order. Hands on whole ones only, and after a loss only from a key on.

    Never raises, whatever the packets hold.

    Args:
        codec: what the packets carry.
    """

    def __init__(self, codec: Codec) -> None:
        self._hevc = codec == "hevc"
        self._nals: list[bytes] = []  # of the unit being put together
        self._fragment: list[bytes] = []  # of the NAL unit being put together
        self._size = 0
        self._timestamp: int | None = None  # None between a marker and the next packet
        self._arrived_at = 0.0
        self._picture = self._key = self._damaged = False
        self._closed_at: int | None = None  # timestamp of the unit closed by its marker
        self._marked = False  # the packet before this one had the marker, but was not believed
        self._good_markers = 0
        self._misused = False
        self._keyed = False  # whether units may be handed on
        self._dropped: int | None = None  # None before the first key: what was before we came is not lost
        self.damaged_packets = 0
        """Packets that made no sense."""

    def push(self, packet: RtpPacket, gap: bool, at: float) -> list[AccessUnit]:
        """Take the next packet in; return the access units that it completes: mostly none or one.

        Args:
            packet: the packet.
            gap: whether packets are missing before it.
            at: when it came, in seconds.
        """
        whole: list[AccessUnit] = []
        if self._timestamp is None:
            if packet.timestamp == self._closed_at:  # a picture goes on after its marker: what was handed on was torn
                self._misused = self._damaged = True
            self._begin(packet, gap, at)
        elif packet.timestamp != self._timestamp:
            self._damaged |= gap and not self._marked  # the gap may have eaten its end
            self._good_markers = self._good_markers + 1 if self._marked else 0
            whole += self._close()
            self._begin(packet, gap, at)
        else:
            self._misused |= self._marked
            self._damaged |= gap
        self._marked = False
        if not self._take(packet.payload) or self._size > MAX_UNIT:
            self.damaged_packets += 1
            self._damaged = True
            self._nals, self._fragment, self._size = [], [], 0
        if packet.marker and (self._picture or self._damaged):
            if self._good_markers >= _TRUST_AFTER and not self._misused:
                whole += self._close()
                self._closed_at, self._timestamp = packet.timestamp, None
            else:
                self._marked = True
        return whole

    def need_key(self) -> None:
        """Hand on nothing before the next key: the decoder could not use the last unit."""
        self._keyed = False

    def _begin(self, packet: RtpPacket, gap: bool, at: float) -> None:
        self._timestamp, self._arrived_at = packet.timestamp, at
        if gap:
            self._keyed = False
            # Its first packets may be what is missing.
            self._damaged |= not self._begins_unit(packet.payload)

    def _begins_unit(self, payload: bytes) -> bool:
        """Whether a packet is certainly the first of its unit.

        After a loss that is one with the parameter sets or the delimiter that a key begins with. Where the stream is
        joined, the first slice of a picture will do: parameter sets may have come with the session description.
        """
        header = 2 if self._hevc else 1
        if len(payload) < header + 2:
            return False
        kind = self._type(payload)
        if kind == (48 if self._hevc else 24):
            return self._begins_unit(payload[header + 2 :])
        if kind in ((32, 35) if self._hevc else (7, 9)):
            return True
        if self._dropped is not None:
            return False
        if kind == (49 if self._hevc else 28):
            return bool(payload[header] & payload[header + 1] & 0x80)
        return bool((kind < 32 if self._hevc else kind <= 5) and payload[header] & 0x80)

    def _close(self) -> list[AccessUnit]:
        """End the unit; return it if it is whole and can be decoded."""
        if self._fragment:
            self._damaged = True
        if not self._picture and not self._damaged:
            return []  # parameter sets alone go with the picture that follows
        nals, key, damaged = self._nals, self._key, self._damaged
        self._nals, self._fragment, self._size = [], [], 0
        self._picture = self._key = self._damaged = False
        fresh = key and not self._keyed
        self._keyed = not damaged and (self._keyed or key)
        if not self._keyed or self._timestamp is None:
            if self._dropped is not None:
                self._dropped += 1
            return []
        dropped, self._dropped = self._dropped or 0, 0
        data = b"".join(START_CODE + nal for nal in nals)
        return [AccessUnit(data, self._timestamp, fresh, dropped, self._arrived_at)]

    def _type(self, nal: bytes) -> int:
        return nal[0] >> 1 & 63 if self._hevc else nal[0] & 31

    def _take(self, payload: bytes) -> bool:
        """Add a packet's payload to the unit; False if it makes no sense."""
        header = 2 if self._hevc else 1
        if len(payload) <= header:
            return False
        kind = self._type(payload)
        if kind == (49 if self._hevc else 28):
            return self._take_fragment(payload, header)
        if self._fragment:
            return False  # a fragmented NAL unit without an end
        if kind == (48 if self._hevc else 24):
            return self._take_aggregate(payload, header)
        if kind > 49 if self._hevc else kind in (0, 25, 26, 27, 29, 30, 31):
            return False  # interleaved modes, which nobody sends live
        self._add(payload)
        return True

    def _take_aggregate(self, payload: bytes, header: int) -> bool:
        at = header
        while at < len(payload):
            begin = at + 2
            at = begin + int.from_bytes(payload[at:begin], "big")
            if at - begin < header or at > len(payload):
                return False
            self._add(payload[begin:at])
        return True

    def _take_fragment(self, payload: bytes, header: int) -> bool:
        if len(payload) < header + 2:
            return False
        flags = payload[header]
        begins, ends = flags & 0x80, flags & 0x40
        if bool(begins) == bool(self._fragment):
            self._fragment = []
            return False  # a beginning within another, or a middle without a beginning
        if begins:
            if self._hevc:
                self._fragment.append(bytes((payload[0] & 0x81 | (flags & 63) << 1, payload[1])))
            else:
                self._fragment.append(bytes((payload[0] & 0xE0 | flags & 31,)))
        self._fragment.append(payload[header + 1 :])
        self._size += len(payload)
        if ends:
            nal, self._fragment = b"".join(self._fragment), []
            self._size -= len(nal)
            self._add(nal)
        return True

    def _add(self, nal: bytes) -> None:
        self._nals.append(nal)
        self._size += len(nal)
        kind = self._type(nal)
        if self._hevc:
            self._picture |= kind < 32
            self._key |= 16 <= kind <= 21
        else:
            self._picture |= 1 <= kind <= 5
            self._key |= kind == 5 or (kind == 6 and _is_recovery_point(nal))


def _is_recovery_point(sei: bytes) -> bool:
    """Whether an H.264 SEI says that decoding may begin here: cameras that refresh by stripes never send an IDR."""
    at = 1
    while at + 2 < len(sei):
        kind = size = 0
        while at < len(sei) and sei[at] == 255:
            kind, at = kind + 255, at + 1
        kind, at = kind + sum(sei[at : at + 1]), at + 1
        while at < len(sei) and sei[at] == 255:
            size, at = size + 255, at + 1
        size, at = size + sum(sei[at : at + 1]), at + 1
        if kind == 6:
            return True
        at += size
    return False
