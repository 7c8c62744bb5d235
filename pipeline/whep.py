"""WHEP: the video of any stream to browsers and players, as routes for any aiohttp application.

    whep = WhepServer(broadcast, token="…")
    application.add_routes(whep.routes())          # POST /whep/door, DELETE /whep/door/SESSION

`?overlay=off` asks for the pictures without results drawn on them. A viewer that opens a data channel "results" gets
the record of each picture there, with the picture's RTP timestamp. All of it runs on the application's event loop; a
token or an SDP is never logged.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web
from aiortc import RTCIceServer

from pipeline.whep_peer import ViewerPeer
from sinks.broadcast import BroadcastSink, NoSuchStreamError, View
from sources.door import Door, read_text, refusal
from sources.webrtc_peer import OfferError
from sources.webrtc_server import MAX_OFFER_BYTES, SILENCE_S, link_of

log = logging.getLogger(__name__)

MAX_VIEWERS = 16


class WhepServer:
    """The endpoint. `close` ends every viewer's session.

    Args:
        videos: what can be watched; it stays the caller's.
        token, origins: as in `Door`.
        ice_servers, media_hosts, silence_s: as in `WebRtcServer`.
        max_viewers: how many may watch at a time, all streams together.
        answer: called with the name of the stream and what its viewer says over the data channel; what it returns is
            sent back. Must return at once.
    """

    def __init__(
        self,
        videos: BroadcastSink,
        *,
        token: str | None = None,
        origins: Sequence[str] = (),
        ice_servers: Sequence[RTCIceServer] = (),
        media_hosts: Sequence[str] | None = None,
        silence_s: float = SILENCE_S,
        max_viewers: int = MAX_VIEWERS,
        answer: Callable[[str, str], str | None] = lambda stream, text: None,
    ) -> None:
        self._videos = videos
        self._door = Door(token, origins)
        self._ice_servers = list(ice_servers)
        self._media_hosts = media_hosts
        self._silence_s = silence_s
        self._max_viewers = max_viewers
        self._answer = answer
        self._peers: dict[str, ViewerPeer | None] = {}  # by the secret in the session's URL; None: being made
        self._closed = False

    @property
    def viewers(self) -> int:
        """How many watch, those still connecting among them."""
        return len(self._peers)

    def routes(self, path: str = "/whep") -> list[web.AbstractRouteDef]:
        """The routes: each stream below `path`, and its sessions below that."""
        stream, session = f"{path}/{{stream}}", f"{path}/{{stream}}/{{session}}"
        return [
            web.post(stream, self._whep),
            web.delete(session, self._end),
            *(web.options(place, self._preflight) for place in (stream, session)),
        ]

    async def close(self) -> None:
        """End every session and let nobody in any more."""
        self._closed = True
        await asyncio.gather(*(peer.close() for peer in list(self._peers.values()) if peer))

    async def _whep(self, request: web.Request) -> web.Response:
        cors = self._door.admit(request)
        if request.content_type != "application/sdp":
            raise refusal(web.HTTPUnsupportedMediaType, "the offer must be of type application/sdp", cors)
        offer = await read_text(request, MAX_OFFER_BYTES, "an offer", cors)
        session, answer = await self._accept(request, offer, cors)
        response = web.Response(status=201, text=answer, content_type="application/sdp", headers=cors)
        response.headers["Location"] = f"{request.path}/{session}"
        for link in map(link_of, self._ice_servers):
            response.headers.add("Link", link)
        return response

    async def _end(self, request: web.Request) -> web.Response:
        cors = self._door.admit(request)
        peer = self._peers.get(request.match_info["session"])
        if peer is None:
            raise refusal(web.HTTPNotFound, "no such session; it may have ended already", cors)
        await peer.close()
        return web.Response(status=200, headers=cors)

    async def _preflight(self, request: web.Request) -> web.Response:
        return await self._door.preflight(request, "POST, DELETE", "application/sdp")

    async def _accept(self, request: web.Request, offer: str, cors: dict[str, str]) -> tuple[str, str]:
        """Make a viewer of an offer; return his session's secret and the answer."""
        stream = request.match_info["stream"]
        if stream not in self._videos.streams:
            raise refusal(web.HTTPNotFound, "there is no picture of a stream of that name", cors)
        if self._closed or len(self._peers) >= self._max_viewers:
            raise refusal(web.HTTPServiceUnavailable, f"{len(self._peers)} are watching, no more may", cors)
        session = secrets.token_urlsafe(16)
        self._peers[session] = None  # a place is taken from here on, whatever else is waited for
        peer: ViewerPeer | None = None
        try:
            peer = await ViewerPeer.accept(
                offer,
                ice_servers=self._ice_servers,
                media_hosts=self._media_hosts,
                silence_s=self._silence_s,
                on_closed=lambda: self._peers.pop(session, None),
            )
            self._peers[session] = peer
            peer.messages.answer = partial(self._answer, stream)
            peer.watch(partial(self._videos.join, stream, View(request.query.get("overlay") != "off", peer.codec)))
        except OfferError as error:
            kind = web.HTTPUnprocessableEntity if error.understood else web.HTTPBadRequest
            raise refusal(kind, str(error), cors) from None
        except NoSuchStreamError:  # it has ended meanwhile
            assert peer is not None
            await peer.close()
            raise refusal(web.HTTPNotFound, "the stream has ended", cors) from None
        finally:
            if peer is None:
                self._peers.pop(session, None)
        if self._closed:  # meanwhile
            await peer.close()
            raise refusal(web.HTTPServiceUnavailable, "the server is shutting down", cors)
        log.info("%s: a viewer connects, %s", stream, peer.codec)
        return session, peer.answer
