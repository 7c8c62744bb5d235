"""Puts RTP packets back in order: drops duplicates, waits a while for a missing one, counts what never came.

Pure: the caller passes the time. Knows nothing of sockets, codecs or what the packets carry.
"""

from __future__ import annotations

from collections.abc import Iterator

from saccade.sources.rtp.packet import RtpPacket, signed

_CAPACITY = 32  # packets; 1 % loss at 2 Mbit/s is noticed after 150 ms
_WAIT_S = 0.2  # the same limit in time: at 5 frames a second 32 packets would be 3.2 s
_RESTART = 3000  # a sequence number this far off is a sender that restarted, as RFC 3550 has it


class ReorderBuffer:
    """Yields packets in the order of their sequence numbers, each with whether packets are missing before it.

    Packets that arrive in order pass at once. Behind a gap packets are held back for the missing one, up to `capacity`
    packets and `wait_s` seconds. A packet of another sender, or one far from the expected number, is taken for a stray
    one until the next in its own order confirms it.

    Args:
        capacity: packets held back at most; 0 for TCP, where nothing is overtaken.
        wait_s: how long a missing packet is waited for, in seconds.
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
        """The sender followed; None before the first packet."""
        return self._ssrc if self._next is not None else None

    @property
    def holds_back(self) -> bool:
        """Whether packets wait for a missing one."""
        return bool(self._held)

    def push(self, packet: RtpPacket, now: float) -> Iterator[tuple[RtpPacket, bool]]:
        """Take a packet in, at `now` seconds; yield those whose turn it is."""
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
        """Yield what was held back for longer than `wait_s` at `now` seconds."""
        # By the one that waits longest, which need not be the first in order. The sum is rounded as the caller's is.
        while self._held and now >= min(at for _, at in self._held.values()) + self._wait_s - 1e-9:
            yield from self._release(skip=True)

    def _release(self, *, skip: bool = False) -> Iterator[tuple[RtpPacket, bool]]:
        """Yield what is in order; with `skip`, give up the packets missing before it."""
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
