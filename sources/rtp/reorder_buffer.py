"""Reorder buffer for RTP packets: drops duplicates, waits for missing packets and counts lost ones."""

from __future__ import annotations

from saccade.sources.rtp.packet import RtpPacket, signed

_CAPACITY = 32  # packets; 1 % loss at 2 Mbit/s is noticed after 150 ms
_WAIT_S = 0.2  # the same limit in time: at 5 frames a second 32 packets would be 3.2 s
_RESTART = 3000  # a sequence number this far off is a sender that restarted, as RFC 3550 has it

Ordered = tuple[RtpPacket, bool, float]
"""A packet in order, whether packets are missing before it, and its arrival time in seconds."""


class ReorderBuffer:
    """Sorts RTP packets by sequence number.

    Packets in sequence are returned immediately. Packets that follow a missing packet wait for it. A stray packet is
    ignored, but two in sequence, such as after a restart of the sender, reset the buffer.

    Args:
        capacity: maximum number of waiting packets; 0 for TCP, which keeps the order.
        wait_s: maximum time to wait for a missing packet, in seconds.
    """

    __slots__ = ("_capacity", "_far", "_held", "_next", "_ssrc", "_stray", "_wait_s", "lost")

    def __init__(self, capacity: int = _CAPACITY, wait_s: float = _WAIT_S) -> None:
        self._capacity = capacity
        self._wait_s = wait_s
        self._far = _RESTART + capacity
        self._held: dict[int, tuple[RtpPacket, float]] = {}  # by number, in order of arrival
        self._next: int | None = None  # extended beyond 16 bits
        self._ssrc = 0
        self._stray: tuple[RtpPacket, float] | None = None
        self.lost = 0
        """Number of packets that did not arrive in time."""

    @property
    def ssrc(self) -> int | None:
        """SSRC (sender's identifier in RTP) of the current sender; None before the first packet."""
        return self._ssrc if self._next is not None else None

    @property
    def highest(self) -> int:
        """Highest sequence number received, extended beyond 16 bits; 0 before the first packet."""
        return max(self._held, default=(self._next or 1) - 1)

    @property
    def holds_back(self) -> bool:
        """Whether packets are waiting for a missing packet."""
        return bool(self._held)

    def push(self, packet: RtpPacket, now: float) -> list[Ordered]:
        """Add a packet. Return the packets that are next in sequence."""
        if self._next is None:
            return [self._start(packet, now)]
        ahead = signed(packet.sequence - self._next, 16)
        if packet.ssrc != self._ssrc or abs(ahead) > self._far:
            return self._take_stray(packet, now)
        if ahead < 0:
            return self.expire(now)  # a duplicate, or too late
        if not ahead and not self._held:
            self._next += 1
            return [(packet, False, now)]
        self._held.setdefault(self._next + ahead, (packet, now))
        return self._release(skip=len(self._held) > self._capacity) + self.expire(now)

    def expire(self, now: float) -> list[Ordered]:
        """Return the packets that were buffered for `wait_s` seconds or longer. The missing packets count as lost."""
        ordered: list[Ordered] = []
        # By the one that waits longest, which need not be the first in order. The sum is rounded as the caller's is.
        while self._held and now >= next(iter(self._held.values()))[1] + self._wait_s - 1e-9:
            ordered += self._release(skip=True)
        return ordered

    def _release(self, *, skip: bool) -> list[Ordered]:
        """Return the packets that are next in sequence. If `skip` is True, give up the missing packets before them."""
        assert self._next is not None
        first = self._next
        while skip and self._next not in self._held:
            self._next += 1
        gap = self._next > first
        self.lost += self._next - first
        ordered: list[Ordered] = []
        while (entry := self._held.pop(self._next, None)) is not None:
            self._next += 1
            ordered.append((entry[0], gap, entry[1]))
            gap = False
        return ordered

    def _take_stray(self, packet: RtpPacket, now: float) -> list[Ordered]:
        stray, self._stray = self._stray, (packet, now)
        if not stray or stray[0].ssrc != packet.ssrc or (stray[0].sequence + 1) % 65536 != packet.sequence:
            return self.expire(now)
        ordered: list[Ordered] = []
        while self._held:
            ordered += self._release(skip=True)
        return [*ordered, self._start(*stray), *self.push(packet, now)]

    def _start(self, packet: RtpPacket, now: float) -> Ordered:
        self._stray = None
        self._ssrc = packet.ssrc
        self._next = packet.sequence + 1
        return packet, True, now
