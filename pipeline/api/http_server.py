"""The HTTP server of Saccade: one ASGI application with all routes.

    serve(controller, host, port, token)    serves the complete API, with or without workers
    serve_local(local, …)                   serves the routes that need video frames or the engine, in a worker

An error response is {"error": "one line"}. Under /v1, it is an error object as in OpenAI's API. `/openapi.json` and
`/docs` describe the routes.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute
from starlette.types import Receive, Scope, Send

from saccade.distribution import VERSION
from saccade.engine.errors import EngineError
from saccade.pipeline.api import (
    config,
    console,
    events,
    live_mp4,
    moondream,
    openai_chat,
    ptz,
    recording,
    rules,
    static_files,
    streams,
    zones,
)
from saccade.pipeline.api import whep as video
from saccade.pipeline.api.access import Access, AccessGuard, WorkerAccess
from saccade.pipeline.api.asker import Asker, Askers, Bodies
from saccade.pipeline.api.events import Stored, media_file
from saccade.pipeline.api.forward import Forwarder, Here, Update
from saccade.pipeline.api.prometheus import Metrics
from saccade.pipeline.api.routes import Json, Routes, the
from saccade.pipeline.api.whep import WhepServer
from saccade.pipeline.config import Prompts
from saccade.pipeline.config.http import check_open
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.control.local import Local
from saccade.pipeline.control.source_policy import NotAllowedError
from saccade.pipeline.errors import AwayError, ConfigError, NotKeptError, StreamError, one_line
from saccade.pipeline.events.storage.store_reader import StoreError, media_path
from saccade.pipeline.settings import PlacedError
from saccade.sinks import SinkError
from saccade.sinks.video.broadcast import BroadcastSink
from saccade.sources import SourceError
from saccade.sources.webrtc.signaling import SILENCE_S, ice_server
from saccade.web.errors import HttpError
from saccade.web.server import AppServer, Hook

_STATUS: dict[type[Exception], int] = {
    NotAllowedError: 403,
    AwayError: 503,
    StreamError: 409,
    ConfigError: 422,
    EngineError: 422,
    SinkError: 422,
    SourceError: 422,
    PlacedError: 422,
    NotKeptError: 503,
    StoreError: 503,
}
"""HTTP status of each exception class; the most specific class wins."""

_about = Routes("about")
_of_worker = Routes("worker")


class HttpServer(AppServer):
    """An HTTP server. The constructor starts the server, and `close` stops it.

    Attributes:
        guard: the ASGI application with access control.

    Args:
        routes: routes to serve, in addition to the OpenAPI schema.
        parts: shared objects for the route handlers, by class.
        host: address to listen on.
        port: port to listen on; 0 for any free port.
        token: token that clients send as `Authorization: Bearer` or `?token=`.
        tls: TLS context with the server's certificate; None for no encryption.
        origins: web origins that can connect, in addition to this server.
        access: access control that replaces `token` and `origins`.
        on_cleanup: functions to call on the event loop after the last request.

    Raises:
        ConfigError: if the address is not available, or a public address has no token.
    """

    def __init__(
        self,
        routes: Sequence[Routes | BaseRoute],
        parts: Mapping[type, Any],
        host: str = "127.0.0.1",
        port: int = 8080,
        token: str | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        origins: Sequence[str] = (),
        access: Access | None = None,
        on_cleanup: Sequence[Hook] = (),
    ) -> None:
        if access is None:
            check_open(host, token)
        app = FastAPI(title="Saccade", version=VERSION, openapi_url=None, separate_input_output_schemas=False)
        app.state.parts = self.parts = dict(parts)
        for one in [*routes, _about]:
            app.router.routes.extend(one.all if isinstance(one, Routes) else [one])
        self.guard = _ApiGuard(app, access or Access(token, origins))
        try:
            super().__init__(self.guard, host, port, "saccade-http", tls, on_cleanup=on_cleanup)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


class _ApiGuard(AccessGuard):
    def __init__(self, app: FastAPI, access: Access) -> None:
        super().__init__(app.router.routes, access)
        self._app = app

    async def handle(self, route: BaseRoute, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self._app
        # The middleware that FastAPI puts around its router; the guard handles errors.
        await AsyncExitStackMiddleware(route.handle)(scope, receive, send)

    def known(self, error: Exception) -> HttpError | None:
        status = next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), None)
        return None if status is None else HttpError(status, one_line(str(error)))


@_about.get("/openapi.json", role="anyone", include_in_schema=False)
async def _schema(request: Request) -> Response:
    return Json(schema_of(request.app))


@_about.get("/docs", role="anyone", include_in_schema=False)
async def _docs() -> Response:
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Saccade",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="data:,",  # no icon
    )


@_about.get("/docs/{name}", role="anyone", include_in_schema=False)
async def _docs_file(name: Literal["swagger-ui-bundle.js", "swagger-ui.css"]) -> Response:
    return FileResponse(Path(str(resources.files("fastapi_offline"))) / "static" / name)


def schema_of(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI schema of an application, without the metadata of command-line flags."""
    schema = app.openapi()
    schema.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{"token": []}, {}]
    _strip(schema)
    return schema


def _strip(part: Any) -> None:
    if isinstance(part, dict):
        for key in ("more", "metavar", "flags", "env") if "description" in part and "flags" in part else ():
            part.pop(key, None)
    for inner in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _strip(inner)


def serve(
    controller: Controller,
    host: str = "127.0.0.1",
    port: int = 8080,
    token: str | None = None,
    *,
    tls: ssl.SSLContext | None = None,
    origins: Sequence[str] = (),
    access: Access | None = None,
    prompts: Prompts | None = None,
    silence_s: float = SILENCE_S,
    routes: Sequence[Routes | BaseRoute] = (),
    parts: Mapping[type, Any] | None = None,
    on_cleanup: Sequence[Hook] = (),
) -> HttpServer:
    """Serve the web console and the HTTP API of a controller, until the returned server is closed.

    Args:
        controller: controller of the streams.
        host: address to listen on.
        port: port to listen on; 0 for any free port.
        token: see `HttpServer`.
        tls: see `HttpServer`.
        origins: see `HttpServer`.
        access: see `HttpServer`.
        on_cleanup: see `HttpServer`.
        prompts: initial prompts of a video that a web page publishes; None to disable publishing.
        silence_s: seconds without packets after which a viewer is disconnected.
        routes: additional routes.
        parts: additional shared objects for the route handlers, by class.

    Raises:
        ConfigError: if the address is not available, or a public address has no token.
    """
    runner = controller.runner
    here: dict[type, Any]
    closing: list[Hook]
    if isinstance(runner, Local):
        here, closing = local_parts(runner, controller.update, controller.config.ice_servers, silence_s=silence_s)
    else:
        forwarder = Forwarder(runner)
        here, closing = {Forwarder: forwarder}, [forwarder.close]
    every: dict[type, Any] = {
        Controller: controller,
        streams.Calls: streams.Calls(controller),
        config.FileCalls: config.FileCalls(),
        console.Publishing: console.Publishing(prompts),
        Metrics: Metrics(runner),
        **here,
        **(parts or {}),
    }
    if runner.store is not None:
        every[Stored] = Stored(runner.store, runner)
    return HttpServer(
        [*static_files.PAGE, static_files.CLIP, *WANTED, *LOCAL, *routes],
        every,
        host,
        port,
        token,
        tls=tls,
        origins=origins,
        access=access,
        on_cleanup=[*closing, *on_cleanup],
    )


WANTED = (streams.routes, zones.routes, rules.routes, config.routes, console.routes, events.routes)
LOCAL = (
    zones.drawn,
    recording.routes,
    ptz.routes,
    console.seeing,
    video.routes,
    live_mp4.routes,
    moondream.routes,
    moondream.listing,
    openai_chat.routes,
)
"""The routes that need video frames, the engine or the camera."""


def local_parts(
    local: Local, update: Update, ice_servers: Sequence[str] = (), *, silence_s: float = SILENCE_S
) -> tuple[dict[type, Any], list[Hook]]:
    """Return the objects that the route handlers of this process share, by class, and the functions that close them."""
    here = Here(local, update)
    videos = local.videos or BroadcastSink()
    whep = WhepServer(
        videos,
        ice_servers=[ice_server(text) for text in ice_servers],
        silence_s=silence_s,
        answer=partial(console.answer_page, here),
        on_viewers=here.watch,
    )
    finding = Asker(local.engine)
    talking = finding if local.asks is local.engine else Asker(local.asks)
    parts = {Here: here, BroadcastSink: videos, WhepServer: whep, Askers: Askers(finding, talking), Bodies: Bodies()}
    parts |= {recording.Exports: recording.Exports(), ptz.PtzCalls: ptz.PtzCalls()}
    return parts, [whep.close]


def serve_local(
    local: Local,
    update: Update,
    host: str,
    secret: str,
    media: Path | None,
    ice_servers: Sequence[str],
) -> HttpServer:
    """Serve the routes of a worker process, until the returned server is closed. Only the controller can send requests.

    Args:
        local: runner of the worker's streams.
        update: function that changes the settings of a stream.
        host: address to listen on. The port is any free port.
        secret: secret that the controller and the worker share.
        media: folder with the clips and snapshots of events on this machine, or None.
        ice_servers: addresses of STUN and TURN servers, see `ice_server`.

    Raises:
        ConfigError: if the address is not available.
    """
    parts, closing = local_parts(local, update, ice_servers)
    parts[_Media] = _Media(media)
    return HttpServer([*LOCAL, _of_worker], parts, host, 0, access=WorkerAccess(secret), on_cleanup=closing)


class _Media:
    def __init__(self, folder: Path | None) -> None:
        self.folder = folder


@_of_worker.get("/media/{id}/{kind}", role="viewer")
async def _send_media(id: str, kind: str, media: Annotated[_Media, the(_Media)]) -> Response:
    """Return the clip or the snapshot of an event that is stored on this machine."""
    path = None if media.folder is None or kind not in ("clip", "snapshot") else media_path(media.folder, id, kind)
    try:
        if path is not None:
            return await media_file(path, kind)
    except FileNotFoundError:
        pass
    raise HttpError(404, f"event '{id[:80]}' has no {kind[:20]}, or it is not complete yet")
