"""`saccade demo`: a page that shows the model at work on a camera, a clip, a video or a running stream.

    POST /whip            a page's own video, by WHIP (RFC 9725)

and what every console has (`saccade.pipeline.server.console`). Beside its video a page may open a data channel
"results": records come on it, and what is sent on it changes its prompts.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from aiohttp import web

from saccade.engine.results import Result
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
from saccade.pipeline.server.console import Console
from saccade.pipeline.server.http_server import HttpServer
from saccade.sinks import CallbackSink, Latency, make_record
from saccade.sinks.record import to_json
from saccade.sinks.video.broadcast import BroadcastSink
from saccade.sources import Frame
from saccade.sources.http.auth import refusal
from saccade.sources.http.tokens import is_loopback
from saccade.sources.webrtc.signaling import SILENCE_S
from saccade.sources.webrtc.source import WebRtcSource
from saccade.sources.webrtc.whip_server import WebRtcServer

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
        self.videos = BroadcastSink()
        policy = SourcePolicy(allow_sources, open_by_default=is_loopback(host))
        streams = Streams(engine, [Output(self.videos, NEWEST, viewing=True)])
        self.controller = _Cameras(Local(streams, policy=policy, videos=self.videos), base, endless=True)
        self.whip = WebRtcServer(self._take, token=token, max_peers=MAX_PUBLISHERS, silence_s=silence_s)
        shown = in_model_names(engine, prompts)
        self._console = Console(self.controller, shown, token=token, silence_s=silence_s)
        self.whep = self._console.whep
        self._server = HttpServer(
            self.controller,
            host,
            port,
            token,
            tls=tls,
            routes=[*self._console.routes(), *self.whip.routes()],
            public=self._console.public,
            on_cleanup=[self.whep.close, self.whip.close],
        )
        self.url = f"{self._server.url}/"

    def close(self) -> None:
        """End everything but the engine. A second call does nothing."""
        try:
            self._server.close()
        finally:
            self.controller.local.close()

    @property
    def streams(self) -> Streams:
        """What runs."""
        return self.controller.streams

    def __enter__(self) -> Self:
        """Return the demo itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        asked = {key: getattr(self._prompts, key) for key in Prompts.model_fields}
        try:
            name = free_name(source.name, self.streams.names)
            config = ListedStream(name=name, source=f"webrtc:{name}", in_flight=in_flight, **asked)
            stream = self.controller.local.open(config, source=source)
            stream.outputs.append(Output(CallbackSink(send), NEWEST))
            source.messages.answer = partial(self._console.answer, name)
            self.controller.attach(stream).watch(watched=True)  # by the page that sends it
        except StreamError as error:
            raise refusal(web.HTTPServiceUnavailable, str(error)) from None
