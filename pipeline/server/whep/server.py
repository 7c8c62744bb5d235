"""WHEP: the video of any stream to browsers and players, as routes for any aiohttp application.

    whep = WhepServer(broadcast, token="…")
    application.add_routes(whep.routes())          # POST /whep/door, DELETE /whep/door/SESSION

`?overlay=off` requests the frames without results drawn on them, `?width=480` smaller ones. A viewer that opens a data
channel "results" gets the record of each frame there, with the frame's RTP timestamp. All of it runs on the
application's event loop; a token or an SDP is never logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web
from aiortc import RTCIceServer

from saccade.pipeline.server.access import client_of
from saccade.pipeline.server.whep.peer import ViewerPeer
from saccade.sinks.video.broadcast import BroadcastSink, NoSuchStreamError, View
from saccade.sources.http.auth import HttpAuth, refusal
from saccade.sources.webrtc.signaling import SILENCE_S, Signaling

log = logging.getLogger(__name__)

MAX_VIEWERS = 64
_WIDTHS = (64, 1920)


class WhepServer(Signaling[ViewerPeer]):
    """The endpoint. `close` ends every viewer's session.

    Args:
        videos: what can be watched; it stays the caller's.
        token, origins, ice_servers, media_hosts, silence_s, auth: as in `Signaling`.
        max_viewers: how many viewers at a time, of all streams together.
        answer: called with the name of the stream and each message of its viewer over the data channel; its result is
            sent back. Must return at once.
        on_viewers: called with the name of a stream and how many watch it, whenever that changes.
    """

    activity = "are watching"

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
        auth: HttpAuth | None = None,
        on_viewers: Callable[[str, int], None] = lambda stream, viewers: None,
    ) -> None:
        super().__init__(
            token=token,
            origins=origins,
            ice_servers=ice_servers,
            media_hosts=media_hosts,
            silence_s=silence_s,
            max_peers=max_viewers,
            auth=auth,
        )
        self._videos = videos
        self._answer = answer
        self._on_viewers = on_viewers
        self._watched: dict[str, str] = {}  # the stream of each session

    @property
    def viewers(self) -> int:
        """How many viewers there are, those still connecting included."""
        return len(self._peers)

    def routes(self, path: str = "/whep") -> list[web.AbstractRouteDef]:
        """The routes: each stream below `path`, and its sessions below that."""
        return self._session_routes(f"{path}/{{stream}}")

    def _new_peer(self, on_closed: Callable[[], object]) -> ViewerPeer:
        return ViewerPeer(self._settings, on_closed)

    async def _open(self, request: web.Request, offer: str, cors: dict[str, str]) -> tuple[str, ViewerPeer]:
        stream = request.match_info["stream"]
        if stream not in self._videos.streams:
            raise refusal(web.HTTPNotFound, "there is no video of a stream of that name", cors)
        width = width_of(request, cors)
        session, peer = await super()._open(request, offer, cors)
        # A message may change what is found, which a viewer may not: it is answered as one that changes nothing.
        changes = client_of(request).may("operator")
        peer.messages.answer = lambda text: self._answer(stream, text if changes else "{}")
        view = View(request.query.get("overlay") != "off", peer.codec, width)
        try:
            peer.watch(partial(self._videos.join, stream, view))
        except NoSuchStreamError:  # it has ended meanwhile
            await peer.close()
            raise refusal(web.HTTPNotFound, "the stream has ended", cors) from None
        log.info("%s: a viewer connects, %s", stream, peer.codec)
        if session in self._peers:  # else it has disconnected already
            self._watched[session] = stream
            self._note_viewers(stream)
        return session, peer

    def _forget(self, session: str) -> None:
        super()._forget(session)
        stream = self._watched.pop(session, None)
        if stream is not None:
            self._note_viewers(stream)

    def _note_viewers(self, stream: str) -> None:
        self._on_viewers(stream, list(self._watched.values()).count(stream))


def width_of(request: web.Request, cors: dict[str, str] | None = None) -> int | None:
    """The width in pixels that a request asks for; raises an HTTP error if it is not one."""
    text = request.query.get("width")
    if text is None:
        return None
    if not (text.isdecimal() and len(text) < 6 and _WIDTHS[0] <= int(text) <= _WIDTHS[1]):
        raise refusal(web.HTTPBadRequest, f"width should be pixels from {_WIDTHS[0]} to {_WIDTHS[1]}", cors)
    return int(text) // 2 * 2
