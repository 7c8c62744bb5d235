"""A client made of nothing but /openapi.json adds, changes and removes a stream; answers fit the schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import jsonschema
import pytest

from saccade.pipeline.api.http_server import serve
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.runtime.streams import Streams
from tests.support.control import controller_of


class Client:
    """Has a method for each operation of a schema; it checks what is sent and what comes against it."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60)
        self.schema = self._http.get("/openapi.json").json()
        self._operations = {
            operation["operationId"]: (method, path, operation)
            for path, operations in self.schema["paths"].items()
            for method, operation in operations.items()
        }

    def close(self) -> None:
        self._http.close()

    def __getattr__(self, name: str) -> Any:
        method, path, operation = self._operations[name]

        def call(body: Any = None, **given: str) -> Any:
            places = {one["name"]: one["in"] for one in operation.get("parameters", ())}
            in_path = {key: value for key, value in given.items() if places[key] == "path"}
            query = {key: value for key, value in given.items() if places[key] == "query"}
            if body is not None:
                self._check(body, operation["requestBody"]["content"]["application/json"]["schema"])
            response = self._http.request(method, path.format(**in_path), params=query, json=body)
            described = operation["responses"].get(str(response.status_code), operation["responses"].get("default"))
            value = response.json() if response.content else None
            if value is not None:
                self._check(value, described["content"]["application/json"]["schema"])
            return response.status_code, value

        return call

    def _check(self, value: Any, schema: Any) -> None:
        jsonschema.validate(value, {**schema, "components": self.schema["components"]})


@pytest.fixture
def client(streams: Streams) -> Iterator[Client]:
    controller = controller_of(streams)
    with controller.local, closing(serve(controller, port=0)) as server, closing(Client(server.url)) as one:
        yield one


def test_a_client_of_the_schema_adds_changes_and_removes_a_stream(client: Client) -> None:
    wanted = {"source": str(DEMO_CLIP), "name": "hall", "detect": ["person"], "loop": True}
    status, added = client.streams_add(wanted)
    assert (status, added["name"], added["detect"]) == (201, "hall", ["person"])
    status, changed = client.streams_change({"detect": ["chair"], "weight": 2.0}, name="hall")
    assert (status, changed["detect"], changed["weight"]) == (200, ["chair"], 2.0)
    status, listed = client.streams_list_streams()
    assert (status, [one["name"] for one in listed["streams"]]) == (200, ["hall"])
    status, shown = client.streams_show(name="hall")
    assert (status, shown["config"]["loop"]) == (200, True)
    zones = {"zones": {"mat": {"polygon": [[0, 0], [1, 0], [1, 1]]}}, "lines": {}}
    assert client.zones_replace(zones, name="hall")[0] == 200
    assert client.zones_counts(name="hall", since="0")[0] == 200
    rules = {"rules": [{"name": "seen", "when": "chair in mat for 2s"}]}
    assert client.rules_replace(rules, name="hall")[1]["rules"][0]["name"] == "seen"
    assert client.rules_states(name="hall")[1]["rules"][0]["holds"] is False
    assert client.streams_remove(name="hall") == (204, None)
    status, refused = client.streams_show(name="hall")
    assert (status, list(refused)) == (404, ["error"])


def test_what_is_known_of_a_run_fits_the_schema(client: Client) -> None:
    for operation in ("live", "ready", "health", "workers"):
        assert getattr(client, f"streams_{operation}")()[0] == 200
    assert client.console_model()[1]["model"] == "nano"
    assert client.console_names(of="bikes")[1]["names"] == ["bicycle"]
    assert client.config_show()[1] == {"file": False}
    assert client.v1_models()[1]["object"] == "list"
    assert client.events_list_events()[0] == 404  # nothing is stored


def test_the_schema_says_who_may_call_each_operation(client: Client) -> None:
    roles = {operation["x-role"] for operations in client.schema["paths"].values() for operation in operations.values()}
    assert roles == {"anyone", "viewer", "operator", "admin"}
    assert "metavar" not in str(client.schema)
    names = [operation["operationId"] for one in client.schema["paths"].values() for operation in one.values()]
    assert len(names) == len(set(names))


def test_the_page_of_the_schema_is_served(client: Client) -> None:
    page = client._http.get("/docs")
    assert (page.status_code, "openapi.json" in page.text) == (200, True)
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) == 3
    for address in loaded:
        assert address.startswith("data:") or client._http.get(f"/{address}").status_code == 200, address
    assert client._http.get("/docs/other.js").status_code == 422
