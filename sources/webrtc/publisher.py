"""A WebRTC peer that publishes video to Saccade.

aiortc's jitter buffer is not used: it delays each frame, stops at a lost packet and is too small for large keyframes.
RTCP packets are intercepted for the sender's clock, which aiortc does not expose. `saccade.sources.webrtc.source`
decodes the video.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

from aiortc import RTCRtpTransceiver
from aiortc.rtp import RtcpByePacket, RtcpSrPacket
from aiortc.rtp import RtpPacket as AiortcPacket

from saccade.sources.gpu import HwAccel
from saccade.sources.rtp.packet import RtpPacket
from saccade.sources.rtp.rtcp import SenderReport, unix_of
from saccade.sources.webrtc.peer import OfferError, Peer, PeerSettings
from saccade.sources.webrtc.source import WebRtcConnection


class PublisherPeer(Peer):
    """A WebRTC peer that sends video to Saccade. After `accept`, the attribute `video` provides its frames.

    Args:
        settings, on_closed: see `Peer`.
        hwaccel: for H.264, "auto" to use a GPU if there is one, "cuda" to require a GPU, "none" for the CPU.
    """

    requirement = "send VP8, or H264 of the Baseline profile with packetization-mode=1"

    def __init__(self, settings: PeerSettings, on_closed: Callable[[], object], hwaccel: HwAccel) -> None:
        super().__init__(settings, on_closed)
        self._hwaccel = hwaccel
        self.video: WebRtcConnection

    def _select_transceiver(self) -> RTCRtpTransceiver:
        for transceiver in self._connection.getTransceivers():
            if transceiver.kind == "video" and transceiver.receiver.track is not None:
                transceiver.direction = "recvonly"
                return transceiver
        raise OfferError("the SDP offer contains no video", understood=True)

    def _start_media(self, transceiver: RTCRtpTransceiver) -> None:
        self._replace(transceiver.receiver, "_RTCRtpReceiver__jitter_buffer", SimpleNamespace(add=self._take))
        self._intercept_rtcp(transceiver.receiver)
        on_close = partial(self._call_soon, self._begin_close)
        self.video = WebRtcConnection(_codecs_of(self.answer), hwaccel=self._hwaccel, on_close=on_close)

    async def _close(self) -> None:
        self.video.close()
        try:
            await asyncio.to_thread(self.video.join)
        finally:
            await super()._close()

    def _mark_heard(self) -> None:
        super()._mark_heard()
        self.video.heard(self._heard_at)

    def _take(self, packet: AiortcPacket) -> tuple[bool, None]:
        """Process an RTP packet. This method replaces the method `add` of aiortc's jitter buffer.

        Returns:
            Whether aiortc should request a keyframe, and the frame that aiortc should decode, which is always None.
        """
        self._mark_heard()
        ours = RtpPacket(
            marker=bool(packet.marker),
            payload_type=packet.payload_type,
            sequence=packet.sequence_number,
            timestamp=packet.timestamp,
            ssrc=packet.ssrc,
            payload=packet.payload,
        )
        self.video.take(ours, self._heard_at)
        return self.video.asks_for_key_frame(self._heard_at), None

    def _take_report(self, packet: object) -> None:
        super()._take_report(packet)
        if isinstance(packet, RtcpSrPacket):
            info = packet.sender_info
            self.video.note_report(SenderReport(unix_of(info.ntp_timestamp), info.rtp_timestamp))
        elif isinstance(packet, RtcpByePacket):
            self.video.close()


def _codecs_of(answer: str) -> dict[int, str]:
    """Return the codec name of each payload type in the SDP answer."""
    return {int(number): name for number, name in re.findall(r"^a=rtpmap:(\d+) ([^/\s]+)/", answer, re.MULTILINE)}
