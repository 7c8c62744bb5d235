"""RTP packets (RFC 3550): parser, and arithmetic for sequence numbers and timestamps that wrap around."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)  # a frozen dataclass would take 1 µs longer to create
class RtpPacket:
    """One RTP packet."""

    marker: bool
    payload_type: int
    sequence: int
    timestamp: int
    ssrc: int
    payload: bytes


def parse_rtp(data: bytes) -> RtpPacket | None:
    """Parse an RTP packet; return None if it is invalid."""
    if len(data) < 12 or data[0] >> 6 != 2:
        return None
    first = data[0]
    begin = 12 + 4 * (first & 15)
    end = len(data)
    if first & 0x20:
        end -= data[-1]
    if first & 0x10:
        if begin + 4 > len(data):
            return None
        begin += 4 + 4 * int.from_bytes(data[begin + 2 : begin + 4], "big")
    if begin > end:
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
    """Reduce the difference of two numbers that wrap around, such as RTP timestamps, to a signed `bits`-bit number.

    Args:
        difference: the difference.
        bits: number of bits of the two numbers.
    """
    half = 1 << (bits - 1)
    return (difference + half) % (2 * half) - half
