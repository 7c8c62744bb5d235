"""RTP and RTCP without sockets: parsing, reordering, depacketizing and sender clocks."""

from saccade.sources.rtp.depacketizer import AccessUnit, Codec, Depacketizer
from saccade.sources.rtp.jitter_buffer import CodedFrame, JitterBuffer
from saccade.sources.rtp.packet import RtpPacket, parse_rtp
from saccade.sources.rtp.reorder_buffer import ReorderBuffer
from saccade.sources.rtp.rtcp import PLAUSIBLE_S, SenderReport, parse_rtcp, receiver_report

__all__ = [
    "PLAUSIBLE_S",
    "AccessUnit",
    "Codec",
    "CodedFrame",
    "Depacketizer",
    "JitterBuffer",
    "ReorderBuffer",
    "RtpPacket",
    "SenderReport",
    "parse_rtcp",
    "parse_rtp",
    "receiver_report",
]
