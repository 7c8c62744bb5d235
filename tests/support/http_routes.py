"""Routes for tests of the HTTP server, and its limits made short: the one place that knows the server's framework."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from saccade.web import body as body_module
from saccade.web import server as server_module

LONG_S = 60
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


class AnyoneRoute(Route):
    """A route that needs no token."""

    role = "anyone"


def answering(path: str, body: bytes, kind: type[Route] = Route) -> Any:
    """Answers GET with these bytes."""

    async def answer(_: Request) -> Response:
        return Response(body)

    return kind(path, answer)


def failing(path: str, error: Exception) -> Any:
    """Fails as a handler with a bug does."""

    async def fail(_: Request) -> Response:
        raise error

    return Route(path, fail)


def hanging(path: str, begun: threading.Event) -> Any:
    """Never answers; sets `begun` when it is asked."""

    async def hang(_: Request) -> Response:
        begun.set()
        await asyncio.sleep(LONG_S)
        return Response()

    return Route(path, hang)


def dripping(path: str, begun: threading.Event) -> Any:
    """Sends server-sent events until the client is gone or the server ends."""

    async def events() -> AsyncIterator[bytes]:
        while True:
            yield b"data: {}\n\n"
            begun.set()
            await asyncio.sleep(0.05)

    async def drip(request: Request) -> Response:
        return StreamingResponse(events(), media_type="text/event-stream")

    return Route(path, drip)


def of_any_method(path: str) -> list[Any]:
    """A route that was added without a thought of roles."""

    async def added(_: Request) -> Response:
        return JSONResponse({"secret": 1})

    return [Route(path, added, methods=METHODS)]


@contextmanager
def short_limits(patch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    """Servers opened in the block wait that long for requests and bodies, and for answers to be taken."""
    with patch.context() as inside:
        inside.setattr(server_module, "_ASK_S", seconds)
        inside.setattr(server_module, "_TAKE_S", seconds)
        inside.setattr(body_module, "_BODY_S", seconds)
        yield


def connections(server: Any) -> int:
    """How many a server has open."""
    count: int = server.connections
    return count
