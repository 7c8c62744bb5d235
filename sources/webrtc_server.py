"""Signalling for WebRTC in: WHIP (RFC 9725) and a plain JSON offer/answer, as routes for any aiohttp application.

    server = WebRtcServer(on_source=start_a_run, token="…")
    application.add_routes(server.routes())

Each accepted peer becomes a `WebRtcSource`. All of it runs on the application's event loop; a token, a password
or an SDP is never logged. Knows nothing of who reads the sources, nor of models, results or sinks.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Callable, Sequence

from aiohttp import web
from aiortc import RTCIceServer
from aiortc.rtcicetransport import parse_stun_turn_uri

from sources.decoder import HwAccel, gpu_decoding
from sources.door import Door, read_text, refusal
from sources.webrtc import WebRtcSource
from sources.webrtc_peer import OfferError, Peer

log = logging.getLogger(__name__)

MAX_OFFER_BYTES = 64 * 1024  # a browser's with three tracks has 10 kB
MAX_PEERS = 8
SILENCE_S = 15.0  # browsers send a report every second; half of the 30 s after which a vanished peer must be gone


class WebRtcServer:
    """The endpoint. `close` ends every peer; so does the end of the application that has its `routes`.

    Args:
        on_source: called on the event loop with the source of each accepted peer; must return at once.
        token: what `Authorization: Bearer` or `?token=` must bear; None lets everybody in.
        origins: pages that may connect, as `https://example.org`, besides those of this server itself; "*" is any.
        ice_servers: STUN and TURN servers, for the server's own use and as `Link` headers for the clients. None by
            default: on one network nobody needs one, and a public one would learn who connects.
        media_hosts: addresses to offer for the media; those of every interface if None, loopback last.
        max_peers: how many may be connected at a time.
        replace: when there are as many, let the oldest go instead of refusing the newcomer.
        silence_s: a peer of whom nothing is heard for so long is gone.
        vid_stride: hand on every `vid_stride`-th picture.
        hwaccel: whether to decode H.264 on the GPU.

    Raises:
        ValueError: if the address of an ICE server is none.
        SourceError: if the GPU is insisted on and cannot decode.
    """

    def __init__(
        self,
        on_source: Callable[[WebRtcSource], None],
        *,
        token: str | None = None,
        origins: Sequence[str] = (),
        ice_servers: Sequence[RTCIceServer] = (),
        media_hosts: Sequence[str] | None = None,
        max_peers: int = MAX_PEERS,
        replace: bool = False,
        silence_s: float = SILENCE_S,
        vid_stride: int = 1,
        hwaccel: HwAccel = "none",
    ) -> None:
        gpu_decoding(hwaccel)  # to tell now that there is no GPU, not with the first peer
        self._on_source = on_source
        self._door = Door(token, origins)
        self._ice_servers = list(ice_servers)
        for url in (
            url for server in ice_servers for url in ([server.urls] if isinstance(server.urls, str) else server.urls)
        ):
            parse_stun_turn_uri(url)  # now, not with the first peer
        self._media_hosts = media_hosts
        self._max_peers = max_peers
        self._replace = replace
        self._silence_s = silence_s
        self._vid_stride = vid_stride
        self._hwaccel = hwaccel
        self._names: dict[str, str] = {}  # of the streams, by session
        self._peers: dict[str, Peer | None] = {}  # by the secret in the session's URL, oldest first; None: being made
        self._closed = False

    @property
    def peers(self) -> int:
        """How many peers there are, those still connecting among them."""
        return len(self._peers)

    def routes(self, path: str = "/whip", offer_path: str = "/offer") -> list[web.AbstractRouteDef]:
        """The routes: WHIP at `path`, its sessions below it, and the JSON offer at `offer_path`.

        `?stream=door` in the address names the stream. Every other method, PATCH among them, gets aiohttp's 405, as
        RFC 9725 asks of a server without trickle ICE.
        """
        return [
            web.post(path, self._whip),
            web.post(offer_path, self._offer),
            web.delete(f"{path}/{{session}}", self._end),
            *(web.options(p, self._preflight) for p in (path, offer_path, f"{path}/{{session}}")),
        ]

    async def close(self) -> None:
        """End every peer and let nobody in any more."""
        self._closed = True
        await asyncio.gather(*(peer.close() for peer in list(self._peers.values()) if peer))

    # ---- the requests

    async def _whip(self, request: web.Request) -> web.Response:
        cors = self._door.admit(request)
        if request.content_type != "application/sdp":
            raise refusal(web.HTTPUnsupportedMediaType, "the offer must be of type application/sdp", cors)
        session, answer = await self._accept(request, await self._read(request, cors), cors)
        response = web.Response(status=201, text=answer, content_type="application/sdp", headers=cors)
        response.headers["Location"] = f"{request.path}/{session}"
        for link in map(link_of, self._ice_servers):
            response.headers.add("Link", link)
        return response

    async def _offer(self, request: web.Request) -> web.Response:
        cors = self._door.admit(request)
        if request.content_type != "application/json":
            raise refusal(web.HTTPUnsupportedMediaType, "the offer must be of type application/json", cors)
        try:
            offer = json.loads(await self._read(request, cors))
        except (ValueError, RecursionError):
            raise refusal(web.HTTPBadRequest, "the body is not JSON", cors) from None
        if not isinstance(offer, dict) or offer.get("type") != "offer" or not isinstance(offer.get("sdp"), str):
            raise refusal(web.HTTPBadRequest, 'the body must be {"type": "offer", "sdp": "…"}', cors)
        session, answer = await self._accept(request, offer["sdp"], cors)
        return web.json_response({"type": "answer", "sdp": answer, "session": session}, headers=cors)

    async def _end(self, request: web.Request) -> web.Response:
        cors = self._door.admit(request)
        peer = self._peers.get(request.match_info["session"])
        if peer is None:
            raise refusal(web.HTTPNotFound, "no such session; it may have ended already", cors)
        await peer.close()
        return web.Response(status=200, headers=cors)

    async def _preflight(self, request: web.Request) -> web.Response:
        return await self._door.preflight(request, "POST, DELETE", "application/sdp")

    # ---- what they have in common

    async def _read(self, request: web.Request, cors: dict[str, str]) -> str:
        return await read_text(request, MAX_OFFER_BYTES, "an offer", cors)

    async def _accept(self, request: web.Request, offer: str, cors: dict[str, str]) -> tuple[str, str]:
        """Make a peer of an offer; return its session's secret and the answer."""
        if self._replace and len(self._peers) >= self._max_peers:
            oldest = next(iter(self._peers.values()))
            if oldest is not None:
                await oldest.close()
        if self._closed or len(self._peers) >= self._max_peers:
            raise refusal(web.HTTPServiceUnavailable, f"{len(self._peers)} peers are connected, no more may", cors)
        session = secrets.token_urlsafe(16)
        self._peers[session] = None  # a place is taken from here on, whatever else is waited for
        peer: Peer | None = None
        try:
            peer = await Peer.accept(
                offer,
                ice_servers=self._ice_servers,
                media_hosts=self._media_hosts,
                silence_s=self._silence_s,
                hwaccel=self._hwaccel,
                on_closed=lambda: self._forget(session),
            )
        except OfferError as error:
            kind = web.HTTPUnprocessableEntity if error.understood else web.HTTPBadRequest
            raise refusal(kind, str(error), cors) from None
        finally:
            if peer is None:
                self._forget(session)
        self._peers[session] = peer
        if self._closed:  # meanwhile
            await peer.close()
            raise refusal(web.HTTPServiceUnavailable, "the server is shutting down", cors)
        self._names[session] = name = self._stream_name(request.query.get("stream", "webrtc"))
        log.info("%s: a peer connects", name)
        try:
            source = WebRtcSource(peer.feed, stream=name, vid_stride=self._vid_stride, messages=peer.messages)
            self._on_source(source)
        except BaseException:
            await peer.close()
            raise
        return session, peer.answer

    def _forget(self, session: str) -> None:
        self._peers.pop(session, None)
        self._names.pop(session, None)

    def _stream_name(self, asked: str) -> str:
        name = re.sub(r"[^\w.-]", "", asked)[:32] or "webrtc"
        taken = set(self._names.values())
        return next(n for n in (name, *(f"{name}-{i}" for i in range(2, 2 + len(taken)))) if n not in taken)


def link_of(server: RTCIceServer) -> str:
    """An ICE server as RFC 9725 tells it to clients: a `Link` header, with all its addresses."""
    secret = f'; username="{server.username}"; credential="{server.credential}"; credential-type="password"'
    return ", ".join(f'<{url}>; rel="ice-server"{secret if server.username else ""}' for url in _urls(server))


def _urls(server: RTCIceServer) -> list[str]:
    return [server.urls] if isinstance(server.urls, str) else server.urls
