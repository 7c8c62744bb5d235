"""Sends JSON values as server-sent events, each value as soon as it is available.

An error before the first value gives an HTTP error status.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from saccade.pipeline.api.generator_response import GeneratorResponse
from saccade.web.errors import HttpError


async def event_stream(
    pieces: AsyncGenerator[str], event: Callable[[str], Any], last: Callable[[], Iterable[Any]]
) -> GeneratorResponse:
    """Return a response of server-sent events: one event per piece of text, then the events that `last` returns.

    If the client disconnects, `pieces` is closed. If `pieces` fails after the first event, the last event is an error.
    """
    return await GeneratorResponse.begin(_events(pieces, event, last), lambda _: "text/event-stream")


async def _events(
    pieces: AsyncGenerator[str], event: Callable[[str], Any], last: Callable[[], Iterable[Any]]
) -> AsyncGenerator[str]:
    begun = False
    try:
        async for piece in pieces:
            yield _as_event(event(piece))
            begun = True
        for value in last():
            yield _as_event(value)
            begun = True
    except HttpError as error:
        if not begun:
            raise
        yield _as_event({"error": {"message": error.detail, "code": error.status_code}})
    finally:
        await pieces.aclose()


def _as_event(value: Any) -> str:
    return f"data: {value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}\n\n"
