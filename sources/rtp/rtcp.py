"""RTCP (RFC 3550): sender reports with the sender's clock, receiver reports, and requests for key frames.

Pure: bytes in, bytes out. Knows nothing of sockets.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from saccade.sources.rtp.packet import signed

_NTP_TO_UNIX_S = 2_208_988_800  # from 1900 to 1970
_SENDER, _RECEIVER, _DESCRIPTION, _BYE, _PAYLOAD_FEEDBACK = 200, 201, 202, 203, 206
_OUR_SSRC = 0x5ACCADE
PLAUSIBLE_S = 10.0
"""A sender's clock further off than this was never set."""

_RTP_CLOCK = 90_000  # units a second of every RTP video format handled here


@dataclass(slots=True, frozen=True)
class SenderReport:
    """One moment on two clocks of the sender; the other attributes are needed for receiver reports only.

    Attributes:
        unix_s: the sender's wall clock, Unix time in seconds.
        timestamp: its RTP clock at that moment, 32 bits.
        ssrc: the sender.
        ntp_middle: the middle 32 bits of the wall clock as sent, repeated in receiver reports.
        at: when it arrived, in seconds on the caller's clock.
    """

    unix_s: float
    timestamp: int
    ssrc: int = 0
    ntp_middle: int = 0
    at: float = 0.0

    def plausible_capture(self, timestamp: int, arrived: float) -> float | None:
        """As `captured_at`; None if it is too far from `arrived`, Unix time, for a clock that was ever set."""
        captured = self.captured_at(timestamp)
        return captured if abs(captured - arrived) < PLAUSIBLE_S else None

    def captured_at(self, timestamp: int) -> float:
        """Unix time in seconds at which the frame with this RTP timestamp was taken."""
        return self.unix_s + signed(timestamp - self.timestamp) / _RTP_CLOCK


def unix_of(ntp: int) -> float:
    """Unix time in seconds of an NTP timestamp: 64 bits, of which the upper half are seconds."""
    return (ntp - (_NTP_TO_UNIX_S << 32)) / (1 << 32)


def parse_rtcp(data: bytes, at: float) -> tuple[SenderReport | None, frozenset[int]]:
    """Read a compound packet: its sender report, if it holds one with a clock, and the SSRCs that leave (BYE)."""
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
    """A report on what was received, with the source description that must go with it.

    Args:
        ssrc: sender of the packets received.
        highest: highest sequence number seen, extended to 32 bits.
        lost: packets that never came.
        report: the last sender report.
        now: seconds on the clock that `report.at` is on.
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
    """A request for a key frame (RFC 4585, PLI) to the sender `ssrc`."""
    return struct.pack(">BBHII", 0x81, _PAYLOAD_FEEDBACK, 2, _OUR_SSRC, ssrc)
