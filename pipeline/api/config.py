"""Routes that show, reload, compare and save the configuration file."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel
from starlette.requests import Request

from saccade.pipeline.api.blocking_calls import BlockingCalls
from saccade.pipeline.api.routes import MAX_BODY_BYTES, YAML, AnyText, Routes, Wanted, the
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.errors import ConfigError
from saccade.web.body import read_text
from saccade.web.errors import HttpError

_LIMIT_S = 60.0

routes = Routes("config")


class FileCalls(BlockingCalls):
    """Runs operations on the configuration file (load, save, compare) one at a time."""

    def __init__(self) -> None:
        busy = "the file is being read or written"
        super().__init__(1, _LIMIT_S, busy, (503, f"{busy}; try again"))


Calls = Annotated[FileCalls, the(FileCalls)]


class HasFile(BaseModel):
    """Whether Saccade was started with a configuration file."""

    file: bool


class SavedTo(BaseModel):
    """The name of the configuration file that was saved."""

    file: AnyText


class ConfigChanges(BaseModel):
    """The differences between two configurations, one text line per difference."""

    changes: list[AnyText]


@routes.get("/config", role="viewer")
async def show(controller: Wanted) -> HasFile:
    """Return whether Saccade was started with a configuration file."""
    return HasFile(file=controller.file is not None)


@routes.post("/config/save", role="admin")
async def save(controller: Wanted, calls: Calls) -> SavedTo:
    """Save the current configuration to the configuration file. Comments in the file are preserved."""
    _require_file(controller)
    try:
        return SavedTo(file=await calls.ask(controller.save))
    except ConfigError as error:
        raise HttpError(409, str(error)) from None


@routes.post("/config/reload", role="admin")
async def reload(controller: Wanted, calls: Calls) -> ConfigChanges:
    """Reload the configuration file and apply it. Return the changes."""
    _require_file(controller)
    return ConfigChanges(changes=await calls.ask(controller.reload))


_TEXT = {"requestBody": {"required": True, "content": {YAML: {"schema": {"type": "string"}}}}}


@routes.post("/config/diff", role="admin", openapi_extra=_TEXT)
async def diff(request: Request, controller: Wanted, calls: Calls) -> ConfigChanges:
    """Return the changes that a new configuration would cause, without applying them. The request body is YAML."""
    text = await read_text(request, MAX_BODY_BYTES, "a configuration")
    return ConfigChanges(changes=await calls.ask(controller.preview, text))


def _require_file(controller: Controller) -> None:
    if controller.file is None:
        raise HttpError(409, "Saccade has no configuration file: start it with --config FILE")
