"""The zones and lines of a running stream, and what was counted, over HTTP, as routes for any aiohttp application.

    GET    /streams/door/zones            {"zones": {…}, "lines": {…}} as in a configuration
    PUT    /streams/door/zones            replaces them, from the next frame on; what stays the same keeps its counts
    DELETE /streams/door/zones            removes them all
    GET    /streams/door/counts?since=T   the totals, and what came in each minute of the last day from T on
    GET    /streams/door/heatmap.png      where objects have been since it began, transparent elsewhere, to lay over it

Times are Unix times for live streams, and seconds from the start for files. Authentication is elsewhere.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import asdict
from typing import Any

import cv2
from aiohttp import web

from saccade.pipeline.analytics.analyze import analyze_stage
from saccade.pipeline.analytics.settings import Regions
from saccade.pipeline.config import ListedStream
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.errors import StreamError
from saccade.pipeline.server.blocking_calls import BlockingCalls
from saccade.pipeline.server.streams_api import OPEN_S, name_of, read_body, update, wanted_of
from saccade.sources.http.auth import HttpAuth, refusal

_MAX_CHANGING = 32


class AnalyticsApi:
    """The routes.

    Args:
        controller: of the streams whose zones and counts.
        auth: answers preflight requests.
    """

    def __init__(self, controller: Controller, auth: HttpAuth) -> None:
        self._controller = controller
        self._runner = controller.runner
        self._auth = auth
        self._calls = BlockingCalls(_MAX_CHANGING, OPEN_S)

    def routes(self) -> list[web.AbstractRouteDef]:
        """All of them."""
        zones, counts = "/streams/{name}/zones", "/streams/{name}/counts"
        return [
            web.get(zones, self._show),
            web.put(zones, self._replace),
            web.delete(zones, self._remove),
            web.get(counts, self._counts),
            web.get("/streams/{name}/heatmap.png", self._heatmap),
            *(web.options(path, self._preflight) for path in (zones, counts)),
        ]

    async def _show(self, request: web.Request) -> web.Response:
        return web.json_response(_regions(wanted_of(self._controller, name_of(self._runner, request))))

    async def _replace(self, request: web.Request) -> web.Response:
        wanted = await read_body(request, Regions)
        name = name_of(self._runner, request)
        values = {"zones": wanted.zones, "lines": wanted.lines}
        return web.json_response(_regions(await update(self._controller, name, values, self._calls)))

    async def _remove(self, request: web.Request) -> web.Response:
        name = name_of(self._runner, request)
        await update(self._controller, name, {"zones": {}, "lines": {}}, self._calls)
        return web.Response(status=204)

    async def _counts(self, request: web.Request) -> web.Response:
        try:
            since = float(request.query.get("since", "0"))
        except ValueError:
            since = math.nan
        if not math.isfinite(since):
            raise refusal(web.HTTPUnprocessableEntity, "since should be a time in seconds, such as 1795262111")
        name = name_of(self._runner, request)
        try:
            totals, found = await asyncio.to_thread(self._runner.counts, name, since)
        except StreamError as error:
            raise refusal(web.HTTPConflict, str(error)) from None
        minutes = [{"start": minute.start, **asdict(minute.counts)} for minute in found]
        return web.json_response({"totals": asdict(totals), "minutes": minutes})

    async def _heatmap(self, request: web.Request) -> web.Response:
        stage = analyze_stage(self._controller.local.streams.get(name_of(self._runner, request)).stages)
        if stage is None:
            raise refusal(web.HTTPConflict, "the stream was started by a program without a stage for zones")
        heat = stage.heat

        def draw() -> bytes:
            done, data = cv2.imencode(".png", cv2.cvtColor(heat.overlay(), cv2.COLOR_RGBA2BGRA))
            assert done
            return data.tobytes()

        drawn = await asyncio.to_thread(draw)
        return web.Response(body=drawn, content_type="image/png", headers={"Cache-Control": "no-store"})

    async def _preflight(self, request: web.Request) -> web.Response:
        return await self._auth.preflight(request, "GET, PUT, DELETE", "application/json")


def _regions(config: ListedStream) -> dict[str, Any]:
    return config.model_dump(mode="json", include={"zones", "lines"})
