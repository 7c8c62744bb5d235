"""Routes for the rules of a stream. A YAML error is returned as {"error": …, "line": 2, "column": 9}."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from saccade.pipeline.analytics.settings import Regions
from saccade.pipeline.api.routes import MAX_BODY_BYTES, YAML, Json, Routes, Wanted, read_model
from saccade.pipeline.api.streams import Changing, known
from saccade.pipeline.config.edit_rules import text_of_rules
from saccade.pipeline.config.file import RuleList, read_rules
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.errors import AwayError, TextError
from saccade.pipeline.events.machine import RuleState
from saccade.pipeline.events.settings import RuleSettings, check_places
from saccade.pipeline.settings import PlacedError
from saccade.web.body import content_type, read_text

routes = Routes("rules")

_PATH = "/streams/{name}/rules"
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": "#/components/schemas/RuleList"}},
            YAML: {"schema": {"type": "string"}},
        },
    }
}


class RuleShown(BaseModel):
    """A rule and its state. `p_yes` is the model's probability of "yes". `event` is the ID of the open event."""

    name: str
    when: str | None
    ask: str | None
    expect: str
    threshold: dict[str, Any]
    problem: str | None
    holds: bool
    p_yes: float | None
    event: str | None
    since: float | None


class RuleStates(BaseModel):
    """The states of all rules of a stream. `rules` is null if the stream does not support rules."""

    rules: list[RuleShown] | None


@routes.get(_PATH, role="viewer", response_model=RuleList)
async def show(name: str, request: Request, controller: Wanted) -> Response:
    """Return the rules of a stream as JSON. With `Accept: application/yaml`, return them as a YAML list."""
    await known(controller, name)
    rules = controller.stream(name).rules
    if YAML in request.headers.get("Accept", ""):
        return Response(text_of_rules(rules), media_type=f"{YAML}; charset=utf-8")
    return _listed(rules)


@routes.put(_PATH, role="operator", response_model=RuleList, openapi_extra=_BODY)
async def replace(name: str, request: Request, calls: Changing) -> Response:
    """Replace the rules of a stream from the next frame on. Open events of unchanged rules continue."""
    try:
        rules = await _wanted(request, calls.controller, name, needs_worker=False)
    except TextError as error:
        return _mistake(error)
    await calls.update(name, {"rules": rules})
    return _listed(rules)


@routes.delete(_PATH, role="operator", status_code=204)
async def remove(name: str, calls: Changing) -> None:
    """Remove all rules of a stream."""
    await calls.update(name, {"rules": []})


@routes.post(f"{_PATH}/check", role="operator", response_model=RuleList, openapi_extra=_BODY)
async def check(name: str, request: Request, controller: Wanted) -> Response:
    """Validate rules without applying them. The response is the same as for PUT with these rules."""
    try:
        return _listed(await _wanted(request, controller, name))
    except TextError as error:
        return _mistake(error)


@routes.get(f"{_PATH}/state", role="viewer", response_model=RuleStates)
async def states(name: str, controller: Wanted) -> Response:
    """Return the current state of each rule of a stream."""
    await known(controller, name)
    found = await asyncio.to_thread(controller.runner.rule_states, name)
    if found is None:
        return Json({"rules": None})
    config, by_name = controller.stream(name), {state.name: state for state in found}
    return Json({"rules": [_described(rule, by_name.get(rule.name), config) for rule in config.rules]})


async def _wanted(
    request: Request, controller: Controller, name: str, *, needs_worker: bool = True
) -> list[RuleSettings]:
    """Parse the rules in a request, and check that the stream supports the rules.

    Args:
        request: the request.
        controller: controller of the stream.
        name: name of the stream.
        needs_worker: whether the request fails if no worker is available for the check.
    """
    await known(controller, name)

    def check(rules: list[RuleSettings]) -> None:
        with nullcontext() if needs_worker else suppress(AwayError):
            controller.check_rules(name, {"rules": rules})

    if content_type(request) == YAML:
        text = await read_text(request, MAX_BODY_BYTES, "a body")
        return await asyncio.to_thread(read_rules, text, check)
    rules = (await read_model(request, RuleList)).rules
    await asyncio.to_thread(check, rules)
    return rules


def _listed(rules: Sequence[RuleSettings]) -> Response:
    return Json({"rules": [rule.model_dump(mode="json", exclude_unset=True) for rule in rules]})


def _mistake(error: TextError) -> Response:
    return Json({"error": str(error), "line": error.line, "column": error.column}, 422)


def _described(rule: RuleSettings, state: RuleState | None, regions: Regions) -> dict[str, Any]:
    """Convert a rule and its state to JSON for the web console."""
    described: dict[str, Any] = {"name": rule.name, "when": rule.when, "ask": rule.ask, "expect": rule.expect}
    problem = None
    try:
        check_places([rule], regions)
    except PlacedError as error:
        problem = str(error)
    described |= {"threshold": rule.threshold.model_dump(), "problem": problem}
    return described | (asdict(state) if state else {"holds": False, "p_yes": None, "event": None, "since": None})
