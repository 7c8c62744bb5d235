"""A WebRTC connection that sends encoded video frames and the JSON record of each frame to a viewer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import av
from aiortc import RTCRtpSender, RTCRtpTransceiver, VideoStreamTrack
from aiortc.mediastreams import MediaStreamError
from aiortc.rtp import RtcpRrPacket, RtcpSrPacket

from saccade.pipeline.api.loss_control import LossControl
from saccade.sinks.record import to_json
from saccade.sinks.video.broadcast import Viewer, ViewerFrame
from saccade.sinks.video.encoder import TIME_BASE, Codec
from saccade.sources.webrtc.peer import OfferError, Peer, PeerSettings

_CODECS: tuple[Codec, ...] = ("H264", "VP8")  # the preferred codec first
# Private attributes of aiortc: the RTP timestamp of the last frame, and the SSRC of the sender.
_RTP_CLOCK, _SSRC = "_RTCRtpSender__rtp_timestamp", "_ssrc"
_WRAP = 1 << 32
_SOON_S, _TRIES = 0.01, 50  # interval and number of attempts to send the first record after its frame


async def next_frame(viewer: Viewer, changed: asyncio.Event) -> ViewerFrame | None:
    """Wait for the next frame for a viewer. Return None when the stream has ended.

    Args:
        viewer: the viewer.
        changed: event that is set for each new frame, and at the end of the stream.
    """
    while (frame := viewer.take()) is None:
        if viewer.ended:
            return None
        await changed.wait()
        changed.clear()
    return frame


class _Track(VideoStreamTrack):
    """A WebRTC video track of encoded frames. Before each frame, `on_record` receives the JSON record of the frame."""

    def __init__(self, on_record: Callable[[dict[str, Any], int], None]) -> None:
        super().__init__()
        self._on_record = on_record
        self._changed = asyncio.Event()
        self.viewer: Viewer | None = None

    def wake(self) -> None:
        self._changed.set()

    async def recv(self) -> Any:
        """Return the next encoded frame as an `av.Packet`."""
        while self.viewer is None:
            await self._changed.wait()
            self._changed.clear()
        frame = await next_frame(self.viewer, self._changed)
        if frame is None:
            raise MediaStreamError
        self._on_record(frame.record, frame.encoded.pts)
        packet: Any = av.Packet(frame.encoded.data)
        packet.pts, packet.time_base = frame.encoded.pts, TIME_BASE
        return packet


class ViewerPeer(Peer):
    """A WebRTC connection to one viewer. `watch` selects the video.

    Attributes:
        codec: codec of the video.
        messages: data channel for the JSON record of each frame.

    Args:
        settings, on_closed: see `Peer`.
    """

    requirement = f"accept {' or '.join(_CODECS)}"

    def __init__(self, settings: PeerSettings, on_closed: Callable[[], object]) -> None:
        super().__init__(settings, on_closed)
        self._track = _Track(self._send_record)
        self._transceiver = self._connection.addTransceiver(self._track, direction="sendonly")
        known = RTCRtpSender.getCapabilities("video").codecs
        self._transceiver.setCodecPreferences(
            [c for name in (*_CODECS, "rtx") for c in known if c.mimeType == f"video/{name}"]
        )
        self._loss = LossControl()
        self._clock: tuple[int, int] | None = None  # a pts and its RTP timestamp
        self._last_pts: int | None = None
        self.codec: Codec = "H264"

    def watch(self, join: Callable[[Callable[[], None]], Viewer]) -> None:
        """Start to send video over this WebRTC connection.

        Args:
            join: function that subscribes to the video and returns the subscription. Its argument is a thread-safe
                callback, which must be called for each new frame.
        """
        self._track.viewer = join(partial(self._call_soon, self._wake))
        self._wake()

    def _select_transceiver(self) -> RTCRtpTransceiver:
        if "send" not in (self._transceiver._offerDirection or ""):
            raise OfferError("the SDP offer does not request video", understood=True)
        return self._transceiver

    def _start_media(self, transceiver: RTCRtpTransceiver) -> None:
        self.codec = _chosen_codec(self.answer)
        self._sender = transceiver.sender
        self._intercept_rtcp(self._sender)
        self._replace(self._sender, "_send_keyframe", self._ask)

    async def _close(self) -> None:
        if self._track.viewer is not None:
            self._track.viewer.leave()
        await super()._close()

    def _wake(self) -> None:
        self._track.wake()
        if self._track.viewer is not None and self._track.viewer.ended:
            self._begin_close()

    def _take_report(self, packet: object) -> None:
        super()._take_report(packet)
        viewer, halvings = self._track.viewer, self._loss.halvings
        if viewer is None or not isinstance(packet, RtcpRrPacket | RtcpSrPacket):
            return
        for report in packet.reports:
            if report.ssrc == getattr(self._sender, _SSRC):
                self._loss.report(report.fraction_lost / 256, time.monotonic())
        if self._loss.halvings != halvings:
            viewer.set_halvings(self._loss.halvings)

    def _ask(self) -> None:
        if self._track.viewer is not None:
            self._track.viewer.request_key_frame()

    def _send_record(self, record: dict[str, Any], pts: int) -> None:
        """Send a JSON record just before its frame, with the RTP timestamp of the frame.

        The first record is sent after its frame, because the first RTP timestamp is not known earlier.
        """
        if self._clock is None and self._last_pts is not None:
            self._clock = self._last_pts, getattr(self._sender, _RTP_CLOCK)
        self._last_pts = pts
        if self._clock is None:
            self._loop.call_later(_SOON_S, self._send_first, record, pts, _TRIES)
        elif self.messages.open:
            self._send_stamped(record, pts, self._clock)

    def _send_first(self, record: dict[str, Any], pts: int, tries: int) -> None:
        """Send the first JSON record as soon as the first RTP timestamp is known. Retry up to `tries` times."""
        if self._clock is None and (stamp := getattr(self._sender, _RTP_CLOCK)):  # 0 before the first frame
            self._clock = pts, stamp
        if self._clock is not None:
            self._send_stamped(record, pts, self._clock)
        elif tries:
            self._loop.call_later(_SOON_S, self._send_first, record, pts, tries - 1)

    def _send_stamped(self, record: dict[str, Any], pts: int, clock: tuple[int, int]) -> None:
        stamp = (clock[1] + pts - clock[0]) % _WRAP
        self.messages.send(to_json({**record, "rtp_timestamp": stamp}).decode())


def _chosen_codec(answer: str) -> Codec:
    """Return the video codec of an SDP answer: the codec of the first payload type."""
    for number in re.findall(r"^m=video \d+ \S+ (.*)$", answer, re.MULTILINE)[0].split():
        for name in _CODECS:
            if re.search(rf"^a=rtpmap:{number} {name}/", answer, re.MULTILINE):
                return name
    raise OfferError(f"the SDP offer has no supported codec; {ViewerPeer.requirement}", understood=True)
