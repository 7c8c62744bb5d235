"""The HTTP server of a session: the streams (`server.streams_api`), and whatever routes other parts add.

Every error is {"error": "one line"}, and under /v1 an object as in OpenAI's API. Runs in a thread of its own, with its
own event loop. Knows authentication, not what is served.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from saccade.pipeline.control.controller import Controller
from saccade.pipeline.errors import ConfigError, one_line
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.server.access import Access
from saccade.pipeline.server.analytics_api import AnalyticsApi
from saccade.pipeline.server.api.asker import Asker
from saccade.pipeline.server.api.events import EventsApi
from saccade.pipeline.server.api.events_search import SearchEvents
from saccade.pipeline.server.api.moondream import MoondreamApi
from saccade.pipeline.server.api.openai_chat import OpenAiApi
from saccade.pipeline.server.rules_api import RulesApi
from saccade.pipeline.server.streams_api import MAX_BODY_BYTES, Api
from saccade.sources.http.app_server import AppServer
from saccade.sources.http.auth import HttpAuth, refusal
from saccade.sources.http.tls import optional_context
from saccade.sources.http.tokens import is_loopback, read_token

log = logging.getLogger(__name__)
_CORS = web.RequestKey("cors", dict)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Hook = Callable[[web.Application], Awaitable[None]]


class HttpServer(AppServer):
    """Serves from construction on, until `close`.

    Args:
        controller: of the streams that it lists and changes; None for a server of `routes` alone.
        host: address to listen on.
        port: the port; 0 for any that is free.
        token: what clients must send, as `Authorization: Bearer` or `?token=`.
        tls: with the server's certificate; None for no encryption.
        origins: pages that may connect, besides those of this server itself.
        routes: further routes, with the same authentication.
        public: paths of further routes that need no token, such as that of a page that asks for it.
        on_startup: called on the event loop before the first request.
        on_cleanup: called on the event loop after the last request.
        events: whose events are served; None for those of the controller's store, if it has one.
        search: searches them; None for the controller's streams.
        access: who may do what, instead of `token` and `origins`.

    Raises:
        ConfigError: if the address is not available, or other machines could reach it and there is no token.
    """

    def __init__(
        self,
        controller: Controller | None,
        host: str = "127.0.0.1",
        port: int = 8080,
        token: str | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        origins: Sequence[str] = (),
        routes: Sequence[web.AbstractRouteDef] = (),
        public: Sequence[str] = (),
        on_startup: Sequence[Hook] = (),
        on_cleanup: Sequence[Hook] = (),
        events: EventStore | None = None,
        search: SearchEvents | None = None,
        access: HttpAuth | None = None,
    ) -> None:
        if access is None:
            check_open(host, token)
        self._guarded = token is not None or access is not None
        self._access = access
        self._auth = access or HttpAuth(token, origins)
        self._public = frozenset([*public, "/livez", "/readyz"])
        application = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        if controller is not None:
            runner = controller.runner
            events, search = events or runner.store, search or runner.search
            local = controller.local
            asker = Asker(local.engine)
            talker = asker if local.asks is local.engine else Asker(local.asks)
            application.add_routes([*MoondreamApi(asker, talker).routes(), *OpenAiApi(asker, talker).routes()])
            application.add_routes(Api(controller, self._auth).routes())
            application.add_routes(AnalyticsApi(controller, self._auth).routes())
            application.add_routes(RulesApi(controller, self._auth).routes())
        if events is not None:
            application.add_routes(EventsApi(events, self._auth, search).routes())
        application.add_routes(routes)
        application.on_response_prepare.append(_add_cors)
        application.on_startup.extend(on_startup)
        application.on_cleanup.extend(on_cleanup)
        try:
            super().__init__(application, host, port, "saccade-http", tls)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Authorize a request, and report errors in one line of JSON."""
        try:
            if not self._guarded and not _is_address(request.host):
                # A page can have its own name resolve to this machine (DNS rebinding), and read what needs no token.
                raise refusal(web.HTTPForbidden, "without a token this is served under an address or localhost only")
            public = request.method == "OPTIONS" or request.path in self._public
            request[_CORS] = self._auth.check_origin(request) if public else self._auth.authorize(request)
            response = await handler(request)
        except web.HTTPException as error:
            await self._audit(request, error.status)
            if error.status < 400:
                raise
            kept = {key: value for key, value in error.headers.items() if not key.lower().startswith("content-")}
            body = {"error": _described(request, one_line(error.text or error.reason), error.status)}
            return web.json_response(body, status=error.status, headers=kept)
        except Exception as error:  # a bug
            resource = request.match_info.route.resource  # and not the path, which holds the secret of a session
            log.exception("%s %s failed", request.method, resource.canonical if resource else "of nothing")
            body = {"error": _described(request, f"internal error: {type(error).__name__}", 500)}
            return web.json_response(body, status=500)
        await self._audit(request, response.status)
        return response

    async def _audit(self, request: web.Request, status: int) -> None:
        if not isinstance(self._access, Access):
            return
        try:
            await asyncio.to_thread(self._access.note, request, status)
        except OSError as error:
            log.warning("the audit cannot be written: %s", error.strerror or error)


def check_open(host: str, token: str | None) -> None:
    """Refuse to serve the network without authentication.

    Raises:
        ConfigError: if other machines can reach `host`, and there is no token.
    """
    if token is None and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from the network, so a token is needed: --http-token-file or SACCADE_TOKEN"
        )


def tls_of(cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """The TLS context of a certificate's files, or None without one.

    Raises:
        ConfigError: if they cannot be used.
    """
    try:
        return optional_context(cert, key)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def token_of(token: str | None, token_file: str | None) -> str | None:
    """The token, or else the one in the file, if there is one.

    Raises:
        ConfigError: if the file holds no token.
    """
    try:
        return token or (read_token(token_file) if token_file else None)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _described(request: web.Request, line: str, status: int) -> str | dict[str, Any]:
    """An error as the API that was called describes it: one line, or under /v1 an object as in OpenAI's."""
    if not request.path.startswith("/v1/"):
        return line
    kind = {401: "authentication_error", 403: "permission_error"}.get(status)
    return {
        "message": line,
        "type": kind or ("server_error" if status >= 500 else "invalid_request_error"),
        "param": None,
        "code": None,
    }


async def _add_cors(request: web.Request, response: web.StreamResponse) -> None:
    """Hook for `on_response_prepare`: also of events and clips, which begin before their handler has ended."""
    response.headers.update(request.get(_CORS, {}))


def _is_address(place: str) -> bool:
    """Whether a `Host` header holds an address or localhost, and no other name."""
    with suppress(ValueError):
        host = urlsplit(f"//{place}").hostname or ""
        if host == "localhost":
            return True
        ipaddress.ip_address(host)
        return True
    return False
