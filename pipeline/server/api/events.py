"""Stored events over HTTP, as routes for any aiohttp application.

    GET    /events?stream=&rule=&label=&zone=&since=&q=&limit=&after=    {"events": […], "after": ID or null}
    GET    /events/search?q=          those that a model finds it in, the likeliest first, each with `match`
    GET    /events/rules?stream=      {"rules": […]}: the names of rules that have events
    GET    /events/ID                 the record, with the paths of its tracks
    GET    /events/ID/clip.mp4        in ranges, if asked for; so does /events/ID/snapshot.jpg
    DELETE /events/ID                 204
    GET    /streams/NAME/history?since=    what was counted in each stored minute

Authentication is elsewhere (`saccade.pipeline.server.http_server`). Reading the store is done in threads.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from saccade.engine.errors import EngineError
from saccade.pipeline.core.errors import ConfigError
from saccade.pipeline.events.store import EventStore
from saccade.pipeline.events.store_reader import MEDIA, EventQuery, StoreError, time_of_text
from saccade.pipeline.search import search_events
from saccade.sources.http.auth import HttpAuth, refusal

if TYPE_CHECKING:
    from saccade.engine import Engine

_CANDIDATES = 50  # that a request has the model asked about
_KNOWN = ("stream", "rule", "label", "zone", "since", "q", "limit", "after", "token")


class EventsApi:
    """The routes.

    Args:
        store: what is read.
        auth: answers preflight requests.
        engine: is asked about snapshots; None for nothing.
    """

    def __init__(self, store: EventStore, auth: HttpAuth, engine: Engine | None = None) -> None:
        self._store = store
        self._auth = auth
        self._engine = engine
        self._searching = asyncio.Semaphore(1)

    def routes(self) -> list[web.AbstractRouteDef]:
        """All of them."""
        media = [f"{kind}{suffix}" for kind, suffix in MEDIA.items()]
        return [
            web.get("/events", self._list),
            web.get("/events/search", self._search),
            web.get("/events/rules", self._rules),
            web.get("/events/{id}", self._show),
            web.delete("/events/{id}", self._delete),
            *(web.get(f"/events/{{id}}/{name}", self._send) for name in media),
            web.get("/streams/{name}/history", self._history),
            *(web.options(path, self._preflight) for path in ("/events", "/events/{id}")),
            *(web.options(f"/events/{{id}}/{name}", self._preflight) for name in media),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        try:
            query = query_of(dict(request.query))
        except ValueError as error:
            raise refusal(web.HTTPUnprocessableEntity, str(error)) from None
        events = await asyncio.to_thread(self._store.search, query)
        more = events[-1]["id"] if len(events) == query.limit else None
        return web.json_response({"events": events, "after": more})

    async def _search(self, request: web.Request) -> web.Response:
        given = dict(request.query)
        text = given.pop("q", "")
        if self._engine is None:
            raise refusal(web.HTTPConflict, "there is no model here to search with")
        if self._searching.locked():
            raise refusal(web.HTTPServiceUnavailable, "another search goes on; try again")
        try:
            query = query_of(given)
            async with self._searching:
                search = partial(search_events, self._store, self._engine, text, query, candidates=_CANDIDATES)
                found = await asyncio.to_thread(search)
        except (ValueError, ConfigError, EngineError) as error:
            raise refusal(web.HTTPUnprocessableEntity, str(error)) from None
        return web.json_response({"events": [one.to_json() for one in found]})

    async def _rules(self, request: web.Request) -> web.Response:
        return web.json_response({"rules": await asyncio.to_thread(self._store.rules, request.query.get("stream"))})

    async def _show(self, request: web.Request) -> web.Response:
        record = await asyncio.to_thread(self._store.get, request.match_info["id"])
        if record is None:
            raise no_event(request)
        return web.json_response(record)

    async def _send(self, request: web.Request) -> web.StreamResponse:
        kind = request.path.rpartition("/")[2].partition(".")[0]
        path = await asyncio.to_thread(self._store.media, request.match_info["id"], kind)
        if path is None:
            raise refusal(
                web.HTTPNotFound, f"there is no {kind} of event '{request.match_info['id'][:80]}', or not yet"
            )
        types = {"clip": "video/mp4", "snapshot": "image/jpeg"}
        return web.FileResponse(path, headers={"Content-Type": types[kind], "Cache-Control": "private, max-age=60"})

    async def _delete(self, request: web.Request) -> web.Response:
        try:
            deleted = await asyncio.to_thread(self._store.delete, request.match_info["id"])
        except StoreError as error:
            raise refusal(web.HTTPServiceUnavailable, str(error)) from None
        if not deleted:
            raise no_event(request)
        return web.Response(status=204)

    async def _history(self, request: web.Request) -> web.Response:
        try:
            since = time_of_text(request.query.get("since", "0"))
        except ValueError as error:
            raise refusal(web.HTTPUnprocessableEntity, str(error)) from None
        minutes = await asyncio.to_thread(self._store.counts, request.match_info["name"], since)
        return web.json_response({"minutes": minutes})

    async def _preflight(self, request: web.Request) -> web.Response:
        return await self._auth.preflight(request, "GET, DELETE", "application/json")


def query_of(given: dict[str, str]) -> EventQuery:
    """The query of a request; raises ValueError, in half a line for the user, if it is none."""
    if unknown := next((name for name in given if name not in _KNOWN), None):
        raise ValueError(f"there is no filter '{unknown[:40]}'; known: {', '.join(_KNOWN[:-1])}")
    limit = given.get("limit", "50")
    if not limit.isdecimal() or len(limit) > 9:
        raise ValueError("limit should be a whole number, such as 50")
    return EventQuery(
        given.get("stream"),
        given.get("rule"),
        given.get("label"),
        given.get("zone"),
        time_of_text(given["since"]) if "since" in given else None,
        given.get("q", ""),
        given.get("after"),
        int(limit),
    )


def no_event(request: web.Request) -> web.HTTPException:
    """The answer where no event has the id of a request."""
    return refusal(web.HTTPNotFound, f"there is no event '{request.match_info['id'][:80]}'")
