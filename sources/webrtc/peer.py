"""Base class of a WebRTC peer: an aiortc connection that answers an SDP offer and closes if the peer is silent.

The subclass in `saccade.sources.webrtc.publisher` receives video; the subclass in `saccade.pipeline.api.whep_peer`
sends video.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar

from aiortc import (
    RTCBundlePolicy,
    RTCConfiguration,
    RTCIceServer,
    RTCPeerConnection,
    RTCRtpReceiver,
    RTCRtpSender,
    RTCRtpTransceiver,
    RTCSessionDescription,
)
from aiortc.exceptions import InvalidStateError, OperationError

from saccade.sources.errors import SourceError
from saccade.sources.webrtc.data_channel import Messages

_MAX_MEDIA = 8  # media sections of an offer, each of which costs a transceiver
_MAX_CANDIDATES = 32
_CONNECT = "_RTCPeerConnection__connect"


class OfferError(Exception):
    """Raised if an SDP offer cannot be accepted. The message is one line for the client.

    Attributes:
        understood: whether the offer is valid SDP, but requires something unsupported.
    """

    def __init__(self, message: str, *, understood: bool = False) -> None:
        super().__init__(message)
        self.understood = understood


@dataclass(slots=True, frozen=True)
class PeerSettings:
    """Network settings of WebRTC peers.

    Attributes:
        ice_servers: STUN and TURN servers.
        media_hosts: IP addresses to announce as ICE host candidates; None for all interfaces, loopback last.
        silence_s: seconds without data after which a peer counts as disconnected.
    """

    ice_servers: Sequence[RTCIceServer]
    media_hosts: Sequence[str] | None
    silence_s: float


class Peer(ABC):
    """A WebRTC peer that is connecting or connected. All calls must come from one event loop.

    Attributes:
        answer: the SDP answer to the peer's offer.
        messages: sends and receives text messages over the data channel, if the peer opens one.

    Args:
        settings: network settings.
        on_closed: called when the connection has closed, also after a rejected offer.
    """

    requirement: ClassVar[str]
    """What an SDP offer must contain, for the error message."""

    def __init__(self, settings: PeerSettings, on_closed: Callable[[], object]) -> None:
        # An empty list, since None would mean a public STUN server to aiortc.
        configuration = RTCConfiguration(iceServers=list(settings.ice_servers), bundlePolicy=RTCBundlePolicy.MAX_BUNDLE)
        self._connection = RTCPeerConnection(configuration)
        self._loop = asyncio.get_running_loop()
        self._settings = settings
        self._on_closed = on_closed
        self._heard_at = time.monotonic()
        self._closing: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._replaced: list[tuple[object, str, object]] = []
        self._expect_early_close()
        self.messages = Messages()
        self.messages.listen(self._connection)
        self.answer = ""

    async def accept(self, offer: str) -> None:
        """Answer an SDP offer, or close the connection if the offer cannot be answered.

        Raises:
            OfferError: if the offer is not SDP, or its content is unsupported.
        """
        connection = self._connection
        try:
            await self._apply(checked_offer(offer))
            chosen = self._select_transceiver()
            for transceiver in connection.getTransceivers():
                if transceiver is not chosen:
                    transceiver.direction = "inactive"  # aiortc would decode it and queue it without bound
            choose_addresses(chosen, self._settings.media_hosts)
            await connection.setLocalDescription(await connection.createAnswer())
            self.answer = connection.localDescription.sdp
            self._start_media(chosen)
        except BaseException:
            await Peer._close(self)  # the subclass has started nothing yet
            raise
        connection.on("connectionstatechange", self._state_changed)
        self._watch = asyncio.create_task(self._watch_silence())

    async def close(self) -> None:
        """Close the WebRTC connection and wait until it is closed."""
        self._begin_close()
        assert self._closing is not None
        await asyncio.shield(self._closing)

    @abstractmethod
    def _select_transceiver(self) -> RTCRtpTransceiver:
        """Return the video transceiver of the SDP offer. Raises `OfferError` if there is none."""

    @abstractmethod
    def _start_media(self, transceiver: RTCRtpTransceiver) -> None:
        """Start receiving or sending video, after the SDP answer is created."""

    async def _close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        try:
            await self._connection.close()
        finally:
            # What refers back to this peer, so that it is freed now and not by the cyclic collector: 1 MB a peer.
            self._connection.remove_all_listeners()
            for part, name, theirs in self._replaced:
                setattr(part, name, theirs)
            self._replaced.clear()
            self._on_closed()

    def _begin_close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())

    def _call_soon(self, call: Callable[[], None]) -> None:
        """Call a function soon on the event loop of the connection. Thread-safe."""
        with suppress(RuntimeError):  # the loop has ended, and every peer with it
            self._loop.call_soon_threadsafe(call)

    def _mark_heard(self) -> None:
        """Record that the peer has sent data, which resets the silence timeout."""
        self._heard_at = time.monotonic()

    def _take_report(self, packet: object) -> None:
        """Handle an incoming RTCP packet. aiortc processes the packet afterwards."""
        self._mark_heard()

    def _replace(self, part: object, name: str, ours: object) -> Any:
        """Replace an attribute of an aiortc object until the peer is closed. Return the original value."""
        theirs = replace_private(part, name, ours)
        self._replaced.append((part, name, theirs))
        return theirs

    def _intercept_rtcp(self, end: RTCRtpReceiver | RTCRtpSender) -> None:
        """Pass each incoming RTCP packet to `_take_report` first, and then to aiortc."""

        async def handle_rtcp(packet: object) -> None:
            self._take_report(packet)
            await handle(packet)

        handle: Callable[[object], Coroutine[Any, Any, None]] = self._replace(end, "_handle_rtcp_packet", handle_rtcp)

    def _expect_early_close(self) -> None:
        """Ignore the error of aiortc's background task if the connection is closed before it is established."""
        connection = self._connection

        async def connect_unless_closed() -> None:
            try:
                await connect()
            except InvalidStateError:
                if connection.signalingState != "closed":
                    raise

        connect: Callable[[], Coroutine[Any, Any, None]] = self._replace(connection, _CONNECT, connect_unless_closed)

    def _state_changed(self) -> None:
        if self._connection.connectionState in ("failed", "closed"):
            self._begin_close()

    async def _watch_silence(self) -> None:
        """Close the peer if no data arrives from it for `silence_s` seconds, or if it does not connect in this time."""
        # Browsers send RTCP every second. A killed browser sends no BYE, and ICE would notice after 30 s or more.
        while (quiet := time.monotonic() - self._heard_at) < self._settings.silence_s:
            await asyncio.sleep(self._settings.silence_s - quiet)
        self._begin_close()

    async def _apply(self, offer: str) -> None:
        try:
            await self._connection.setRemoteDescription(RTCSessionDescription(sdp=offer, type="offer"))
        except OperationError:
            raise OfferError(f"the SDP offer has no supported codec; {self.requirement}", understood=True) from None
        except Exception:  # aiortc's parser raises IndexError, KeyError, AssertionError and more
            raise OfferError("the SDP offer is invalid or unsupported") from None


def replace_private(part: object, name: str, ours: object) -> Any:
    """Replace an attribute of an aiortc object. Return the original value.

    Raises:
        SourceError: if this version of aiortc has no such attribute.
    """
    if not hasattr(part, name):
        raise SourceError(f"aiortc {version('aiortc')} is not supported; install aiortc 1.16")
    theirs = getattr(part, name)
    setattr(part, name, ours)
    return theirs


def checked_offer(offer: str) -> str:
    """Return the SDP offer with at most 32 ICE candidates, and without candidates that have host names.

    Raises:
        OfferError: if the offer is not SDP, has too many media sections, or has no DTLS fingerprint.
    """
    if not offer.startswith("v=0"):
        raise OfferError("the offer is not SDP")
    lines = offer.splitlines()
    if sum(line.startswith("m=") for line in lines) > _MAX_MEDIA:
        raise OfferError(f"the SDP offer has more than {_MAX_MEDIA} media sections", understood=True)
    if not any(line.startswith("a=fingerprint:") for line in lines):
        raise OfferError("the SDP offer has no DTLS fingerprint")
    kept, candidates = [], 0
    for line in lines:
        if line.startswith("a=candidate:"):
            candidates += 1
            if candidates > _MAX_CANDIDATES or not _has_address(line):
                continue
        if line != "a=end-of-candidates":  # with this line, ICE would fail if no candidate is left
            kept.append(line)
    return "\r\n".join(kept) + "\r\n"


def _has_address(candidate: str) -> bool:
    words = candidate.split()
    with suppress(ValueError, IndexError):
        return bool(ipaddress.ip_address(words[4]))
    return False


def choose_addresses(transceiver: RTCRtpTransceiver, hosts: Sequence[str] | None) -> None:
    """Set the IP addresses that a connection offers as ICE host candidates. Call this before candidates are gathered.

    Args:
        transceiver: a media transceiver of the connection.
        hosts: IP addresses; None for those of all interfaces, including loopback.
    """
    gathering: Any = transceiver.receiver.transport.transport.iceGatherer._connection
    gather = gathering.get_component_candidates

    async def gather_chosen(component: int, addresses: list[str], timeout: int = 5) -> object:
        chosen = list(hosts) if hosts is not None else [*addresses, "127.0.0.1"]
        return await gather(component=component, addresses=chosen, timeout=timeout)

    gathering.get_component_candidates = gather_chosen
