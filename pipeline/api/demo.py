"""The command `saccade demo`: serves a web page that shows a camera, the demo clip, a video file or a running stream.

The page can also publish the video of a webcam with WHIP (RFC 9725). Over the data channel "results", the page receives
the detections of each frame as JSON, and can change the prompts of its stream.
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
    """A controller that loops every video file endlessly, to simulate a camera."""

    def add(self, config: StreamConfig) -> StreamStatus:
        return super().add(config.model_copy(update={"loop": True}))


class Demo:
    """Serves the demo web page and its streams until `close` is called.

    Attributes:
        controller: controller of the running streams.
        url: URL of the page.

    Args:
        engine: the inference engine, which the caller must close.
        prompts: initial prompts.
        host: address to listen on.
        port: port to listen on; 0 for any free port.
        token: token that clients need; None for no authentication.
        tls: TLS context with the server's certificate; None for no encryption.
        base: configuration with the initial streams.
        allow_sources: sources that clients can open, see `SourcePolicy`.
        silence_s: seconds without packets after which a page is disconnected.

    Raises:
        ConfigError: if the address is not available, a public address has no token, or the model does not support the
            prompts.
        UnknownClassError: if the model does not know a label.
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
        """Stop the server and the streams. The engine stays open. A second call does nothing."""
        try:
            self._server.close()
        finally:
            self._local.close()

    @property
    def streams(self) -> Streams:
        """The streams that are running."""
        return self._local.streams

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- on the event loop

    def _take(self, source: WebRtcSource) -> None:
        """Start a stream for the video that a web page publishes, and send the results to the page."""

        def send(frame: Frame, result: Result, latency: Latency) -> None:
            if source.messages.open:
                source.messages.send(to_json(make_record(frame, result, latency)).decode())

        # On a CPU, a second frame in flight raises the latency but not the frame rate.
        in_flight = 1 if self._engine.model.device == "cpu" else 2
        asked = dict(self._prompts.prompts)
        try:
            name = free_name(source.name, self.streams.names)
            config = ListedStream(name=name, source=f"webrtc:{name}", in_flight=in_flight, **asked)
            stream = self._local.open(config, source=source)
            stream.outputs.append(Output(CallbackSink(send), NEWEST))
            source.messages.answer = partial(answer_page, Here(self._local, self.controller.update), name)
            self.controller.attach(stream).watch(watched=True)  # watched by the page that publishes it
        except StreamError as error:
            raise HttpError(503, str(error)) from None


routes = Routes("publishing")
_Whip = Annotated[WebRtcServer, the(WebRtcServer)]


@routes.post("/whip", role="operator", limited="always", status_code=201, openapi_extra=SDP_BODY)
async def _publish(request: Request, whip: _Whip) -> Response:
    """Publish the video of a web page (WHIP). The request body is an SDP offer.

    The response header `Location` contains the URL of the session.
    """
    return await whip.post(request)


@routes.delete("/whip/{session}", role="operator", limited="always")
async def _leave(session: str, request: Request, whip: _Whip) -> Response:
    """End the WHIP session of a web page."""
    return await whip.end(request)


@routes.post("/offer", role="admin")
async def _offer(request: Request, whip: _Whip) -> Response:
    """Publish the video of a web page. The request is an SDP offer as JSON, the response an SDP answer as JSON."""
    return await whip.offer(request)
