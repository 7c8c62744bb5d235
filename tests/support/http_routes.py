"""Routes for tests of the HTTP server, and its limits made short: the one place that knows the server's framework."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web

from saccade.sources.http import app_server, auth

LONG_S = 60


def answering(path: str, body: bytes) -> Any:
    """Answers GET with these bytes."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body)

    return web.get(path, answer)


def failing(path: str, error: Exception) -> Any:
    """Fails as a handler with a bug does."""

    async def fail(_: web.Request) -> web.Response:
        raise error

    return web.get(path, fail)


def hanging(path: str, begun: threading.Event) -> Any:
    """Never answers; sets `begun` when it is asked."""

    async def hang(_: web.Request) -> web.Response:
        begun.set()
        await asyncio.sleep(LONG_S)
        return web.Response()

    return web.get(path, hang)


def dripping(path: str, begun: threading.Event) -> Any:
    """Sends server-sent events until the client is gone or the server ends."""

    async def drip(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(b"data: {}\n\n")
            begun.set()
            await asyncio.sleep(0.05)

    return web.get(path, drip)


def of_any_method(path: str) -> list[Any]:
    """A route that was added without a thought of roles."""

    async def added(_: web.Request) -> web.Response:
        return web.json_response({"secret": 1})

    return [web.route("*", path, added)]


@contextmanager
def short_limits(patch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    """Servers opened in the block wait that long for requests and bodies, and for answers to be taken."""
    with patch.context() as inside:
        inside.setattr(app_server, "_ASK_S", seconds)
        inside.setattr(app_server, "_TAKE_S", seconds)
        inside.setattr(auth, "_BODY_S", seconds)
        yield


def connections(server: Any) -> int:
    """How many a server has open."""
    handlers = server._runner.server
    return len(handlers.connections) if handlers is not None else 0
