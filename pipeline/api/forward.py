"""What needs pixels or the engine: answered here, or passed on to the worker that has them, and its answer passed back.

A route of the kind `WorkerRoute` is such a one. It goes to the worker of the stream in its path, or else to any.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from saccade.pipeline.api.access import client_of, headers_for
from saccade.pipeline.api.routes import ApiRoute
from saccade.pipeline.config import ListedStream
from saccade.pipeline.control.local import Local
from saccade.pipeline.control.runner import Address, Runner
from saccade.pipeline.errors import StreamError
from saccade.web.errors import HttpError

if TYPE_CHECKING:
    import httpx

_CONNECT_S = 5.0
_ANSWER_S = 130.0  # for the answer to begin, and between its parts: a model may have to think
_ASKED = ("content-type", "accept", "range", "if-none-match", "if-modified-since", "if-range", "content-length")
_ANSWERED = (
    *("content-type", "content-length", "content-range", "accept-ranges", "etag", "last-modified", "cache-control"),
    *("location", "link", "allow", "retry-after"),
)

Update = Callable[[str, Mapping[str, object]], ListedStream]
"""Changes values of a stream, as `Controller.update`."""


@dataclass(slots=True, frozen=True)
class Here:
    """The part of an application that answers for the streams and engines of this process.

    Attributes:
        local: runs the streams.
        update: changes what they run by, when a viewer asks.
    """

    local: Local
    update: Update

    def watch(self, stream: str, viewers: int) -> None:
        """Give a stream that is watched more of the model."""
        with suppress(StreamError):  # it has ended
            self.local.streams.get(stream).watch(watched=viewers > 0)


class Forwarder:
    """The part of an application that passes requests on.

    Args:
        runner: knows who has the streams and engines.
    """

    def __init__(self, runner: Runner) -> None:
        import httpx  # takes 0.2 s and 10 MB, and only runs with workers need it

        self._runner = runner
        self._failures = (httpx.HTTPError, OSError)
        timeout = httpx.Timeout(_ANSWER_S, connect=_CONNECT_S)
        self._http = httpx.AsyncClient(timeout=timeout, trust_env=False, limits=httpx.Limits(max_connections=None))

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    async def pass_on(self, request: Request, stream: str | None) -> Response:
        """Have a worker answer a request: the one of a stream, or any."""
        try:
            address = self._runner.address(stream)
        except StreamError as error:
            raise HttpError(404 if stream and stream not in self._runner.names else 503, str(error)) from None
        assert address is not None  # else there would be no forwarder
        return await self.ask(request, address, request.scope["raw_path"].decode())

    async def ask(self, request: Request, address: Address, path: str) -> Response:
        """Have somebody answer a request at another path."""
        headers = {key: request.headers[key] for key in _ASKED if key in request.headers}
        headers |= {**address.headers, **headers_for(client_of(request)), "accept-encoding": "identity"}
        query: Any = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
        body = request.stream() if "content-length" in headers or "transfer-encoding" in request.headers else None
        try:
            asked = self._http.build_request(
                request.method, f"{address.url}{path}", params=query, headers=headers, content=body
            )
            answer = await self._http.send(asked, stream=True)
        except self._failures:
            raise HttpError(503, "the worker does not answer; try again") from None
        kept = {key: value for key, value in answer.headers.items() if key in _ANSWERED or key.startswith("x-")}
        return StreamingResponse(self._parts(answer), answer.status_code, kept)

    async def _parts(self, answer: httpx.Response) -> AsyncGenerator[bytes]:
        """What a worker sends; where it ends in the middle, so does the answer."""
        try:
            async for part in answer.aiter_raw():
                yield part
        except self._failures:
            raise HttpError(503) from None  # nobody reads it: the connection is closed
        finally:
            await answer.aclose()


class WorkerRoute(ApiRoute):
    """A route that is answered where the pixels or the engine are."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request here, or have a worker do it."""
        forwarder: Forwarder | None = scope["app"].state.parts.get(Forwarder)
        if forwarder is None:
            await self.handle_here(scope, receive, send)
            return
        given = scope["path_params"]
        response = await forwarder.pass_on(Request(scope, receive), given.get("name") or given.get("stream"))
        await response(scope, receive, send)

    async def handle_here(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request here."""
        await super().handle(scope, receive, send)
