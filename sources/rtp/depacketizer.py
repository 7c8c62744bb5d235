"""RTP packets of H.264 (RFC 6184) and H.265 (RFC 7798) into access units, the coded frames a decoder takes.

An access unit is closed at its marker bit, not when the next one begins: waiting for the next makes every frame one
interval old (44 ms at 25 fps). Pure: packets in, bytes out. Knows nothing of sockets or decoders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.sources.rtp.nal import H264, HEVC, START_CODE, split_annex_b
from saccade.sources.rtp.packet import RtpPacket

Codec = Literal["h264", "hevc"]

MAX_UNIT = 16 << 20  # bytes; a key frame of an 8K camera has 2 MB
_TRUST_AFTER = 2  # units; the first come one interval late, but a sender that misuses the marker tears none


@dataclass(slots=True)
class AccessUnit:
    """One coded frame.

    Attributes:
        data: NAL units, each behind a start code (Annex B).
        timestamp: RTP timestamp, 32 bits of 1/90000 s.
        key: whether decoding may begin here.
        fresh: True when units are missing before it, so that the decoder must be flushed; it is a key then.
        damaged: whether a part of it, or of a unit that it is predicted from, is missing; only with `show_damaged`.
        dropped_before: units left out since the one before, because they were damaged or predicted from one that was.
        arrived_at: when its first packet arrived, in seconds on the caller's clock.
    """

    data: bytes
    timestamp: int
    key: bool
    fresh: bool
    damaged: bool
    dropped_before: int
    arrived_at: float


class Depacketizer:
    """Assembles access units from packets in order. After a loss it yields nothing before the next key.

    Never raises, whatever the packets hold. What carries no part of a frame (padding, filler, ends of sequences,
    undefined types) is no damage.

    Args:
        codec: what the packets carry.
        show_damaged: yield incomplete units and those predicted from them as well, marked as damaged.
    """

    def __init__(self, codec: Codec, *, show_damaged: bool = False) -> None:
        self._syntax = HEVC if codec == "hevc" else H264
        self._show_damaged = show_damaged
        self._nals: list[bytes] = []  # of the unit being assembled
        self._fragments: list[bytes] = []  # of the NAL unit being assembled
        self._size = 0
        self._timestamp = 0
        self._arrived_at = 0.0
        self._has_slices = self._key = self._damaged = False  # of the unit being assembled
        self._closed_at: int | None = None  # timestamp of the unit closed by its marker
        self._gap = False  # packets are missing before the next one
        self._marked = False  # the packet before this one had the marker, but it was not trusted
        self._good_markers = 0
        self._misused = False
        self._in_band_sets = False
        self._keyed = False  # whether units are yielded
        self._dropped: int | None = None  # None before the first key: what was sent before we joined is not lost
        self.damaged_packets = 0
        """Packets that could not be parsed."""

    def push(self, packet: RtpPacket, gap: bool, at: float) -> list[AccessUnit]:
        """Take the next packet in; return the access units that it completes: usually none or one.

        Args:
            packet: the packet.
            gap: whether packets are missing before it.
            at: when it arrived, in seconds.
        """
        whole: list[AccessUnit] = []
        gap, self._gap = gap or self._gap, False
        if self._is_open:
            if packet.timestamp != self._timestamp:
                self._damaged |= gap and not self._marked  # the gap may have eaten its end
                self._good_markers = self._good_markers + 1 if self._marked else 0
                whole += self._close()
                self._marked = False
        elif packet.timestamp == self._closed_at and self._holds_slices(packet.payload):
            self._misused = self._damaged = True  # a frame goes on after its marker: what was yielded was torn
        if not self._is_known(packet.payload):
            self._gap = gap
        elif self._is_open:
            self._misused |= self._marked and self._holds_slices(packet.payload)
            self._damaged |= gap
            self._marked = False
            self._take(packet.payload)
        else:
            self._begin(packet, gap, at)
            self._take(packet.payload)
        if packet.marker and self._is_open and packet.timestamp == self._timestamp:
            if self._good_markers >= _TRUST_AFTER and not self._misused:
                whole += self._close()
                self._closed_at = packet.timestamp
            else:
                self._marked = True
        return whole

    @property
    def needs_key(self) -> bool:
        """Whether nothing whole is yielded before the next key."""
        return not self._keyed

    def skip(self, gap: bool) -> None:
        """Take note of a packet that is not for this codec, and of whether packets are missing before it."""
        self._gap |= gap

    def need_key(self) -> None:
        """Yield nothing before the next key: the decoder could not use the last unit."""
        self._keyed = False

    @property
    def _is_open(self) -> bool:
        """Whether the unit being assembled holds more than parameter sets and the like."""
        return self._has_slices or self._damaged or bool(self._fragments)

    def _begin(self, packet: RtpPacket, gap: bool, at: float) -> None:
        self._timestamp = packet.timestamp
        self._marked = False
        if not self._nals:
            self._arrived_at = at
        if gap:
            self._keyed = False
            self._damaged |= not self._begins_unit(packet.payload)  # its first packets may be what is missing

    def _begins_unit(self, payload: bytes) -> bool:
        """Whether a packet after a gap is certainly the first of its unit, but for parameter sets that are known."""
        syntax = self._syntax
        nal = _first_nal(payload)
        if syntax.type_of(nal) == syntax.aggregate:
            nal = payload[syntax.header + 2 :] or nal
        kind = syntax.type_of(nal)
        if kind in syntax.openers:
            return True
        if self._dropped is not None and self._in_band_sets:
            return False  # parameter sets come with each key here, and may be missing
        if kind == syntax.fragment:
            return len(nal) > syntax.header + 1 and bool(nal[syntax.header] & nal[syntax.header + 1] & 0x80)
        return kind in syntax.prefixes or (kind in syntax.slices and syntax.is_first_slice(nal))

    def _close(self) -> list[AccessUnit]:
        """End the unit; return it if it can be decoded."""
        nals, key, slices = self._nals, self._key, self._has_slices
        damaged = self._damaged or bool(self._fragments)
        self._nals, self._fragments, self._size = [], [], 0
        self._has_slices = self._key = self._damaged = False
        keyed_before = self._keyed
        self._keyed = not damaged and (keyed_before or key)
        started = self._dropped is not None or key
        if not self._keyed and not (self._show_damaged and slices and started):
            if self._dropped is not None:
                self._dropped += 1
            return []
        fresh = key and not keyed_before and not self._show_damaged
        dropped, self._dropped = self._dropped or 0, 0
        data = b"".join([piece for nal in nals for piece in (START_CODE, nal)])
        return [AccessUnit(data, self._timestamp, key, fresh, not self._keyed, dropped, self._arrived_at)]

    def _is_known(self, payload: bytes) -> bool:
        """Whether a payload is more than padding, filler or an undefined type."""
        if not payload:
            return False
        # 0 is an undefined type, but also the first byte of a start code.
        return self._syntax.type_of(payload) not in self._syntax.ignored or payload.startswith(b"\0\0")

    def _holds_slices(self, payload: bytes) -> bool:
        """Whether a payload holds a part of a frame, as far as its first NAL unit shows."""
        syntax = self._syntax
        if not payload:
            return False
        nal = _first_nal(payload)
        kind = syntax.type_of(nal)
        if kind == syntax.fragment:
            flags = payload[syntax.header : syntax.header + 1]
            return bool(flags) and flags[0] & (63 if syntax.header == 2 else 31) in syntax.slices
        if kind == syntax.aggregate:
            inner = payload[syntax.header + 2 :]
            return bool(inner) and syntax.type_of(inner) in syntax.slices
        return kind in syntax.slices

    def _take(self, payload: bytes) -> None:
        """Add a packet's payload to the unit."""
        if not self._parse(payload) or self._size > MAX_UNIT:
            self.damaged_packets += 1
            self._damaged = True
            self._nals, self._fragments, self._size = [], [], 0

    def _parse(self, payload: bytes) -> bool:
        """Add a payload's NAL units; False if it is malformed or of a kind that is not supported."""
        syntax = self._syntax
        kind = syntax.type_of(payload)
        if len(payload) < syntax.header or kind in syntax.unsupported:
            return False
        if kind == syntax.fragment:
            return self._parse_fragment(payload)
        if self._fragments:
            return False  # a fragmented NAL unit without an end
        if kind == syntax.aggregate:
            return self._parse_aggregate(payload)
        self._add(payload)
        return True

    def _parse_aggregate(self, payload: bytes) -> bool:
        at = self._syntax.header
        while at < len(payload):
            begin = at + 2
            at = begin + int.from_bytes(payload[at:begin], "big")
            if at - begin < self._syntax.header or at > len(payload):
                return False
            self._add(payload[begin:at])
        return True

    def _parse_fragment(self, payload: bytes) -> bool:
        header = self._syntax.header
        if len(payload) <= header:
            return False
        flags = payload[header]
        begins, ends = flags & 0x80, flags & 0x40
        if bool(begins) == bool(self._fragments):
            self._fragments = []
            return False  # a beginning within another, or a middle without a beginning
        if begins and header == 2:
            self._fragments.append(bytes((payload[0] & 0x81 | (flags & 63) << 1, payload[1])))
        elif begins:
            self._fragments.append(bytes((payload[0] & 0xE0 | flags & 31,)))
        self._fragments.append(payload[header + 1 :])
        self._size += len(payload)
        if ends:
            nal, self._fragments = b"".join(self._fragments), []
            self._size -= len(nal)
            self._add(nal)
        return True

    def _add(self, data: bytes) -> None:
        syntax = self._syntax
        for nal in split_annex_b(data):
            kind = syntax.type_of(nal)
            if kind in syntax.ignored:
                continue
            self._nals.append(nal)
            self._size += len(nal)
            self._has_slices |= kind in syntax.slices
            self._in_band_sets |= kind in syntax.sets
            self._key = self._key or syntax.is_key(nal)


def _first_nal(payload: bytes) -> bytes:
    """The payload from its first NAL unit on: some senders leave a start code before it."""
    return (split_annex_b(payload) or [payload])[0] if payload.startswith(b"\0\0") else payload
