"""A WebRTC viewer: a peer that receives encoded frames unchanged, with their records.

aiortc would encode the frames of a track, but sends already encoded packets as they are. This module relies on two
private parts of aiortc: requests for key frames, and the start of the RTP clock.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import av
from aiortc import RTCRtpSender, RTCRtpTransceiver, VideoStreamTrack
from aiortc.mediastreams import MediaStreamError

from saccade.sinks.record import to_json
from saccade.sinks.video.broadcast import Viewer
from saccade.sinks.video.live_encoder import TIME_BASE, Codec
from saccade.sources.webrtc.peer import OfferError, Peer, PeerSettings

_CODECS: tuple[Codec, ...] = ("H264", "VP8")  # the preferred codec first
_RTP_CLOCK = "_RTCRtpSender__rtp_timestamp"
_WRAP = 1 << 32
_SOON_S, _TRIES = 0.01, 50  # interval and number of attempts to send the first record after its frame


class _Track(VideoStreamTrack):
    """The track that the connection sends. Each record is sent with its frame."""

    def __init__(self, on_record: Callable[[dict[str, Any], int], None]) -> None:
        super().__init__()
        self._on_record = on_record
        self._changed = asyncio.Event()
        self.viewer: Viewer | None = None

    def wake(self) -> None:
        self._changed.set()

    async def recv(self) -> Any:
        """Return the next frame as an `av.Packet`."""
        while True:
            frame = self.viewer.take() if self.viewer is not None else None
            if frame is not None:
                self._on_record(frame.record, frame.encoded.pts)
                packet: Any = av.Packet(frame.encoded.data)
                packet.pts, packet.time_base = frame.encoded.pts, TIME_BASE
                return packet
            if self.viewer is not None and self.viewer.ended:
                raise MediaStreamError
            await self._changed.wait()
            self._changed.clear()


class ViewerPeer(Peer):
    """A `Peer` that receives the video given by `watch`.

    Attributes:
        codec: codec of the video.
        messages: data channel for records, each with the `rtp_timestamp` of its frame.

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
        self._leave: Callable[[], None] = lambda: None
        self._clock: tuple[int, int] | None = None  # a pts and its RTP timestamp
        self._last_pts: int | None = None
        self.codec: Codec = "H264"

    def watch(self, join: Callable[[Callable[[], None]], tuple[Viewer, Callable[[], None]]]) -> None:
        """Start to send the video that `join` returns; `join` receives a thread-safe callback that wakes this peer."""
        self._track.viewer, self._leave = join(partial(self._call_soon, self._wake))
        self._wake()

    def _select_transceiver(self) -> RTCRtpTransceiver:
        if "send" not in (self._transceiver._offerDirection or ""):
            raise OfferError("the offer does not ask for video", understood=True)
        return self._transceiver

    def _start_media(self, transceiver: RTCRtpTransceiver) -> None:
        self.codec = _chosen_codec(self.answer)
        self._sender = transceiver.sender
        self._intercept_rtcp(self._sender)
        self._replace(self._sender, "_send_keyframe", self._ask)

    async def _close(self) -> None:
        self._leave()
        await super()._close()

    def _wake(self) -> None:
        self._track.wake()
        if self._track.viewer is not None and self._track.viewer.ended:
            self._begin_close()

    def _ask(self) -> None:
        """Request a key frame for the peer."""
        if self._track.viewer is not None:
            self._track.viewer.request_key_frame()

    def _send_record(self, record: dict[str, Any], pts: int) -> None:
        """Send a record just before its frame, with the frame's RTP timestamp.

        The RTP clock starts at a random number inside aiortc, which is read from the last sent frame. So the first
        record follows its frame; waiting for the second frame would delay the boxes by 0.25 s at 4 frames per second.
        """
        if self._clock is None and self._last_pts is not None:
            self._clock = self._last_pts, getattr(self._sender, _RTP_CLOCK)
        self._last_pts = pts
        if self._clock is None:
            self._loop.call_later(_SOON_S, self._send_first, record, pts, _TRIES)
        elif self.messages.open:
            self._send_stamped(record, pts, self._clock)

    def _send_first(self, record: dict[str, Any], pts: int, tries: int) -> None:
        """Send the first record once its frame is sent; it waits until the channel opens, or for a newer record."""
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
    """Return the codec of the first payload type in the answer's video, which is the codec used."""
    for number in re.findall(r"^m=video \d+ \S+ (.*)$", answer, re.MULTILINE)[0].split():
        for name in _CODECS:
            if re.search(rf"^a=rtpmap:{number} {name}/", answer, re.MULTILINE):
                return name
    raise OfferError(f"no codec in common; {ViewerPeer.requirement}", understood=True)
