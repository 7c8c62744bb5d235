"""Routes for the PTZ (pan, tilt, zoom) presets of an ONVIF camera."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

from pydantic import BaseModel

from saccade.pipeline.api.blocking_calls import BlockingCalls
from saccade.pipeline.api.forward import Here, InThisProcess, WorkerRoute
from saccade.pipeline.api.routes import AnyText, Routes, the
from saccade.pipeline.errors import one_line
from saccade.sources import LiveError
from saccade.sources.onvif import OnvifSource, PtzError
from saccade.web.errors import HttpError

_ANSWER_S = 20.0  # longer than the time limit of `OnvifSource.presets`
_MOST = 8

T = TypeVar("T")

routes = Routes("ptz", WorkerRoute)


class PtzCalls(BlockingCalls):
    """Sends requests to cameras in threads, because a camera can take seconds to respond."""

    def __init__(self) -> None:
        super().__init__(_MOST, _ANSWER_S, "too many requests to cameras", (504, "the camera does not answer"))


class PtzPreset(BaseModel):
    """A PTZ preset: a position (pan, tilt, zoom) that is stored in a camera."""

    token: AnyText
    name: AnyText


class PtzPresets(BaseModel):
    """The PTZ presets of a camera. A preset is a stored position (pan, tilt, zoom)."""

    presets: list[PtzPreset]


Cameras = Annotated[PtzCalls, the(PtzCalls)]


@routes.get("/streams/{name}/ptz/presets", role="operator")
async def presets(name: str, here: InThisProcess, calls: Cameras) -> PtzPresets:
    """Return the PTZ presets (stored positions) of a stream's ONVIF camera."""
    found = await _answer(calls, _source(here, name).presets)
    return PtzPresets(presets=[PtzPreset(token=one.token, name=one.name) for one in found])


@routes.post("/streams/{name}/ptz/presets/{preset}", role="operator", status_code=204)
async def go_to(name: str, preset: str, here: InThisProcess, calls: Cameras) -> None:
    """Move the ONVIF camera of a stream to a PTZ preset (stored position).

    The response is sent when the camera has accepted the command.
    """
    await _answer(calls, _source(here, name).go_to, preset)


def _source(here: Here, name: str) -> OnvifSource:
    source = here.running(name).source
    if not isinstance(source, OnvifSource):
        raise HttpError(409, f"'{name[:80]}' is not an ONVIF stream: its source should be onvif://user:password@HOST")
    return source


async def _answer(calls: PtzCalls, call: Callable[..., T], *given: str) -> T:
    """Send a request to a camera, and return the camera's answer.

    Raises:
        HttpError: with status 404 if the camera does not support PTZ or does not know the preset, 502 if the request
            fails, 504 after a timeout.
    """
    try:
        return await calls.ask(call, *given)
    except PtzError as error:
        raise HttpError(404, one_line(str(error))) from None
    except LiveError as error:
        raise HttpError(504 if error.reason == "timeout" else 502, one_line(str(error))) from None
