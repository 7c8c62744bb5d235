"""The events that the machines of workers have stored, over HTTP as those of one store: routes as `EventsApi` has them.

Pages are merged by the time of storing, newest first. What only one machine has, its clips among it, comes from there.
A machine that does not answer is listed under `away`, and the answer is what the others have. Knows addresses; not how
stores work.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from aiohttp import web
from saccade.pipeline.server.api.events import no_event
from saccade.pipeline.server.api.events_query import query_of
from saccade.pipeline.server.api.events_search import EventsSearchApi, SearchEvents
from saccade.sources.http.auth import HttpAuth, refusal

from saccade.pipeline.events.storage.store_reader import MEDIA
from saccade.pipeline.workers.front.forwarding import Forwarder

Stored = tuple[dict[str, Any], float]
"""The record of an event, and when it was stored: no two of one machine at the same time."""

OWN = "front"
"""What the front's own machine is called, where it does not answer."""


def merge_pages(
    pages: Sequence[Sequence[Stored]], limit: int, after: tuple[float, str] | None = None
) -> tuple[list[Stored], bool]:
    """Merge pages of several stores into one, newest first.

    Args:
        pages: of each store, newest first: up to `limit` + 1 events that were stored until the time of `after`. A page
            of fewer is its last.
        limit: how many events are wanted at most.
        after: time of storing and id of the last event of the page before; None for the first.

    Returns:
        The events, and whether there are more.
    """
    # What is older than the last event of a full page may be newer than what that store has not sent.
    floor = max((page[-1][1] for page in pages if len(page) > limit), default=float("-inf"))
    found = sorted((one for page in pages for one in page), key=_place_of, reverse=True)
    found = [one for one in found if one[1] >= floor and (after is None or _place_of(one) < after)]
    return found[:limit], len(found) > limit or floor > float("-inf")


class MergedEvents:
    """The routes.

    Args:
        stores: the addresses of the stores by their machines' names, "" the front's own.
        forwarder: asks them.
        auth: answers preflight requests.
        search: finds events by the models of workers; None where none is to be asked.
    """

    def __init__(
        self,
        stores: Callable[[], Mapping[str, str]],
        forwarder: Forwarder,
        auth: HttpAuth,
        search: SearchEvents | None = None,
    ) -> None:
        self._search = EventsSearchApi(search)
        self._stores = stores
        self._forwarder = forwarder
        self._auth = auth

    def routes(self) -> list[web.AbstractRouteDef]:
        """All of them."""
        media = [f"/events/{{id}}/{kind}{suffix}" for kind, suffix in MEDIA.items()]
        return [
            web.get("/events", self._list),
            *self._search.routes(),
            web.get("/events/rules", self._rules),
            web.get("/events/{id}", self._show),
            web.delete("/events/{id}", self._forward),
            *(web.get(path, self._forward) for path in media),
            web.get("/streams/{name}/history", self._history),
            *(web.options(path, self._preflight) for path in ("/events", "/events/{id}", *media)),
        ]

    async def _list(self, request: web.Request) -> web.Response:
        given = dict(request.query)  # of a filter that is given twice the first, as everywhere
        given.pop("token", None)
        after = _after_of(given.pop("after", None))
        try:
            query = query_of(given)
        except ValueError as error:
            raise refusal(web.HTTPUnprocessableEntity, str(error)) from None
        if after is not None:
            given["until"] = repr(after[0])
        answers, away = await self._ask_all(request, f"/stored?{urlencode(given)}")
        pages = [[(record, stored_at) for record, stored_at in answer["events"]] for answer in answers.values()]
        shown, more = merge_pages(pages, query.limit, after)
        last = f"{shown[-1][1]!r}~{shown[-1][0]['id']}" if more and shown else None
        return web.json_response({"events": [record for record, _ in shown], "after": last, **away})

    async def _rules(self, request: web.Request) -> web.Response:
        query = urlencode({"stream": request.query["stream"]}) if "stream" in request.query else ""
        answers, away = await self._ask_all(request, f"/events/rules?{query}")
        rules = {rule for answer in answers.values() for rule in answer["rules"]}
        return web.json_response({"rules": sorted(rules), **away})

    async def _history(self, request: web.Request) -> web.Response:
        since = urlencode({"since": request.query.get("since", "0")})
        name = quote(request.match_info["name"], safe="")
        answers, away = await self._ask_all(request, f"/streams/{name}/history?{since}")
        minutes = [minute for answer in answers.values() for minute in answer["minutes"]]
        return web.json_response({"minutes": sorted(minutes, key=lambda one: one["start"]), **away})

    async def _show(self, request: web.Request) -> web.Response:
        _, record = await self._find(request)
        return web.json_response(record)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        machine, _ = await self._find(request)
        return await self._forwarder.forward(request, self._stores().get(machine))

    async def _find(self, request: web.Request) -> tuple[str, dict[str, Any]]:
        """The machine that has an event, and its record."""
        answers, away = await self._ask_all(request, f"/events/{quote(request.match_info['id'], safe='')}")
        for machine, record in answers.items():
            return machine, record
        if away:
            names = ", ".join(away["away"])
            raise refusal(web.HTTPServiceUnavailable, f"no machine that answers has the event; away: {names}")
        raise no_event(request)

    async def _ask_all(self, request: web.Request, path: str) -> tuple[dict[str, Any], dict[str, list[str]]]:
        """The answers of all machines that have one; and, under `away`, the names of those that do not answer.

        Raises:
            HTTPUnprocessableEntity: if a machine refuses what is asked.
        """
        stores = self._stores()
        answers = await asyncio.gather(*(self._forwarder.ask(request, url, path) for url in stores.values()))
        found, away = {}, []
        for machine, answer in zip(stores, answers, strict=True):
            if answer is None or answer[0] >= 500:
                away.append(machine or OWN)
            elif answer[0] == 200:
                found[machine] = json.loads(answer[1])
            elif answer[0] == 422:
                raise refusal(web.HTTPUnprocessableEntity, json.loads(answer[1])["error"])
        return found, {"away": away} if away else {}

    async def _preflight(self, request: web.Request) -> web.Response:
        return await self._auth.preflight(request, "GET, DELETE", "application/json")


def _place_of(one: Stored) -> tuple[float, str]:
    return one[1], one[0]["id"]


def _after_of(text: str | None) -> tuple[float, str] | None:
    """Where the page before has ended; raises HTTPUnprocessableEntity if it is not what that had."""
    if text is None:
        return None
    stored_at, tilde, event = text.partition("~")
    try:
        if tilde:
            return float(stored_at), event
    except ValueError:
        pass
    raise refusal(web.HTTPUnprocessableEntity, "after should be what the page before had there")
