"""Serves the store of one machine to the front: what it lists, keeps and deletes. It answers who knows the secret.

Besides the routes of `EventsApi`, but for its pages:

    GET  /stored?…&until=T    {"events": [[record, time of storing], …]}: newest first, one more than `limit`;
                              with `&media=1` those with a snapshot or a clip
    GET  /going-on            {"events": […]}: the records of events that have not ended
    POST /records             {"records": […]}: stores them, of events, tracks, minutes and files; 204 when that is done

Knows nothing of other machines.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from aiohttp import web
from saccade.pipeline.server.api.events_query import query_of
from saccade.pipeline.server.http_server import HttpServer
from saccade.sources.http.auth import refusal

from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import StoreError
from saccade.pipeline.workers.auth import FrontAuth

log = logging.getLogger(__name__)


class StoreServer:
    """Serves from construction on, until `close`.

    Args:
        store: what is served; it stays the caller's.
        secret: that the front sends.
        host: address to listen on.
        port: the port; 0 for any that is free.

    Raises:
        ConfigError: if the address is not available.
    """

    def __init__(self, store: EventStore, secret: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self._store = store
        routes = [
            web.get("/stored", self._list),
            web.get("/going-on", self._going_on),
            web.post("/records", self._write),
        ]
        self._server = HttpServer(None, host, port, access=FrontAuth(secret), events=store, routes=routes)

    @property
    def url(self) -> str:
        """Where it is served."""
        return self._server.url

    def close(self) -> None:
        """End."""
        self._server.close()

    async def _list(self, request: web.Request) -> web.Response:
        given = dict(request.query)
        try:
            until = float(given.pop("until", "inf"))
            media = given.pop("media", None) is not None
            query = replace(query_of(given), until=until, media=media)
        except ValueError as error:
            raise refusal(web.HTTPUnprocessableEntity, str(error)) from None
        return web.json_response({"events": await asyncio.to_thread(self._store.page, query, 1)})

    async def _going_on(self, request: web.Request) -> web.Response:
        return web.json_response({"events": await asyncio.to_thread(self._store.going_on)})

    async def _write(self, request: web.Request) -> web.Response:
        try:
            records = json.loads(await request.content.read())["records"]  # of the front, however long
            await asyncio.to_thread(self._store_all, records)
        except (ValueError, KeyError, TypeError):
            raise refusal(web.HTTPUnprocessableEntity, "these are no records") from None
        return web.Response(status=204)

    def _store_all(self, records: Sequence[dict[str, Any]]) -> None:
        for record in records:
            try:
                self._store.write(record)
            except (KeyError, TypeError, ValueError) as error:  # one that is none must not keep the others waiting
                log.warning("a record could not be stored: %s", error)
        with suppress(StoreError):  # its disk is full: it keeps them until they can be written
            self._store.flush()
