"""Routes of the HTTP API that show, add, change and remove streams.

The JSON keys of a stream are the same as in the configuration file.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Annotated, Any

from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from saccade.pipeline.api.blocking_calls import BlockingCalls
from saccade.pipeline.api.prometheus import Metrics
from saccade.pipeline.api.routes import YAML, AnyText, Json, Routes, Wanted, Who, the
from saccade.pipeline.config import Changes, ListedStream, Prompts, ShareSettings, StreamConfig
from saccade.pipeline.config.text import shown_stream, text_of_stream
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.errors import ConfigError, NotKeptError, StreamError
from saccade.pipeline.runtime.streams import StreamStatus
from saccade.web.errors import HttpError

OPEN_S = 15.0  # time limit for opening a source, such as a file on a network, and its outputs
_END_S = 20.0  # longer than the wait of `Streams.remove`
_MAX_OPENING = 8
_MAX_CHANGING = 32

routes = Routes("streams")


class Calls:
    """Runs slow operations on streams, such as opening and stopping, in threads.

    Args:
        controller: controller of the streams.
    """

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        busy = "too many streams are being opened"
        self.opening, self.reopening = (
            BlockingCalls(_MAX_OPENING, limit_s, busy, (504, f"the stream did not open within {limit_s:g} s"))
            for limit_s in (OPEN_S, _END_S + OPEN_S)
        )
        late = (409, "the stream is still being stopped; try again")
        self.ending = BlockingCalls(_MAX_OPENING, _END_S, "too many streams are being stopped", late)
        busy = "too many changes are being made"
        self.changing = BlockingCalls(_MAX_CHANGING, OPEN_S, busy, (503, f"{busy}; try again"))

    async def update(self, name: str, values: Mapping[str, Any]) -> ListedStream:
        """Change settings of a stream. Return the new configuration of the stream."""
        await known(self.controller, name)
        return await self.changing.ask(self.controller.update, name, values)


Changing = Annotated[Calls, the(Calls)]


class Ok(BaseModel):
    """The result of a health check: `ok` is true if the check passed."""

    ok: bool


class Health(Ok):
    """The result of a health check of all streams. `unhealthy` maps the name of each unhealthy stream to the reason."""

    streams: int
    unhealthy: dict[str, AnyText]
    sinks: dict[str, AnyText | None] | None = Field(
        None, description="names of paused sinks, which are retried; a restart of Saccade is not needed"
    )
    workers: dict[str, AnyText] | None = Field(None, description="workers that are not ready")


class LatencyMs(BaseModel):
    """The median and the 99th percentile of a stream's recent latency, in milliseconds. `null` if unknown."""

    p50: float | None
    p99: float | None


class StreamState(BaseModel):
    """The name, the source and the state of a stream."""

    name: AnyText
    source: AnyText
    state: str
    ok: bool
    reason: AnyText | None
    detail: AnyText | None
    live: bool


class Stream(ShareSettings, Prompts, StreamState):
    """The state of a stream, and its prompts. The prompts are `null` if unknown."""

    fps: float
    age_ms: float | None
    latency_ms: LatencyMs
    objects: int
    frames_in: int
    frames_out: int
    dropped: dict[str, int]
    worker: str | None = None


class StreamDetails(Stream):
    """The state of a stream, and its configuration."""

    config: dict[str, Any] | None


class Streams(BaseModel):
    """All streams that the client can access."""

    streams: list[Stream]


class Worker(BaseModel):
    """The status of a worker process, which runs an inference engine."""

    name: str
    state: str
    reason: AnyText | None
    pid: int | None
    streams: list[str]
    busy: float | None = Field(description="fraction of time in which the worker's engine is busy, from 0 to 1")
    rss_bytes: int | None
    starts: int
    restarted_in_s: list[float]


class Workers(BaseModel):
    """The status of all worker processes."""

    workers: list[Worker]


@routes.get("/livez", role="anyone")
async def live() -> Ok:
    """Return 200 while the HTTP server runs. No token is needed."""
    return Ok(ok=True)


@routes.get("/readyz", role="anyone", response_model=Ok)
async def ready(controller: Wanted) -> Response:
    """Return 200 if streams can be added and the model responds, otherwise 503. No token is needed."""
    runner = controller.runner
    is_ready = runner.ready and all(status.state != "stuck" for status in runner.statuses())
    return Json({"ok": is_ready}, 200 if is_ready else 503)


@routes.get("/healthz", role="viewer", response_model=Health)
async def health(controller: Wanted) -> Response:
    """Return 200 if every stream is healthy, otherwise 503 with the unhealthy streams."""
    runner = controller.runner
    statuses = runner.statuses()
    unhealthy = {one.name: f"{one.state}: {one.reason or 'no frame'}" for one in statuses if not one.ok}
    found: dict[str, Any] = {"ok": not unhealthy, "streams": len(statuses), "unhealthy": unhealthy}
    if paused := {sink.name: sink.reason for _, sink in runner.sink_statuses() if sink.state == "paused"}:
        found["sinks"] = paused  # the status stays 200
    if away := {one.name: one.reason or one.state for one in runner.workers() if one.state != "ready"}:
        found["workers"] = away
    return Json(found, 503 if unhealthy else 200)


@routes.get("/metrics", role="viewer", response_class=Response)
async def metrics(shown: Annotated[Metrics, the(Metrics)]) -> Response:
    """Return the metrics of Saccade in the text format of Prometheus."""
    return Response(await asyncio.to_thread(shown.as_text), headers={"Content-Type": CONTENT_TYPE_LATEST})


@routes.get("/workers", role="viewer")
async def workers(controller: Wanted) -> Workers:
    """List the worker processes, each with its streams, engine load, memory use and restarts."""
    found = await asyncio.to_thread(controller.runner.workers)
    return Workers(workers=[Worker.model_validate(one, from_attributes=True) for one in found])


@routes.get("/streams", role="viewer", limited="always", response_model_exclude_unset=True)
async def list_streams(controller: Wanted, who: Who) -> Streams:
    """List all streams that the client can access."""
    return Streams.model_construct(streams=[shown(one) for one in controller.runner.statuses() if who.sees(one.name)])


@routes.post("/streams", role="admin", status_code=201, response_model=Stream, response_model_exclude_unset=True)
async def add(wanted: StreamConfig, calls: Changing, response: Response) -> Stream:
    """Add a stream. The JSON keys are the same as in the configuration file, but output files are not allowed."""
    if wanted.nothing:
        raise HttpError(422, wanted.nothing)
    if wanted.heatmap:  # clients must not choose files on the server
        raise HttpError(
            422,
            "heatmap: not available over HTTP; use GET /streams/NAME/heatmap.png, or set it in the configuration file",
        )
    if wanted.record:
        raise HttpError(422, "record: not available over HTTP; set it in the configuration file")

    def undo(status: StreamStatus) -> None:
        """Remove a stream that opened after the timeout. The client has already received an error."""
        threading.Thread(target=calls.controller.remove, args=(status.name,), name="saccade undo", daemon=True).start()

    status = await calls.opening.ask(calls.controller.add, wanted, undo=undo)
    response.headers["Location"] = f"/streams/{status.name}"
    return shown(status)


@routes.get("/streams/{name}", role="viewer", response_model=StreamDetails, response_model_exclude_unset=True)
async def show(name: str, request: Request, controller: Wanted) -> Response:
    """Return the state and configuration of a stream. `Accept: application/yaml` returns only the configuration."""
    status = await known(controller, name)
    if YAML in request.headers.get("Accept", "") and status.config is not None:
        return Response(text_of_stream(status.config), media_type=f"{YAML}; charset=utf-8")
    config = None if status.config is None else shown_stream(status.config)
    return Json({**shown(status).model_dump(exclude_unset=True), "config": config})


@routes.patch("/streams/{name}", role="operator", response_model_exclude_unset=True)
async def change(name: str, wanted: Changes, calls: Changing) -> Stream:
    """Change settings of a stream. The new settings apply from the next frame on."""
    await calls.update(name, changes_of(wanted))
    return shown(await known(calls.controller, name))


@routes.delete("/streams/{name}", role="admin", status_code=204)
async def remove(name: str, calls: Changing) -> None:
    """Stop a stream, and remove it from the list of streams."""
    await known(calls.controller, name)
    try:
        await calls.ending.ask(calls.controller.remove, name)
    except NotKeptError:
        raise
    except ConfigError as error:  # for example if the configuration file cannot be saved without the stream
        raise HttpError(409, str(error)) from None
    except StreamError as error:
        if name in calls.controller.runner.names:  # otherwise it has ended in the meantime
            raise HttpError(409, str(error)) from None


@routes.post("/streams/{name}/restart", role="operator", response_model_exclude_unset=True)
async def restart(name: str, calls: Changing) -> Stream:
    """Stop a stream, and open it again with its current configuration. This also restarts a failed stream."""
    await known(calls.controller, name)
    return shown(await calls.reopening.ask(calls.controller.restart, name))


async def known(controller: Controller, name: str) -> StreamStatus:
    """Return the status of a stream, even if the stream has failed.

    Raises:
        HttpError: with status 404 if the stream does not exist.
    """
    try:
        return controller.runner.status(name)
    except StreamError as error:
        raise HttpError(404, str(error)) from None


def changes_of(wanted: BaseModel) -> dict[str, Any]:
    """Return the fields that a request body sets, with their values."""
    return {key: getattr(wanted, key) for key in wanted.model_fields_set}


def shown(status: StreamStatus) -> Stream:
    """Convert the status of a stream to the JSON format of the API. Latencies are in milliseconds."""
    report, now = status.report, status.report.recent
    share = status.config or ShareSettings()
    values: dict[str, Any] = (status.prompts or Prompts()).model_dump()
    values |= {key: getattr(share, key) for key in ShareSettings.model_fields}
    values |= {key: getattr(status, key) for key in ("name", "source", "state", "ok", "reason", "detail", "live")}
    if status.worker is not None:
        values["worker"] = status.worker
    return Stream.model_construct(
        **values,
        fps=round(now.fps, 2),
        age_ms=now.age_ms and round(now.age_ms, 1),
        latency_ms=LatencyMs(p50=now.p50_ms and round(now.p50_ms, 1), p99=now.p99_ms and round(now.p99_ms, 1)),
        objects=now.objects,
        frames_in=report.read,
        frames_out=report.frames,
        dropped=dict(report.drops),
    )
