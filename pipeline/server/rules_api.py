"""The rules of a running stream over HTTP, as routes for any aiohttp application.

    GET    /streams/door/rules    {"rules": […]} as in a configuration
    PUT    /streams/door/rules    replaces them, from the next frame on; the event of one that stays the same goes on
    DELETE /streams/door/rules    removes them all

Authentication is elsewhere (`saccade.pipeline.server.http_server`).
"""

from __future__ import annotations

from aiohttp import web
from pydantic import BaseModel, ConfigDict

from saccade.engine import EngineError
from saccade.pipeline.analytics.analyze import analyze_stage
from saccade.pipeline.core.errors import ConfigError
from saccade.pipeline.core.run_tasks import check_asked, missing_tasks
from saccade.pipeline.core.stream_manager import Streams
from saccade.pipeline.core.stream_run import Run
from saccade.pipeline.events.settings import Rules, RuleSettings, check_places
from saccade.pipeline.events.stage import EventStage, event_stage
from saccade.pipeline.server.streams_api import read_body, run_of
from saccade.pipeline.settings import PlacedError
from saccade.sources.http.auth import HttpAuth, refusal


class RuleList(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rules: Rules


class RulesApi:
    """The routes.

    Args:
        streams: whose rules.
        auth: answers preflight requests.
    """

    def __init__(self, streams: Streams, auth: HttpAuth) -> None:
        self._streams = streams
        self._auth = auth

    def routes(self) -> list[web.AbstractRouteDef]:
        """All of them."""
        path = "/streams/{name}/rules"
        return [
            web.get(path, self._show),
            web.put(path, self._replace),
            web.delete(path, self._remove),
            web.options(path, self._preflight),
        ]

    async def _show(self, request: web.Request) -> web.Response:
        return self._listed(self._stage(run_of(self._streams, request)))

    async def _replace(self, request: web.Request) -> web.Response:
        wanted = (await read_body(request, RuleList)).rules
        run = run_of(self._streams, request)
        stage = self._stage(run)
        try:
            self._prepare(run, wanted)
        except (ConfigError, EngineError, PlacedError) as error:
            raise refusal(web.HTTPUnprocessableEntity, str(error)) from None
        stage.rules = wanted
        return self._listed(stage)

    async def _remove(self, request: web.Request) -> web.Response:
        self._stage(run_of(self._streams, request)).rules = ()
        return web.Response(status=204)

    async def _preflight(self, request: web.Request) -> web.Response:
        return await self._auth.preflight(request, "GET, PUT, DELETE", "application/json")

    def _prepare(self, run: Run, rules: list[RuleSettings]) -> None:
        """Have the stream tracked, and what the rules name detected."""
        analysis = analyze_stage(run.stages)
        if analysis is None:
            raise ConfigError("the stream was started by a program without a stage for tracks")
        check_places(rules, analysis.regions)
        check_asked(self._stage(run), rules)
        run.tasks = (*run.tasks, *missing_tasks(self._streams.engine, run.tasks, rules))
        analysis.need_tracks()

    def _stage(self, run: Run) -> EventStage:
        stage = event_stage(run.stages)
        if stage is None:
            raise refusal(web.HTTPConflict, "the stream was started by a program without a stage for events")
        return stage

    def _listed(self, stage: EventStage) -> web.Response:
        return web.json_response({"rules": [rule.model_dump(mode="json", exclude_unset=True) for rule in stage.rules]})
