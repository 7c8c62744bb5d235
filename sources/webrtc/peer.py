"""One WebRTC peer: an aiortc connection that answers an offer, and closes when the peer is silent.

One subclass receives video (`webrtc.publisher`), the other one sends it (`server.whep.peer`). Only these three modules
use private parts of aiortc, and only of single connections.
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
from aiortc.exceptions import OperationError

from saccade.sources.errors import SourceError
from saccade.sources.webrtc.data_channel import Messages

_MAX_MEDIA = 8  # media sections of an offer, each of which costs a transceiver
_MAX_CANDIDATES = 32


class OfferError(Exception):
    """Raised if an offer cannot be accepted. The message is one line for the client.

    `understood` is True if the offer is valid SDP but unusable here.
    """

    def __init__(self, message: str, *, understood: bool = False) -> None:
        super().__init__(message)
        self.understood = understood


@dataclass(slots=True, frozen=True)
class PeerSettings:
    """Network settings of peers.

    Attributes:
        ice_servers: STUN and TURN servers.
        media_hosts: IP addresses to offer for the media; None for those of every interface, loopback last.
        silence_s: seconds without data after which a peer counts as disconnected.
    """

    ice_servers: Sequence[RTCIceServer]
    media_hosts: Sequence[str] | None
    silence_s: float


class Peer(ABC):
    """A connecting or connected peer. Use it from one event loop.

    Attributes:
        answer: the SDP answer to the peer's offer.
        messages: the data channel that the peer may open.

    Args:
        settings: network settings.
        on_closed: called when the connection has closed, also after a rejected offer.
    """

    requirement: ClassVar[str]
    """What an offer must support, for the error text."""

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
        self.messages = Messages()
        self.messages.listen(self._connection)
        self.answer = ""

    async def accept(self, offer: str) -> None:
        """Answer an offer. The connection closes if this fails.

        Raises:
            OfferError: if the offer is not SDP, or unusable.
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
        """Close the connection and wait until it has closed."""
        self._begin_close()
        assert self._closing is not None
        await asyncio.shield(self._closing)

    @abstractmethod
    def _select_transceiver(self) -> RTCRtpTransceiver:
        """Return the video transceiver of the applied offer. Raises `OfferError` if there is none."""

    @abstractmethod
    def _start_media(self, transceiver: RTCRtpTransceiver) -> None:
        """Start receiving or sending video, after the answer is created."""

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
        """Schedule a function on the event loop. Thread-safe."""
        with suppress(RuntimeError):  # the loop has ended, and every peer with it
            self._loop.call_soon_threadsafe(call)

    def _mark_heard(self) -> None:
        """Record that data arrived from the peer."""
        self._heard_at = time.monotonic()

    def _take_report(self, packet: object) -> None:
        """Handle an RTCP report before aiortc does."""
        self._mark_heard()

    def _replace(self, part: object, name: str, ours: object) -> Any:
        """Replace a private attribute until the peer is closed, see `replace_private`."""
        theirs = replace_private(part, name, ours)
        self._replaced.append((part, name, theirs))
        return theirs

    def _intercept_rtcp(self, end: RTCRtpReceiver | RTCRtpSender) -> None:
        """Pass each RTCP packet of a sender or receiver to `_take_report` first."""

        async def handle_rtcp(packet: object) -> None:
            self._take_report(packet)
            await handle(packet)

        handle: Callable[[object], Coroutine[Any, Any, None]] = self._replace(end, "_handle_rtcp_packet", handle_rtcp)

    def _state_changed(self) -> None:
        if self._connection.connectionState in ("failed", "closed"):
            self._begin_close()

    async def _watch_silence(self) -> None:
        """Close the peer after `silence_s` seconds without a frame, a report or a connection.

        Browsers send a report every second. The consent check of ICE takes 30 s or more, and a killed browser sends no
        BYE.
        """
        while (quiet := time.monotonic() - self._heard_at) < self._settings.silence_s:
            await asyncio.sleep(self._settings.silence_s - quiet)
        self._begin_close()

    async def _apply(self, offer: str) -> None:
        try:
            await self._connection.setRemoteDescription(RTCSessionDescription(sdp=offer, type="offer"))
        except OperationError:
            raise OfferError(f"no codec in common; {self.requirement}", understood=True) from None
        except Exception:  # aiortc's parser raises IndexError, KeyError, AssertionError and more
            raise OfferError("the SDP of the offer cannot be used") from None


def replace_private(part: object, name: str, ours: object) -> Any:
    """Replace a private attribute of an aiortc object and return the original.

    Raises:
        SourceError: if this version of aiortc has no such attribute.
    """
    if not hasattr(part, name):
        raise SourceError(f"aiortc {version('aiortc')} is not supported; install aiortc 1.16")
    theirs = getattr(part, name)
    setattr(part, name, ours)
    return theirs


def checked_offer(offer: str) -> str:
    """Remove candidates with host names from an offer, and limit it to 32 candidates.

    Resolving the host names is not wanted. Browsers hide addresses behind names in `.local`; ICE connectivity checks
    find such browsers. The end-of-candidates line is removed too, because ICE would give up without candidates.

    Raises:
        OfferError: if the offer is not SDP, or too large.
    """
    if not offer.startswith("v=0"):
        raise OfferError("the offer is not SDP")
    lines = offer.splitlines()
    if sum(line.startswith("m=") for line in lines) > _MAX_MEDIA:
        raise OfferError(f"the offer has more than {_MAX_MEDIA} media sections", understood=True)
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
    """Set the IP addresses to offer for the media before they are gathered. By default, aioice omits loopback."""
    gathering: Any = transceiver.receiver.transport.transport.iceGatherer._connection
    gather = gathering.get_component_candidates

    async def gather_chosen(component: int, addresses: list[str], timeout: int = 5) -> object:
        chosen = list(hosts) if hosts is not None else [*addresses, "127.0.0.1"]
        return await gather(component=component, addresses=chosen, timeout=timeout)

    gathering.get_component_candidates = gather_chosen
