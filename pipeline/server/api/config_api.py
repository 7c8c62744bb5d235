"""The configuration file of the run over HTTP.

GET  /config           {"file": true} if there is one
POST /config/save      writes everything that was changed since it was read into it, its comments kept: {"file": …}
POST /config/reload    reads it again: {"changes": ["yard: other conf"]}
POST /config/diff      the text of another one, as application/yaml: {"changes": […]} as reload, and nothing is changed
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from aiohttp import web

from saccade.pipeline.errors import ConfigError
from saccade.pipeline.server.blocking_calls import BlockingCalls, BusyError
from saccade.pipeline.server.streams_api import MAX_BODY_BYTES
from saccade.sources.http.auth import read_text, refusal

_LIMIT_S = 60.0
T = TypeVar("T")


class HasFile(Protocol):
    """What has a configuration file: a `Controller`, or the front of workers."""

    @property
    def file(self) -> object:
        """None without one."""

    def save(self) -> str:
        """As `Controller.save`."""

    def reload(self) -> list[str]:
        """As `Controller.reload`."""

    def preview(self, text: str) -> list[str]:
        """As `Controller.preview`."""


class ConfigApi:
    """The routes.

    Args:
        controller: has the file.
    """

    def __init__(self, controller: HasFile) -> None:
        self._controller = controller
        self._calls = BlockingCalls(1, _LIMIT_S)

    def routes(self) -> list[web.AbstractRouteDef]:
        """All of them."""
        return [
            web.get("/config", self._show),
            web.post("/config/save", self._save),
            web.post("/config/reload", self._reload),
            web.post("/config/diff", self._diff),
        ]

    async def _show(self, request: web.Request) -> web.Response:
        return web.json_response({"file": self._controller.file is not None})

    async def _save(self, request: web.Request) -> web.Response:
        self._require_file()
        try:
            return web.json_response({"file": await self._run(self._controller.save)})
        except ConfigError as error:
            raise refusal(web.HTTPConflict, str(error)) from None

    async def _reload(self, request: web.Request) -> web.Response:
        self._require_file()
        return await self._changes(self._controller.reload)

    async def _diff(self, request: web.Request) -> web.Response:
        text = await read_text(request, MAX_BODY_BYTES, "a configuration")
        return await self._changes(partial(self._controller.preview, text))

    async def _changes(self, call: Callable[[], list[str]]) -> web.Response:
        try:
            return web.json_response({"changes": await self._run(call)})
        except ConfigError as error:
            raise refusal(web.HTTPUnprocessableEntity, str(error)) from None

    async def _run(self, call: Callable[[], T]) -> T:
        try:
            return await self._calls.run(call)
        except (BusyError, TimeoutError):
            raise refusal(web.HTTPServiceUnavailable, "the file is being read or written; try again") from None

    def _require_file(self) -> None:
        if self._controller.file is None:
            raise refusal(web.HTTPConflict, "there is no configuration file: start with --config FILE")
