"""`saccade demo`: a page that shows the model at work on a camera, a clip, a video or a running stream.

It has what every console has, and takes a page's own video by WHIP (RFC 9725). Beside its video a page may open a data
channel "results": records come on it, and what is sent on it changes its prompts.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Self

from starlette.requests import Request
from starlette.responses import Response

from saccade.engine.results import Result
from saccade.pipeline.api.console import answer_page
from saccade.pipeline.api.forward import Here
from saccade.pipeline.api.http_server import serve
from saccade.pipeline.api.routes import SDP_BODY, Routes, the
from saccade.pipeline.api.whep import WhepServer
from saccade.pipeline.config import ListedStream, Prompts, RunConfig, StreamConfig
from saccade.pipeline.config.queue_policy import NEWEST
from saccade.pipeline.config.stream_names import free_name
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.control.local import Local
from saccade.pipeline.control.source_policy import SourcePolicy
from saccade.pipeline.errors import StreamError
from saccade.pipeline.runtime.output import Output
from saccade.pipeline.runtime.streams import Streams, StreamStatus
from saccade.pipeline.runtime.tasks import in_model_names, tasks_for
from saccade.sinks import CallbackSink, Latency, make_record
from saccade.sinks.record import to_json
from saccade.sinks.video.broadcast import BroadcastSink
from saccade.sources import Frame
from saccade.sources.webrtc.signaling import SILENCE_S
from saccade.sources.webrtc.source import WebRtcSource
from saccade.sources.webrtc.whip_server import WebRtcServer
from saccade.web.errors import HttpError
from saccade.web.tokens import is_loopback

if TYPE_CHECKING:
    from saccade.engine import Engine

DEFAULT_PORT = 8080
MAX_PUBLISHERS = 4


class _Cameras(Controller):
    """Plays each file that is added over and over, as if it were a camera."""

    def add(self, config: StreamConfig) -> StreamStatus:
        return super().add(config.model_copy(update={"loop": True}))


class Demo:
    """The page and its streams; serves from construction on, until `close`.

    Attributes:
        controller: of the streams that run: pages', and those that are added.
        url: where the page is.

    Args:
        engine: finds things in frames; it stays the caller's.
        prompts: what to find until a page asks for something else.
        host: address to listen on.
        port: the port; 0 for any that is free.
        token: what a page must send; None for no authentication.
        tls: with the server's certificate; None for no encryption.
        base: has the streams to start with, once `controller.start` is called.
        allow_sources: what POST /streams may open, as in `SourcePolicy`.
        silence_s: a page that is silent for so long is disconnected.

    Raises:
        ConfigError: if the address is not available, other machines could reach it and there is no token, or the model
            cannot do what is asked for.
        UnknownClassError: if the model does not know a name.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Prompts,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        token: str | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        base: RunConfig | None = None,
        allow_sources: Sequence[str] = (),
        silence_s: float = SILENCE_S,
    ) -> None:
        self._engine = engine
        tasks_for(engine, prompts)
        self._prompts = prompts
        policy = SourcePolicy(allow_sources, open_by_default=is_loopback(host))
        self.videos = BroadcastSink()
        streams = Streams(engine, [Output(self.videos, NEWEST, viewing=True)])
        self._local = Local(streams, policy=policy, videos=self.videos)
        self.controller = _Cameras(self._local, base, endless=True)
        self.whip = WebRtcServer(self._take, max_peers=MAX_PUBLISHERS, silence_s=silence_s)
        self._server = serve(
            self.controller,
            host,
            port,
            token,
            tls=tls,
            prompts=in_model_names(engine, prompts),
            silence_s=silence_s,
            routes=[routes],
            parts={WebRtcServer: self.whip},
            on_cleanup=[self.whip.close],
        )
        self.whep: WhepServer = self._server.parts[WhepServer]
        self.url = f"{self._server.url}/"

    def close(self) -> None:
        """End everything but the engine. A second call does nothing."""
        try:
            self._server.close()
        finally:
            self._local.close()

    @property
    def streams(self) -> Streams:
        """What runs."""
        return self._local.streams

    def __enter__(self) -> Self:
        """Return the demo itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    # ---- on the event loop

    def _take(self, source: WebRtcSource) -> None:
        """Start a stream of a page's video; it ends when the page disconnects."""

        def send(frame: Frame, result: Result, latency: Latency) -> None:
            if source.messages.open:
                source.messages.send(to_json(make_record(frame, result, latency)).decode())

        # On a CPU a second frame in flight raises the latency of each, and not their rate.
        in_flight = 1 if self._engine.model.device == "cpu" else 2
        asked = dict(self._prompts.prompts)
        try:
            name = free_name(source.name, self.streams.names)
            config = ListedStream(name=name, source=f"webrtc:{name}", in_flight=in_flight, **asked)
            stream = self._local.open(config, source=source)
            stream.outputs.append(Output(CallbackSink(send), NEWEST))
            source.messages.answer = partial(answer_page, Here(self._local, self.controller.update), name)
            self.controller.attach(stream).watch(watched=True)  # by the page that sends it
        except StreamError as error:
            raise HttpError(503, str(error)) from None


routes = Routes("publishing")
_Whip = Annotated[WebRtcServer, the(WebRtcServer)]


@routes.post("/whip", role="operator", limited="always", status_code=201, openapi_extra=SDP_BODY)
async def _publish(request: Request, whip: _Whip) -> Response:
    """Send the video of a page: takes an SDP offer; the answer's `Location` is the session."""
    return await whip.post(request)


@routes.delete("/whip/{session}", role="operator", limited="always")
async def _leave(session: str, request: Request, whip: _Whip) -> Response:
    """End a session."""
    return await whip.end(request)


@routes.post("/offer", role="admin")
async def _offer(request: Request, whip: _Whip) -> Response:
    """Send video: takes and answers an offer in JSON."""
    return await whip.offer(request)
