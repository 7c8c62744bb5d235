"""Searching stored events by a model over HTTP.

    GET /events/search?q=TEXT&…    {"events": […]}: the likeliest first, each with `match`

With `Accept: text/event-stream` how far it is comes before that, as server-sent events: `{"done": 3, "of": 50}`. Where
some machines of a run could not be asked, they are named under `away`. Knows a function that searches; no models.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from aiohttp import web

from saccade.engine.errors import EngineError
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.storage.store_reader import EventQuery
from saccade.pipeline.search import Progress, Searched
from saccade.pipeline.server.api.events_query import query_of
from saccade.pipeline.server.api.server_sent_events import EventStream
from saccade.sources.http.auth import refusal

SearchEvents = Callable[[str, EventQuery, Progress], Searched]
"""Searches for a text; called in a thread. Raises ConfigError or EngineError if that cannot be."""


class _GoneError(Exception):
    """Nobody waits for the search any more."""


class EventsSearchApi:
    """The route.

    Args:
        search: finds events; None for a server without a model.
    """

    def __init__(self, search: SearchEvents | None) -> None:
        self._search = search
        self._searching = threading.Lock()  # until the search has ended, also where nobody waits for it any more

    def routes(self) -> list[web.AbstractRouteDef]:
        """It, in a list."""
        return [web.get("/events/search", self._answer)]

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        given = dict(request.query)
        text = given.pop("q", "")
        if self._search is None:
            raise refusal(web.HTTPConflict, "there is no model here to search with")
        try:
            query = query_of(given)
        except ValueError as error:
            raise refusal(web.HTTPUnprocessableEntity, str(error)) from None
        if not self._searching.acquire(blocking=False):
            raise refusal(web.HTTPServiceUnavailable, "another search goes on; try again")
        done: list[Searched] = []
        steps = self._steps(self._search, text, query, done)
        if "text/event-stream" in request.headers.get("Accept", ""):
            stream = EventStream(request)
            await stream.send_all(steps, lambda step: step, lambda: [done[0].to_json()])
            return stream.response
        async with aclosing(steps):
            async for _ in steps:
                if request.transport is None:
                    raise refusal(web.HTTPServiceUnavailable, "nobody waits for the search any more")
        return web.json_response(done[0].to_json())

    async def _steps(
        self, search: SearchEvents, text: str, query: EventQuery, done: list[Searched]
    ) -> AsyncGenerator[str]:
        """Search; yields how far it is as JSON, and puts what was found into `done`. Closing it ends the search."""
        loop = asyncio.get_running_loop()
        steps: asyncio.Queue[str | Searched | Exception] = asyncio.Queue()
        gone = threading.Event()

        def put(step: str | Searched | Exception) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(steps.put_nowait, step)

        def progress(number: int, of: int) -> None:
            if gone.is_set():
                raise _GoneError
            put(json.dumps({"done": number, "of": of}))

        def work() -> None:
            found: Searched | Exception
            try:
                found = search(text, query, progress)
            except Exception as error:
                found = error
            self._searching.release()  # before the answer, after which a client may ask again
            put(found)

        threading.Thread(target=work, name="saccade search", daemon=True).start()
        try:
            while isinstance(step := await steps.get(), str):
                yield step
        finally:
            gone.set()
        if isinstance(step, ConfigError | EngineError):
            raise refusal(web.HTTPUnprocessableEntity, str(step)) from None
        if isinstance(step, Exception):
            raise step
        done.append(step)
