"""The rules of a running stream over HTTP, as routes for any aiohttp application.

    GET    /streams/door/rules          {"rules": […]} as in a configuration; with Accept: application/yaml a YAML list
    PUT    /streams/door/rules          replaces them, from the next frame on; the event of one that stays the same goes
                                        on. A mistake in YAML comes back as {"error": …, "line": 2, "column": 9}
    DELETE /streams/door/rules          removes them all
    POST   /streams/door/rules/check    as PUT, but nothing is changed
    GET    /streams/door/rules/state    how each is doing: if its condition holds, p(yes) of its question, its event;
                                        {"rules": null} of a stream that can have none

Authentication is elsewhere (`saccade.pipeline.server.http_server`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from aiohttp import web

from saccade.engine import EngineError
from saccade.pipeline.analytics.analyze import analyze_stage
from saccade.pipeline.analytics.settings import Regions
from saccade.pipeline.config.edit_rules import text_of_rules
from saccade.pipeline.config.file import RuleList, read_rules
from saccade.pipeline.errors import ConfigError, TextError
from saccade.pipeline.events.machine import RuleState
from saccade.pipeline.events.settings import RuleSettings, check_places
from saccade.pipeline.events.stage import EventStage, event_stage
from saccade.pipeline.runtime.run import Run
from saccade.pipeline.runtime.streams import Streams
from saccade.pipeline.runtime.tasks import check_asked, missing_tasks
from saccade.pipeline.server.streams_api import MAX_BODY_BYTES, read_body, run_of
from saccade.pipeline.settings import PlacedError
from saccade.sources.http.auth import HttpAuth, read_text, refusal

if TYPE_CHECKING:
    from saccade.engine import Engine

_YAML = "application/yaml"


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
            web.post(f"{path}/check", self._check),
            web.get(f"{path}/state", self._state),
            *(web.options(one, self._preflight) for one in (path, f"{path}/check", f"{path}/state")),
        ]

    async def _show(self, request: web.Request) -> web.Response:
        stage = self._stage(run_of(self._streams, request))
        if _YAML in request.headers.get("Accept", ""):
            return web.Response(text=text_of_rules(stage.rules), content_type=_YAML)
        return self._listed(stage.rules)

    async def _replace(self, request: web.Request) -> web.Response:
        run = run_of(self._streams, request)
        self._stage(run)
        try:
            rules = await self._wanted(request, run)
        except TextError as error:
            return _mistake(error)
        change_rules(run, self._streams.engine, rules)
        return self._listed(rules)

    async def _check(self, request: web.Request) -> web.Response:
        run = run_of(self._streams, request)
        self._stage(run)
        try:
            return self._listed(await self._wanted(request, run))
        except TextError as error:
            return _mistake(error)

    async def _remove(self, request: web.Request) -> web.Response:
        self._stage(run_of(self._streams, request)).rules = ()
        return web.Response(status=204)

    async def _state(self, request: web.Request) -> web.Response:
        run = run_of(self._streams, request)
        stage = event_stage(run.stages)
        if stage is None:  # as that of a page's own camera
            return web.json_response({"rules": None})
        states = {state.name: state for state in stage.states}
        return web.json_response({"rules": [_described(rule, states.get(rule.name), run) for rule in stage.rules]})

    async def _preflight(self, request: web.Request) -> web.Response:
        return await self._auth.preflight(request, "GET, POST, PUT, DELETE", "application/json")

    async def _wanted(self, request: web.Request, run: Run) -> list[RuleSettings]:
        """The rules in a request, which the stream can have; raises TextError, or an HTTP error, if it cannot."""

        def check(rules: list[RuleSettings]) -> None:
            check_rules(run, self._streams.engine, rules)

        try:
            if request.content_type == _YAML:
                return read_rules(await read_text(request, MAX_BODY_BYTES, "a body"), check)
            rules = (await read_body(request, RuleList)).rules
            check(rules)
            return rules
        except TextError:
            raise
        except (ConfigError, PlacedError) as error:
            raise refusal(web.HTTPUnprocessableEntity, str(error)) from None

    def _stage(self, run: Run) -> EventStage:
        stage = event_stage(run.stages)
        if stage is None:
            raise refusal(web.HTTPConflict, "the stream was started by a program without a stage for events")
        return stage

    def _listed(self, rules: Sequence[RuleSettings]) -> web.Response:
        return web.json_response({"rules": [rule.model_dump(mode="json", exclude_unset=True) for rule in rules]})


def check_rules(run: Run, engine: Engine, rules: Sequence[RuleSettings], regions: Regions | None = None) -> None:
    """Check that a stream can have rules.

    Args:
        run: of the stream.
        engine: finds what they name.
        rules: those wanted.
        regions: the zones and lines that they may name; None for those that the stream has.

    Raises:
        PlacedError: if one names a place that is not there, or what the model does not know; or asks something that
            nothing can answer.
        ConfigError: if the stream has no stages for them.
    """
    analysis, stage = analyze_stage(run.stages), event_stage(run.stages)
    if analysis is None or stage is None:
        raise ConfigError("the stream was started by a program without stages for tracks and events")
    check_places(list(rules), regions or analysis.regions)
    for number, rule in enumerate(rules):
        key, part = ("rules", number, "when"), rule.when
        try:
            missing_tasks(engine, run.tasks, [rule])
            key, part = ("rules", number, "ask" if rule.ask else "verify" if rule.verify else "attributes"), ""
            check_asked(stage, [rule])
        except (ConfigError, EngineError) as error:
            named = next((part.find(label) for label in rule.condition.labels if f"'{label}'" in str(error)), 0)
            raise PlacedError(str(error), max(0, named), key) from None


def change_rules(run: Run, engine: Engine, rules: Sequence[RuleSettings]) -> None:
    """Have a stream watch other rules from the next frame on; it is tracked, and what they name is detected.

    Raises:
        EngineError: if the model does not know what they name; see `check_rules`.
    """
    analysis, stage = analyze_stage(run.stages), event_stage(run.stages)
    if analysis is None or stage is None:
        return
    run.tasks = (*run.tasks, *missing_tasks(engine, run.tasks, rules))
    if rules:
        analysis.need_tracks()
    stage.rules = rules


def _mistake(error: TextError) -> web.Response:
    return web.json_response({"error": str(error), "line": error.line, "column": error.column}, status=422)


def _described(rule: RuleSettings, state: RuleState | None, run: Run) -> dict[str, Any]:
    """A rule as the console shows it."""
    described: dict[str, Any] = {"name": rule.name, "when": rule.when, "ask": rule.ask, "expect": rule.expect}
    analysis, problem = analyze_stage(run.stages), None
    try:
        check_places([rule], analysis.regions if analysis else Regions())
    except PlacedError as error:
        problem = str(error)
    described |= {"threshold": rule.threshold.model_dump(), "problem": problem}
    return described | (asdict(state) if state else {"holds": False, "p_yes": None, "event": None, "since": None})
