"""Server-sent events as a response: JSON values one by one, each as soon as it is there.

Nothing is sent before the first value, so that what fails before it is a plain HTTP error.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from typing import Any

from aiohttp import web

from saccade.pipeline.errors import one_line


class EventStream:
    """The response to a request, as events.

    Attributes:
        response: of the handler.

    Args:
        request: to respond to.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        self.response = web.StreamResponse(headers=headers)

    async def send_all(
        self, pieces: AsyncGenerator[str], event: Callable[[str], Any], last: Callable[[], Iterable[Any]]
    ) -> None:
        """Send each piece as the event made of it, then those of `last`; a client that goes away ends the pieces.

        What fails after the first event is sent as an event with the `error`, and ends the stream.
        """
        try:
            async for piece in pieces:
                await self._send(event(piece))
            for value in last():
                await self._send(value)
        except ConnectionError:
            pass  # the client has gone
        except web.HTTPException as error:
            if not self.response.prepared:
                raise
            with suppress(ConnectionError):
                await self._send({"error": {"message": one_line(error.text or error.reason), "code": error.status}})
        finally:
            await pieces.aclose()
        if self.response.prepared:
            with suppress(ConnectionError):
                await self.response.write_eof()

    async def _send(self, value: Any) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
        await self.response.write(f"data: {text}\n\n".encode())
