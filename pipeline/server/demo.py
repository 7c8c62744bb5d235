"""`saccade demo`: a page that shows the model at work on a camera, a clip, a video or a running stream.

    GET  /                the page, and its files beside it
    GET  /model           the model, the names that it knows, and the prompts at first
    GET  /names?of=bike   what the model calls that: {"names": ["bicycle"], "colors": {…}}, or {"error": "one line"}
    POST /whip            a page's own video; /whep/NAME: any stream's. WHIP (RFC 9725) and WHEP

Beside the video a page may open a data channel "results": records come on it, and what is sent on it, such as
{"detect": ["cat"]}, changes its prompts. The answer is {"prompts": {…}, "colors": {…}} or {"error": "…"}.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web
from pydantic import ValidationError

from saccade.engine.errors import EngineError
from saccade.engine.results import Result
from saccade.pipeline.core.assets import DEMO_CLIP, PAGES
from saccade.pipeline.core.bounded_queue import NEWEST
from saccade.pipeline.core.build import add_stream, change_prompts, prompts_of, tasks_for
from saccade.pipeline.core.config import Prompts, StreamConfig
from saccade.pipeline.core.config_file import explain
from saccade.pipeline.core.errors import ConfigError, StreamError
from saccade.pipeline.core.output import Output
from saccade.pipeline.core.stream_manager import Streams
from saccade.pipeline.core.stream_run import Run
from saccade.pipeline.server.http_server import HttpServer
from saccade.pipeline.server.static_files import file_route
from saccade.pipeline.server.streams_api import parse_json
from saccade.pipeline.server.whep_server import WhepServer
from saccade.sinks import CallbackSink, Latency, color_of, make_record
from saccade.sinks.record import to_json
from saccade.sinks.video.broadcast import BroadcastSink
from saccade.sources import Frame
from saccade.sources.http.auth import refusal
from saccade.sources.webrtc.signaling import SILENCE_S
from saccade.sources.webrtc.source import WebRtcSource
from saccade.sources.webrtc.whip_server import WebRtcServer

if TYPE_CHECKING:
    from saccade.engine import Engine

DEFAULT_PORT = 8080
MAX_PUBLISHERS = 4
_FILES = ("demo.css", "demo.js", "link.js", "match.js", "paint.js", "panel.js", "stage.js")
_LONGEST_NAME = 200


class Demo:
    """The page and its streams; serves from construction on, until `close`.

    Attributes:
        streams: those that run: pages', and whatever else is added.
        url: where the page is.

    Args:
        engine: finds things in frames; it stays the caller's.
        prompts: what to find until a page asks for something else.
        host: address to listen on.
        port: the port; 0 for any that is free.
        token: what a page must send; None for no authentication.
        tls: with the server's certificate; None for no encryption.
        allow_sources: what POST /streams may open, as in `HttpServer`.
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
        allow_sources: Sequence[str] = (),
        silence_s: float = SILENCE_S,
    ) -> None:
        self._engine = engine
        self._tasks = tasks_for(engine, prompts)
        self.videos = BroadcastSink()
        self.streams = Streams(engine, [Output(self.videos, NEWEST)])
        self.whip = WebRtcServer(self._take, token=token, max_peers=MAX_PUBLISHERS, silence_s=silence_s)
        self.whep = WhepServer(
            self.videos, token=token, answer=self._answer, silence_s=silence_s, on_viewers=self._watch
        )

        files = {f"/{name}": PAGES / name for name in _FILES} | {"/": PAGES / "index.html"}
        self._server = HttpServer(
            self.streams,
            host,
            port,
            token,
            tls=tls,
            allow_sources=allow_sources,
            routes=[
                *(file_route(place, path) for place, path in files.items()),
                web.get("/clip.mp4", _clip),
                web.get("/model", self._model),
                web.get("/names", self._names),
                *self.whip.routes(),
                *self.whep.routes(),
            ],
            public=[*files, "/clip.mp4"],  # nothing secret; the page requests the rest with its token
            on_cleanup=[self.whep.close, self.whip.close],
        )
        self.url = f"{self._server.url}/"

    def close(self) -> None:
        """End everything but the engine. A second call does nothing."""
        try:
            self._server.close()
        finally:
            self.streams.close()

    def add(self, config: StreamConfig) -> Run:
        """Start a stream for pages to watch; a file is played over and over, at its own pace.

        Raises:
            SourceError, EngineError, ConfigError: if something it names cannot be used.
            StreamError: if its name is taken, or too many run.
        """
        return add_stream(self.streams, config, repeat=True)

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
        outputs = [Output(CallbackSink(send), NEWEST)]
        try:
            with self.streams.reserve(source.name, or_similar=True) as name:
                source.messages.answer = partial(self._answer, name)
                run = self.streams.add(name, source, self._tasks, outputs=outputs, in_flight=in_flight, reserved=True)
                run.watch(watched=True)  # by the page that sends it
        except StreamError as error:
            raise refusal(web.HTTPServiceUnavailable, str(error)) from None

    def _watch(self, stream: str, viewers: int) -> None:
        """Give a stream that is watched more of the model."""
        with suppress(StreamError):  # it has ended
            self.streams.get(stream).watch(watched=viewers > 0)

    def _answer(self, stream: str, text: str) -> str:
        """Change the prompts of a stream as a page asks, and return what they are now."""
        try:
            wanted = Prompts.model_validate(parse_json(text))
            run = self.streams.get(stream)
            if wanted.model_fields_set:
                change_prompts(run, self._engine, wanted)
            return json.dumps(_described(prompts_of(run.tasks)))
        except ValidationError as error:
            reason = explain(error.errors()[0], Prompts)
        except (ValueError, RecursionError):
            reason = "the message is not JSON"
        except (ConfigError, EngineError, StreamError) as error:
            reason = str(error)
        return json.dumps({"error": reason})

    async def _model(self, request: web.Request) -> web.Response:
        model = self._engine.model
        described = {"model": model.name, "device": model.device, "classes": model.classes, "skills": model.skills}
        return web.json_response({**described, **_described(prompts_of(self._tasks))})

    async def _names(self, request: web.Request) -> web.Response:
        try:
            names = self._engine.resolve([request.query.get("of", "")[:_LONGEST_NAME]])
        except EngineError as error:
            return web.json_response({"error": str(error)})  # an answer like any other
        return web.json_response({"names": names, "colors": _colors(names)})


def _described(prompts: Prompts) -> dict[str, Any]:
    return {"prompts": prompts.model_dump(), "colors": _colors([*prompts.detect, *prompts.point])}


def _colors(labels: list[str]) -> dict[str, str]:
    """The colours of labels, as in frames that are drawn here."""
    return {label: "#{:02x}{:02x}{:02x}".format(*color_of(label)) for label in labels}


async def _clip(request: web.Request) -> web.FileResponse:
    return web.FileResponse(DEMO_CLIP)
