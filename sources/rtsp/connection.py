"""An RTSP camera with H.264 or H.265: each frame is decoded when its last packet is here.

FFmpeg's own client gives a frame when the next one begins, 44 ms late at 25 fps; other codecs are left to it
(`saccade.sources.live.ffmpeg`). Knows nothing of states or of coming back.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from fractions import Fraction

import av.error

from saccade.sources.errors import LiveError
from saccade.sources.live.connection import LiveFrame
from saccade.sources.live.decoder import Decoder, HwAccel
from saccade.sources.rtp.depacketizer import AccessUnit, Codec, Depacketizer
from saccade.sources.rtp.packet import RtpPacket, parse_rtp, signed
from saccade.sources.rtp.reorder_buffer import ReorderBuffer
from saccade.sources.rtp.rtcp import SenderReport, parse_rtcp, receiver_report
from saccade.sources.rtsp.client import RtspClient, Transport
from saccade.sources.rtsp.sdp import Media, parse_sdp
from saccade.sources.urls import RtspAddress, redact

_CODECS: dict[str, Codec] = {"H264": "h264", "H265": "hevc", "HEVC": "hevc"}
_REPORT_S = 5.0
_KEEPALIVE_S = 25.0  # at most; some cameras hang up after 30 s whatever they say
_REMEMBERED = 64  # frames inside the decoder; H.264 allows 16


class UnhandledCodecError(Exception):
    """The camera's video is neither H.264 nor H.265."""


class RtspConnection:
    """One connection to a camera, playing from construction on.

    Args:
        url: the address, credentials and all.
        closed: ends every wait when set.
        transport: RTP beside the requests over TCP, or over UDP.
        hwaccel: whether to decode on the GPU.

    Raises:
        LiveError: if it cannot be played.
        UnhandledCodecError: if its video is something else.
        SourceError: if the address is none, or the GPU is insisted on and cannot decode.
    """

    def __init__(
        self, url: str, closed: threading.Event, *, transport: Transport = "tcp", hwaccel: HwAccel = "none"
    ) -> None:
        address = RtspAddress.parse(url)
        self._connection = RtspClient(address, closed)
        try:
            public = self._connection.request("OPTIONS").header("public")
            reply = self._connection.request("DESCRIBE", headers={"Accept": "application/sdp"})
            base = reply.header("content-base") or reply.header("content-location") or address.url
            media = _video(parse_sdp(reply.body, base), address)
            self._codec = _CODECS[media.encoding]
            self._decoder = Decoder(self._codec, media.parameter_sets, hwaccel)
            timeout_s = self._connection.setup(media.control, transport)
            self._connection.request("PLAY", base, {"Range": "npt=0.000-"})
        except BaseException:
            self._connection.close()
            raise
        self._alive = "GET_PARAMETER" if "GET_PARAMETER" in public else "OPTIONS"
        self._base = base
        self._media = media
        self._keepalive_s = min(_KEEPALIVE_S, timeout_s / 2)
        now = time.monotonic()
        self._asked_at = self._reported_at = self._heard_at = now
        self._sequencer = ReorderBuffer() if transport == "udp" else ReorderBuffer(room=0)
        self._units = Depacketizer(self._codec)
        self._report: SenderReport | None = None
        self._ssrc: int | None = None
        self._time = 0  # RTP timestamp of the newest unit, never wrapped
        self._undecodable = 0
        self._lost = 0
        self._inside: dict[int, AccessUnit] = {}  # by time: what the decoder has not given back yet
        self._ready: deque[LiveFrame] = deque()

    @property
    def codec(self) -> str:
        """FFmpeg's name of the codec."""
        return self._codec

    @property
    def decoder(self) -> str:
        """What decodes it."""
        return self._decoder.name

    @property
    def rate(self) -> Fraction | None:
        """Frames a second, as announced; None when not said."""
        return Fraction(self._media.rate).limit_denominator(1001) if self._media.rate else None

    @property
    def heard_at(self) -> float:
        """`time.monotonic()` when a packet last came, in seconds."""
        return self._heard_at

    @property
    def damaged(self) -> int:
        """Packets that never came or made no sense, and frames that could not be decoded."""
        return self._sequencer.lost + self._units.damaged_packets + self._undecodable

    def read(self, timeout_s: float) -> LiveFrame | None:
        """The next frame; None if there is none after `timeout_s` seconds, or when closed.

        Raises:
            LiveError: if the connection is over.
        """
        if not self._ready:
            for datagram in self._connection.receive(timeout_s):
                self._heard_at = datagram.at
                if datagram.rtcp:
                    self._take_rtcp(datagram.data, datagram.at)
                elif packet := parse_rtp(datagram.data):
                    self._take_rtp(packet, datagram.at)
            self._keep_alive(time.monotonic())
        return self._ready.popleft() if self._ready else None

    def close(self) -> None:
        """Hang up."""
        self._connection.close()

    def _take_rtp(self, packet: RtpPacket, at: float) -> None:
        if packet.payload_type != self._media.payload_type:
            return
        self._ssrc = packet.ssrc
        for one, gap in self._sequencer.push(packet):
            for unit in self._units.push(one, gap, at):
                self._decode(unit)

    def _take_rtcp(self, data: bytes, at: float) -> None:
        report, bye = parse_rtcp(data, at)
        if report and report.ssrc == self._ssrc:
            self._report = report
        if bye:
            raise LiveError("connection failed", "the camera has ended the stream")

    def _decode(self, unit: AccessUnit) -> None:
        self._time += signed(unit.timestamp - self._time)
        self._lost += unit.dropped_before
        if unit.fresh:
            self._decoder.forget()
            self._lost += len(self._inside) if unit.dropped_before else 0
            self._inside.clear()
        self._inside[self._time] = unit
        if len(self._inside) > _REMEMBERED:
            del self._inside[min(self._inside)]
        try:
            frames = self._decoder.decode(unit.data, self._time)
        except av.error.FFmpegError:
            frames = []
            self._spoilt(self._time)
        for frame in frames:
            source = self._inside.pop(frame.pts, unit) if frame.pts is not None else unit
            if frame.is_corrupt:
                self._spoilt(frame.pts)
                continue
            captured_at = self._report.captured_at(source.timestamp) if self._report else None
            self._ready.append(LiveFrame(frame, frame.pts, source.arrived_at, captured_at, self._lost))
            self._lost = 0

    def _spoilt(self, pts: int | None) -> None:
        """A frame is no good, nor is what is predicted from it."""
        self._inside.pop(pts if pts is not None else -1, None)
        self._undecodable += 1
        self._lost += 1
        self._units.need_key()

    def _keep_alive(self, now: float) -> None:
        if now - self._asked_at >= self._keepalive_s:
            self._asked_at = now
            self._connection.send(self._alive, self._base)
        if now - self._reported_at >= _REPORT_S and self._ssrc is not None:
            self._reported_at = now
            sequencer = self._sequencer
            self._connection.send_rtcp(
                receiver_report(self._ssrc, sequencer.highest, sequencer.lost, self._report, now)
            )


def _video(medias: list[Media], address: RtspAddress) -> Media:
    """The first stream of frames in H.264 or H.265."""
    videos = [media for media in medias if media.kind == "video"]
    if not videos:
        held = ", ".join(sorted({media.kind for media in medias if media.kind})) or "nothing"
        raise LiveError("codec unsupported", f"{redact(address.url)} has no video (it offers {held})")
    for media in videos:
        if media.encoding in _CODECS:
            return media
    raise UnhandledCodecError
