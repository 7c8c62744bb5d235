"""The HTTP face of several workers, as that of one process: as routes for any aiohttp application.

What concerns one stream is forwarded to its worker, what concerns the model to any; lists, health and metrics are those
of all together. Streams are added and removed by the supervisor. Besides the routes of one process:

    GET /workers    each with its state, memory, load and streams, and how often and how fast it was started again

Authentication is elsewhere (`saccade.pipeline.server.http_server`). Knows nothing of processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST
from saccade.pipeline.server.access import client_of
from saccade.pipeline.server.static_files import FILES, file_route, send_file
from saccade.pipeline.server.streams_api import OPEN_S, read_stream
from saccade.sources.http.auth import HttpAuth, refusal

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import Prompts, ShareSettings
from saccade.pipeline.config.stream_names import name_of
from saccade.pipeline.errors import StreamError
from saccade.pipeline.workers.front.forwarding import Forwarder, unavailable
from saccade.pipeline.workers.front.metrics import MergedMetrics
from saccade.pipeline.workers.states import RefusedError, StreamState, WorkerSeat
from saccade.pipeline.workers.supervisor import Supervisor
from saccade.sources import redact

_END_S = 20.0
_REFUSALS: dict[str, type[web.HTTPException]] = {"NotAllowedError": web.HTTPForbidden, "StreamError": web.HTTPConflict}
_ONE = "/streams/{name}"
_OF_STREAM = (f"{_ONE}/{{rest:.+}}", "/whep/{stream}", "/whep/{stream}/{session}")
_OF_MODEL = ("/names", "/v1/{rest:.+}")


class FrontApi:
    """The routes.

    Attributes:
        public: paths that need no token.

    Args:
        supervisor: runs the streams.
        forwarder: asks the workers.
        auth: answers preflight requests.
        metrics: of all workers.
        events: whether events are stored, for the page.
    """

    public: Sequence[str] = (*FILES, "/clip.mp4")

    def __init__(
        self,
        supervisor: Supervisor,
        forwarder: Forwarder,
        auth: HttpAuth,
        metrics: MergedMetrics,
        *,
        events: bool = False,
    ) -> None:
        self._supervisor = supervisor
        self._forwarder = forwarder
        self._auth = auth
        self._metrics = metrics
        self._events = events

    def routes(self) -> list[web.AbstractRouteDef]:
        """All of them."""
        own = [
            web.get("/livez", self._live),
            web.get("/readyz", self._ready),
            web.get("/healthz", self._health),
            web.get("/metrics", self._show_metrics),
            web.get("/workers", self._workers),
            web.get("/streams", self._list),
            web.post("/streams", self._begin),
            web.get(_ONE, self._show),
            web.patch(_ONE, self._of_stream),
            web.delete(_ONE, self._end),
            web.post(f"{_ONE}/restart", self._restart),
            web.get("/model", self._model),
            web.get("/clip.mp4", _clip),
            *(file_route(place, path) for place, path in FILES.items()),
        ]
        ours = ("/streams", _ONE, f"{_ONE}/restart")
        return [
            *own,
            *(web.options(path, self._preflight) for path in (*ours, *_OF_STREAM, *_OF_MODEL)),
            *(web.route("*", path, self._of_stream) for path in _OF_STREAM),
            *(web.route("*", path, self._of_model) for path in _OF_MODEL),
        ]

    # ---- of all

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"ok": True})

    async def _ready(self, request: web.Request) -> web.Response:
        ready = self._supervisor.any_url() is not None
        return web.json_response({"ok": ready}, status=200 if ready else 503)

    async def _health(self, request: web.Request) -> web.Response:
        statuses = await self._statuses(request)
        unhealthy = {one["name"]: f"{one['state']}: {one['reason'] or 'no frame'}" for one in statuses if not one["ok"]}
        away = {seat.name: seat.reason or "starting" for seat in self._supervisor.seats() if not seat.ready}
        health: dict[str, Any] = {"ok": not unhealthy, "streams": len(statuses), "unhealthy": unhealthy}
        if away:
            health["workers"] = away
        return web.json_response(health, status=503 if unhealthy else 200)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        text = await self._metrics.as_text(self._forwarder)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _workers(self, request: web.Request) -> web.Response:
        streams = self._supervisor.streams().values()
        return web.json_response({"workers": [seat_as_json(seat, streams) for seat in self._supervisor.seats()]})

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"streams": await self._statuses(request)})

    async def _statuses(self, request: web.Request) -> list[dict[str, Any]]:
        """Every stream that the client may see, in the order in which they were added."""
        seats = [seat for seat in self._supervisor.seats() if seat.ready]
        answers = await asyncio.gather(*(self._forwarder.get(request, seat.url, "/streams") for seat in seats))
        known = {
            one["name"]: {**one, "worker": seat.name}
            for seat, answer in zip(seats, answers, strict=True)
            if answer is not None
            for one in answer["streams"]
        }
        client = client_of(request)
        wanted = self._supervisor.streams()
        return [
            known[name] if stream.phase == "open" and name in known else waiting_as_json(stream)
            for name, stream in wanted.items()
            if client.sees(name)
        ]

    # ---- of one stream

    async def _show(self, request: web.Request) -> web.Response:
        return web.json_response(await self._status(request, self._find(request).name))

    async def _status(self, request: web.Request, name: str) -> dict[str, Any]:
        stream = self._supervisor.streams().get(name)
        answer = await self._forwarder.get(request, self._supervisor.url_of(name), f"/streams/{name}")
        if stream is None:
            raise refusal(web.HTTPNotFound, f"no stream is called '{name[:80]}'")
        return waiting_as_json(stream) if answer is None else {**answer, "worker": stream.worker}

    async def _of_stream(self, request: web.Request) -> web.StreamResponse:
        stream = self._find(request)
        response = await self._forwarder.forward(request, self._supervisor.url_of(stream.name))
        if request.method not in ("GET", "POST") and response.status < 300:
            self._supervisor.refresh(stream.name)
        return response

    async def _begin(self, request: web.Request) -> web.Response:
        wanted = await read_stream(request)
        config = wanted.model_dump(mode="json", exclude_unset=True)
        name = await self._opened(config, wanted.name or name_of(wanted.source), or_similar=wanted.name is None)
        status = await self._status(request, name)
        return web.json_response(status, status=201, headers={"Location": f"/streams/{name}"})

    async def _opened(self, config: dict[str, Any], wanted: str, *, or_similar: bool) -> str:
        def begin() -> Future[str]:
            return self._supervisor.open(config, wanted, or_similar=or_similar, checked=True)

        return await self._wait_for(begin)

    async def _wait_for(self, begin: Callable[[], Future[str]]) -> str:
        """The name of a stream, once it is open; raises an HTTP error if it cannot be opened."""
        if self._supervisor.any_url() is None:
            raise unavailable()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(begin()), OPEN_S)
        except TimeoutError:
            raise refusal(web.HTTPGatewayTimeout, f"the stream did not open within {OPEN_S:g} s") from None
        except StreamError as error:
            raise refusal(web.HTTPConflict, str(error)) from None
        except RefusedError as error:
            raise refusal(_REFUSALS.get(error.kind, web.HTTPUnprocessableEntity), str(error)) from None

    async def _end(self, request: web.Request) -> web.Response:
        name = self._find(request).name
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._supervisor.close_stream(name)), _END_S)
        except TimeoutError:
            raise refusal(web.HTTPConflict, f"'{name}' is being ended, and has not ended yet") from None
        except StreamError:
            pass  # it has ended meanwhile
        return web.Response(status=204)

    async def _restart(self, request: web.Request) -> web.Response:
        stream = self._find(request)
        await self._wait_for(lambda: self._supervisor.restart(stream.name))
        return web.json_response(await self._status(request, stream.name))

    def _find(self, request: web.Request) -> StreamState:
        name = request.match_info.get("name") or request.match_info["stream"]
        stream = self._supervisor.streams().get(name)
        if stream is None:
            raise refusal(web.HTTPNotFound, f"no stream is called '{name[:80]}'")
        return stream

    # ---- of the model

    async def _of_model(self, request: web.Request) -> web.StreamResponse:
        return await self._forwarder.forward(request, self._supervisor.any_url())

    async def _model(self, request: web.Request) -> web.Response:
        answer = await self._forwarder.get(request, self._supervisor.any_url(), "/model")
        if answer is None:
            raise unavailable()
        return web.json_response({**answer, "events": self._events})

    async def _preflight(self, request: web.Request) -> web.Response:
        return await self._auth.preflight(request, "GET, POST, PUT, PATCH, DELETE", "application/json, application/sdp")


def seat_as_json(seat: WorkerSeat, streams: Iterable[StreamState]) -> dict[str, Any]:
    """A worker, for a list."""
    report = seat.report
    return {
        "name": seat.name,
        "state": "ready" if seat.ready else "starting" if seat.worker else "ended",
        "reason": None if seat.ready else seat.reason,
        "pid": seat.pid if seat.ready else None,
        "streams": [stream.name for stream in streams if stream.worker == seat.name],
        "busy": report.busy if report else None,
        "rss_bytes": report.rss_bytes if report else None,
        "starts": seat.starts,
        "restarted_in_s": [round(seconds, 3) for seconds in seat.restarted_in_s],
    }


def waiting_as_json(stream: StreamState) -> dict[str, Any]:
    """A stream that no worker has at the moment, with the keys of one that has."""
    config = stream.config
    failed = stream.phase == "failed"
    prompts = {key: config.get(key, field.default) for key, field in Prompts.model_fields.items()}
    share = {key: config.get(key, field.default) for key, field in ShareSettings.model_fields.items()}
    return {
        "name": stream.name,
        "source": redact(str(config.get("source", ""))),
        "state": "failed" if failed else "waiting",
        "ok": False,
        "reason": stream.reason if failed else "waiting for a worker",
        "detail": None,
        "live": stream.live is not False,
        **prompts,
        **share,
        "fps": 0.0,
        "age_ms": None,
        "latency_ms": {"p50": None, "p99": None},
        "objects": 0,
        "frames_in": 0,
        "frames_out": 0,
        "dropped": {},
        "worker": None,
    }


async def _clip(request: web.Request) -> web.StreamResponse:
    return await send_file(request, DEMO_CLIP, {})
