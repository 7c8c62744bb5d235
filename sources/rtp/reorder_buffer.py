"""Reorder buffer for RTP packets: drops duplicates, waits for missing packets and counts lost ones."""

from __future__ import annotations

from collections.abc import Iterator

from saccade.sources.rtp.packet import RtpPacket, signed

_CAPACITY = 32  # packets; 1 % loss at 2 Mbit/s is noticed after 150 ms
_WAIT_S = 0.2  # the same limit in time: at 5 frames a second 32 packets would be 3.2 s
_RESTART = 3000  # a sequence number this far off is a sender that restarted, as RFC 3550 has it


class ReorderBuffer:
    """Sorts RTP packets by sequence number. Yields each packet with a flag: True if packets before it are missing.

    Packets in order are yielded at once. After a gap, packets are held until the missing packet arrives, up to
    `capacity` packets and `wait_s` seconds. A single packet from another sender, or with a distant sequence number, is
    ignored. Two such packets in sequence reset the buffer.

    Args:
        capacity: highest number of held packets; 0 for TCP, which keeps the order.
        wait_s: longest wait for a missing packet, in seconds.
    """

    __slots__ = ("_capacity", "_held", "_next", "_ssrc", "_stray", "_wait_s", "highest", "lost")

    def __init__(self, capacity: int = _CAPACITY, wait_s: float = _WAIT_S) -> None:
        self._capacity = capacity
        self._wait_s = wait_s
        self._held: dict[int, tuple[RtpPacket, float]] = {}  # by number, with the time of arrival
        self._next: int | None = None  # extended beyond 16 bits
        self._ssrc = 0
        self._stray: RtpPacket | None = None
        self.lost = 0
        self.highest = 0
        """Highest sequence number received, extended beyond 16 bits."""

    @property
    def ssrc(self) -> int | None:
        """SSRC (sender's identifier in RTP) of the current sender; None before the first packet."""
        return self._ssrc if self._next is not None else None

    @property
    def holds_back(self) -> bool:
        """Whether packets are being held until a missing packet arrives."""
        return bool(self._held)

    def push(self, packet: RtpPacket, now: float) -> Iterator[tuple[RtpPacket, bool]]:
        """Add a packet at time `now` in seconds. Yield the packets that are next in order.

        Each packet is yielded with a flag: whether packets are missing before it.
        """
        if self._next is None:
            yield from self._restart(packet)
            return
        ahead = signed(packet.sequence - self._next, 16)
        if packet.ssrc != self._ssrc or abs(ahead) > _RESTART:
            stray, self._stray = self._stray, packet
            if stray and stray.ssrc == packet.ssrc and (stray.sequence + 1) % 65536 == packet.sequence:
                yield from self._restart(stray)
                yield from self.push(packet, now)
            return
        if ahead < 0:
            return  # a duplicate, or too late
        number = self._next + ahead
        self.highest = max(self.highest, number)
        self._held[number] = packet, now
        if len(self._held) > self._capacity:
            yield from self._release(skip=True)
        yield from self._release()
        yield from self.expire(now)

    def expire(self, now: float) -> Iterator[tuple[RtpPacket, bool]]:
        """Yield the packets held longer than `wait_s` at time `now` in seconds, without the missing packets."""
        # By the one that waits longest, which need not be the first in order. The sum is rounded as the caller's is.
        while self._held and now >= min(at for _, at in self._held.values()) + self._wait_s - 1e-9:
            yield from self._release(skip=True)

    def _release(self, *, skip: bool = False) -> Iterator[tuple[RtpPacket, bool]]:
        """Yield the packets that are next in order. If `skip` is True, first stop waiting for the missing packets."""
        assert self._next is not None
        missing = 0
        if skip and self._next not in self._held:
            first = min(self._held)
            missing, self._next = first - self._next, first
            self.lost += missing
        while (entry := self._held.pop(self._next, None)) is not None:
            self._next += 1
            yield entry[0], missing > 0
            missing = 0

    def _restart(self, packet: RtpPacket) -> Iterator[tuple[RtpPacket, bool]]:
        self._held.clear()
        self._stray = None
        self._ssrc = packet.ssrc
        self.highest = packet.sequence
        self._next = packet.sequence + 1
        yield packet, True
