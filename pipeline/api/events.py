"""Stored events over HTTP. Reading the store is done in threads."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Query
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from saccade.pipeline.api.events_query import query_of
from saccade.pipeline.api.forward import Forwarder
from saccade.pipeline.api.routes import Json, Routes, the
from saccade.pipeline.api.server_sent_events import event_stream
from saccade.pipeline.control.runner import Address, StoredEvents
from saccade.pipeline.events.storage.store_reader import EventQuery, time_of_text
from saccade.pipeline.search import Progress, Searched
from saccade.web.errors import HttpError

_MEDIA_TYPES = {"clip": "video/mp4", "snapshot": "image/jpeg"}

Search = Callable[[str, EventQuery, Progress], Searched]
"""Searches for a text; called in a thread. Raises ConfigError or EngineError if that cannot be."""

routes = Routes("events")


@dataclass(slots=True, frozen=True)
class Stored:
    """The part of an application that has events.

    Attributes:
        store: of this machine, or of all.
        search: asks a model about them; None where there is none.
        searching: held until a search has ended, also where nobody waits for it any more.
    """

    store: StoredEvents
    search: Search | None = None
    searching: threading.Lock = field(default_factory=threading.Lock)

    @property
    def away(self) -> dict[str, list[str]]:
        """Names of machines that do not answer, for a list of what was found."""
        names = list(self.store.away)
        return {"away": names} if names else {}

    def missing(self, what: str) -> HttpError:
        """The answer where something is not there."""
        if names := self.away.get("away"):
            return HttpError(503, f"no machine that answers has the event; away: {', '.join(names)}")
        return HttpError(404, what)


Events = Annotated[Stored, the(Stored)]


class EventList(BaseModel):
    """Events, newest first, and what `after` is for the next page; machines that do not answer are `away`."""

    events: list[dict[str, Any]]
    after: str | None = None
    away: list[str] | None = None


class RuleNames(BaseModel):
    """Names of rules that have events."""

    rules: list[str]
    away: list[str] | None = None


class History(BaseModel):
    """What was counted in each stored minute."""

    minutes: list[dict[str, Any]]
    away: list[str] | None = None


class Filters(BaseModel):
    """What of the stored events is asked for."""

    stream: str | None = None
    rule: str | None = None
    label: str | None = None
    zone: str | None = None
    since: str | None = Field(None, description="a time in seconds, or an age such as 2h")
    q: str = Field("", description="words that are in them; of a search, what to find")
    limit: str = Field("50", description="most events of a page, up to 500")
    after: str | None = Field(None, description="what the page before had there")
    token: str | None = Field(None, description="instead of the Authorization header")


Asked = Annotated[Filters, Query()]


@routes.get("/events", role="viewer", limited="asked", response_model_exclude_unset=True)
async def list_events(request: Request, filters: Asked, events: Events) -> EventList:
    """A page of them."""
    query = _query_of(_given(request))
    found = await asyncio.to_thread(events.store.page, query)
    # The time of storing and not the id: the last event of a page may be deleted before the next is asked for.
    after = repr(found[-1][1]) if len(found) == query.limit else None
    return EventList(events=[record for record, _ in found], after=after, **events.away)


@routes.get("/events/search", role="operator", limited="asked")  # it is read, but has a model asked
async def search(request: Request, filters: Asked, events: Events) -> Response:
    """Those that a model finds something in, the likeliest first, each with `match`.

    With `Accept: text/event-stream` how far it is comes before that: `{"done": 3, "of": 50}`. Machines that do not
    answer are named under `away`.
    """
    given = _given(request)
    text = given.pop("q", "")
    if events.search is None:
        raise HttpError(409, "there is no model here to search with")
    query = _query_of(given)
    if not events.searching.acquire(blocking=False):
        raise HttpError(503, "another search goes on; try again")
    done: list[Searched] = []
    steps = _steps(events, events.search, text, query, done)
    if "text/event-stream" in request.headers.get("Accept", ""):
        return await event_stream(steps, lambda step: step, lambda: [done[0].to_json()])
    async with aclosing(steps):
        async for _ in steps:
            if await request.is_disconnected():
                raise HttpError(503, "nobody waits for the search any more")
    return Json(done[0].to_json())


@routes.get("/events/rules", role="viewer", limited="asked", response_model_exclude_unset=True)
async def rules(events: Events, stream: str | None = None) -> RuleNames:
    """The names of rules that have events."""
    return RuleNames(rules=await asyncio.to_thread(events.store.rules, stream), **events.away)


@routes.get("/events/{id}", role="viewer")
async def show(id: str, events: Events) -> dict[str, Any]:
    """The record of one, with the paths of its tracks."""
    record = await asyncio.to_thread(events.store.get, id)
    if record is None:
        raise events.missing(f"there is no event '{id[:80]}'")
    return record


@routes.delete("/events/{id}", role="operator", status_code=204)
async def delete(id: str, events: Events) -> None:
    """Delete one, with its clip and snapshot."""
    if not await asyncio.to_thread(events.store.delete, id):
        raise events.missing(f"there is no event '{id[:80]}'")


@routes.get("/events/{id}/clip.mp4", role="viewer", response_class=Response)
async def clip(id: str, request: Request, events: Events) -> Response:
    """Its clip; in ranges, if asked for."""
    return await _media(id, "clip", request, events)


@routes.get("/events/{id}/snapshot.jpg", role="viewer", response_class=Response)
async def snapshot(id: str, request: Request, events: Events) -> Response:
    """Its best image; in ranges, if asked for."""
    return await _media(id, "snapshot", request, events)


@routes.get("/streams/{name}/history", role="viewer", response_model_exclude_unset=True)
async def history(name: str, events: Events, since: str = "0") -> History:
    """What was counted in each stored minute."""
    try:
        start = time_of_text(since)
    except ValueError as error:
        raise HttpError(422, str(error)) from None
    return History(minutes=await asyncio.to_thread(events.store.counts, name, start), **events.away)


async def _media(id: str, kind: str, request: Request, events: Events) -> Response:
    path = await asyncio.to_thread(events.store.media, id, kind)
    if path is None:
        raise events.missing(f"there is no {kind} of event '{id[:80]}', or not yet")
    if isinstance(path, Address):
        forwarder: Forwarder = request.app.state.parts[Forwarder]
        return await forwarder.ask(request, path, f"/media/{quote(id, safe='')}/{kind}")
    return media_file(path, kind)


def media_file(path: Path, kind: str) -> Response:
    """A clip or a snapshot, or the range of it that is asked for."""
    return FileResponse(path, media_type=_MEDIA_TYPES[kind], headers={"Cache-Control": "private, max-age=60"})


def _given(request: Request) -> dict[str, str]:
    """The filters of a request; of one that is given twice the first."""
    return dict(reversed(request.query_params.multi_items()))


def _query_of(given: dict[str, str]) -> EventQuery:
    try:
        return query_of(given)
    except ValueError as error:
        raise HttpError(422, str(error)) from None


class _GoneError(Exception):
    """Nobody waits for the search any more."""


async def _steps(
    events: Stored, search: Search, text: str, query: EventQuery, done: list[Searched]
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
        events.searching.release()  # before the answer, after which a client may ask again
        put(found)

    threading.Thread(target=work, name="saccade search", daemon=True).start()
    try:
        while isinstance(step := await steps.get(), str):
            yield step
    finally:
        gone.set()
    if isinstance(step, Exception):
        raise step
    done.append(step)
