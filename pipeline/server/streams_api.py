"""What can be asked and told of the streams over HTTP, as routes for any aiohttp application.

    GET    /healthz         200 while every stream is well, else 503 and which is not
    GET    /metrics         for Prometheus
    GET    /streams         all of them; /streams/door: one
    POST   /streams         {"source": "rtsp://…", "name": "door", "detect": ["person"], …}: begins one
    PATCH  /streams/door    {"detect": ["cat"], "conf": 0.4}: looks for something else from the next frame on
    DELETE /streams/door    ends it

Keys are those of a configuration. Who may come in is decided elsewhere (`saccade.pipeline.server.http_server`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError

from saccade.engine import EngineError
from saccade.pipeline.core.build import change_prompts, prompts_of
from saccade.pipeline.core.config import Prompts, StreamConfig
from saccade.pipeline.core.config_file import explain
from saccade.pipeline.core.errors import ConfigError, StreamError
from saccade.pipeline.core.stream_manager import Streams, StreamStatus, status_of
from saccade.pipeline.core.stream_run import Run
from saccade.pipeline.server.prometheus import Metrics
from saccade.sinks import SinkError
from saccade.sources import SourceError
from saccade.sources.http.auth import HttpAuth, read_text, refusal

MAX_BODY_BYTES = 64 * 1024

M = TypeVar("M", bound=BaseModel)


class Api:
    """The routes.

    Args:
        streams: what is told of and changed.
        auth: answers pages that ask whether they may.
        add: begins a stream as POST asks for it.
    """

    def __init__(self, streams: Streams, auth: HttpAuth, add: Callable[[StreamConfig], Run]) -> None:
        self._streams = streams
        self._auth = auth
        self._add = add
        self._metrics = Metrics(streams)

    def routes(self) -> list[web.AbstractRouteDef]:
        """All of them."""
        return [
            web.get("/healthz", self._health),
            web.get("/metrics", self._show_metrics),
            web.get("/streams", self._list),
            web.post("/streams", self._begin),
            web.get("/streams/{name}", self._show),
            web.patch("/streams/{name}", self._change),
            web.delete("/streams/{name}", self._end),
            *(web.options(path, self._preflight) for path in ("/streams", "/streams/{name}")),
        ]

    async def _health(self, request: web.Request) -> web.Response:
        statuses = await asyncio.to_thread(self._streams.snapshot)
        ill = {status.name: f"{status.state}: {status.reason or 'no frame'}" for status in statuses if not status.ok}
        told: dict[str, Any] = {"ok": not ill, "streams": len(statuses), "ill": ill}
        if paused := {sink.name: sink.reason for _, sink in self._streams.sink_statuses() if sink.state == "paused"}:
            told["sinks"] = paused  # a restart would not help them: the status stays 200
        return web.json_response(told, status=503 if ill else 200)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        text = await asyncio.to_thread(self._metrics.as_text)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _list(self, request: web.Request) -> web.Response:
        statuses = await asyncio.to_thread(self._streams.snapshot)
        return web.json_response({"streams": [_told(status) for status in statuses]})

    async def _show(self, request: web.Request) -> web.Response:
        return web.json_response(_told(self._find(request)))

    async def _begin(self, request: web.Request) -> web.Response:
        wanted = await _body(request, StreamConfig)
        if wanted.nothing:
            raise refusal(web.HTTPUnprocessableEntity, wanted.nothing)
        try:
            run = await asyncio.to_thread(self._add, wanted)
        except StreamError as error:
            raise refusal(web.HTTPConflict, str(error)) from None
        except (ConfigError, EngineError, SinkError, SourceError) as error:
            raise refusal(web.HTTPUnprocessableEntity, str(error)) from None
        return web.json_response(_told(status_of(run)), status=201, headers={"Location": f"/streams/{run.name}"})

    async def _change(self, request: web.Request) -> web.Response:
        wanted = await _body(request, Prompts)
        run = self._run(request)
        try:
            change_prompts(run, self._streams.engine, wanted)
        except (ConfigError, EngineError) as error:
            raise refusal(web.HTTPUnprocessableEntity, str(error)) from None
        return web.json_response(_told(status_of(run)))

    async def _end(self, request: web.Request) -> web.Response:
        self._find(request)
        name = request.match_info["name"]
        try:
            await asyncio.to_thread(self._streams.remove, name)
        except StreamError as error:
            if name in self._streams.names:  # else it has ended meanwhile, or somebody else ended it
                raise refusal(web.HTTPConflict, str(error)) from None
        return web.Response(status=204)

    async def _preflight(self, request: web.Request) -> web.Response:
        return await self._auth.preflight(request, "GET, POST, PATCH, DELETE", "application/json")

    def _run(self, request: web.Request) -> Run:
        try:
            return self._streams.get(request.match_info["name"])
        except StreamError as error:
            raise refusal(web.HTTPNotFound, str(error)) from None

    def _find(self, request: web.Request) -> StreamStatus:
        """The status of the stream that is asked for, which may have failed."""
        name = request.match_info["name"]
        found = next((status for status in self._streams.snapshot() if status.name == name), None)
        return found or status_of(self._run(request))


async def _body(request: web.Request, kind: type[M]) -> M:
    """The body of a request as an object of a kind."""
    if request.content_type != "application/json":
        raise refusal(web.HTTPUnsupportedMediaType, "the body must be of type application/json")
    try:
        values = json.loads(await read_text(request, MAX_BODY_BYTES, "a body"))
    except (ValueError, RecursionError):
        raise refusal(web.HTTPBadRequest, "the body is not JSON") from None
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise refusal(web.HTTPUnprocessableEntity, explain(error.errors()[0], kind)) from None


def _told(status: StreamStatus) -> dict[str, Any]:
    """A stream as JSON; times in milliseconds, null where nothing is known yet."""
    report, now = status.report, status.report.recent
    return {
        "name": status.name,
        "source": status.source,
        "state": status.state,
        "reason": status.reason,
        "live": status.live,
        **prompts_of(status.tasks).model_dump(),
        "fps": round(now.fps, 2),
        "age_ms": now.age_ms and round(now.age_ms, 1),
        "latency_ms": {"p50": now.p50_ms and round(now.p50_ms, 1), "p99": now.p99_ms and round(now.p99_ms, 1)},
        "objects": now.objects,
        "frames_in": report.read,
        "frames_out": report.frames,
        "dropped": report.drops,
    }
