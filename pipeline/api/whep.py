"""WHEP (WebRTC-HTTP egress protocol): sends the live video of a stream to browsers and players.

`?overlay=off` requests video without boxes and labels. `?width=480` requests video with a width of 480 pixels. A viewer
can open the data channel "results" to receive the result of each frame as JSON, with the frame's RTP timestamp.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated

from aiortc import RTCIceServer
from starlette.requests import Request
from starlette.responses import Response

from saccade.pipeline.api.access import client_of
from saccade.pipeline.api.forward import WorkerRoute
from saccade.pipeline.api.routes import SDP_BODY, Routes, the
from saccade.pipeline.api.whep_peer import ViewerPeer
from saccade.sinks.video.broadcast import BroadcastSink, NoSuchStreamError, View
from saccade.sources.webrtc.signaling import SILENCE_S, Signaling
from saccade.web.errors import HttpError

log = logging.getLogger(__name__)

MAX_VIEWERS = 64
_WIDTHS = (64, 1920)


class WhepServer(Signaling[ViewerPeer]):
    """The WHEP endpoint, which sends live video to viewers. `close` ends all sessions.

    Args:
        videos: the videos of all streams, which the caller must close.
        ice_servers, media_hosts, silence_s: see `Signaling`.
        max_viewers: maximum total number of viewers of all streams.
        answer: function that returns the reply to a message on a viewer's data channel. Its arguments are the stream's
            name and the message. It must not block.
        on_viewers: function that receives a stream's name and number of viewers when this number changes.
    """

    activity = "are watching"

    def __init__(
        self,
        videos: BroadcastSink,
        *,
        ice_servers: Sequence[RTCIceServer] = (),
        media_hosts: Sequence[str] | None = None,
        silence_s: float = SILENCE_S,
        max_viewers: int = MAX_VIEWERS,
        answer: Callable[[str, str], str | None] = lambda stream, text: None,
        on_viewers: Callable[[str, int], None] = lambda stream, viewers: None,
    ) -> None:
        super().__init__(
            ice_servers=ice_servers,
            media_hosts=media_hosts,
            silence_s=silence_s,
            max_peers=max_viewers,
        )
        self.videos = videos
        self._answer = answer
        self._on_viewers = on_viewers
        self._watched: dict[str, str] = {}  # stream of each session

    @property
    def n_open(self) -> int:
        """The number of viewers. Connecting viewers and viewers of fragmented MP4 are included."""
        return len(self._peers) + len(self._watched.keys() - self._peers.keys())

    def prompts_of(self, stream: str) -> str | None:
        """Return the current prompts of a stream as JSON. Return None if they are unknown."""
        return self._answer(stream, "{}")

    @contextmanager
    def count_viewer(self, stream: str) -> Iterator[None]:
        """Count a viewer without a WebRTC session (such as a viewer of fragmented MP4) until the `with` block ends.

        Raises:
            HttpError: with status 503 if there are too many viewers.
        """
        self._require_room()
        viewer = secrets.token_urlsafe(16)
        self._watched[viewer] = stream
        self._note_viewers(stream)
        try:
            yield
        finally:
            self._forget(viewer)

    def _new_peer(self, on_closed: Callable[[], object]) -> ViewerPeer:
        return ViewerPeer(self._settings, on_closed)

    async def _open(self, request: Request, offer: str) -> tuple[str, ViewerPeer]:
        stream = request.path_params["stream"]
        if stream not in self.videos.streams:
            raise HttpError(404, "this stream does not exist")
        width = width_of(request)
        session, peer = await super()._open(request, offer)
        # A viewer must not change prompts, so its messages are answered as if they changed nothing.
        changes = client_of(request).may("operator")
        peer.messages.answer = lambda text: self._answer(stream, text if changes else "{}")
        view = View(request.query_params.get("overlay") != "off", peer.codec, width)
        try:
            peer.watch(partial(self.videos.join, stream, view))
        except NoSuchStreamError:  # it has ended in the meantime
            await peer.close()
            raise HttpError(404, "the stream has ended") from None
        log.info("%s: a viewer is connecting (video codec %s)", stream, peer.codec)
        if session in self._peers:  # otherwise it has already disconnected
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


def width_of(request: Request) -> int | None:
    """Return the video width that a request asks for, in pixels. Return None if the request has no `width` parameter.

    Raises:
        HttpError: with status 400 if the width is invalid.
    """
    text = request.query_params.get("width")
    if text is None:
        return None
    if not (text.isdecimal() and len(text) < 6 and _WIDTHS[0] <= int(text) <= _WIDTHS[1]):
        raise HttpError(400, f"width should be from {_WIDTHS[0]} to {_WIDTHS[1]} pixels")
    return int(text) // 2 * 2


routes = Routes("video", WorkerRoute)
Whep = Annotated[WhepServer, the(WhepServer)]


@routes.post("/whep/{stream}", role="viewer", status_code=201, response_class=Response, openapi_extra=SDP_BODY)
async def watch(stream: str, request: Request, whep: Whep) -> Response:
    """Watch a stream's live video (WHEP). The request body is an SDP offer.

    The response header `Location` contains the URL of the session.
    """
    return await whep.post(request)


@routes.delete("/whep/{stream}/{session}", role="viewer", response_class=Response)
async def leave(stream: str, session: str, request: Request, whep: Whep) -> Response:
    """End the WHEP session of a viewer."""
    return await whep.end(request)
