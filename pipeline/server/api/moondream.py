"""Moondream's HTTP API, so that its own client works: `moondream.vl(endpoint="http://127.0.0.1:8080/v1")`.

    POST /v1/detect    {"image_url": "data:…", "object": "person"} → {"request_id": …, "objects": [{"x_min": …, …}]}
    POST /v1/point     the same → {"request_id": …, "points": [{"x": …, "y": …}], "count": 2}
    POST /v1/query     {"image_url": …, "question": "…", "stream": false} → {"request_id": …, "answer": "…"}
    POST /v1/caption   {"image_url": …, "length": "normal", "stream": false} → {"request_id": …, "caption": "…"}
    POST /v1/segment   {"image_url": …, "object": "cat", "spatial_refs": …, "stream": false}
                       → {"request_id": …, "path": "M 0.1 …", "bbox": {"x_min": …, …}}
    GET  /v1/models    the model, as OpenAI's API lists it; and the one that answers questions, if it is another

Coordinates are fractions of width and height. Objects and points have their `score` besides, and `settings` may hold
`conf`. A request for points or an outline and a question may have `spatial_refs`: points [x, y] and boxes [x1, y1, x2,
y2] that it is about. Questions are reasoned about where the model can, unless `"reasoning": false`; the answer then has
`"reasoning": {"text": …, "grounding": [{"start_idx": …, "end_idx": …, "points": [[x, y], …]}]}`. Beyond Moondream's
own: `"choices": ["yes", "no"]` gets `"probabilities": {"yes": 0.9, "no": 0.1}`, and a question needs no image. A stream
is server-sent events with a `text` each (older clients read `chunk` and `completed`). Texts are sampled at temperature
0.2 and top_p 0.9 by default, as the makers' engine does; `Query` and `Caption` in Python take the likeliest token.

A path's coordinates are fractions of its box. An outline has `complete` and `refined` besides. Its stream is one event
`{"type": "bbox", "bbox": …}`, then `{"type": "path_delta", "chunk": …, "completed": false}` each, then `{"type":
"final", "path": …, "bbox": …, "completed": true}`.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from aiohttp import web
from pydantic import Field

from saccade.engine.results import Outline, Result, Text
from saccade.engine.tasks import Caption, Detect, Point, Query, Segment
from saccade.pipeline.server.api.asker import Asker
from saccade.pipeline.server.api.images import decode_image
from saccade.pipeline.server.api.server_sent_events import EventStream
from saccade.pipeline.settings import NullIsUnset
from saccade.sources.http.auth import refusal

MAX_TOKENS = 768
_TEMPERATURE, _TOP_P = 0.2, 0.9  # the defaults of the makers' engine


class _Settings(NullIsUnset):
    """How to answer; what a client sends besides is of no concern here."""

    max_objects: int = Field(50, ge=1, le=1000)
    conf: float = Field(0.5, ge=0, le=1)
    max_tokens: int = Field(MAX_TOKENS, ge=1, le=4096)
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, gt=0, le=1)

    @property
    def of_text(self) -> tuple[float, float]:
        """Temperature and top-p of texts: by default as the makers' engine has them."""
        warmth = _TEMPERATURE if self.temperature is None else self.temperature
        return warmth, _TOP_P if self.top_p is None else self.top_p


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
    reasoning: bool | None = Field(None, description="by default where the model can and there are no choices")
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
            web.post("/v1/segment", self._segment),
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
                    reasoning=self._reasoning(asked),
                    refs=_refs(asked.spatial_refs),
                    temperature=how.of_text[0],
                    top_p=how.of_text[1],
                )
            except ValueError as error:
                raise refusal(web.HTTPBadRequest, str(error)) from None
            return await self._text(request, asked, task, "answer")

    async def _caption(self, request: web.Request) -> web.StreamResponse:
        async with self._talker.reading():
            asked = await self._talker.read(request, _Length)
            how = asked.how
            task = Caption(asked.length, how.max_tokens, temperature=how.of_text[0], top_p=how.of_text[1])
            return await self._text(request, asked, task, "caption")

    def _reasoning(self, asked: _Question) -> bool:
        if asked.reasoning is None:
            return self._talker.engine.model.reasons and not asked.choices
        return asked.reasoning

    async def _segment(self, request: web.Request) -> web.StreamResponse:
        able = [one for one in (self._asker, self._talker) if Segment.skill in one.engine.model.skills]
        asker = able[0] if able else self._asker  # which says that it cannot
        async with asker.reading():
            asked = await asker.read(request, _Pointed)
            how = asked.how
            try:
                warmth, narrow = how.temperature or 0.0, 1.0 if how.top_p is None else how.top_p
                refs = _refs(asked.spatial_refs)
                task = Segment(asked.object, refs, how.max_tokens, temperature=warmth, top_p=narrow)
            except ValueError as error:
                raise refusal(web.HTTPBadRequest, str(error)) from None
            image = await asker.decode(partial(decode_image, asked.image_url))
            name = _request_id()
            if not asked.stream:
                (outline,) = (await asker.result(image, [task])).segments
                return web.json_response({"request_id": name, **_outlined(outline)})
            events, whole = EventStream(request), list[Result]()

            def event(piece: str) -> dict[str, Any]:
                if piece.startswith("{"):  # the first: the box
                    return {"type": "bbox", "bbox": json.loads(piece)}
                return {"type": "path_delta", "chunk": piece, "completed": False}

            def last() -> list[dict[str, Any]]:
                (outline,) = whole[0].segments
                return [{"type": "final", **_outlined(outline), "completed": True, "request_id": name}]

            await events.send_all(asker.pieces(image, task, whole.append), event, last)
            return events.response

    async def _text(
        self, request: web.Request, asked: _Question | _Length, task: Query | Caption, key: str
    ) -> web.StreamResponse:
        url = asked.image_url
        image = None if url is None else await self._talker.decode(partial(decode_image, url))
        name = _request_id()
        if not asked.stream:
            (text,) = (await self._talker.result(image, [task])).texts
            return web.json_response({"request_id": name, key: text.text, **_about(text)})
        events, whole = EventStream(request), list[Result]()

        def event(piece: str, *, completed: bool = False) -> dict[str, Any]:
            return {"text": piece, "chunk": piece, "completed": completed, "request_id": name}

        def last() -> list[dict[str, Any]]:
            return [{**event("", completed=True), **_about(whole[0].texts[0])}]

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
    return Point(asked.object, asked.how.max_objects, asked.how.conf, _refs(asked.spatial_refs))


def _refs(given: list[list[float]]) -> Any:
    """References as tasks take them, who check them."""
    return tuple(map(tuple, given))


def _outlined(outline: Outline) -> dict[str, Any]:
    box = dict(zip(("x_min", "y_min", "x_max", "y_max"), outline.box, strict=True))
    return {"path": outline.path, "bbox": box, "complete": outline.complete, "refined": outline.refined}


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
