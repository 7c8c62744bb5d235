"""Moondream's HTTP API, for Moondream's Python client: `moondream.vl(endpoint="http://127.0.0.1:8080/v1")`.

    POST /v1/detect, /v1/point, /v1/segment, /v1/query, /v1/caption
    GET  /v1/models    the available models, in OpenAI's format

Coordinates are normalized to the image size (0 to 1). Requests for points, segmentation and questions accept
`spatial_refs`: points [x, y] and boxes [x1, y1, x2, y2].

Saccade extends Moondream's API:
    - Objects and points have a `score`. `settings` accepts `conf`, the minimum score.
    - `"choices": ["yes", "no"]` returns `"probabilities": {"yes": 0.9, "no": 0.1}`.
    - The image of a question is optional.

A question uses reasoning if the model supports it, unless the request has `"reasoning": false`. The answer then has
`"reasoning": {"text": …, "grounding": [{"start_idx": …, "end_idx": …, "points": [[x, y], …]}]}`.

A streamed text consists of server-sent events, each with a `text`. For older clients, each event also has `chunk` and
`completed`. Text is sampled with temperature 0.2 and top_p 0.9 by default.

The contour of an object is an SVG path, with coordinates relative to the bounding box of the object. `complete` is
false if the end of the path is missing. `refined` is true if the path comes from a refined mask. A streamed contour has
one event of type "bbox", then events of type "path_delta", and one event of type "final".
"""

from __future__ import annotations

import json
import secrets
import time
from functools import partial
from typing import Any, Literal

from pydantic import BaseModel, Field
from starlette.responses import Response

from saccade.engine.results import Outline, Result, Text
from saccade.engine.tasks import Caption, Detect, Point, Query, Segment
from saccade.pipeline.api.asker import Asker, Engines, ModelRoute
from saccade.pipeline.api.forward import WorkerRoute
from saccade.pipeline.api.images import decode_image
from saccade.pipeline.api.routes import Json, Routes, bad_values
from saccade.pipeline.api.server_sent_events import event_stream
from saccade.pipeline.settings import NullIsUnset

MAX_TOKENS = 768
_TEMPERATURE, _TOP_P = 0.2, 0.9  # the defaults of Moondream's engine


class Settings(NullIsUnset):
    """The sampling and detection settings of a request. Unknown keys are ignored."""

    max_objects: int = Field(50, ge=1, le=1000)
    conf: float = Field(0.5, ge=0, le=1)
    max_tokens: int = Field(MAX_TOKENS, ge=1, le=4096)
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, gt=0, le=1)

    @property
    def of_text(self) -> tuple[float, float]:
        """The sampling parameters of a text: `temperature` (default 0.2) and `top_p` (default 0.9)."""
        warmth = _TEMPERATURE if self.temperature is None else self.temperature
        return warmth, _TOP_P if self.top_p is None else self.top_p


class Asked(NullIsUnset):
    """The common fields of all requests to the model."""

    settings: Settings | None = None
    stream: bool = False

    @property
    def how(self) -> Settings:
        """The settings of the request, or the default settings."""
        return self.settings or Settings.model_validate({})


class ObjectAsked(Asked):
    """A request for object detection: an image, and the label of the objects."""

    image_url: str = Field(description="the image, as a data URL")
    object: str = Field(min_length=1, max_length=4096, description="label to detect")


class PointsAsked(ObjectAsked):
    """A request for points or a segmentation: an image, the object's label, and optional reference points and boxes."""

    spatial_refs: list[list[float]] = Field(
        [], max_length=64, description="reference points (x, y) and boxes (x1, y1, x2, y2), in normalized coordinates"
    )


class Question(Asked):
    """A question, with or without an image."""

    image_url: str | None = Field(None, description="the image, as a data URL; null for a question without an image")
    question: str = Field(min_length=1, max_length=65536, description="the question")
    reasoning: bool | None = Field(
        None, description="whether to use reasoning; default: if the model supports it and there are no choices"
    )
    spatial_refs: list[list[float]] = Field(
        [], max_length=64, description="reference points (x, y) and boxes (x1, y1, x2, y2), in normalized coordinates"
    )
    choices: list[str] = Field([], max_length=128, description="allowed answers")


class CaptionAsked(Asked):
    """A request for a caption of an image."""

    image_url: str = Field(description="the image, as a data URL")
    length: Literal["short", "normal", "long"] = "normal"


class FoundBox(BaseModel):
    """A bounding box, normalized to the image size (0 to 1)."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float


class FoundObject(FoundBox):
    """A detected object: its bounding box, label and score."""

    score: float
    label: str


class Objects(BaseModel):
    """The detected objects, with their bounding boxes."""

    request_id: str
    objects: list[FoundObject]


class FoundPoint(BaseModel):
    """The centre point of a detected object, normalized to the image size (0 to 1)."""

    x: float
    y: float
    score: float
    label: str


class FoundPoints(BaseModel):
    """The centre points of the detected objects."""

    request_id: str
    points: list[FoundPoint]
    count: int


class OutlineAnswer(BaseModel):
    """The contour of an object as an SVG path. The path coordinates are relative to the bounding box, from 0 to 1."""

    request_id: str
    path: str
    bbox: FoundBox
    complete: bool
    refined: bool


class TextAnswer(BaseModel):
    """A generated answer or caption, with optional reasoning and probabilities."""

    request_id: str
    answer: str | None = None
    caption: str | None = None
    reasoning: dict[str, Any] | None = None
    probabilities: dict[str, float] | None = None


class Model(BaseModel):
    """A model, in the format of OpenAI's model list."""

    id: str
    object: str
    created: int
    owned_by: str
    skills: list[str]
    classes: list[str] | None


class Models(BaseModel):
    """The available models."""

    object: str
    data: list[Model]


routes = Routes("v1", ModelRoute)
listing = Routes("v1", WorkerRoute)
_BEGUN = int(time.time())


@routes.post("/v1/detect", role="operator", limited="always")
async def detect(asked: ObjectAsked, engines: Engines) -> Objects:
    """Detect objects, and return their bounding boxes."""
    with bad_values(400):
        task = Detect(asked.object, asked.how.max_objects, asked.how.conf)
    found = await _find(engines.finding, asked, task)
    objects = [
        FoundObject(x_min=box.x1, y_min=box.y1, x_max=box.x2, y_max=box.y2, score=box.score, label=box.label)
        for box in found.detections.boxes
    ]
    return Objects(request_id=_request_id(), objects=objects)


@routes.post("/v1/point", role="operator", limited="always")
async def point(asked: PointsAsked, engines: Engines) -> FoundPoints:
    """Detect objects, and return their centre points."""
    with bad_values(400):
        task = Point(asked.object, asked.how.max_objects, asked.how.conf, _refs(asked.spatial_refs))
    found = await _find(engines.finding, asked, task)
    points = [FoundPoint(x=one.x, y=one.y, score=one.score, label=one.label) for one in found.points.points]
    return FoundPoints(request_id=_request_id(), points=points, count=len(points))


@routes.post("/v1/query", role="operator", limited="always", response_model=TextAnswer)
async def query(asked: Question, engines: Engines) -> Response:
    """Answer a question, with or without an image."""
    asker, how = engines.talking, asked.how
    reasoning = asked.reasoning
    if reasoning is None:
        reasoning = asker.engine.model.reasons and not asked.choices
    with bad_values(400):
        task = Query(
            asked.question,
            how.max_tokens,
            choices=tuple(asked.choices),
            reasoning=reasoning,
            refs=_refs(asked.spatial_refs),
            temperature=how.of_text[0],
            top_p=how.of_text[1],
        )
    return await _text(asker, asked, task, "answer")


@routes.post("/v1/caption", role="operator", limited="always", response_model=TextAnswer)
async def caption(asked: CaptionAsked, engines: Engines) -> Response:
    """Generate a caption of an image."""
    how = asked.how
    task = Caption(asked.length, how.max_tokens, temperature=how.of_text[0], top_p=how.of_text[1])
    return await _text(engines.talking, asked, task, "caption")


@routes.post("/v1/segment", role="operator", limited="always", response_model=OutlineAnswer)
async def segment(asked: PointsAsked, engines: Engines) -> Response:
    """Segment one object, and return its contour as an SVG path."""
    able = [one for one in (engines.finding, engines.talking) if Segment.skill in one.engine.model.skills]
    asker = able[0] if able else engines.finding  # this engine reports the error
    how = asked.how
    warmth, narrow = how.temperature or 0.0, 1.0 if how.top_p is None else how.top_p
    with bad_values(400):
        task = Segment(asked.object, _refs(asked.spatial_refs), how.max_tokens, temperature=warmth, top_p=narrow)
    image = await asker.decode(partial(decode_image, asked.image_url))
    name = _request_id()
    if not asked.stream:
        (outline,) = (await asker.result(image, [task])).segments
        return Json({"request_id": name, **_outlined(outline)})
    whole = list[Result]()

    def event(piece: str) -> dict[str, Any]:
        if piece.startswith("{"):  # the first piece is the box
            return {"type": "bbox", "bbox": json.loads(piece)}
        return {"type": "path_delta", "chunk": piece, "completed": False}

    def last() -> list[dict[str, Any]]:
        (outline,) = whole[0].segments
        return [{"type": "final", **_outlined(outline), "completed": True, "request_id": name}]

    return await event_stream(asker.pieces(image, task, whole.append), event, last)


@listing.get("/v1/models", role="viewer", limited="always")
async def models(engines: Engines) -> Models:
    """List the available models."""
    data = []
    for asker in dict.fromkeys((engines.finding, engines.talking)):
        model = asker.engine.model
        classes = None if model.classes is None else list(model.classes)
        listed = {"id": asker.model_name, "object": "model", "created": _BEGUN, "owned_by": "saccade"}
        data.append(Model.model_validate({**listed, "skills": list(model.skills), "classes": classes}))
    return Models(object="list", data=data)


async def _find(asker: Asker, asked: ObjectAsked, task: Detect | Point) -> Result:
    image = await asker.decode(partial(decode_image, asked.image_url))
    return await asker.result(image, [task])


async def _text(asker: Asker, asked: Question | CaptionAsked, task: Query | Caption, key: str) -> Response:
    url = asked.image_url
    image = None if url is None else await asker.decode(partial(decode_image, url))
    name = _request_id()
    if not asked.stream:
        (text,) = (await asker.result(image, [task])).texts
        return Json({"request_id": name, key: text.text, **_about(text)})
    whole = list[Result]()

    def event(piece: str, *, completed: bool = False) -> dict[str, Any]:
        return {"text": piece, "chunk": piece, "completed": completed, "request_id": name}

    def last() -> list[dict[str, Any]]:
        return [{**event("", completed=True), **_about(whole[0].texts[0])}]

    return await event_stream(asker.pieces(image, task, whole.append), event, last)


def _refs(given: list[list[float]]) -> Any:
    return tuple(map(tuple, given))


def _outlined(outline: Outline) -> dict[str, Any]:
    box = dict(zip(("x_min", "y_min", "x_max", "y_max"), outline.box, strict=True))
    return {"path": outline.path, "bbox": box, "complete": outline.complete, "refined": outline.refined}


def _about(text: Text) -> dict[str, Any]:
    """Return the reasoning and the probabilities of an answer as response fields, if the answer has them."""
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
