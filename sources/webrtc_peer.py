"""One WebRTC peer: an aiortc connection whose video comes out as it arrives, and which ends when the peer falls silent.

The only file that reaches into aiortc. It replaces two things on the receiver of one connection, nothing global: the
jitter buffer, which is late by a picture, freezes for seconds on a lost packet and has no room for a big key frame; and
the handler of RTCP, because aiortc keeps the sender's clock to itself. Decoding is ours too (`sources.webrtc`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

from aiortc import (
    RTCBundlePolicy,
    RTCConfiguration,
    RTCIceServer,
    RTCPeerConnection,
    RTCRtpReceiver,
    RTCRtpTransceiver,
    RTCSessionDescription,
)
from aiortc.exceptions import OperationError
from aiortc.rtp import RtcpByePacket, RtcpSrPacket

from sources.base import SourceError
from sources.decoder import HwAccel
from sources.jitter import JitterBuffer, Packet
from sources.messages import Messages
from sources.webrtc import DECODERS, SenderReport, WebRtcFeed

_BUFFER = "_RTCRtpReceiver__jitter_buffer"
_RTCP = "_handle_rtcp_packet"
_NTP_TO_UNIX_S = 2_208_988_800  # from 1900 to 1970
_MAX_MEDIA = 8  # parts of an offer, each of which costs a transceiver
_MAX_CANDIDATES = 32


class OfferError(Exception):
    """An offer that cannot be taken: one line for the client. `understood` where it was SDP, but of no use here."""

    def __init__(self, message: str, *, understood: bool = False) -> None:
        super().__init__(message)
        self.understood = understood


class Peer:
    """A connected or connecting peer; made by `accept`. Everything here belongs to one event loop."""

    def __init__(self, connection: RTCPeerConnection, silence_s: float, on_closed: Callable[[], object]) -> None:
        self._connection = connection
        self._silence_s = silence_s
        self._on_closed = on_closed
        self._buffer = JitterBuffer()
        self._closing: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self.feed: WebRtcFeed
        self.messages = Messages()
        self.answer = ""

    @classmethod
    async def accept(
        cls,
        offer: str,
        *,
        ice_servers: Sequence[RTCIceServer],
        media_hosts: Sequence[str] | None,
        silence_s: float,
        hwaccel: HwAccel,
        on_closed: Callable[[], object],
    ) -> Peer:
        """Answer an offer; the peer's feed is there at once, its pictures when it has connected.

        Raises:
            OfferError: if the offer is no SDP, or has no video that can be decoded here.
        """
        # An empty list, since None would mean a public STUN server to aiortc.
        configuration = RTCConfiguration(iceServers=list(ice_servers), bundlePolicy=RTCBundlePolicy.MAX_BUNDLE)
        connection = RTCPeerConnection(configuration)
        peer = cls(connection, silence_s, on_closed)
        peer.messages.listen(connection)
        try:
            transceiver = await _apply(connection, checked_offer(offer))
            choose_addresses(transceiver, media_hosts)
            await connection.setLocalDescription(await connection.createAnswer())
            peer.answer = connection.localDescription.sdp
            loop = asyncio.get_running_loop()

            def close_from_any_thread() -> None:
                with suppress(RuntimeError):  # the loop has ended, and every peer with it
                    loop.call_soon_threadsafe(peer._begin_close)

            peer.feed = WebRtcFeed(codecs_of(peer.answer), hwaccel=hwaccel, on_close=close_from_any_thread)
        except BaseException:
            await connection.close()
            raise
        peer._listen(transceiver.receiver)
        peer._watch = asyncio.create_task(peer._watch_silence())
        return peer

    async def close(self) -> None:
        """End the connection and the feed; returns when both have ended."""
        self._begin_close()
        assert self._closing is not None
        await asyncio.shield(self._closing)

    def _begin_close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self.feed.close()
        try:
            await self._connection.close()
            await asyncio.to_thread(self.feed.join)
        finally:
            self._on_closed()

    async def _watch_silence(self) -> None:
        """Wait until nothing was heard for `silence_s`: no picture and no report, or no connection at all.

        ICE's own consent check takes 30 s and more, and a browser that was killed says no goodbye.
        """
        while (quiet := time.monotonic() - self.feed.heard_at) < self._silence_s:
            await asyncio.sleep(self._silence_s - quiet)
        self.feed.close()

    def _take(self, packet: Packet) -> tuple[bool, None]:
        """Take a packet in aiortc's jitter buffer's stead: whether to ask for a key frame, and nothing to decode."""
        now = time.monotonic()
        self.feed.heard(now)
        for picture in self._buffer.add(packet, now):
            self.feed.take(picture)
        return self.feed.asks_for_key_frame(now), None

    def _listen(self, receiver: RTCRtpReceiver) -> None:
        """Lead the receiver's packets and reports to the feed."""
        setattr(receiver, _BUFFER, SimpleNamespace(add=self._take))
        handle: Callable[[object], Coroutine[Any, Any, None]] = getattr(receiver, _RTCP)

        async def handle_rtcp(packet: object) -> None:
            self.feed.heard(time.monotonic())
            if isinstance(packet, RtcpSrPacket):
                info = packet.sender_info
                unix_time = info.ntp_timestamp / (1 << 32) - _NTP_TO_UNIX_S
                self.feed.note_report(SenderReport(unix_time, info.rtp_timestamp))
            elif isinstance(packet, RtcpByePacket):
                self.feed.close()
            await handle(packet)

        setattr(receiver, _RTCP, handle_rtcp)

        @self._connection.on("connectionstatechange")
        def state_changed() -> None:
            if self._connection.connectionState in ("failed", "closed"):
                self.feed.close()


async def _apply(connection: RTCPeerConnection, offer: str) -> RTCRtpTransceiver:
    """Give the offer to the connection; return what receives its first video, with everything else switched off."""
    try:
        await connection.setRemoteDescription(RTCSessionDescription(sdp=offer, type="offer"))
    except OperationError:
        raise OfferError(f"no codec in common; send {' or '.join(DECODERS)}", understood=True) from None
    except Exception:  # aiortc parses with index and key errors, assertions and more
        raise OfferError("the offer is not usable SDP") from None
    chosen = None
    for transceiver in connection.getTransceivers():
        if chosen is None and transceiver.kind == "video" and transceiver.receiver.track is not None:
            chosen = transceiver
            transceiver.direction = "recvonly"
        else:
            transceiver.direction = "inactive"  # aiortc would decode it and queue it for ever
    if chosen is None:
        raise OfferError("the offer sends no video", understood=True)
    if not hasattr(chosen.receiver, _BUFFER) or not hasattr(chosen.receiver, _RTCP):
        raise SourceError(f"aiortc {version('aiortc')} is not known here; install aiortc 1.16")
    return chosen


def checked_offer(offer: str) -> str:
    """The offer without candidates that name a host, which would be looked up, and without a flood of them.

    Browsers hide addresses behind names in `.local`; such a browser is found by its own checks, which come here. That
    there are no more candidates to come is left out too, for without any ICE would give up at once.

    Raises:
        OfferError: if it is no SDP, or more than anybody needs.
    """
    if not offer.startswith("v=0"):
        raise OfferError("the offer is not SDP")
    lines = offer.splitlines()
    if sum(line.startswith("m=") for line in lines) > _MAX_MEDIA:
        raise OfferError(f"the offer has more than {_MAX_MEDIA} media", understood=True)
    if not any(line.startswith("a=fingerprint:") for line in lines):
        raise OfferError("the offer has no fingerprint")
    kept, candidates = [], 0
    for line in lines:
        if line.startswith("a=candidate:"):
            candidates += 1
            if candidates > _MAX_CANDIDATES or not _has_address(line):
                continue
        if line != "a=end-of-candidates":
            kept.append(line)
    return "\r\n".join(kept) + "\r\n"


def _has_address(candidate: str) -> bool:
    words = candidate.split()
    with suppress(ValueError, IndexError):
        return bool(ipaddress.ip_address(words[4]))
    return False


def choose_addresses(transceiver: RTCRtpTransceiver, hosts: Sequence[str] | None) -> None:
    """Choose, before they are gathered, the addresses to offer for the media. By itself aioice leaves loopback out."""
    gathering: Any = transceiver.receiver.transport.transport.iceGatherer._connection
    gather = gathering.get_component_candidates

    async def gather_chosen(component: int, addresses: list[str], timeout: int = 5) -> object:
        chosen = list(hosts) if hosts is not None else [*addresses, "127.0.0.1"]
        return await gather(component=component, addresses=chosen, timeout=timeout)

    gathering.get_component_candidates = gather_chosen


def codecs_of(answer: str) -> dict[int, str]:
    """The payload types of the session and the names of their codecs."""
    return {int(number): name for number, name in re.findall(r"^a=rtpmap:(\d+) ([^/\s]+)/", answer, re.MULTILINE)}
