"""Routes for the zones, lines and object counts of a stream.

Times of live streams are Unix times. Times of video files are seconds from the start of the file.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import cv2
from pydantic import BaseModel
from starlette.responses import Response

from saccade.pipeline.analytics.analyze import AnalyzeStage
from saccade.pipeline.analytics.settings import Regions
from saccade.pipeline.analytics.stages import find_stage
from saccade.pipeline.api.forward import InThisProcess, WorkerRoute
from saccade.pipeline.api.routes import Json, Routes, Wanted, bad_values
from saccade.pipeline.api.streams import Changing, known
from saccade.pipeline.events.storage.store_reader import finite
from saccade.web.errors import HttpError

routes = Routes("zones")
drawn = Routes("heatmap", WorkerRoute)

Counts = dict[str, dict[str, dict[str, int]]]


class CountedTotals(BaseModel):
    """The number of tracked objects by label, and the counts of each zone and line."""

    objects: dict[str, int]
    zones: Counts
    lines: Counts


class CountedMinute(CountedTotals):
    """The object counts of one minute. `start` is the start of the minute, in seconds."""

    start: int


class Counted(BaseModel):
    """The object counts since the start of the stream, and the counts of each requested minute."""

    totals: CountedTotals
    minutes: list[CountedMinute]


@routes.get("/streams/{name}/zones", role="viewer", response_model=Regions)
async def show(name: str, controller: Wanted) -> Response:
    """Return the zones and lines of a stream, in the format of the configuration file."""
    await known(controller, name)
    return _regions(controller.stream(name))


@routes.put("/streams/{name}/zones", role="operator", response_model=Regions)
async def replace(name: str, wanted: Regions, calls: Changing) -> Response:
    """Replace the zones and lines of a stream from the next frame on.

    Unchanged zones and lines keep their object counts.
    """
    return _regions(await calls.update(name, {"zones": wanted.zones, "lines": wanted.lines}))


@routes.delete("/streams/{name}/zones", role="operator", status_code=204)
async def remove(name: str, calls: Changing) -> None:
    """Remove all zones and lines of a stream."""
    await calls.update(name, {"zones": {}, "lines": {}})


@routes.get("/streams/{name}/counts", role="viewer")
async def counts(name: str, controller: Wanted, since: str = "0") -> Counted:
    """Return the object counts of a stream since its start, and for each minute after `since` (at most 24 hours)."""
    with bad_values(422):
        start = finite(since, "since should be a Unix time in seconds, such as 1795262111")
    await known(controller, name)
    totals, minutes = await asyncio.to_thread(controller.runner.counts, name, start)
    added = [{"start": minute.start, **asdict(minute.counts)} for minute in minutes]
    return Counted.model_validate({"totals": asdict(totals), "minutes": added})


@drawn.get("/streams/{name}/heatmap.png", role="viewer", response_class=Response)
async def heatmap(name: str, here: InThisProcess) -> Response:
    """Return a heatmap of object positions in a stream, as a transparent PNG to overlay on the video."""
    stage = find_stage(here.running(name).stages, AnalyzeStage)
    if stage is None:
        raise HttpError(409, f"stream '{name}' counts no objects: it was opened without the stage AnalyzeStage")
    heat = stage.heat

    def draw() -> bytes:
        done, data = cv2.imencode(".png", cv2.cvtColor(heat.overlay(), cv2.COLOR_RGBA2BGRA))
        assert done
        return data.tobytes()

    image = await asyncio.to_thread(draw)
    return Response(image, media_type="image/png", headers={"Cache-Control": "no-store"})


def _regions(config: Any) -> Response:
    return Json(config.model_dump(mode="json", include={"zones", "lines"}))
