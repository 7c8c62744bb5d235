"""RTP packets of H.264 (RFC 6184) and H.265 (RFC 7798) into access units, the coded frames a decoder takes.

An access unit is closed at its marker bit, not when the next one begins: waiting for the next makes every frame one
interval old (44 ms at 25 fps). Pure: packets in, bytes out. Knows nothing of sockets or decoders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from saccade.sources.rtp.packet import RtpPacket

Codec = Literal["h264", "hevc"]

START_CODE = b"\x00\x00\x00\x01"
MAX_UNIT = 16 << 20  # bytes; a key frame of an 8K camera has 2 MB
_TRUST_AFTER = 2  # units; the first come one interval late, but a sender that misuses the marker tears none


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


class Depacketizer:
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
