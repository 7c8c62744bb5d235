"""WebRTC signaling over HTTP, shared by WHIP (RFC 9725) and WHEP.

A client sends its SDP offer by POST and receives the SDP answer with a session URL. A DELETE of the session URL ends
the session. The code runs on the application's event loop. Passwords and SDP are never logged.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar
from urllib.parse import unquote

from aiortc import RTCIceServer
from aiortc.rtcicetransport import parse_stun_turn_uri
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from saccade.sources.webrtc.peer import OfferError, Peer, PeerSettings
from saccade.web.body import read_text, require_type
from saccade.web.errors import HttpError

MAX_OFFER_BYTES = 64 * 1024  # a browser's with three tracks has 10 kB
SILENCE_S = 15.0  # browsers send a report every second; half of the 30 s after which a vanished peer must be gone

P = TypeVar("P", bound=Peer)


class Signaling(ABC, Generic[P]):
    """A WebRTC signaling endpoint (WHIP or WHEP) with its sessions.

    Args:
        ice_servers: STUN and TURN servers for the server and its clients. These servers learn the IP addresses of
            clients.
        media_hosts: IP addresses to announce as ICE host candidates; None for all interfaces, loopback last.
        silence_s: seconds without data after which a peer counts as disconnected.
        max_peers: maximum number of connected peers.

    Raises:
        ValueError: if the address of an ICE server is malformed.
    """

    activity: ClassVar[str]
    """What the connected peers do, such as "are watching", for the message of HTTP error 503."""

    def __init__(
        self,
        *,
        ice_servers: Sequence[RTCIceServer],
        media_hosts: Sequence[str] | None,
        silence_s: float,
        max_peers: int,
    ) -> None:
        for url in (url for server in ice_servers for url in _urls(server)):
            parse_stun_turn_uri(url)  # raises now, not with the first peer
        self._settings = PeerSettings(list(ice_servers), media_hosts, silence_s)
        self._max_peers = max_peers
        self._peers: dict[str, P | None] = {}  # by the secret in the session's URL, oldest first; None while connecting
        self._closed = False

    async def close(self) -> None:
        """Disconnect all WebRTC peers and refuse new ones."""
        self._closed = True
        await asyncio.gather(*(peer.close() for peer in list(self._peers.values()) if peer))

    @abstractmethod
    def _new_peer(self, on_closed: Callable[[], object]) -> P:
        """Create the WebRTC peer of a new session."""

    def session_routes(self, path: str) -> list[Route]:
        """Return the HTTP routes: SDP offers at `path`, and session URLs below `path`."""
        return [
            Route(path, self.post, methods=["POST"]),
            Route(f"{path}/{{session}}", self.end, methods=["DELETE"]),
        ]

    async def post(self, request: Request) -> Response:
        """Handle an HTTP POST: answer the SDP offer in its body."""
        require_type(request, "application/sdp", "the offer")
        offer = await read_text(request, MAX_OFFER_BYTES, "an offer")
        session, peer = await self._open(request, offer)
        response = Response(peer.answer, 201, media_type="application/sdp")
        response.headers["Location"] = f"{request.scope['raw_path'].decode()}/{session}"
        for link in map(link_of, self._settings.ice_servers):
            response.headers.append("Link", link)
        return response

    async def end(self, request: Request) -> Response:
        """Handle an HTTP DELETE of a session URL: end the session."""
        peer = self._peers.get(request.path_params["session"])
        if peer is None:
            raise HttpError(404, "no such session; it may have ended already")
        await peer.close()
        return Response()

    async def _open(self, request: Request, offer: str) -> tuple[str, P]:
        """Answer an SDP offer. Return the random session ID, which is part of the session URL, and the new peer."""
        self._require_room()
        session = secrets.token_urlsafe(16)
        peer = self._new_peer(lambda: self._forget(session))
        self._peers[session] = None  # it counts from here on, also while `accept` is awaited
        try:
            await peer.accept(offer)
        except OfferError as error:
            raise HttpError(422 if error.understood else 400, str(error)) from None
        self._peers[session] = peer
        if self._closed:  # while `accept` was awaited
            await peer.close()
            raise HttpError(503, "the server is shutting down")
        return session, peer

    @property
    def n_open(self) -> int:
        """Number of WebRTC peers, including peers that are still connecting."""
        return len(self._peers)

    def _require_room(self) -> None:
        if self._closed or self.n_open >= self._max_peers:
            raise HttpError(503, f"{self.n_open} {self.activity}, which is the limit; try again later")

    def _forget(self, session: str) -> None:
        self._peers.pop(session, None)


def ice_server(text: str) -> RTCIceServer:
    """Parse an ICE server's address, such as `stun:stun.example.org:3478` or `turn:USER:PASSWORD@HOST:3478`.

    Raises:
        ValueError: if the address is malformed. The message omits the address, because it may contain a password.
    """
    scheme, _, rest = text.partition(":")
    login, _, place = rest.rpartition("@")
    user, _, password = login.partition(":")
    url = f"{scheme}:{place}"
    try:
        parse_stun_turn_uri(url)
    except ValueError:
        raise ValueError("an ICE server must be stun:HOST:PORT or turn:USER:PASSWORD@HOST:PORT") from None
    if not login:
        return RTCIceServer(url)
    return RTCIceServer(url, username=unquote(user), credential=unquote(password))


def link_of(server: RTCIceServer) -> str:
    """Return the value of an HTTP `Link` header (RFC 9725) with the URLs of an ICE server."""
    secret = f'; username="{server.username}"; credential="{server.credential}"; credential-type="password"'
    return ", ".join(f'<{url}>; rel="ice-server"{secret if server.username else ""}' for url in _urls(server))


def _urls(server: RTCIceServer) -> list[str]:
    return [server.urls] if isinstance(server.urls, str) else server.urls
