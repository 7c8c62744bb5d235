"""Moondream's HTTP API, so that its own client works: `moondream.vl(endpoint="http://127.0.0.1:8080/v1")`.

    POST /v1/detect    {"image_url": "data:…", "object": "person"} → {"request_id": …, "objects": [{"x_min": …, …}]}
    POST /v1/point     the same → {"request_id": …, "points": [{"x": …, "y": …}], "count": 2}
    POST /v1/query     {"image_url": …, "question": "…", "stream": false} → {"request_id": …, "answer": "…"}
    POST /v1/caption   {"image_url": …, "length": "normal", "stream": false} → {"request_id": …, "caption": "…"}
    GET  /v1/models    the model, as OpenAI's API lists it; and the one that answers questions, if it is another

Coordinates are fractions of width and height. Objects and points have their `score` besides, and `settings` may hold
`conf`. A point request and a question may have `spatial_refs`, points [x, y] and boxes [x1, y1, x2, y2] that it is
about. A question may have `"reasoning": true`; the answer then has `"reasoning": {"text": …, "grounding":
[{"start_idx": …, "end_idx": …, "points": [[x, y], …]}]}`. Beyond Moondream's own: `"choices": ["yes", "no"]` gets
`"probabilities": {"yes": 0.9, "no": 0.1}`, and a question needs no image. A stream is server-sent events with a `text`
each (older clients read `chunk` and `completed`).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from aiohttp import web
from pydantic import Field

from saccade.engine.results import Result, Text
from saccade.engine.tasks import Caption, Detect, Point, Query
from saccade.pipeline.server.api.asker import Asker
from saccade.pipeline.server.api.images import decode_image
from saccade.pipeline.server.api.server_sent_events import EventStream
from saccade.pipeline.settings import NullIsUnset
from saccade.sources.http.auth import refusal

MAX_TOKENS = 768


class _Settings(NullIsUnset):
    """How to answer; what a client sends besides is of no concern here."""

    max_objects: int = Field(50, ge=1, le=1000)
    conf: float = Field(0.5, ge=0, le=1)
    max_tokens: int = Field(MAX_TOKENS, ge=1, le=4096)
    temperature: float = Field(0.0, ge=0, le=10)
    top_p: float = Field(1.0, gt=0, le=1)


class _Asked(NullIsUnset):
    settings: _Settings | None = None
    stream: bool = False

    @property
    def how(self) -> _Settings:
        """The settings given, or those by default."""
        return self.settings or _Settings.model_validate({})


class _Object(_Asked):
    image_url: str = Field(description="the image, as a data URL")
    object: str = Field(min_length=1, max_length=4096, description="what to find")


class _Pointed(_Object):
    spatial_refs: list[list[float]] = Field([], max_length=64, description="points and boxes that it is about")


class _Question(_Asked):
    image_url: str | None = Field(None, description="the image, as a data URL; none where it is about no image")
    question: str = Field(min_length=1, max_length=65536, description="what to answer")
    reasoning: bool = False
    spatial_refs: list[list[float]] = Field([], max_length=64, description="points and boxes that it is about")
    choices: list[str] = Field([], max_length=128, description="one of them is the answer")


class _Length(_Asked):
    image_url: str = Field(description="the image, as a data URL")
    length: Literal["short", "normal", "long"] = "normal"


_ObjectT = TypeVar("_ObjectT", bound=_Object)


class MoondreamApi:
    """The routes.

    Args:
        asker: asks the engine that finds.
        talker: asks the one that writes texts.
    """

    def __init__(self, asker: Asker, talker: Asker) -> None:
        self._asker = asker
        self._talker = talker
        self._begun = int(time.time())

    def routes(self) -> list[web.AbstractRouteDef]:
        """All of them."""
        return [
            web.post("/v1/detect", self._detect),
            web.post("/v1/point", self._point),
            web.post("/v1/query", self._query),
            web.post("/v1/caption", self._caption),
            web.get("/v1/models", self._models),
        ]

    async def _find(
        self, request: web.Request, form: type[_ObjectT], task: Callable[[_ObjectT], Detect | Point]
    ) -> Result:
        """What a request for objects or points finds."""
        async with self._asker.reading():
            asked = await self._asker.read(request, form)
            try:
                wanted = task(asked)
            except ValueError as error:
                raise refusal(web.HTTPBadRequest, str(error)) from None
            image = await self._asker.decode(partial(decode_image, asked.image_url))
            return await self._asker.result(image, [wanted])

    async def _detect(self, request: web.Request) -> web.StreamResponse:
        found = (await self._find(request, _Object, _detect_task)).detections
        objects = [
            {"x_min": box.x1, "y_min": box.y1, "x_max": box.x2, "y_max": box.y2, "score": box.score, "label": box.label}
            for box in found.boxes
        ]
        return web.json_response({"request_id": _request_id(), "objects": objects})

    async def _point(self, request: web.Request) -> web.StreamResponse:
        found = (await self._find(request, _Pointed, _point_task)).points
        points = [{"x": spot.x, "y": spot.y, "score": spot.score, "label": spot.label} for spot in found.points]
        return web.json_response({"request_id": _request_id(), "points": points, "count": len(points)})

    async def _query(self, request: web.Request) -> web.StreamResponse:
        async with self._talker.reading():
            asked = await self._talker.read(request, _Question)
            how = asked.how
            try:
                task = Query(
                    asked.question,
                    how.max_tokens,
                    choices=tuple(asked.choices),
                    reasoning=asked.reasoning,
                    refs=tuple(map(tuple, asked.spatial_refs)),  # type: ignore[arg-type]  # which Query checks
                    temperature=how.temperature,
                    top_p=how.top_p,
                )
            except ValueError as error:
                raise refusal(web.HTTPBadRequest, str(error)) from None
            return await self._text(request, asked, task, "answer")

    async def _caption(self, request: web.Request) -> web.StreamResponse:
        async with self._talker.reading():
            asked = await self._talker.read(request, _Length)
            how = asked.how
            task = Caption(asked.length, how.max_tokens, temperature=how.temperature, top_p=how.top_p)
            return await self._text(request, asked, task, "caption")

    async def _text(
        self, request: web.Request, asked: _Question | _Length, task: Query | Caption, key: str
    ) -> web.StreamResponse:
        url = asked.image_url
        image = None if url is None else await self._talker.decode(partial(decode_image, url))
        name = _request_id()
        if not asked.stream:
            (text,) = (await self._talker.result(image, [task])).texts
            return web.json_response({"request_id": name, key: text.text, **_about(text)})
        events, whole = EventStream(request), list[Text]()

        def event(piece: str, *, completed: bool = False) -> dict[str, Any]:
            return {"text": piece, "chunk": piece, "completed": completed, "request_id": name}

        def last() -> list[dict[str, Any]]:
            return [{**event("", completed=True), **_about(whole[0])}]

        await events.send_all(self._talker.pieces(image, task, whole.append), event, last)
        return events.response

    async def _models(self, request: web.Request) -> web.Response:
        data = []
        for asker in dict.fromkeys((self._asker, self._talker)):
            model = asker.engine.model
            listed = {"id": asker.model_name, "object": "model", "created": self._begun, "owned_by": "saccade"}
            data.append({**listed, **_abilities(model.skills, model.classes)})
        return web.json_response({"object": "list", "data": data})


def _detect_task(asked: _Object) -> Detect:
    return Detect(asked.object, asked.how.max_objects, asked.how.conf)


def _point_task(asked: _Pointed) -> Point:
    refs: Any = tuple(map(tuple, asked.spatial_refs))  # which Point checks
    return Point(asked.object, asked.how.max_objects, asked.how.conf, refs)


def _abilities(skills: Sequence[str], classes: Sequence[str] | None) -> dict[str, Any]:
    return {"skills": list(skills), "classes": None if classes is None else list(classes)}


def _about(text: Text) -> dict[str, Any]:
    """The reasoning before an answer and the probabilities of its choices, where there are such."""
    about: dict[str, Any] = {}
    if text.reasoning is not None:
        grounding = [
            {"start_idx": one.start, "end_idx": one.end, "points": [list(point) for point in one.points]}
            for one in text.reasoning.grounding
        ]
        about["reasoning"] = {"text": text.reasoning.text, "grounding": grounding}
    if text.probabilities is not None:
        about["probabilities"] = dict(text.probabilities)
    return about


def _request_id() -> str:
    return f"{time.strftime('%Y-%m-%d_%H:%M:%S', time.gmtime())}_{secrets.token_hex(4)}"
