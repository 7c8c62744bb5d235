"""Sends JSON values as server-sent events, each value as soon as it is available.

The response starts only when the first value is available. An error before the first value can therefore be sent with
an HTTP error status.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from starlette.responses import Response, StreamingResponse

from saccade.web.errors import HttpError

HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers for a response that caches and proxies must forward without buffering."""


async def event_stream(
    pieces: AsyncGenerator[str], event: Callable[[str], Any], last: Callable[[], Iterable[Any]]
) -> Response:
    """Return a response with one server-sent event for each piece of text, followed by the events of `last`.

    If the client disconnects, `pieces` is closed. If `pieces` fails after the first event, the response ends with an
    event that has an `error`.
    """
    events = _events(pieces, event, last)
    try:
        first = await anext(events, "")
    except BaseException:
        await events.aclose()
        raise

    async def text() -> AsyncGenerator[str]:
        yield first
        try:
            async for one in events:
                yield one
        except HttpError as error:
            yield _as_event({"error": {"message": error.detail, "code": error.status_code}})
        finally:
            await events.aclose()

    return StreamingResponse(text(), media_type="text/event-stream", headers=HEADERS)


async def _events(
    pieces: AsyncGenerator[str], event: Callable[[str], Any], last: Callable[[], Iterable[Any]]
) -> AsyncGenerator[str]:
    try:
        async for piece in pieces:
            yield _as_event(event(piece))
        for value in last():
            yield _as_event(value)
    finally:
        await pieces.aclose()


def _as_event(value: Any) -> str:
    return f"data: {value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}\n\n"
