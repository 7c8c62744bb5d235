"""The configuration file of the session over HTTP.

GET  /config           {"file": true} if there is one
POST /config/save      writes the zones, lines and rules of the streams into it, its comments kept: {"file": …}
POST /config/reload    reads it anew: {"changes": ["yard: other conf"]}
"""

from __future__ import annotations

from typing import Protocol

from aiohttp import web

from saccade.pipeline.errors import ConfigError
from saccade.pipeline.server.blocking_calls import BlockingCalls, BusyError
from saccade.sources.http.auth import refusal

_LIMIT_S = 60.0


class ConfigActions(Protocol):
    """What can be done with the file."""

    def save(self) -> str:
        """Write the zones, lines and rules; returns the file's name. Raises ConfigError."""

    def reload(self) -> list[str]:
        """Read it anew; returns a line for each change. Raises ConfigError."""


class ConfigApi:
    """The routes.

    Attributes:
        actions: on the file; None where there is none.
    """

    def __init__(self) -> None:
        self.actions: ConfigActions | None = None
        self._calls = BlockingCalls(1, _LIMIT_S)

    def routes(self) -> list[web.AbstractRouteDef]:
        """All of them."""
        return [
            web.get("/config", self._show),
            web.post("/config/save", self._save),
            web.post("/config/reload", self._reload),
        ]

    async def _show(self, request: web.Request) -> web.Response:
        return web.json_response({"file": self.actions is not None})

    async def _save(self, request: web.Request) -> web.Response:
        actions = self._required()
        try:
            return web.json_response({"file": await self._calls.run(actions.save)})
        except ConfigError as error:
            raise refusal(web.HTTPConflict, str(error)) from None
        except (BusyError, TimeoutError):
            raise refusal(web.HTTPServiceUnavailable, "the file is being read or written; try again") from None

    async def _reload(self, request: web.Request) -> web.Response:
        actions = self._required()
        try:
            return web.json_response({"changes": await self._calls.run(actions.reload)})
        except ConfigError as error:
            raise refusal(web.HTTPUnprocessableEntity, str(error)) from None
        except (BusyError, TimeoutError):
            raise refusal(web.HTTPServiceUnavailable, "the file is being read or written; try again") from None

    def _required(self) -> ConfigActions:
        if self.actions is None:
            raise refusal(web.HTTPConflict, "there is no configuration file: start with --config FILE")
        return self.actions
