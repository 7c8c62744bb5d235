"""A web server that keeps what is posted to it, and misbehaves on request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from saccade.web.server import AppServer

Answer = Callable[[Request], Awaitable[Response | None]]


class Receiver:
    """A web server in a thread that keeps what is posted; `answers` are given first, then 200; on one port for ever."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, httpx.Headers, Any]] = []
        self.answers: list[Answer | int] = []
        self.port = 0
        self._server: AppServer | None = None
        self.on()

    def on(self) -> None:
        self._server = AppServer(self._app, "127.0.0.1", self.port, "receiver")
        self.port = urlsplit(self._server.url).port or 0

    def off(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        self.off()

    def url(self, rest: str = "/hook") -> str:
        return f"http://127.0.0.1:{self.port}{rest}"

    @property
    def bodies(self) -> list[Any]:
        return [body for _, _, body in list(self.posts)]

    async def keep(self, request: Request) -> None:
        target = request.scope["raw_path"].decode() + (f"?{request.url.query}" if request.url.query else "")
        self.posts.append((target, httpx.Headers(dict(request.headers)), await request.json()))

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._take(Request(scope, receive))
        if response is None:  # the connection is closed in the middle
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            return
        await response(scope, receive, send)

    async def _take(self, request: Request) -> Response | None:
        answer = self.answers.pop(0) if self.answers else 200
        if not isinstance(answer, int):
            return await answer(request)
        if answer == 200:
            await self.keep(request)
        return Response("x" * 1000, answer)


async def busy(request: Request) -> Response:
    return Response(status_code=429, headers={"Retry-After": "1"})


async def hang(request: Request) -> Response:
    await asyncio.sleep(1)
    return Response()


async def cut(request: Request) -> None:
    return None
