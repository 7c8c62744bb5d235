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

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from aiohttp import web

from saccade.pipeline.analytics.settings import Regions
from saccade.pipeline.config.edit_rules import text_of_rules
from saccade.pipeline.config.file import RuleList, read_rules
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.errors import ConfigError, StreamError, TextError
from saccade.pipeline.events.machine import RuleState
from saccade.pipeline.events.settings import RuleSettings, check_places
from saccade.pipeline.server.blocking_calls import BlockingCalls
from saccade.pipeline.server.streams_api import MAX_BODY_BYTES, OPEN_S, YAML, name_of, read_body, update, wanted_of
from saccade.pipeline.settings import PlacedError
from saccade.sources.http.auth import HttpAuth, read_text, refusal

_MAX_CHANGING = 32


class RulesApi:
    """The routes.

    Args:
        controller: of the streams whose rules.
        auth: answers preflight requests.
    """

    def __init__(self, controller: Controller, auth: HttpAuth) -> None:
        self._controller = controller
        self._runner = controller.runner
        self._auth = auth
        self._calls = BlockingCalls(_MAX_CHANGING, OPEN_S)

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
        rules = wanted_of(self._controller, name_of(self._runner, request)).rules
        if YAML in request.headers.get("Accept", ""):
            return web.Response(text=text_of_rules(rules), content_type=YAML)
        return _listed(rules)

    async def _replace(self, request: web.Request) -> web.Response:
        name = name_of(self._runner, request)
        try:
            rules = await self._wanted(request, name)
        except TextError as error:
            return _mistake(error)
        await update(self._controller, name, {"rules": rules}, self._calls)
        return _listed(rules)

    async def _check(self, request: web.Request) -> web.Response:
        name = name_of(self._runner, request)
        try:
            return _listed(await self._wanted(request, name))
        except TextError as error:
            return _mistake(error)

    async def _remove(self, request: web.Request) -> web.Response:
        await update(self._controller, name_of(self._runner, request), {"rules": []}, self._calls)
        return web.Response(status=204)

    async def _state(self, request: web.Request) -> web.Response:
        name = name_of(self._runner, request)
        try:
            found = await asyncio.to_thread(self._runner.rule_states, name)
        except StreamError as error:
            raise refusal(web.HTTPServiceUnavailable, str(error)) from None
        if found is None:
            return web.json_response({"rules": None})
        config, states = wanted_of(self._controller, name), {state.name: state for state in found}
        return web.json_response({"rules": [_described(rule, states.get(rule.name), config) for rule in config.rules]})

    async def _preflight(self, request: web.Request) -> web.Response:
        return await self._auth.preflight(request, "GET, POST, PUT, DELETE", "application/json")

    async def _wanted(self, request: web.Request, name: str) -> list[RuleSettings]:
        """The rules in a request, which the stream can have; raises TextError, or an HTTP error, if it cannot."""

        def check(rules: list[RuleSettings]) -> None:
            self._controller.check_rules(name, {"rules": rules})

        try:
            if request.content_type == YAML:
                return read_rules(await read_text(request, MAX_BODY_BYTES, "a body"), check)
            rules = (await read_body(request, RuleList)).rules
            check(rules)
            return rules
        except TextError:
            raise
        except StreamError as error:
            raise refusal(web.HTTPConflict, str(error)) from None
        except (ConfigError, PlacedError) as error:
            raise refusal(web.HTTPUnprocessableEntity, str(error)) from None


def _listed(rules: Sequence[RuleSettings]) -> web.Response:
    return web.json_response({"rules": [rule.model_dump(mode="json", exclude_unset=True) for rule in rules]})


def _mistake(error: TextError) -> web.Response:
    return web.json_response({"error": str(error), "line": error.line, "column": error.column}, status=422)


def _described(rule: RuleSettings, state: RuleState | None, regions: Regions) -> dict[str, Any]:
    """A rule as the console shows it."""
    described: dict[str, Any] = {"name": rule.name, "when": rule.when, "ask": rule.ask, "expect": rule.expect}
    problem = None
    try:
        check_places([rule], regions)
    except PlacedError as error:
        problem = str(error)
    described |= {"threshold": rule.threshold.model_dump(), "problem": problem}
    return described | (asdict(state) if state else {"holds": False, "p_yes": None, "event": None, "since": None})
