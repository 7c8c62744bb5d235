"""Base class of the video depacketizers, which assemble RTP packets into access units (encoded frames).

An access unit ends at the packet with the marker bit. The depacketizer returns it at that packet, without waiting for
the next access unit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from saccade.sources.rtp.packet import RtpPacket

MAX_UNIT = 16 << 20  # bytes; a keyframe of an 8K camera has 2 MB
_TRUST_AFTER = 2  # units before the marker is trusted; they are one interval late, but a misused marker tears none


@dataclass(slots=True)
class AccessUnit:
    """One access unit: the encoded data of one frame.

    Attributes:
        data: the encoded frame for the decoder. NAL units of H.264 and H.265 have start codes (Annex B).
        timestamp: RTP timestamp, 32 bits in units of 1/90000 s.
        key: whether the access unit is a keyframe, at which decoding can start.
        fresh: whether to flush the decoder before this keyframe, because previous access units are missing.
        damaged: whether a part of the access unit, or of a reference frame, is missing; only with `show_damaged`.
        dropped_before: number of access units that were dropped directly before this access unit.
        arrived_at: arrival time of the first packet, in seconds, as passed to `Depacketizer.push`.
        codec: FFmpeg's name of the codec.
    """

    data: bytes
    timestamp: int
    key: bool
    fresh: bool
    damaged: bool
    dropped_before: int
    arrived_at: float
    codec: str


class Depacketizer(ABC):
    """Assembles access units (encoded frames) from RTP packets in sequence. After packet loss, it skips to a keyframe.

    Malformed packets never raise an error.

    Args:
        codec: FFmpeg's name of the codec.
        show_damaged: whether to also return access units with missing data or missing reference frames.
        trust_marker: whether the sender is known to set correct marker bits, as in WebRTC. If False, marker bits are
            used after two access units with correct marker bits.
    """

    def __init__(self, codec: str, *, show_damaged: bool = False, trust_marker: bool = False) -> None:
        self.codec = codec
        self._show_damaged = show_damaged
        self._trust_after = 0 if trust_marker else _TRUST_AFTER
        self._parts: list[bytes] = []  # of the unit being assembled
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
        self._keyed = False  # whether units are yielded
        self._dropped: int | None = None  # None before the first keyframe: units sent before we joined are not dropped
        self.damaged_packets = 0
        """Number of packets that could not be parsed."""

    def push(self, packet: RtpPacket, gap: bool, at: float) -> list[AccessUnit]:
        """Append an RTP packet and return the access units that it completes, usually none or one.

        Args:
            packet: packet to append.
            gap: whether packets are missing before this packet.
            at: arrival time in seconds.
        """
        whole: list[AccessUnit] = []
        gap, self._gap = gap or self._gap, False
        is_open, payload = self._is_open, packet.payload
        if is_open and packet.timestamp != self._timestamp:
            self._damaged |= gap and not self._marked  # the missing packets may include the unit's end
            self._good_markers = self._good_markers + 1 if self._marked else 0
            whole = self._close()
            is_open = self._marked = False
        elif not is_open and packet.timestamp == self._closed_at and self._holds_slices(payload):
            # The frame continues after its marker: the yielded unit was torn.
            is_open = self._misused = self._damaged = True
        if not self._is_known(payload):
            self._gap = gap
        else:
            if is_open:
                self._misused |= self._marked and self._holds_slices(payload)
                self._damaged |= gap
                self._marked = False
            else:
                self._begin(packet, gap, at)
            if not self._parse(payload) or self._size > MAX_UNIT:
                self.damaged_packets += 1
                self._damaged = True
                self._parts, self._fragments, self._size = [], [], 0
        if packet.marker and self._is_open and packet.timestamp == self._timestamp:
            if self._good_markers >= self._trust_after and not self._misused:
                whole += self._close()
                self._closed_at = packet.timestamp
            else:
                self._marked = True
        return whole

    @property
    def needs_key(self) -> bool:
        """Whether the depacketizer is skipping to the next keyframe."""
        return not self._keyed

    def skip(self, gap: bool) -> None:
        """Skip a packet whose payload belongs to another codec. `gap` says whether packets before it were lost."""
        self._gap |= gap

    @property
    def _is_open(self) -> bool:
        """Whether frame data of the current access unit has arrived."""
        return self._has_slices or self._damaged or bool(self._fragments)

    def _begin(self, packet: RtpPacket, gap: bool, at: float) -> None:
        self._timestamp = packet.timestamp
        self._marked = False
        if not self._parts:
            self._arrived_at = at
        if gap:
            self._keyed = False
            self._damaged |= not self._begins_unit(packet.payload)  # the missing packets may be the unit's first

    def _close(self) -> list[AccessUnit]:
        """End the current access unit. Return a list with the access unit, or an empty list if it cannot be decoded."""
        parts, key, slices = self._parts, self._key, self._has_slices
        damaged = self._damaged or bool(self._fragments)
        self._parts, self._fragments, self._size = [], [], 0
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
        damaged = not self._keyed
        data = b"".join(parts)
        return [AccessUnit(data, self._timestamp, key, fresh, damaged, dropped, self._arrived_at, self.codec)]

    @abstractmethod
    def _is_known(self, payload: bytes) -> bool:
        """Return whether a payload can contain frame data or parameter sets; padding, for example, cannot."""

    @abstractmethod
    def _holds_slices(self, payload: bytes) -> bool:
        """Return whether a payload begins with frame data, not with parameter sets."""

    @abstractmethod
    def _begins_unit(self, payload: bytes) -> bool:
        """Return whether a payload certainly starts a new access unit. Called after packet loss."""

    @abstractmethod
    def _parse(self, payload: bytes) -> bool:
        """Append the data of a payload to the current access unit. Return False if it is malformed or out of place."""
