"""Routes for stored events, their media files, and false alarms."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field, StrictBool
from starlette.requests import Request
from starlette.responses import Response

from saccade.pipeline.api.events_query import query_of
from saccade.pipeline.api.file_response import OpenFileResponse
from saccade.pipeline.api.forward import Forwarder
from saccade.pipeline.api.routes import Json, Routes, bad_values, the
from saccade.pipeline.api.server_sent_events import event_stream
from saccade.pipeline.control.runner import Address, Runner, StoredEvents
from saccade.pipeline.events.storage.store_reader import EventQuery, time_of_text
from saccade.pipeline.search import Searched
from saccade.web.errors import HttpError

_MEDIA_TYPES = {"clip": "video/mp4", "snapshot": "image/jpeg"}

routes = Routes("events")


@dataclass(slots=True, frozen=True)
class Stored:
    """The event store, and the runner that searches it.

    Attributes:
        store: the stored events.
        runner: runner of the streams.
        searching: lock that limits searches to one at a time.
    """

    store: StoredEvents
    runner: Runner
    searching: threading.Lock = field(default_factory=threading.Lock)

    @property
    def away(self) -> dict[str, list[str]]:
        """The unreachable machines, as {"away": [names]}. Empty if all machines are reachable."""
        names = list(self.store.away)
        return {"away": names} if names else {}

    def told(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the record of an event. For a false alarm, add the fields `false_alarm` and `held_back`.

        `held_back` is the number of suppressed detections that were similar to the false alarm.
        """
        if not any(one.event == record["id"] for one in self.store.verdicts(record["stream"])):
            return record
        held = self.runner.held_back(record["stream"]).get(record["id"], 0)
        return {**record, "false_alarm": True, "held_back": held}

    def missing(self, what: str) -> HttpError:
        """Return the HTTP error for a missing event or file: 404, or 503 if a machine of the cluster is unreachable."""
        if names := self.away.get("away"):
            return HttpError(503, f"no reachable machine stores this event; unreachable: {', '.join(names)}")
        return HttpError(404, what)


Events = Annotated[Stored, the(Stored, "there is no event store; start Saccade with --store FOLDER")]


class EventList(BaseModel):
    """One page of stored events, newest first.

    `after` is the value of the query parameter `after` that requests the next page. `away` lists the unreachable
    machines.
    """

    events: list[dict[str, Any]]
    after: str | None = None
    away: list[str] | None = None


class RuleNames(BaseModel):
    """The names of the rules that have stored events."""

    rules: list[str]
    away: list[str] | None = None


class VerdictGiven(BaseModel):
    """A request to mark an event as a false alarm. `false_alarm: false` removes the mark."""

    model_config = ConfigDict(extra="forbid")
    false_alarm: StrictBool


class VerdictShown(BaseModel):
    """An event that a user marked as a false alarm.

    Similar detections are suppressed if their score is at most `needed`. `held_back` is the number of suppressed
    detections. `by_look` is true if the detections must also have a similar appearance.
    """

    event: str
    stream: str
    label: str
    score: float
    needed: float
    box_norm: tuple[float, float, float, float]
    by_look: bool
    held_back: int


class VerdictList(BaseModel):
    """The events that users marked as false alarms, oldest first."""

    verdicts: list[VerdictShown]


class History(BaseModel):
    """The object counts of a stream for each minute. Minutes in which nothing was counted are omitted."""

    minutes: list[dict[str, Any]]
    away: list[str] | None = None


class Filters(BaseModel):
    """Query parameters that filter stored events."""

    stream: str | None = None
    rule: str | None = None
    label: str | None = None
    zone: str | None = None
    since: str | None = Field(
        None, description="lowest start time: a Unix time in seconds, or a duration before now such as 2h"
    )
    q: str = Field(
        "", description="filter: words in labels, answers and attributes; in a search: the text that images must match"
    )
    limit: str = Field("50", description="maximum number of events per page, up to 500")
    after: str | None = Field(None, description="value of `after` in the response for the previous page")
    token: str | None = Field(None, description="bearer token, as an alternative to the Authorization header")


Asked = Annotated[Filters, Query()]


@routes.get("/events", role="viewer", limited="asked", response_model_exclude_unset=True)
async def list_events(request: Request, filters: Asked, events: Events) -> EventList:
    """Return one page of stored events, newest first."""
    query = _query_of(_given(request))
    found = await asyncio.to_thread(events.store.page, query)
    # The storage time and not the ID, because the last event of a page may be deleted before the next request.
    after = repr(found[-1][1]) if len(found) == query.limit else None
    return EventList(events=[record for record, _ in found], after=after, **events.away)


@routes.get("/events/search", role="operator", limited="asked")  # operator: it only reads, but uses the model
async def search(request: Request, filters: Asked, events: Events) -> Response:
    """Search the stored events for a text. The model compares the text with the snapshot of each event.

    The best matches come first. `match` is the probability of a match. `away` lists the unreachable machines. With
    `Accept: text/event-stream`, the response first reports the number of processed snapshots: `{"done": 3, "of": 50}`.
    """
    given = _given(request)
    text = given.pop("q", "")
    query = _query_of(given)
    if not events.searching.acquire(blocking=False):
        raise HttpError(503, "another search is running; try again")
    done: list[Searched] = []
    steps = _steps(events, text, query, done)
    if "text/event-stream" in request.headers.get("Accept", ""):
        return await event_stream(steps, lambda step: step, lambda: [done[0].to_json()])
    async with aclosing(steps):
        async for _ in steps:
            if await request.is_disconnected():
                raise HttpError(503, "the client has disconnected")
    return Json(done[0].to_json())


@routes.get("/events/rules", role="viewer", limited="asked", response_model_exclude_unset=True)
async def rules(events: Events, stream: str | None = None) -> RuleNames:
    """Return the names of the rules that have stored events."""
    return RuleNames(rules=await asyncio.to_thread(events.store.rules, stream), **events.away)


@routes.get("/events/verdicts", role="viewer", limited="asked")
async def verdicts(events: Events, stream: str | None = None) -> VerdictList:
    """Return the events that users marked as false alarms, oldest first, for one stream or for all streams."""

    def shown() -> list[VerdictShown]:
        found = events.store.verdicts(stream)
        held = {name: events.runner.held_back(name) for name in {one.stream for one in found}}
        return [
            VerdictShown(
                event=one.event,
                stream=one.stream,
                label=one.label,
                score=one.score,
                needed=round(one.needed, 3),
                box_norm=one.box,
                by_look=one.look is not None,
                held_back=held[one.stream].get(one.event, 0),
            )
            for one in found
        ]

    return VerdictList(verdicts=await asyncio.to_thread(shown))


@routes.post("/events/{id}/verdict", role="operator", status_code=204)
async def judge(id: str, given: VerdictGiven, events: Events) -> None:
    """Mark an event as a false alarm, or remove the mark.

    Similar detections are suppressed from then on, unless their score is clearly higher.
    """
    with bad_values(422):
        stream = await asyncio.to_thread(events.runner.judge, id, false_alarm=given.false_alarm)
    if stream is None:
        raise events.missing(f"event '{id[:80]}' does not exist")


@routes.get("/events/{id}", role="viewer")
async def show(id: str, events: Events) -> dict[str, Any]:
    """Return the record of an event, with the trajectories of its objects."""
    record = await asyncio.to_thread(events.store.get, id)
    if record is None:
        raise events.missing(f"event '{id[:80]}' does not exist")
    return await asyncio.to_thread(events.told, record)


@routes.delete("/events/{id}", role="operator", status_code=204)
async def delete(id: str, events: Events) -> None:
    """Delete an event, its clip and its snapshot."""
    if not await asyncio.to_thread(events.store.delete, id):
        raise events.missing(f"event '{id[:80]}' does not exist")


@routes.get("/events/{id}/clip.mp4", role="viewer", response_class=Response)
async def clip(id: str, request: Request, events: Events) -> Response:
    """Return the video clip of an event as MP4. Range requests are supported."""
    return await _media(id, "clip", request, events)


@routes.get("/events/{id}/snapshot.jpg", role="viewer", response_class=Response)
async def snapshot(id: str, request: Request, events: Events) -> Response:
    """Return the snapshot of an event as JPEG. Range requests are supported."""
    return await _media(id, "snapshot", request, events)


@routes.get("/streams/{name}/history", role="viewer", response_model_exclude_unset=True)
async def history(name: str, events: Events, since: str = "0") -> History:
    """Return the object counts of a stream for each minute. Minutes in which nothing was counted are omitted."""
    with bad_values(422):
        start = time_of_text(since)
    return History(minutes=await asyncio.to_thread(events.store.counts, name, start), **events.away)


async def _media(id: str, kind: str, request: Request, events: Events) -> Response:
    missing = f"event '{id[:80]}' has no {kind}, or the {kind} is still being recorded"
    path = await asyncio.to_thread(events.store.media, id, kind)
    if path is None:
        raise events.missing(missing)
    if isinstance(path, Address):
        forwarder: Forwarder = request.app.state.parts[Forwarder]
        return await forwarder.ask(request, path, f"/media/{quote(id, safe='')}/{kind}")
    try:
        return await media_file(path, kind)
    except FileNotFoundError:
        raise events.missing(missing) from None


async def media_file(path: Path, kind: str) -> Response:
    """Return an HTTP response with the clip or the snapshot of an event. Range requests are supported.

    Raises:
        FileNotFoundError: if the file does not exist.
    """
    file = await asyncio.to_thread(path.open, "rb")
    return OpenFileResponse(file, _MEDIA_TYPES[kind], "private, max-age=60")


def _given(request: Request) -> dict[str, str]:
    """Return the query parameters of a request. If a parameter is repeated, its first value is used."""
    return dict(reversed(request.query_params.multi_items()))


def _query_of(given: dict[str, str]) -> EventQuery:
    with bad_values(422):
        return query_of(given)


class _GoneError(Exception):
    pass


async def _steps(events: Stored, text: str, query: EventQuery, done: list[Searched]) -> AsyncGenerator[str]:
    """Search the stored events for a text. Yield the progress as JSON, and append the search result to `done`."""
    loop = asyncio.get_running_loop()
    steps: asyncio.Queue[str | Searched | Exception] = asyncio.Queue()
    gone = threading.Event()

    def put(step: str | Searched | Exception) -> None:
        with suppress(RuntimeError):  # the server has stopped
            loop.call_soon_threadsafe(steps.put_nowait, step)

    def progress(number: int, of: int) -> None:
        if gone.is_set():
            raise _GoneError
        put(json.dumps({"done": number, "of": of}))

    def work() -> None:
        found: Searched | Exception
        try:
            found = events.runner.search(text, query, progress)
        except Exception as error:
            found = error
        events.searching.release()  # before the response, so that the client can search again
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
