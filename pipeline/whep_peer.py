"""One who watches over WebRTC: an aiortc connection that sends coded pictures as they are, with their records.

aiortc sends what a track gives it, and codes it first unless it is coded already; here it always is. This file knows
what `sources.webrtc_peer` knows of aiortc, and two things more: who asks for a key frame, and where the RTP clock
begins.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import av
from aiortc import (
    RTCBundlePolicy,
    RTCConfiguration,
    RTCIceServer,
    RTCPeerConnection,
    RTCRtpSender,
    RTCRtpTransceiver,
    RTCSessionDescription,
    VideoStreamTrack,
)
from aiortc.exceptions import OperationError
from aiortc.mediastreams import MediaStreamError

from sinks.broadcast import Viewer
from sinks.encoder import TIME_BASE, Codec
from sinks.record import to_json
from sources.messages import Messages
from sources.webrtc_peer import OfferError, checked_offer, choose_addresses

_CODECS: tuple[Codec, ...] = ("H264", "VP8")  # the better one first
_RTCP = "_handle_rtcp_packet"
_KEY_FRAME = "_send_keyframe"
_RTP_CLOCK = "_RTCRtpSender__rtp_timestamp"
_WRAP = 1 << 32


class _Track(VideoStreamTrack):
    """What the connection sends: what its viewer is given. Each record goes out with its picture."""

    def __init__(self, on_record: Callable[[dict[str, Any], int], None]) -> None:
        super().__init__()
        self._on_record = on_record
        self._changed = asyncio.Event()
        self.viewer: Viewer | None = None

    def wake(self) -> None:
        self._changed.set()

    async def recv(self) -> Any:
        """The next picture, as an `av.Packet`."""
        while True:
            picture = self.viewer.take() if self.viewer is not None else None
            if picture is not None:
                self._on_record(picture.record, picture.coded.pts)
                packet: Any = av.Packet(picture.coded.data)
                packet.pts, packet.time_base = picture.coded.pts, TIME_BASE
                return packet
            if self.viewer is not None and self.viewer.ended:
                raise MediaStreamError
            await self._changed.wait()
            self._changed.clear()


class ViewerPeer:
    """A connected or connecting viewer; made by `accept`. Everything here belongs to one event loop.

    Attributes:
        answer: to his offer.
        codec: what he is to be sent.
        messages: the channel that he may open; each record goes there, with `rtp_timestamp`, that of its picture.
    """

    def __init__(self, connection: RTCPeerConnection, silence_s: float, on_closed: Callable[[], object]) -> None:
        self._connection = connection
        self._silence_s = silence_s
        self._on_closed = on_closed
        self._heard_at = time.monotonic()
        self._track = _Track(self._send_record)
        self._sender: RTCRtpSender
        self._closing: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._leave: Callable[[], None] = lambda: None
        self._clock: tuple[int, int] | None = None  # a pts, and the RTP timestamp it had
        self._last_pts: int | None = None
        self.messages = Messages()
        self.codec: Codec = "H264"
        self.answer = ""

    @classmethod
    async def accept(
        cls,
        offer: str,
        *,
        ice_servers: Sequence[RTCIceServer],
        media_hosts: Sequence[str] | None,
        silence_s: float,
        on_closed: Callable[[], object],
    ) -> ViewerPeer:
        """Answer an offer; nothing is sent before `watch`.

        Raises:
            OfferError: if the offer is no SDP, or wants no video that can be coded here.
        """
        # An empty list, since None would mean a public STUN server to aiortc.
        configuration = RTCConfiguration(iceServers=list(ice_servers), bundlePolicy=RTCBundlePolicy.MAX_BUNDLE)
        connection = RTCPeerConnection(configuration)
        peer = cls(connection, silence_s, on_closed)
        peer.messages.listen(connection)
        try:
            transceiver = await _apply(connection, checked_offer(offer), peer._track)
            peer._sender = transceiver.sender
            choose_addresses(transceiver, media_hosts)
            await connection.setLocalDescription(await connection.createAnswer())
            peer.answer = connection.localDescription.sdp
            peer.codec = _chosen_codec(peer.answer)
        except BaseException:
            await connection.close()
            raise
        peer._listen()
        peer._watch = asyncio.create_task(peer._watch_silence())
        return peer

    def watch(self, join: Callable[[Callable[[], None]], tuple[Viewer, Callable[[], None]]]) -> None:
        """Begin to send what `join`, given how to be woken from any thread, lets this viewer see."""
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended, and every peer with it
                loop.call_soon_threadsafe(self._wake)

        self._track.viewer, self._leave = join(wake)
        self._wake()

    async def close(self) -> None:
        """End the connection; returns when it has ended."""
        self._begin_close()
        assert self._closing is not None
        await asyncio.shield(self._closing)

    def _wake(self) -> None:
        self._track.wake()
        if self._track.viewer is not None and self._track.viewer.ended:
            self._begin_close()

    def _begin_close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        self._leave()
        if self._watch is not None:
            self._watch.cancel()
        try:
            await self._connection.close()
        finally:
            self._on_closed()

    async def _watch_silence(self) -> None:
        """Wait until no report was heard for `silence_s`; browsers send one a second while they see anything at all."""
        while (quiet := time.monotonic() - self._heard_at) < self._silence_s:
            await asyncio.sleep(self._silence_s - quiet)
        self._begin_close()

    def _send_record(self, record: dict[str, Any], pts: int) -> None:
        """Send a record, just before its picture, with the RTP timestamp that the picture will have.

        The RTP clock begins at a number that aiortc alone knows; it is told by the picture sent last.
        """
        if self._clock is None and self._last_pts is not None:
            self._clock = self._last_pts, getattr(self._sender, _RTP_CLOCK)
        self._last_pts = pts
        if self._clock is not None and self.messages.open:
            stamp = (self._clock[1] + pts - self._clock[0]) % _WRAP
            self.messages.send(to_json({**record, "rtp_timestamp": stamp}).decode())

    def _listen(self) -> None:
        """Learn of the viewer's reports, and of his requests for a key frame."""
        handle: Callable[[object], Coroutine[Any, Any, None]] = getattr(self._sender, _RTCP)

        async def handle_rtcp(packet: object) -> None:
            self._heard_at = time.monotonic()
            await handle(packet)

        def ask() -> None:
            if self._track.viewer is not None:
                self._track.viewer.ask()

        setattr(self._sender, _RTCP, handle_rtcp)
        setattr(self._sender, _KEY_FRAME, ask)

        @self._connection.on("connectionstatechange")
        def state_changed() -> None:
            if self._connection.connectionState in ("failed", "closed"):
                self._begin_close()


async def _apply(connection: RTCPeerConnection, offer: str, track: VideoStreamTrack) -> RTCRtpTransceiver:
    """Give the offer to the connection; return what sends its first video, with everything else switched off."""
    chosen = connection.addTransceiver(track, direction="sendonly")
    if not all(hasattr(chosen.sender, name) for name in (_RTCP, _KEY_FRAME)):
        raise RuntimeError(f"aiortc {version('aiortc')} is not known here; install aiortc 1.16")
    known = RTCRtpSender.getCapabilities("video").codecs
    chosen.setCodecPreferences([c for name in (*_CODECS, "rtx") for c in known if c.mimeType == f"video/{name}"])
    try:
        await connection.setRemoteDescription(RTCSessionDescription(sdp=offer, type="offer"))
    except OperationError:
        raise OfferError(f"no codec in common; accept {' or '.join(_CODECS)}", understood=True) from None
    except Exception:  # aiortc parses with index and key errors, assertions and more
        raise OfferError("the offer is not usable SDP") from None
    for transceiver in connection.getTransceivers():
        if transceiver is not chosen:
            transceiver.direction = "inactive"
    if "send" not in (chosen._offerDirection or ""):
        raise OfferError("the offer does not ask for video", understood=True)
    return chosen


def _chosen_codec(answer: str) -> Codec:
    """The codec of the first payload type of the answer's video, which is the one that is sent."""
    for number in re.findall(r"^m=video \d+ \S+ (.*)$", answer, re.MULTILINE)[0].split():
        for name in _CODECS:
            if re.search(rf"^a=rtpmap:{number} {name}/", answer, re.MULTILINE):
                return name
    raise OfferError(f"no codec in common; accept {' or '.join(_CODECS)}", understood=True)
