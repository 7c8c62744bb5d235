"""RTP and RTCP without sockets: parsing, reordering, depacketizing and sender clocks."""

from saccade.sources.rtp.depacketizer import AccessUnit, Depacketizer
from saccade.sources.rtp.h26x import Codec, H26xDepacketizer
from saccade.sources.rtp.packet import RtpPacket, parse_rtp
from saccade.sources.rtp.reorder_buffer import ReorderBuffer
from saccade.sources.rtp.rtcp import PLAUSIBLE_S, SenderReport, parse_rtcp, receiver_report
from saccade.sources.rtp.vp8 import Vp8Depacketizer

__all__ = [
    "PLAUSIBLE_S",
    "AccessUnit",
    "Codec",
    "Depacketizer",
    "H26xDepacketizer",
    "ReorderBuffer",
    "RtpPacket",
    "SenderReport",
    "Vp8Depacketizer",
    "parse_rtcp",
    "parse_rtp",
    "receiver_report",
]
