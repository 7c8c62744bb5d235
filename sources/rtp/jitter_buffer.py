"""Jitter buffer for WebRTC video: reorders RTP packets and completes a frame at its marker bit.

At 30 fps, frames are available 33 ms earlier than from aiortc's jitter buffer, which waits for the next frame's first
packet. Callers pass the current time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from saccade.sources.rtp.packet import signed

CAPACITY = 4096  # packets behind a gap: 5 MB, several keyframes of 4K; aiortc's 512 are fewer than one of them can have
WAIT_S = 0.2  # for a retransmitted packet; longer than two round trips on a bad mobile line
_FAR = 3000  # a sequence number this far off is a sender that restarted, not a late packet


class Packet(Protocol):
    """The fields of an RTP packet that the jitter buffer reads. aiortc's `RtpPacket` has all of them."""

    sequence_number: int
    timestamp: int
    marker: int
    payload_type: int
    ssrc: int
    _data: bytes  # the payload without the codec's own RTP header, where aiortc leaves it


@dataclass(slots=True, frozen=True)
class CodedFrame:
    """One encoded frame of a video track.

    Attributes:
        data: the encoded frame for the decoder.
        timestamp: RTP timestamp, 32 bits.
        payload_type: RTP payload type, which identifies the codec.
        arrived: arrival time of the first packet, on the clock of `JitterBuffer.add`.
        after_loss: whether data before the frame is missing, so that only a keyframe can be decoded.
    """

    data: bytes
    timestamp: int
    payload_type: int
    arrived: float
    after_loss: bool


class JitterBuffer:
    """Jitter buffer of one video track: accepts packets in any order and returns complete frames in order.

    A frame ends at the packet with the marker bit, or before a packet with another timestamp. If a sender sets the
    marker bit inside a frame, all later marker bits are ignored. The buffer waits for a missing packet. If the packet
    does not arrive, the incomplete frames are dropped and the next frame is marked `after_loss`.
    """

    def __init__(self, capacity: int = CAPACITY, wait_s: float = WAIT_S) -> None:
        self._capacity = capacity
        self._wait_s = wait_s
        self.marker_trusted = True
        """False after the sender has set the marker bit inside a frame."""
        self._ssrc: int | None = None
        self._restart(0)

    def _restart(self, sequence_number: int, *, lost: bool = False) -> None:
        self._next = sequence_number
        self._waiting: dict[int, tuple[Packet, float]] = {}
        self._blocked_since: float | None = None
        self._parts: list[bytes] = []
        self._torn = False  # the frame at hand lacks a part
        self._lost = lost  # a frame before the one at hand was left out
        self._timestamp: int | None = None  # of the frame at hand
        self._ended: int | None = None  # timestamp of the frame that was closed last, at its marker
        self._payload_type = 0
        self._arrived = 0.0

    def add(self, packet: Packet, now: float) -> list[CodedFrame]:
        """Add a packet at time `now` in seconds. Return the frames that are now complete, usually none or one."""
        if packet.ssrc != self._ssrc:
            lost = self._ssrc is not None
            self._ssrc = packet.ssrc
            self._restart(packet.sequence_number, lost=lost)
        ahead = signed(packet.sequence_number - self._next, 16)
        if abs(ahead) > _FAR + self._capacity:
            self._restart(packet.sequence_number, lost=True)
            ahead = 0
        if ahead < 0:
            return []  # a second copy, or too late
        self._waiting.setdefault(packet.sequence_number, (packet, now))
        before = self._next
        frames = self._take()
        if not self._waiting:
            self._blocked_since = None
        elif self._blocked_since is None or self._next != before:
            self._blocked_since = now
        elif now - self._blocked_since > self._wait_s or len(self._waiting) > self._capacity:
            self._skip_gap()
            frames += self._take()
        return frames

    def _take(self) -> list[CodedFrame]:
        """Return the frames that are complete, from the packets that are next in sequence."""
        frames: list[CodedFrame] = []
        while (entry := self._waiting.pop(self._next, None)) is not None:
            self._next = (self._next + 1) % 0x10000
            self._place(*entry, frames)
        return frames

    def _place(self, packet: Packet, arrived: float, frames: list[CodedFrame]) -> None:
        if not packet._data and not packet.marker:
            return  # padding, with which browsers probe the bandwidth; it has the timestamp of the frame before
        if self._timestamp is not None and packet.timestamp != self._timestamp:
            self._close(frames)
        if self._timestamp is None:
            if packet._data and packet.timestamp == self._ended:
                self.marker_trusted = False  # that was not the end of it, and only a part was yielded
                self._torn = True
            self._timestamp, self._payload_type, self._arrived = packet.timestamp, packet.payload_type, arrived
        self._parts.append(packet._data)
        if packet.marker and self.marker_trusted:
            self._close(frames)

    def _close(self, frames: list[CodedFrame]) -> None:
        data = b"".join(self._parts)
        if self._torn:
            self._lost = True
        elif data and self._timestamp is not None:
            frames.append(CodedFrame(data, self._timestamp, self._payload_type, self._arrived, self._lost))
            self._lost = False
        self._ended = self._timestamp
        self._timestamp, self._torn = None, False
        self._parts = []

    def _skip_gap(self) -> None:
        """Stop waiting for missing packets, and treat the frames next to the gap as incomplete."""
        if self._timestamp is not None:
            self._timestamp, self._parts = None, []
        self._ended = None
        self._torn = self._lost = True
        behind = self._next
        self._next = min(self._waiting, key=lambda number: (number - behind) % 0x10000)
