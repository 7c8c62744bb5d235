"""Every route of the API: its path and method, the role that its own line names, and who may call it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from saccade.engine import Engine
from saccade.pipeline.api import demo
from saccade.pipeline.api.access import ROLES, RoleAccess
from saccade.pipeline.api.http_server import serve
from saccade.pipeline.api.routes import ApiRoute
from saccade.pipeline.config.file import load
from saccade.pipeline.runtime.streams import Streams
from tests.support import REPO
from tests.support.control import controller_of

ROLE_OF = {
    ("GET", "/livez"): "anyone",
    ("GET", "/readyz"): "anyone",
    ("GET", "/openapi.json"): "anyone",
    ("GET", "/docs"): "anyone",
    ("GET", "/docs/{name}"): "anyone",
    ("GET", "/"): "anyone",
    ("GET", "/clip.json"): "anyone",
    ("GET", "/clip.mp4"): "anyone",
    ("GET", "/healthz"): "viewer",
    ("GET", "/metrics"): "viewer",
    ("GET", "/workers"): "viewer",
    ("GET", "/config"): "viewer",
    ("POST", "/config/diff"): "admin",
    ("POST", "/config/reload"): "admin",
    ("POST", "/config/save"): "admin",
    ("GET", "/events"): "viewer",
    ("GET", "/events/rules"): "viewer",
    ("GET", "/events/search"): "operator",
    ("GET", "/events/verdicts"): "viewer",
    ("POST", "/events/{id}/verdict"): "operator",
    ("DELETE", "/events/{id}"): "operator",
    ("GET", "/events/{id}"): "viewer",
    ("GET", "/events/{id}/clip.mp4"): "viewer",
    ("GET", "/events/{id}/snapshot.jpg"): "viewer",
    ("GET", "/model"): "viewer",
    ("GET", "/names"): "viewer",
    ("POST", "/offer"): "admin",
    ("GET", "/streams"): "viewer",
    ("POST", "/streams"): "admin",
    ("DELETE", "/streams/{name}"): "admin",
    ("GET", "/streams/{name}"): "viewer",
    ("PATCH", "/streams/{name}"): "operator",
    ("GET", "/streams/{name}/counts"): "viewer",
    ("GET", "/streams/{name}/frame.jpg"): "viewer",
    ("GET", "/streams/{name}/live.mp4"): "viewer",
    ("GET", "/streams/{name}/heatmap.png"): "viewer",
    ("GET", "/streams/{name}/history"): "viewer",
    ("GET", "/streams/{name}/ptz/presets"): "operator",
    ("POST", "/streams/{name}/ptz/presets/{preset}"): "operator",
    ("GET", "/streams/{name}/recording"): "viewer",
    ("GET", "/streams/{name}/recording/files/{file:path}"): "viewer",
    ("GET", "/streams/{name}/recording/index.m3u8"): "viewer",
    ("GET", "/streams/{name}/recording/spans"): "viewer",
    ("POST", "/streams/{name}/restart"): "operator",
    ("DELETE", "/streams/{name}/rules"): "operator",
    ("GET", "/streams/{name}/rules"): "viewer",
    ("PUT", "/streams/{name}/rules"): "operator",
    ("POST", "/streams/{name}/rules/check"): "operator",
    ("GET", "/streams/{name}/rules/state"): "viewer",
    ("DELETE", "/streams/{name}/zones"): "operator",
    ("GET", "/streams/{name}/zones"): "viewer",
    ("PUT", "/streams/{name}/zones"): "operator",
    ("POST", "/v1/caption"): "operator",
    ("POST", "/v1/chat/completions"): "operator",
    ("POST", "/v1/detect"): "operator",
    ("GET", "/v1/models"): "viewer",
    ("POST", "/v1/point"): "operator",
    ("POST", "/v1/query"): "operator",
    ("POST", "/v1/segment"): "operator",
    ("POST", "/whep/{stream}"): "viewer",
    ("DELETE", "/whep/{stream}/{session}"): "viewer",
    ("POST", "/whip"): "operator",
    ("DELETE", "/whip/{session}"): "operator",
}
"""As the server before FastAPI had them (/livez, /readyz and pages were public); those of the schema and recordings."""

TOKENS = {"viewer": "look", "operator": "change", "admin": "all"}
FILLED = {
    "{name}": "hall",
    "{stream}": "hall",
    "{id}": "e1",
    "{preset}": "1",
    "{session}": "none",
    "{file:path}": "a/b.mp4",
}


@contextmanager
def served(engine: Engine, folder: Path) -> Iterator[Any]:
    path = folder / "access.yaml"
    path.write_text(
        "clients:\n"
        + "".join(f"  - {{name: {role}, role: {role}, token: {token}}}\n" for role, token in TOKENS.items())
    )
    with Streams(engine) as streams:
        controller = controller_of(streams, base=load(None, {"source": "rtsp://127.0.0.1:1/a", "detect": ["person"]}))
        with closing(serve(controller, port=0, access=RoleAccess(path), routes=[demo.routes])) as server:
            yield server


def routes_of(server: Any) -> list[ApiRoute]:
    found: list[ApiRoute] = server.guard.routes
    return [route for route in found if not route.path.endswith((".js", ".css"))]


def test_every_route_of_before_is_there_with_its_role(engine: Engine, tmp_path: Path) -> None:
    with served(engine, tmp_path) as server:
        found = {
            (method, route.path): route.role
            for route in routes_of(server)
            for method in (route.methods or set()) - {"HEAD"}
        }
    assert found == ROLE_OF


def test_each_route_is_open_to_its_role_and_to_no_weaker_one(engine: Engine, tmp_path: Path) -> None:
    with served(engine, tmp_path) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        for (method, path), role in ROLE_OF.items():
            for name, value in FILLED.items():
                path = path.replace(name, value)
            for client, token in TOKENS.items():
                answer = http.request(method, path, headers={"Authorization": f"Bearer {token}"})
                may = ROLES.index(client) >= ROLES.index(role)
                assert (answer.status_code != 403) == may, (method, path, client, answer.text)
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                answer = http.request(method, path, headers=headers)
                assert (answer.status_code == 401) == (role != "anyone"), (method, path, answer.text)
            if method == "GET" and role == "viewer":
                head = http.head(path, headers={"Authorization": "Bearer look"})
                assert (head.status_code != 405, head.content) == (True, b""), path
            asked = {"Origin": server.url, "Access-Control-Request-Method": method}
            preflight = http.options(path, headers=asked)
            assert preflight.status_code == 204
            assert method in preflight.headers["Access-Control-Allow-Methods"].split(", ")


def test_each_route_names_its_role_on_its_own_line() -> None:
    named = 0
    for path in sorted((REPO / "pipeline" / "api").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for call in getattr(node, "decorator_list", ()):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in METHODS:
                    roles = [one.value for one in call.keywords if one.arg == "role"]
                    assert [type(role) for role in roles] == [ast.Constant], f"{path.name}:{call.lineno}"
                    assert roles[0].lineno == call.lineno, f"{path.name}:{call.lineno}"
                    named += 1
    assert named > 40


METHODS = ("get", "post", "put", "patch", "delete")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("PUT", "/streams", "GET, POST"), ("GET", "/config/save", "POST"), ("POST", "/events/e1", "GET, DELETE")],
)
def test_another_method_is_told_which_there_are(
    engine: Engine, tmp_path: Path, method: str, path: str, allowed: str
) -> None:
    with served(engine, tmp_path) as server:
        answer = httpx.request(method, server.url + path, headers={"Authorization": "Bearer all"}, timeout=60)
    assert (answer.status_code, answer.headers["Allow"]) == (405, allowed)
    assert answer.json() == {"error": "405: Method Not Allowed"}
