"""RTCP packets (RFC 3550): sender reports, receiver reports and keyframe requests."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from saccade.sources.rtp.packet import signed

_NTP_TO_UNIX_S = 2_208_988_800  # from 1900 to 1970
_SENDER, _RECEIVER, _DESCRIPTION, _BYE, _PAYLOAD_FEEDBACK = 200, 201, 202, 203, 206
_OUR_SSRC = 0x5ACCADE
PLAUSIBLE_S = 10.0
"""Seconds. A sender's clock that is wrong by more was never set; `SenderClock` corrects it."""

_RTP_CLOCK = 90_000  # units a second of every RTP video format handled here


@dataclass(slots=True, frozen=True)
class SenderReport:
    """RTCP sender report, which states the Unix time and the RTP timestamp of the same moment.

    Attributes:
        unix_s: Unix time in seconds, by the sender's clock.
        timestamp: RTP timestamp of the same moment, 32 bits.
        ssrc: SSRC of the sender.
        ntp_middle: the middle 32 bits of the NTP timestamp, which the receiver report contains.
        at: arrival time of the report, in seconds on the caller's clock.
    """

    unix_s: float
    timestamp: int
    ssrc: int = 0
    ntp_middle: int = 0
    at: float = 0.0

    def captured_at(self, timestamp: int) -> float:
        """Convert a frame's RTP timestamp to its capture time, as Unix time in seconds."""
        return self.unix_s + signed(timestamp - self.timestamp) / _RTP_CLOCK


class SenderClock:
    """Calculates the capture times of one sender's frames from its RTCP reports.

    Attributes:
        offset_s: correction in seconds, subtracted from the sender's clock. 0 unless the clock is wrong by more than
            `PLAUSIBLE_S` seconds.
    """

    def __init__(self) -> None:
        self.offset_s = 0.0

    def captured_at(self, report: SenderReport, timestamp: int, arrived: float) -> float:
        """Return the capture time of a frame, as Unix time in seconds.

        Args:
            report: the sender's last RTCP report.
            timestamp: RTP timestamp of the frame.
            arrived: arrival time of the frame, as Unix time in seconds.
        """
        captured = report.captured_at(timestamp)
        ahead = captured - arrived
        if abs(ahead) < PLAUSIBLE_S:
            self.offset_s = 0.0
        elif abs(ahead - self.offset_s) >= PLAUSIBLE_S or ahead > self.offset_s:
            self.offset_s = ahead
        return captured - self.offset_s


def unix_of(ntp: int) -> float:
    """Convert a 64-bit NTP timestamp to Unix time in seconds."""
    return (ntp - (_NTP_TO_UNIX_S << 32)) / (1 << 32)


def parse_rtcp(data: bytes, at: float) -> tuple[SenderReport | None, frozenset[int]]:
    """Parse a compound RTCP packet.

    Args:
        data: the packet.
        at: arrival time in seconds.

    Returns:
        The sender report, or None, and the SSRCs of senders that ended their stream (RTCP BYE).
    """
    report, begin = None, 0
    leaving: set[int] = set()
    while begin + 4 <= len(data) and data[begin] >> 6 == 2:
        kind = data[begin + 1]
        end = begin + 4 + 4 * int.from_bytes(data[begin + 2 : begin + 4], "big")
        if kind == _SENDER and begin + 20 <= min(end, len(data)):
            ssrc, ntp, timestamp = struct.unpack_from(">IQI", data, begin + 4)
            if ntp >> 32:  # 0: the sender has no wall clock
                report = SenderReport(unix_of(ntp), timestamp, ssrc, ntp >> 16 & 0xFFFFFFFF, at)
        elif kind == _BYE:
            sources = data[begin + 4 : min(end, begin + 4 + 4 * (data[begin] & 31))]
            leaving |= {int.from_bytes(sources[at : at + 4], "big") for at in range(0, len(sources) - 3, 4)}
        begin = end
    return report, frozenset(leaving)


def receiver_report(ssrc: int, highest: int, lost: int, report: SenderReport | None, now: float) -> bytes:
    """Build an RTCP receiver report, with the source description that RFC 3550 requires.

    Args:
        ssrc: SSRC of the sender.
        highest: highest received sequence number, extended to 32 bits.
        lost: number of lost packets.
        report: the last sender report, or None if there is none.
        now: current time in seconds; the same clock as `report.at`.
    """
    middle, delay = (report.ntp_middle, int((now - report.at) * 65536)) if report else (0, 0)
    block = struct.pack(">IIIIII", ssrc, min(lost, 0x7FFFFF), highest & 0xFFFFFFFF, 0, middle, min(delay, 0xFFFFFFFF))
    name = b"saccade"
    item = bytes((1, len(name))) + name
    item += bytes(4 - len(item) % 4)
    return (
        struct.pack(">BBHI", 0x81, _RECEIVER, 7, _OUR_SSRC)
        + block
        + struct.pack(">BBHI", 0x81, _DESCRIPTION, 1 + len(item) // 4, _OUR_SSRC)
        + item
    )


def picture_loss_indication(ssrc: int) -> bytes:
    """Build a keyframe request for the sender `ssrc` (RTCP picture loss indication, RFC 4585)."""
    return struct.pack(">BBHII", 0x81, _PAYLOAD_FEEDBACK, 2, _OUR_SSRC, ssrc)
