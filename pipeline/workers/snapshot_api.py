"""Asks a worker's engine about snapshots that its machine has, for the front: only their ids and its answers travel.

    POST /snapshots/match    {"text": "a red truck", "events": [ID, …]} → {"match": [0.93, null, …]}

null where there is no such snapshot. Authentication is elsewhere (`workers.auth`): nobody but the front asks.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web
from pydantic import BaseModel, ConfigDict, ValidationError
from saccade.sources.http.auth import refusal

from saccade.engine.errors import EngineClosedError, EngineError
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.storage.store_reader import media_path
from saccade.pipeline.search import SnapshotAsker

if TYPE_CHECKING:
    from saccade.engine import Engine


class _Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: str
    events: list[str]


class SnapshotApi:
    """The route.

    Args:
        engine: is asked; it stays the caller's.
        media: the folder of the snapshots.
    """

    def __init__(self, engine: Engine, media: Path) -> None:
        self._asker = SnapshotAsker(engine, lambda event: media_path(media, event, "snapshot"))

    def routes(self) -> list[web.AbstractRouteDef]:
        """It, in a list."""
        return [web.post("/snapshots/match", self._match)]

    async def _match(self, request: web.Request) -> web.Response:
        try:
            asked = _Asked.model_validate_json(await request.read())
            found = await asyncio.to_thread(lambda: dict(self._asker.match(asked.text, asked.events)))
        except EngineClosedError as error:
            raise refusal(web.HTTPServiceUnavailable, str(error)) from None
        except (ValidationError, ConfigError, EngineError) as error:
            raise refusal(web.HTTPUnprocessableEntity, str(error)) from None
        return web.json_response({"match": [found[event] for event in asked.events]})
