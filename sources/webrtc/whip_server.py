"""WHIP server (RFC 9725) that receives WebRTC video, as routes for any ASGI application.

    server = WebRtcServer(on_source=start_a_run)
    application = Guard(server.routes(), HttpAuth(token))

Each publisher becomes a `WebRtcSource`, which is passed to the function `on_source`. Passwords and SDP are never
logged.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence

from aiortc import RTCIceServer
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from saccade.sources.gpu import HwAccel, gpu_decoding
from saccade.sources.webrtc.publisher import PublisherPeer
from saccade.sources.webrtc.signaling import MAX_OFFER_BYTES, SILENCE_S, Signaling
from saccade.sources.webrtc.source import WebRtcSource
from saccade.web.body import read_text, require_type
from saccade.web.errors import HttpError

log = logging.getLogger(__name__)

MAX_PEERS = 8


class WebRtcServer(Signaling[PublisherPeer]):
    """WHIP server that turns each WebRTC publisher into a source. `close` disconnects all publishers.

    Args:
        on_source: called on the event loop with the source of each accepted peer; must not block.
        ice_servers, media_hosts, silence_s: see `Signaling`.
        max_peers: maximum number of connected peers.
        replace: if `max_peers` are connected, whether a new peer replaces the oldest peer instead of being rejected.
        vid_stride: yield every `vid_stride`-th frame.
        hwaccel: for H.264, "auto" to use a GPU if there is one, "cuda" to require a GPU, "none" for the CPU.

    Raises:
        ValueError: if the address of an ICE server is malformed.
        SourceError: if decoding on a GPU is required and unavailable.
    """

    activity = "peers are connected"

    def __init__(
        self,
        on_source: Callable[[WebRtcSource], None],
        *,
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
        """Number of WebRTC peers, including peers that are still connecting."""
        return len(self._peers)

    def routes(self, path: str = "/whip", offer_path: str = "/offer") -> list[Route]:
        """Return the HTTP routes: WHIP at `path`, session URLs below `path`, and SDP offers as JSON at `offer_path`.

        The query `?stream=door` names the stream.
        """
        return [*self.session_routes(path), Route(offer_path, self.offer, methods=["POST"])]

    async def offer(self, request: Request) -> Response:
        """Answer an SDP offer sent as JSON."""
        require_type(request, "application/json", "the offer")
        try:
            offer = json.loads(await read_text(request, MAX_OFFER_BYTES, "an offer"))
        except (ValueError, RecursionError):
            raise HttpError(400, "the body is not JSON") from None
        if not isinstance(offer, dict) or offer.get("type") != "offer" or not isinstance(offer.get("sdp"), str):
            raise HttpError(400, 'the body must be {"type": "offer", "sdp": "…"}')
        session, peer = await self._open(request, offer["sdp"])
        return JSONResponse({"type": "answer", "sdp": peer.answer, "session": session})

    async def _open(self, request: Request, offer: str) -> tuple[str, PublisherPeer]:
        if self._replace and len(self._peers) >= self._max_peers:
            oldest = next(iter(self._peers.values()))
            if oldest is not None:
                await oldest.close()
        session, peer = await super()._open(request, offer)
        self._names[session] = name = self._stream_name(request.query_params.get("stream", "webrtc"))
        log.info("stream %s: a WebRTC publisher is connecting", name)
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
