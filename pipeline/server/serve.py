"""Serves the streams of a controller over HTTP, with their console and their configuration file."""

from __future__ import annotations

import ssl
from collections.abc import Sequence

from aiohttp import web

from saccade.pipeline.control.controller import Controller
from saccade.pipeline.server.api.config_api import ConfigApi
from saccade.pipeline.server.console import Console
from saccade.pipeline.server.http_server import HttpServer
from saccade.sources.http.auth import HttpAuth


def serve(
    controller: Controller,
    place: tuple[str, int],
    token: str | None = None,
    *,
    tls: ssl.SSLContext | None = None,
    access: HttpAuth | None = None,
    routes: Sequence[web.AbstractRouteDef] = (),
) -> HttpServer:
    """Serve until the server is closed; further `routes` have the same authentication.

    Raises:
        ConfigError: if the address is not available.
    """
    console = Console(controller, token=token, auth=access)
    return HttpServer(
        controller,
        *place,
        token,
        tls=tls,
        access=access,
        routes=[*console.routes(), *ConfigApi(controller).routes(), *routes],
        public=console.public,
        on_cleanup=[console.whep.close],
    )
