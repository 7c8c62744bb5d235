"""Depacketizer for H.264 (RFC 6184) and H.265 (RFC 7798): assembles RTP packets into access units (encoded frames).

An access unit ends at the packet with the marker bit. Waiting for the next access unit's first packet would delay each
frame by one frame interval (40 ms at 25 fps).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.sources.rtp.nal import H264, HEVC, START_CODE, split_annex_b
from saccade.sources.rtp.packet import RtpPacket

Codec = Literal["h264", "hevc"]

MAX_UNIT = 16 << 20  # bytes; a keyframe of an 8K camera has 2 MB
_TRUST_AFTER = 2  # units before the marker is trusted; they are one interval late, but a misused marker tears none


@dataclass(slots=True)
class AccessUnit:
    """One access unit: the encoded data of one frame.

    Attributes:
        data: NAL units, each with a start code (Annex B).
        timestamp: RTP timestamp, 32 bits in units of 1/90000 s.
        key: whether the access unit is a keyframe, at which decoding can start.
        fresh: whether access units are missing before this keyframe, so that the decoder must be flushed.
        damaged: whether a part of the access unit, or of a reference frame, is missing; only with `show_damaged`.
        dropped_before: number of access units dropped since the previous access unit, because packets were missing or
            malformed.
        arrived_at: arrival time of the first packet, in seconds on the caller's clock.
    """

    data: bytes
    timestamp: int
    key: bool
    fresh: bool
    damaged: bool
    dropped_before: int
    arrived_at: float


class Depacketizer:
    """Assembles access units from RTP packets in order. After packet loss, it skips to the next keyframe.

    Malformed packets never raise an error. Packets without frame data (padding, filler, end of sequence, undefined
    types) do not count as damage.

    Args:
        codec: codec of the packets.
        show_damaged: whether to return incomplete access units too, and those that reference them, marked as damaged.
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
        self._gap = False  # packets are missing before the next packet
        self._marked = False  # the previous packet had a marker that was not trusted
        self._good_markers = 0
        self._misused = False
        self._in_band_sets = False
        self._keyed = False  # whether units are yielded
        self._dropped: int | None = None  # None before the first keyframe: units sent before we joined are not dropped
        self.damaged_packets = 0
        """Number of packets that could not be parsed."""

    def push(self, packet: RtpPacket, gap: bool, at: float) -> list[AccessUnit]:
        """Append an RTP packet and return the access units that it completes, usually none or one.

        Args:
            packet: the packet.
            gap: whether packets are missing before this packet.
            at: arrival time in seconds.
        """
        whole: list[AccessUnit] = []
        gap, self._gap = gap or self._gap, False
        if self._is_open:
            if packet.timestamp != self._timestamp:
                self._damaged |= gap and not self._marked  # the missing packets may include the unit's end
                self._good_markers = self._good_markers + 1 if self._marked else 0
                whole += self._close()
                self._marked = False
        elif packet.timestamp == self._closed_at and self._holds_slices(packet.payload):
            self._misused = self._damaged = True  # the frame continues after its marker: the yielded unit was torn
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
        """Whether access units are dropped until the next keyframe."""
        return not self._keyed

    def skip(self, gap: bool) -> None:
        """Skip a packet of another codec. `gap` says whether packets are missing before it."""
        self._gap |= gap

    def need_key(self) -> None:
        """Drop all access units before the next keyframe. Call this if the decoder failed to decode an access unit."""
        self._keyed = False

    @property
    def _is_open(self) -> bool:
        """Whether the unfinished access unit contains frame data."""
        return self._has_slices or self._damaged or bool(self._fragments)

    def _begin(self, packet: RtpPacket, gap: bool, at: float) -> None:
        self._timestamp = packet.timestamp
        self._marked = False
        if not self._nals:
            self._arrived_at = at
        if gap:
            self._keyed = False
            self._damaged |= not self._begins_unit(packet.payload)  # the missing packets may be the unit's first

    def _begins_unit(self, payload: bytes) -> bool:
        """Return whether a payload after packet loss certainly starts a new access unit."""
        syntax = self._syntax
        nal = _first_nal(payload)
        if syntax.type_of(nal) == syntax.aggregate:
            nal = payload[syntax.header + 2 :] or nal
        kind = syntax.type_of(nal)
        if kind in syntax.openers:
            return True
        if self._dropped is not None and self._in_band_sets:
            return False  # this sender repeats parameter sets before each keyframe, and they may be missing
        if kind == syntax.fragment:
            return len(nal) > syntax.header + 1 and bool(nal[syntax.header] & nal[syntax.header + 1] & 0x80)
        return kind in syntax.prefixes or (kind in syntax.slices and syntax.is_first_slice(nal))

    def _close(self) -> list[AccessUnit]:
        """End the current access unit. Return it in a list, which is empty if the access unit cannot be decoded."""
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
        """Return whether a payload can contain frame data or parameters: not padding, filler or an undefined type."""
        if not payload:
            return False
        # 0 is an undefined type, but also the first byte of a start code.
        return self._syntax.type_of(payload) not in self._syntax.ignored or payload.startswith(b"\0\0")

    def _holds_slices(self, payload: bytes) -> bool:
        """Return whether the first NAL unit of a payload is a slice, that is, a part of a frame."""
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
        """Append a packet's payload to the current access unit."""
        if not self._parse(payload) or self._size > MAX_UNIT:
            self.damaged_packets += 1
            self._damaged = True
            self._nals, self._fragments, self._size = [], [], 0

    def _parse(self, payload: bytes) -> bool:
        """Append a payload's NAL units. Return False if the payload is malformed or unsupported."""
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
            return False  # a start inside another fragment, or a middle without a start
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
    """Remove the start code that some senders wrongly put before the first NAL unit of a payload."""
    return (split_annex_b(payload) or [payload])[0] if payload.startswith(b"\0\0") else payload
