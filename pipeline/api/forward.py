"""Forwards HTTP requests that need video frames or the inference engine to worker processes.

Only requests to routes of class `WorkerRoute` are forwarded. A request that names a stream is sent to the worker that
runs the stream. Other requests are sent to any worker.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from saccade.pipeline.api.access import client_of, headers_for
from saccade.pipeline.api.routes import ApiRoute, the
from saccade.pipeline.config import ListedStream
from saccade.pipeline.control.local import Local
from saccade.pipeline.control.runner import Address, Runner
from saccade.pipeline.errors import StreamError
from saccade.pipeline.runtime.run import Run
from saccade.web.errors import HttpError

if TYPE_CHECKING:
    import httpx

_CONNECT_S = 5.0
_ANSWER_S = 130.0  # time limit for the start of a response and between its parts; a model may take long
_ASKED = ("content-type", "accept", "range", "if-none-match", "if-modified-since", "if-range", "content-length")
_ANSWERED = (
    *("content-type", "content-length", "content-range", "accept-ranges", "etag", "last-modified", "cache-control"),
    *("location", "link", "allow", "retry-after"),
)

Update = Callable[[str, Mapping[str, object]], ListedStream]
"""Changes settings of a stream; see `Controller.update`."""


@dataclass(slots=True, frozen=True)
class Here:
    """The streams and engines that run in this process.

    Attributes:
        local: runner of the streams and engines.
        update: function that changes the settings of a stream.
    """

    local: Local
    update: Update

    def watch(self, stream: str, viewers: int) -> None:
        """Raise the scheduling weight of a stream while the stream has viewers."""
        with suppress(StreamError):  # the stream has ended
            self.local.streams.get(stream).watch(watched=viewers > 0)

    def running(self, stream: str) -> Run:
        """Return a stream of this process. Raises HttpError with status 404 if there is no such running stream."""
        try:
            return self.local.streams.get(stream)
        except StreamError as error:
            raise HttpError(404, str(error)) from None


InThisProcess = Annotated[Here, the(Here)]


class Forwarder:
    """Forwards HTTP requests to worker processes.

    Args:
        runner: runner that knows the addresses of the workers.
    """

    def __init__(self, runner: Runner) -> None:
        import httpx  # takes 0.2 s and 10 MB; needed only with workers

        self._runner = runner
        self._failures = (httpx.HTTPError, OSError)
        timeout = httpx.Timeout(_ANSWER_S, connect=_CONNECT_S)
        self._http = httpx.AsyncClient(timeout=timeout, trust_env=False, limits=httpx.Limits(max_connections=None))

    async def close(self) -> None:
        """Close all connections to workers."""
        await self._http.aclose()

    async def pass_on(self, request: Request, stream: str | None) -> Response:
        """Forward a request to the worker that runs a stream, or to any worker if `stream` is None.

        Raises:
            HttpError: with status 404 for an unknown stream, or 503 if no worker responds.
        """
        try:
            address = self._runner.address(stream)
        except StreamError as error:
            raise HttpError(404 if stream and stream not in self._runner.names else 503, str(error)) from None
        assert address is not None  # otherwise there would be no forwarder
        return await self.ask(request, address, request.scope["raw_path"].decode())

    async def ask(self, request: Request, address: Address, path: str) -> Response:
        """Forward a request to the worker at `address`, with the URL path `path`.

        If the worker does not respond, the client receives HTTP status 503.
        """
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
            raise HttpError(503, "the worker does not respond; try again") from None
        kept = {key: value for key, value in answer.headers.items() if key in _ANSWERED or key.startswith("x-")}
        return StreamingResponse(self._parts(answer), answer.status_code, kept)

    async def _parts(self, answer: httpx.Response) -> AsyncGenerator[bytes]:
        """Yield the body of a worker's response in chunks.

        If the connection to the worker fails, the connection to the client is closed.
        """
        try:
            async for part in answer.aiter_raw():
                yield part
        except self._failures:
            raise HttpError(503) from None  # never sent, because the connection is closed
        finally:
            await answer.aclose()


class WorkerRoute(ApiRoute):
    """A route that needs video frames or the inference engine. With workers, its requests are forwarded to a worker."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request in this process, or forward it to a worker."""
        forwarder: Forwarder | None = scope["app"].state.parts.get(Forwarder)
        if forwarder is None:
            await self.handle_here(scope, receive, send)
            return
        given = scope["path_params"]
        response = await forwarder.pass_on(Request(scope, receive), given.get("name") or given.get("stream"))
        await response(scope, receive, send)

    async def handle_here(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request in this process, without forwarding it to a worker."""
        await super().handle(scope, receive, send)
