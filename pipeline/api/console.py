"""Routes for the web console: information about the model, and the current frame of a stream.

The web page changes the prompts of a stream with messages over the WebRTC data channel:
    request     {"detect": ["cat"]}
    response    {"prompts": {…}, "colors": {…}} or {"error": "…"}
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from saccade.engine.errors import EngineError
from saccade.pipeline.api.access import Role
from saccade.pipeline.api.forward import Here, InThisProcess, WorkerRoute
from saccade.pipeline.api.routes import Routes, Wanted, Who, the
from saccade.pipeline.api.streams import changes_of
from saccade.pipeline.api.whep import width_of
from saccade.pipeline.config import Prompts
from saccade.pipeline.config.file import explain, first_mistake
from saccade.pipeline.errors import ConfigError, StreamError
from saccade.pipeline.runtime.tasks import in_model_names
from saccade.sinks import color_of
from saccade.sinks.still import jpeg
from saccade.sinks.video.broadcast import BroadcastSink, NoSuchStreamError
from saccade.web.body import parse_json
from saccade.web.errors import HttpError

_LONGEST_NAME = 200
_FRAME_S = 5.0  # longest wait for a frame
_JPEG = 88  # JPEG quality

routes = Routes("console")
seeing = Routes("console", WorkerRoute)


@dataclass(slots=True, frozen=True)
class Publishing:
    """Settings for web pages that publish video, such as the video of a webcam.

    Attributes:
        prompts: initial prompts of a published video; None if publishing is off.
    """

    prompts: Prompts | None = None


class ModelShown(BaseModel):
    """Information for the web console about the model, the prompts and the client's permissions."""

    model: str
    device: str
    classes: list[str] | None
    skills: list[str]
    publish: bool = Field(description="whether the page may publish video")
    talks: bool
    events: bool = Field(description="whether events are stored")
    role: Role
    saves: bool = Field(description="whether the configuration file can be written")
    prompts: Prompts
    colors: dict[str, str]


@routes.get("/model", role="viewer", limited="always")
async def model(controller: Wanted, who: Who, publishing: Annotated[Publishing, the(Publishing)]) -> ModelShown:
    """Return the model and its labels, the initial prompts, and the client's permissions."""
    info = controller.runner.model
    classes = None if info.classes is None else list(info.classes)
    asked = publishing.prompts or Prompts()
    return ModelShown(
        model=info.name.rpartition("/")[2] or info.name,
        device=info.device,
        classes=classes,
        skills=list(info.skills),
        publish=publishing.prompts is not None and who.may("operator"),
        talks=info.talks,
        events=controller.runner.store is not None,
        role=who.role,
        saves=controller.file is not None and who.may("admin"),
        prompts=asked,
        colors=_colors([*(classes or []), *asked.detect, *asked.point, *asked.segment]),
    )


@seeing.get("/names", role="viewer", limited="always")
async def names(here: InThisProcess, of: str = "") -> dict[str, Any]:
    """Return the model's labels for the word `of`, and the display colors of these labels.

    The response is {"names": ["bicycle"], "colors": {…}}, or {"error": "…"}.
    """
    try:
        found = here.local.engine.resolve([of[:_LONGEST_NAME]])
    except EngineError as error:
        return {"error": str(error)}  # a regular answer
    return {"names": found, "colors": _colors(found)}


@seeing.get("/streams/{name}/frame.jpg", role="viewer", response_class=Response)
async def frame(
    name: str,
    request: Request,
    videos: Annotated[BroadcastSink, the(BroadcastSink)],
    overlay: str = "on",
    width: str | None = None,
) -> Response:
    """Return the next frame of a stream as JPEG, with boxes and labels.

    `?overlay=off` omits boxes and labels. `?width=640` scales the image to a width in pixels.
    """
    pixels = width_of(request)
    try:
        future = videos.next(name)
    except NoSuchStreamError:
        raise HttpError(404, "this stream does not exist") from None
    try:
        shown = await asyncio.wait_for(asyncio.wrap_future(future), _FRAME_S)
    except TimeoutError:
        raise HttpError(504, f"no frame arrived within {_FRAME_S:g} s") from None
    except asyncio.CancelledError:
        if not future.cancelled():
            raise
        raise HttpError(404, "the stream has ended") from None
    data = await asyncio.to_thread(lambda: jpeg(shown.image(drawn=overlay != "off", width=pixels), _JPEG))
    taken = {"X-Frame-Captured-At": f"{shown.frame.captured_at:.3f}", "Cache-Control": "no-store"}
    return Response(data, media_type="image/jpeg", headers=taken)


def answer_page(here: Here, stream: str, text: str) -> str:
    """Apply the prompts in a message from a web page. Return the new prompts of the stream, or an error, as JSON."""
    try:
        wanted = Prompts.model_validate(parse_json(text))
        if wanted.model_fields_set:
            here.update(stream, changes_of(wanted))
        config = here.local.streams.get(stream).config
        return json.dumps(_described(in_model_names(here.local.engine, config or Prompts())))
    except ValidationError as error:
        reason = explain(first_mistake(error), Prompts)
    except (ValueError, RecursionError):
        reason = "the message is not JSON"
    except (ConfigError, EngineError, StreamError) as error:
        reason = str(error)
    return json.dumps({"error": reason})


def _described(prompts: Prompts) -> dict[str, Any]:
    return {"prompts": prompts.model_dump(), "colors": _colors([*prompts.detect, *prompts.point, *prompts.segment])}


def _colors(labels: list[str]) -> dict[str, str]:
    return {label: "#{:02x}{:02x}{:02x}".format(*color_of(label)) for label in labels}
