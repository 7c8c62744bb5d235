"""WebRTC in: WHIP (RFC 9725) and a plain JSON offer/answer, as routes for any aiohttp application.

    server = WebRtcServer(on_source=start_a_run, token="…")
    application.add_routes(server.routes())

Each accepted peer becomes a `WebRtcSource`. Everything runs on the application's event loop; a token, a password
or an SDP is never logged. Knows nothing of who reads the sources, nor of models, results or sinks.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence

from aiohttp import web
from aiortc import RTCIceServer

from saccade.sources.gpu import HwAccel, gpu_decoding
from saccade.sources.http.auth import read_text, refusal
from saccade.sources.webrtc.publisher import PublisherPeer
from saccade.sources.webrtc.signaling import MAX_OFFER_BYTES, SILENCE_S, Signaling
from saccade.sources.webrtc.source import WebRtcSource

log = logging.getLogger(__name__)

MAX_PEERS = 8


class WebRtcServer(Signaling[PublisherPeer]):
    """The endpoint. `close` ends every peer.

    Args:
        on_source: called on the event loop with the source of each accepted peer; must return at once.
        token, origins, ice_servers, media_hosts, silence_s: as in `Signaling`.
        max_peers: maximum number of connected peers.
        replace: at the maximum, close the oldest instead of refusing the new one.
        vid_stride: hand on every `vid_stride`-th frame.
        hwaccel: whether to decode H.264 on the GPU.

    Raises:
        ValueError: if the address of an ICE server is malformed.
        SourceError: if the GPU is insisted on and cannot decode.
    """

    activity = "peers are connected"

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
        gpu_decoding(hwaccel)  # to fail now when there is no GPU, not with the first peer
        super().__init__(
            token=token,
            origins=origins,
            ice_servers=ice_servers,
            media_hosts=media_hosts,
            silence_s=silence_s,
            max_peers=max_peers,
        )
        self._on_source = on_source
        self._replace = replace
        self._vid_stride = vid_stride
        self._hwaccel = hwaccel
        self._names: dict[str, str] = {}  # of the streams, by session

    @property
    def peers(self) -> int:
        """Number of peers, including those still connecting."""
        return len(self._peers)

    def routes(self, path: str = "/whip", offer_path: str = "/offer") -> list[web.AbstractRouteDef]:
        """The routes: WHIP at `path`, its sessions below it, and the JSON offer at `offer_path`.

        `?stream=door` in the address names the stream. Every other method, PATCH among them, gets aiohttp's 405, as
        RFC 9725 asks of a server without trickle ICE.
        """
        offers = [web.post(offer_path, self._offer), web.options(offer_path, self._preflight)]
        return [*self._session_routes(path), *offers]

    async def _offer(self, request: web.Request) -> web.Response:
        cors = self._auth.authorize(request)
        if request.content_type != "application/json":
            raise refusal(web.HTTPUnsupportedMediaType, "the offer must be of type application/json", cors)
        try:
            offer = json.loads(await read_text(request, MAX_OFFER_BYTES, "an offer", cors))
        except (ValueError, RecursionError):
            raise refusal(web.HTTPBadRequest, "the body is not JSON", cors) from None
        if not isinstance(offer, dict) or offer.get("type") != "offer" or not isinstance(offer.get("sdp"), str):
            raise refusal(web.HTTPBadRequest, 'the body must be {"type": "offer", "sdp": "…"}', cors)
        session, peer = await self._open(request, offer["sdp"], cors)
        return web.json_response({"type": "answer", "sdp": peer.answer, "session": session}, headers=cors)

    async def _open(self, request: web.Request, offer: str, cors: dict[str, str]) -> tuple[str, PublisherPeer]:
        if self._replace and len(self._peers) >= self._max_peers:
            oldest = next(iter(self._peers.values()))
            if oldest is not None:
                await oldest.close()
        session, peer = await super()._open(request, offer, cors)
        self._names[session] = name = self._stream_name(request.query.get("stream", "webrtc"))
        log.info("%s: a peer connects", name)
        try:
            source = WebRtcSource(peer.video, stream=name, vid_stride=self._vid_stride, messages=peer.messages)
            self._on_source(source)
        except BaseException:
            await peer.close()
            raise
        return session, peer

    def _new_peer(self, on_closed: Callable[[], object]) -> PublisherPeer:
        return PublisherPeer(self._settings, on_closed, self._hwaccel)

    def _forget(self, session: str) -> None:
        super()._forget(session)
        self._names.pop(session, None)

    def _stream_name(self, asked: str) -> str:
        name = re.sub(r"[^\w.-]", "", asked)[:32] or "webrtc"
        taken = set(self._names.values())
        return next(n for n in (name, *(f"{name}-{i}" for i in range(2, 2 + len(taken)))) if n not in taken)
