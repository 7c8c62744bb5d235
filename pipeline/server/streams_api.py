"""The state of the streams, and adding, changing and removing them over HTTP, as routes for any aiohttp application.

    GET    /livez           200 while the server runs: no token, no detail
    GET    /readyz          200 while streams can be added and the model answers, else 503: no token, no detail
    GET    /healthz         200 while every stream is healthy, else 503, and which is not
    GET    /metrics         for Prometheus
    GET    /streams         all of them; /streams/door: one
    POST   /streams         {"source": "rtsp://…", "name": "door", "detect": ["person"], …}: adds one
    PATCH  /streams/door    {"detect": ["cat"], "weight": 4}: changes prompts and share from the next frame on
    DELETE /streams/door    ends it
    POST   /streams/door/restart    opens it again, as it is wanted; also one that has failed

What one stream runs by is in `config`; with `Accept: application/yaml`, GET /streams/door gives that alone.

Keys are those of a configuration. Authentication is elsewhere (`saccade.pipeline.server.http_server`). Whatever may
block, such as opening a source, runs in threads, a few at a time; health is read on the event loop and waits for none.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ValidationError

from saccade.engine import EngineError
from saccade.pipeline.config import Changes, ListedStream, Prompts, ShareSettings, StreamConfig
from saccade.pipeline.config.file import NOT_UNICODE, explain, first_mistake
from saccade.pipeline.config.text import shown_stream, text_of_stream
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.control.runner import Runner
from saccade.pipeline.control.source_policy import NotAllowedError
from saccade.pipeline.errors import ConfigError, NotKeptError, StreamError
from saccade.pipeline.runtime.streams import StreamStatus
from saccade.pipeline.server.access import client_of
from saccade.pipeline.server.blocking_calls import BlockingCalls, BusyError
from saccade.pipeline.server.prometheus import Metrics
from saccade.sinks import SinkError
from saccade.sources import SourceError
from saccade.sources.http.auth import HttpAuth, read_text, refusal

MAX_BODY_BYTES = 64 * 1024
OPEN_S = 15.0  # for a source, such as a file on a network, and outputs
_END_S = 20.0  # more than `Streams.remove` waits
_MAX_OPENING = 8
_MAX_CHANGING = 32
YAML = "application/yaml"

M = TypeVar("M", bound=BaseModel)


class Api:
    """The routes.

    Args:
        controller: changes what they list.
        auth: answers preflight requests.
    """

    def __init__(self, controller: Controller, auth: HttpAuth) -> None:
        self._controller = controller
        self._runner = controller.runner
        self._auth = auth
        self._metrics = Metrics(controller.runner)
        self._opening = BlockingCalls(_MAX_OPENING, OPEN_S)
        self._ending = BlockingCalls(_MAX_OPENING, _END_S)
        self._reopening = BlockingCalls(_MAX_OPENING, _END_S + OPEN_S)
        self._changing = BlockingCalls(_MAX_CHANGING, OPEN_S)

    def routes(self) -> list[web.AbstractRouteDef]:
        """All of them."""
        return [
            web.get("/livez", self._live),
            web.get("/readyz", self._ready),
            web.get("/healthz", self._health),
            web.get("/metrics", self._show_metrics),
            web.get("/streams", self._list),
            web.post("/streams", self._begin),
            web.get("/streams/{name}", self._show),
            web.patch("/streams/{name}", self._change),
            web.delete("/streams/{name}", self._end),
            web.post("/streams/{name}/restart", self._restart),
            *(
                web.options(path, self._preflight)
                for path in ("/streams", "/streams/{name}", "/streams/{name}/restart")
            ),
        ]

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def _ready(self, request: web.Request) -> web.Response:
        ready = self._runner.ready and all(status.state != "stuck" for status in self._runner.statuses())
        return web.json_response({"ok": ready}, status=200 if ready else 503)

    async def _health(self, request: web.Request) -> web.Response:
        statuses = self._runner.statuses()
        unhealthy = {one.name: f"{one.state}: {one.reason or 'no frame'}" for one in statuses if not one.ok}
        health: dict[str, Any] = {"ok": not unhealthy, "streams": len(statuses), "unhealthy": unhealthy}
        if paused := {sink.name: sink.reason for _, sink in self._runner.sink_statuses() if sink.state == "paused"}:
            health["sinks"] = paused  # a restart would not help them: the status stays 200
        return web.json_response(health, status=503 if unhealthy else 200)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        text = await asyncio.to_thread(self._metrics.as_text)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _list(self, request: web.Request) -> web.Response:
        client = client_of(request)
        seen = [status for status in self._runner.statuses() if client.sees(status.name)]
        return web.json_response({"streams": [self._as_json(status) for status in seen]})

    async def _show(self, request: web.Request) -> web.Response:
        status = self._find(request)
        if YAML in request.headers.get("Accept", "") and status.config is not None:
            return web.Response(text=text_of_stream(status.config), content_type=YAML)
        config = None if status.config is None else shown_stream(status.config)
        return web.json_response({**self._as_json(status), "config": config})

    async def _begin(self, request: web.Request) -> web.Response:
        wanted = await read_stream(request)
        opening = self._opening.run(partial(self._controller.add, wanted), undo=self._undo)
        status = await self._opened(opening, OPEN_S)
        return web.json_response(self._as_json(status), status=201, headers={"Location": f"/streams/{status.name}"})

    def _undo(self, status: StreamStatus) -> None:
        """End a stream that opened when its client had been told that it did not."""
        threading.Thread(target=self._controller.remove, args=(status.name,), name="saccade undo", daemon=True).start()

    async def _opened(self, opening: Awaitable[StreamStatus], limit_s: float) -> StreamStatus:
        """The status of the stream that a call opens; raises an HTTP error if it cannot."""
        try:
            return await opening
        except BusyError:
            raise refusal(web.HTTPServiceUnavailable, "too many streams are being opened; try again") from None
        except TimeoutError:
            raise refusal(web.HTTPGatewayTimeout, f"the stream did not open within {limit_s:g} s") from None
        except StreamError as error:
            raise refusal(web.HTTPConflict, str(error)) from None
        except NotAllowedError as error:
            raise refusal(web.HTTPForbidden, str(error)) from None
        except NotKeptError as error:
            raise refusal(web.HTTPServiceUnavailable, str(error)) from None
        except (ConfigError, EngineError, SinkError, SourceError) as error:
            raise refusal(web.HTTPUnprocessableEntity, str(error)) from None

    async def _restart(self, request: web.Request) -> web.Response:
        name = self._find(request).name
        restarting = self._reopening.run(partial(self._controller.restart, name))
        return web.json_response(self._as_json(await self._opened(restarting, self._reopening.limit_s)))

    async def _change(self, request: web.Request) -> web.Response:
        wanted = await read_body(request, Changes)
        name = name_of(self._runner, request)
        await update(self._controller, name, changes_of(wanted), self._changing)
        return web.json_response(self._as_json(self._runner.status(name)))

    async def _end(self, request: web.Request) -> web.Response:
        self._find(request)
        name = request.match_info["name"]
        try:
            await self._ending.run(partial(self._controller.remove, name))
        except BusyError:
            raise refusal(web.HTTPServiceUnavailable, "too many streams are being ended; try again") from None
        except TimeoutError:
            raise refusal(web.HTTPConflict, f"'{name}' is being ended, and has not ended yet") from None
        except NotKeptError as error:
            raise refusal(web.HTTPServiceUnavailable, str(error)) from None
        except ConfigError as error:  # as where the file cannot be written without the stream
            raise refusal(web.HTTPConflict, str(error)) from None
        except StreamError as error:
            if name in self._runner.names:  # else it has ended meanwhile
                raise refusal(web.HTTPConflict, str(error)) from None
        return web.Response(status=204)

    async def _preflight(self, request: web.Request) -> web.Response:
        return await self._auth.preflight(request, "GET, POST, PATCH, DELETE", "application/json")

    def _find(self, request: web.Request) -> StreamStatus:
        """The status of the stream that is asked for, which may have failed."""
        try:
            return self._runner.status(request.match_info["name"])
        except StreamError as error:
            raise refusal(web.HTTPNotFound, str(error)) from None

    @staticmethod
    def _as_json(status: StreamStatus) -> dict[str, Any]:
        """A stream as JSON; times in milliseconds, null where nothing is known yet."""
        report, now = status.report, status.report.recent
        return {
            "name": status.name,
            "source": status.source,
            "state": status.state,
            "ok": status.ok,
            "reason": status.reason,
            "detail": status.detail,
            "live": status.live,
            **_prompts_and_share(status),
            "fps": round(now.fps, 2),
            "age_ms": now.age_ms and round(now.age_ms, 1),
            "latency_ms": {"p50": now.p50_ms and round(now.p50_ms, 1), "p99": now.p99_ms and round(now.p99_ms, 1)},
            "objects": now.objects,
            "frames_in": report.read,
            "frames_out": report.frames,
            "dropped": report.drops,
            **({} if status.worker is None and status.state != "waiting" else {"worker": status.worker}),
        }


def _prompts_and_share(status: StreamStatus) -> dict[str, Any]:
    wanted: Changes | ListedStream = status.config or Changes()
    prompts = status.prompts or Prompts.model_construct(**{key: getattr(wanted, key) for key in Prompts.model_fields})
    return {**prompts.model_dump(), **{key: getattr(wanted, key) for key in ShareSettings.model_fields}}


def name_of(runner: Runner, request: web.Request) -> str:
    """The name of the stream that a request is about; raises an HTTP error if none of that name runs."""
    name: str = request.match_info["name"]
    try:
        runner.require(name)
    except StreamError as error:
        raise refusal(web.HTTPNotFound, str(error)) from None
    return name


def wanted_of(controller: Controller, name: str) -> ListedStream:
    """What a stream that runs is to run by; raises an HTTP error where a program began it."""
    try:
        return controller.stream(name)
    except StreamError as error:
        raise refusal(web.HTTPConflict, str(error)) from None


async def update(controller: Controller, name: str, values: Mapping[str, Any], calls: BlockingCalls) -> ListedStream:
    """What a stream runs by once values of it have changed; raises an HTTP error if it cannot run so."""
    try:
        return await calls.run(partial(controller.update, name, values))
    except (BusyError, TimeoutError):
        raise refusal(web.HTTPServiceUnavailable, "too many changes are being made; try again") from None
    except StreamError as error:
        raise refusal(web.HTTPConflict, str(error)) from None
    except NotKeptError as error:
        raise refusal(web.HTTPServiceUnavailable, str(error)) from None
    except (ConfigError, EngineError) as error:
        raise refusal(web.HTTPUnprocessableEntity, str(error)) from None


def changes_of(wanted: BaseModel) -> dict[str, Any]:
    """What a body sets."""
    return {key: getattr(wanted, key) for key in wanted.model_fields_set}


def parse_json(text: str) -> Any:
    """The value that a JSON text of a client stands for.

    Raises:
        ValueError: if it is not JSON, or holds half of a surrogate pair, which JSON can write and UTF-8 cannot.
        RecursionError: if it is nested too deeply.
    """
    value = json.loads(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value


async def read_body(request: web.Request, kind: type[M]) -> M:
    """The body of a request as an object of a kind; raises an HTTP error that says what is wrong with it."""
    if request.content_type != "application/json":
        raise refusal(web.HTTPUnsupportedMediaType, "the body must be of type application/json")
    try:
        # Not parse_json(): a name of a file may have bytes that are not UTF-8, as halves of surrogate pairs. Texts that
        # are no names refuse them.
        values = json.loads(await read_text(request, MAX_BODY_BYTES, "a body"))
    except (ValueError, RecursionError):
        raise refusal(web.HTTPBadRequest, "the body is not JSON") from None
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise refusal(web.HTTPUnprocessableEntity, explain(first_mistake(error), kind)) from None
    except UnicodeEncodeError:  # by pydantic, of a validator's message
        raise refusal(web.HTTPUnprocessableEntity, NOT_UNICODE) from None


async def read_stream(request: web.Request) -> StreamConfig:
    """The stream that a request wants opened; raises an HTTP error where it cannot be had."""
    wanted = await read_body(request, StreamConfig)
    if wanted.nothing:
        raise refusal(web.HTTPUnprocessableEntity, wanted.nothing)
    if wanted.heatmap:  # as with outputs: a client names no file that is written here
        reason = "heatmap: is for a configuration; over HTTP it is GET /streams/NAME/heatmap.png"
        raise refusal(web.HTTPUnprocessableEntity, reason)
    if wanted.record:
        raise refusal(web.HTTPUnprocessableEntity, "record: is for a configuration: a client names no files")
    return wanted
