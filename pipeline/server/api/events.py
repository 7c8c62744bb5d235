"""Stored events over HTTP, as routes for any aiohttp application.

    GET    /events?stream=&rule=&label=&zone=&since=&q=&limit=&after=    {"events": […], "after": … or null}
    GET    /events/search?q=          those that a model finds it in: `events_search`
    GET    /events/rules?stream=      {"rules": […]}: the names of rules that have events
    GET    /events/ID                 the record, with the paths of its tracks
    GET    /events/ID/clip.mp4        in ranges, if asked for; so does /events/ID/snapshot.jpg
    DELETE /events/ID                 204
    GET    /streams/NAME/history?since=    what was counted in each stored minute

Authentication is elsewhere (`saccade.pipeline.server.http_server`). Reading the store is done in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from aiohttp import web

from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import MEDIA, StoreError, time_of_text
from saccade.pipeline.server.api.events_query import query_of
from saccade.pipeline.server.api.events_search import EventsSearchApi, SearchEvents
from saccade.pipeline.server.static_files import send_file
from saccade.sources.http.auth import HttpAuth, refusal

_Given = ParamSpec("_Given")
_Answer = TypeVar("_Answer")


class EventsApi:
    """The routes.

    Args:
        store: what is read.
        auth: answers preflight requests.
        search: finds events by a model; None where there is none.
    """

    def __init__(self, store: EventStore, auth: HttpAuth, search: SearchEvents | None = None) -> None:
        self._store = store
        self._auth = auth
        self._search = EventsSearchApi(search)

    def routes(self) -> list[web.AbstractRouteDef]:
        """All of them."""
        media = [f"{kind}{suffix}" for kind, suffix in MEDIA.items()]
        return [
            web.get("/events", self._list),
            *self._search.routes(),
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
        found = await _asked(self._store.page, query)
        # The time of storing and not the id: the last event of a page may be deleted before the next is asked for.
        after = repr(found[-1][1]) if len(found) == query.limit else None
        return web.json_response({"events": [record for record, _ in found], "after": after})

    async def _rules(self, request: web.Request) -> web.Response:
        return web.json_response({"rules": await _asked(self._store.rules, request.query.get("stream"))})

    async def _show(self, request: web.Request) -> web.Response:
        record = await _asked(self._store.get, request.match_info["id"])
        if record is None:
            raise no_event(request)
        return web.json_response(record)

    async def _send(self, request: web.Request) -> web.StreamResponse:
        kind = request.path.rpartition("/")[2].partition(".")[0]
        path = await _asked(self._store.media, request.match_info["id"], kind)
        if path is None:
            raise refusal(
                web.HTTPNotFound, f"there is no {kind} of event '{request.match_info['id'][:80]}', or not yet"
            )
        types = {"clip": "video/mp4", "snapshot": "image/jpeg"}
        headers = {"Content-Type": types[kind], "Cache-Control": "private, max-age=60"}
        return await send_file(request, path, headers)

    async def _delete(self, request: web.Request) -> web.Response:
        deleted = await _asked(self._store.delete, request.match_info["id"])
        if not deleted:
            raise no_event(request)
        return web.Response(status=204)

    async def _history(self, request: web.Request) -> web.Response:
        try:
            since = time_of_text(request.query.get("since", "0"))
        except ValueError as error:
            raise refusal(web.HTTPUnprocessableEntity, str(error)) from None
        minutes = await _asked(self._store.counts, request.match_info["name"], since)
        return web.json_response({"minutes": minutes})

    async def _preflight(self, request: web.Request) -> web.Response:
        return await self._auth.preflight(request, "GET, DELETE", "application/json")


async def _asked(ask: Callable[_Given, _Answer], *given: _Given.args, **more: _Given.kwargs) -> _Answer:
    """Ask the store, in a thread; a disk that fails or a damaged file is the server's trouble, told in one line."""
    try:
        return await asyncio.to_thread(ask, *given, **more)
    except StoreError as error:
        raise refusal(web.HTTPServiceUnavailable, str(error)) from None


def no_event(request: web.Request) -> web.HTTPException:
    """The answer where no event has the id of a request."""
    return refusal(web.HTTPNotFound, f"there is no event '{request.match_info['id'][:80]}'")
