"""Signaling for WebRTC over HTTP: POST an offer, receive an answer and the URL of a session, DELETE it to end.

What WHIP (RFC 9725) and WHEP have in common: everything but the direction. It runs on the application's event loop; a
token, a password or an SDP is never logged. Knows nothing of the media.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

from aiohttp import web
from aiortc import RTCIceServer
from aiortc.rtcicetransport import parse_stun_turn_uri

from saccade.sources.http.auth import HttpAuth, read_text, refusal
from saccade.sources.webrtc.peer import OfferError, Peer, PeerSettings

MAX_OFFER_BYTES = 64 * 1024  # a browser's with three tracks has 10 kB
SILENCE_S = 15.0  # browsers send a report every second; half of the 30 s after which a vanished peer must be gone

P = TypeVar("P", bound=Peer)


class Signaling(ABC, Generic[P]):
    """An endpoint for one kind of peer, and its sessions.

    Args:
        token: what `Authorization: Bearer` or `?token=` must carry; None accepts every request.
        origins: pages that may connect, as `https://example.org`, besides those of this server itself; "*" is any.
        ice_servers: STUN and TURN servers, for the server's own use and as `Link` headers for the clients. None by
            default: on one network none is needed, and a public one would learn who connects.
        media_hosts: addresses to offer for the media; those of every interface if None, loopback last.
        silence_s: a peer that sends nothing for this many seconds is gone.
        max_peers: maximum number of connected peers.
        auth: authorizes requests, instead of `token` and `origins`.

    Raises:
        ValueError: if the address of an ICE server is malformed.
    """

    activity: ClassVar[str]
    """What the connected peers do, for the 503 text, such as "are watching"."""

    def __init__(
        self,
        *,
        token: str | None,
        origins: Sequence[str],
        ice_servers: Sequence[RTCIceServer],
        media_hosts: Sequence[str] | None,
        silence_s: float,
        max_peers: int,
        auth: HttpAuth | None = None,
    ) -> None:
        self._auth = auth or HttpAuth(token, origins)
        for url in (url for server in ice_servers for url in _urls(server)):
            parse_stun_turn_uri(url)  # raises now, not with the first peer
        self._settings = PeerSettings(list(ice_servers), media_hosts, silence_s)
        self._max_peers = max_peers
        self._peers: dict[str, P | None] = {}  # by the secret in the session's URL, oldest first; None while connecting
        self._closed = False

    async def close(self, application: web.Application | None = None) -> None:
        """Close every peer and refuse new ones; register it as the application's shutdown hook."""
        self._closed = True
        await asyncio.gather(*(peer.close() for peer in list(self._peers.values()) if peer))

    @abstractmethod
    def _new_peer(self, on_closed: Callable[[], object]) -> P:
        """A new peer, before its offer."""

    def _session_routes(self, path: str) -> list[web.AbstractRouteDef]:
        """The routes of offers, at `path`, and of sessions, below it."""
        session = f"{path}/{{session}}"
        return [
            web.post(path, self._post),
            web.delete(session, self._end),
            *(web.options(place, self._preflight) for place in (path, session)),
        ]

    async def _post(self, request: web.Request) -> web.Response:
        cors = self._auth.authorize(request)
        if request.content_type != "application/sdp":
            raise refusal(web.HTTPUnsupportedMediaType, "the offer must be of type application/sdp", cors)
        offer = await read_text(request, MAX_OFFER_BYTES, "an offer", cors)
        session, peer = await self._open(request, offer, cors)
        response = web.Response(status=201, text=peer.answer, content_type="application/sdp", headers=cors)
        response.headers["Location"] = f"{request.path}/{session}"
        for link in map(link_of, self._settings.ice_servers):
            response.headers.add("Link", link)
        return response

    async def _end(self, request: web.Request) -> web.Response:
        cors = self._auth.authorize(request)
        peer = self._peers.get(request.match_info["session"])
        if peer is None:
            raise refusal(web.HTTPNotFound, "no such session; it may have ended already", cors)
        await peer.close()
        return web.Response(status=200, headers=cors)

    async def _preflight(self, request: web.Request) -> web.Response:
        return await self._auth.preflight(request, "POST, DELETE", "application/sdp")

    async def _open(self, request: web.Request, offer: str, cors: dict[str, str]) -> tuple[str, P]:
        """Accept an offer; return its session's secret, and the peer."""
        if self._closed or len(self._peers) >= self._max_peers:
            raise refusal(web.HTTPServiceUnavailable, f"{len(self._peers)} {self.activity}, no more may", cors)
        session = secrets.token_urlsafe(16)
        peer = self._new_peer(lambda: self._forget(session))
        self._peers[session] = None  # it counts from here on, also while `accept` is awaited
        try:
            await peer.accept(offer)
        except OfferError as error:
            kind = web.HTTPUnprocessableEntity if error.understood else web.HTTPBadRequest
            raise refusal(kind, str(error), cors) from None
        self._peers[session] = peer
        if self._closed:  # while `accept` was awaited
            await peer.close()
            raise refusal(web.HTTPServiceUnavailable, "the server is shutting down", cors)
        return session, peer

    def _forget(self, session: str) -> None:
        self._peers.pop(session, None)


def link_of(server: RTCIceServer) -> str:
    """An ICE server as the `Link` header of RFC 9725, with all its addresses."""
    secret = f'; username="{server.username}"; credential="{server.credential}"; credential-type="password"'
    return ", ".join(f'<{url}>; rel="ice-server"{secret if server.username else ""}' for url in _urls(server))


def _urls(server: RTCIceServer) -> list[str]:
    return [server.urls] if isinstance(server.urls, str) else server.urls
