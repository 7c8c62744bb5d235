"""Roles, streams of a token, headers of a proxy, and the audit, over HTTP as clients see them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from saccade.engine import Engine
from saccade.pipeline.api.access import RoleAccess
from saccade.pipeline.api.http_server import serve
from saccade.pipeline.config.file import load
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.runtime.streams import Streams
from tests.support.control import controller_of
from tests.support.http_routes import of_any_method

NOWHERE = "rtsp://127.0.0.1:1"
FILE = """\
clients:
  - {name: vera, role: viewer, token: look}
  - {name: otto, role: operator, token: change}
  - {name: ada, role: admin, token: all}
  - {name: yves, role: operator, token: yard-only, streams: [yard]}
proxy:
  addresses: [127.0.0.0/8]
  user: X-Forwarded-User
  role: X-Forwarded-Groups
  roles: {guards: viewer, ops: operator}
audit: AUDIT
"""


ADDED = (
    *("/added", "/added/more/zones", "/streams/{name}/added", "/v1/added", "/events/added"),
    "/whep/{stream}/added/more",
)
"""Routes that somebody adds without a thought of roles."""


class Server:
    def __init__(self, url: str, audit: Path) -> None:
        self.url, self.audit = url, audit

    def ask(self, method: str, path: str, token: str | None, body: Any = None, **headers: str) -> tuple[int, Any]:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        given |= {"Authorization": f"Bearer {token}"} if token else {}
        data = None if body is None else json.dumps(body).encode()
        given |= {"Content-Type": "application/json"} if data else {}
        request = urllib.request.Request(self.url + path, data, given, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                text = response.read()
                return response.status, json.loads(text) if text and "json" in response.headers.get(
                    "Content-Type", ""
                ) else None
        except HTTPError as error:
            with error:
                text = error.read()
                return error.code, json.loads(text) if text else None

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()] if self.audit.exists() else []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("access")
    path = folder / "access.yaml"
    path.write_text(FILE.replace("AUDIT", str(folder / "audit.jsonl")))
    with Engine.load("nano", device="cpu") as engine, Streams(engine) as streams:
        cameras = [{"name": name, "source": f"{NOWHERE}/{name}", "detect": ["person"]} for name in ("hall", "yard")]
        controller = controller_of(streams, base=load(None, {"streams": cameras}))
        routes = [route for path in ADDED for route in of_any_method(path)]
        http = serve(controller, port=0, access=RoleAccess(path), routes=routes)
        controller.start()
        yield Server(http.url, folder / "audit.jsonl")
        http.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "allowed"),
    [
        ("GET", "/streams", None, "viewer"),
        ("GET", "/streams/hall", None, "viewer"),
        ("GET", "/metrics", None, "viewer"),
        ("GET", "/model", None, "viewer"),
        ("HEAD", "/streams/hall", None, "viewer"),
        ("GET", "/streams/hall/rules/state", None, "viewer"),
        ("GET", "/streams/a%2Fb", None, "viewer"),
        ("GET", "/config", None, "viewer"),
        ("GET", "/v1/models", None, "viewer"),
        ("GET", "/events/search?q=car", None, "operator"),
        ("GET", "/events/verdicts", None, "viewer"),
        ("POST", "/events/e1/verdict", {"false_alarm": True}, "operator"),
        ("PATCH", "/streams/hall", {"conf": 0.4}, "operator"),
        ("PUT", "/streams/hall/zones", {"zones": {}}, "operator"),
        ("POST", "/streams/hall/rules/check", {"rules": []}, "operator"),
        ("POST", "/streams/hall/restart", None, "operator"),
        ("POST", "/v1/detect", {}, "operator"),
        ("POST", "/streams", {"source": ""}, "admin"),
        ("DELETE", "/streams/nowhere", None, "admin"),
        ("DELETE", "/streams/zones", None, "admin"),  # a stream of that name
        ("GET", "/added", None, "admin"),  # routes that name no role, whatever their method and their ends
        ("HEAD", "/added", None, "admin"),
        ("PATCH", "/added", None, "admin"),
        ("PUT", "/added/more/zones", None, "admin"),
        ("GET", "/streams/hall/added", None, "admin"),
        ("GET", "/v1/added", None, "admin"),
        ("POST", "/v1/added", None, "admin"),
        ("POST", "/events/added", None, "admin"),
        ("POST", "/whep/hall/added/more", None, "admin"),
    ],
)
def test_each_role_may_what_it_should(server: Server, method: str, path: str, body: Any, allowed: str) -> None:
    roles = {"viewer": "look", "operator": "change", "admin": "all"}
    for number, token in enumerate(roles.values()):
        status, answer = server.ask(method, path, token, body)
        assert (status != 403) == (number >= list(roles).index(allowed)), (token, answer)
    assert server.ask(method, path, None, body)[0] == 401
    assert server.ask(method, path, "wrong", body)[0] == 401


def test_a_token_of_one_stream_knows_of_no_other(server: Server) -> None:
    token = "yard-only"
    assert [stream["name"] for stream in server.ask("GET", "/streams", token)[1]["streams"]] == ["yard"]
    assert server.ask("GET", "/streams/yard", token)[0] == 200
    assert server.ask("PATCH", "/streams/yard", token, {"conf": 0.3})[0] == 200
    for method, path in (("GET", "/streams/hall"), ("GET", "/metrics"), ("GET", "/healthz"), ("GET", "/events")):
        status, answer = server.ask(method, path, token)
        assert status == 403
        assert "yves can only access yard" in json.dumps(answer)
    for path in ("/metrics", "/healthz", "/workers"):  # which take no stream
        assert server.ask("GET", f"{path}?stream=yard", token)[0] == 403, path
    assert server.ask("GET", "/events?stream=yard", token) == (
        404,
        {"error": "there is no event store; start Saccade with --store FOLDER"},
    )
    assert server.ask("GET", "/events?stream=yard&stream=hall", token)[0] == 403
    assert server.ask("GET", "/events/e1?stream=yard", token)[0] == 403  # whose stream is not known
    assert server.ask("GET", "/events/search?q=car", token)[0] == 403
    assert server.ask("GET", "/events/search?q=car&stream=yard", token)[0] == 404
    assert server.ask("PATCH", "/streams/hall", token, {"conf": 0.3})[0] == 403
    assert server.ask("POST", "/whep/hall", token)[0] == 403


def test_the_headers_of_a_trusted_proxy_are_roles(server: Server) -> None:
    someone = {"X_Forwarded_User": "mia@example.org"}
    assert server.ask("GET", "/streams", None, **someone)[0] == 401  # no group of hers is a role
    guard = {**someone, "X_Forwarded_Groups": "staff,guards"}
    assert server.ask("GET", "/streams", None, **guard)[0] == 200
    assert server.ask("PATCH", "/streams/hall", None, {"conf": 0.5}, **guard)[0] == 403
    both = {**someone, "X_Forwarded_Groups": "guards, ops"}
    assert server.ask("PATCH", "/streams/hall", None, {"conf": 0.5}, **both)[0] == 200
    assert server.lines()[-1]["client"] == "mia@example.org"


def test_each_change_is_a_line_of_the_audit(server: Server) -> None:
    before = len(server.lines())
    server.ask("GET", "/streams", "all")
    server.ask("PATCH", "/streams/hall", "change", {"conf": 0.6})
    server.ask("POST", "/streams/hall/rules/check", "change", {"rules": []})
    server.ask("PATCH", "/streams/hall", "look", {"conf": 0.7})
    changes = [(line["client"], line["role"], line["change"], line["status"]) for line in server.lines()[before:]]
    assert changes == [
        ("otto", "operator", "PATCH /streams/hall", 200),
        ("vera", "viewer", "PATCH /streams/hall", 403),
    ]
    assert "change" not in {line.get("token") for line in server.lines()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clients: [{name: a, role: boss, token: x}]", "clients"),
        ("clients: [{name: a, role: anyone, token: x}]", "clients"),  # the role of routes that need no token
        ("clients: [{name: a, role: admin}]", "needs either token or token_file"),
        ("clients: [{name: a, role: admin, token: x}, {name: b, role: viewer, token: x}]", "the same token"),
        ("clients: [{name: a, role: admin, token: x, strems: [y]}]", "strems"),
        ("proxy: {addresses: [nonsense], user: X-User}", "IP address or network"),
        ("clients: [", "invalid YAML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "access.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        RoleAccess(path)
    assert "\n" not in str(caught.value)
