"""A streaming HTTP response from an asynchronous generator."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any, Self

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send


class GeneratorResponse(StreamingResponse):
    """A streaming response. When the client disconnects, the response closes its generator.

    The headers tell caches and proxies not to buffer the response.

    Args:
        first: first value of the generator, which has already been read.
        rest: generator of the other values.
        media_type: content type of the response.
    """

    def __init__(self, first: str | bytes, rest: AsyncGenerator[str | bytes], media_type: str) -> None:
        self._rest = rest
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self._all(first), media_type=media_type, headers=headers)

    @classmethod
    async def begin(cls, values: AsyncGenerator[str | bytes], media_type: Callable[[Any], str]) -> Self:
        """Wait for the first value of the generator, and return a response. An error before that is raised."""
        try:
            first = await anext(values)
            return cls(first, values, media_type(first))
        except BaseException:
            await values.aclose()
            raise

    async def _all(self, first: str | bytes) -> AsyncGenerator[str | bytes]:
        yield first
        async for value in self._rest:
            yield value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - Starlette calls it
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._rest.aclose()
