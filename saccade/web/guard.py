"""Checks each HTTP request before its handler runs: origin, token and route.

The guard also sends one-line error messages, adds CORS headers, and answers preflight and HEAD requests. Client input
is never logged, because it can contain a token.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence
from typing import Any
from urllib.parse import unquote

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from saccade.web.auth import HttpAuth
from saccade.web.errors import HttpError

log = logging.getLogger(__name__)

HELD_SLASH = "\ufdd0"  # never a character of a text: a slash that was percent-encoded, and divides no path
_HEADER_BYTES = 32 * 1024
_ALL_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


class Guard:
    """An ASGI application that checks the origin and the token of each request before a handler runs.

    Attributes:
        routes: served routes.

    Args:
        routes: routes to serve.
        auth: authenticates requests.
    """

    def __init__(self, routes: Sequence[BaseRoute], auth: HttpAuth) -> None:
        self.routes = routes
        self.auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and answer one HTTP request (ASGI interface)."""
        asked = scope["method"]
        scope["path"] = "/".join(map(_decoded, scope["raw_path"].decode("ascii").split("/")))
        if asked == "HEAD":  # the server leaves out the body
            scope = {**scope, "method": "GET"}
        request = Request(scope, receive)
        route = self._find(scope)
        cors: dict[str, str] = {}
        begun = False

        async def answer(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message).update(cors)
                await self.note(request, route, message["status"])
            await send(message)

        async def refuse(status: int, line: str, headers: Any = None) -> None:
            await self.error(request, status, " ".join(line.split()), headers)(scope, receive, answer)

        try:
            headers = sum(len(name) + len(value) for name, value in scope["headers"])
            if headers + len(scope["raw_path"]) + len(scope["query_string"]) > _HEADER_BYTES:
                raise HttpError(431, f"the request headers exceed {_HEADER_BYTES} bytes")
            cors = self.auth.check_origin(request)
            if asked == "OPTIONS":
                await self._preflight(scope)(scope, receive, answer)
                return
            self.admit(request, route)
            if route is None:
                allowed = self._methods(scope)
                raise HttpError(405, headers={"Allow": ", ".join(allowed)}) if allowed else HttpError(404)
            await self.handle(route, scope, receive, answer)
        except HTTPException as error:
            if not begun:
                await refuse(error.status_code, error.detail, error.headers)
        except Exception as error:
            known = self.known(error)
            if known is None:  # a bug; not the path, which may hold the secret of a session
                log.exception("%s %s failed", asked, getattr(route, "path", "of nothing"))
                known = HttpError(500, f"internal error: {type(error).__name__}")
            if not begun:
                await refuse(known.status_code, known.detail)

    # ---- what an application may decide otherwise

    async def handle(self, route: BaseRoute, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the handler of a route, after the request was checked."""
        await route.handle(scope, receive, send)

    def admit(self, request: Request, route: BaseRoute | None) -> None:
        """Check the client's token. Raises HttpError if the token is missing or wrong."""
        self.auth.authorize(request)  # before status 404 is sent, so that nobody can probe for routes without a token

    def known(self, error: Exception) -> HttpError | None:
        """Convert an exception of a request handler to an HTTP error. Return None for unexpected exceptions."""
        return None

    def error(self, request: Request, status: int, line: str, headers: Any) -> Response:
        """Return the HTTP response with a one-line error message."""
        return PlainTextResponse(f"{line}\n", status, headers)

    async def note(self, request: Request, route: BaseRoute | None, status: int) -> None:
        """Called before each response is sent. Subclasses can override this method, for example to log requests."""

    # ---- routes

    def _find(self, scope: MutableMapping[str, Any]) -> BaseRoute | None:
        """Return the route that matches the path of an HTTP request, or None. Adds path parameters to `scope`."""
        for route in self.routes:
            match, child = route.matches(scope)
            if match is Match.FULL:
                scope.update(child)
                return route
        return None

    def _methods(self, scope: Scope) -> list[str]:
        return [method for method in _ALL_METHODS if self._find({**scope, "method": method}) is not None]

    def _preflight(self, scope: Scope) -> Response:
        methods = self._methods(scope)
        if not methods:
            raise HttpError(404)
        offers = scope["path"].startswith(("/whip", "/whep"))
        allowed = {
            "Access-Control-Allow-Methods": ", ".join([*methods, "OPTIONS"]),
            "Access-Control-Allow-Headers": "Authorization, Content-Type",
            "Access-Control-Max-Age": "600",
            "Accept-Post": "application/sdp" if offers else "application/json",
        }
        return Response(status_code=204, headers=allowed)


def _decoded(part: str) -> str:
    return unquote(part).replace("/", HELD_SLASH)
