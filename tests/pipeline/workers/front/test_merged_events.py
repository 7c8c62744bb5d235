"""The stores of several machines as one: pages in one order, clips of any of them, and machines that are away."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.pipeline.api.http_server import HttpServer
from saccade.pipeline.events.record import MinuteCounts, make_history_record
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.workers.front.forwarding import Forwarder
from saccade.pipeline.workers.front.merged_events import MergedEvents, Stored, merge_pages
from saccade.pipeline.workers.machines.store_server import StoreServer
from saccade.web.auth import HttpAuth
from tests.pipeline.events.storage.test_store import EVENTS, event, put
from tests.support.cameras import free_port

SECRET = "sesame"


@dataclass
class Running:
    url: str
    stores: dict[str, EventStore]
    urls: dict[str, str]

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
        request = urllib.request.Request(f"{self.url}{path}", headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.headers, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers, error.read()

    def page(self, query: str = "") -> dict[str, Any]:
        status, _, body = self.ask(f"/events{query}")
        assert status == 200, body
        return dict(json.loads(body))

    def ids(self, query: str = "") -> list[str]:
        return [one["id"] for one in self.page(query)["events"]]

    def pages(self, limit: int) -> list[list[str]]:
        found, after = [], ""
        while True:
            page = self.page(f"?limit={limit}{after}")
            found.append([one["id"] for one in page["events"]])
            if page["after"] is None:
                return found
            after = f"&after={quote(page['after'])}"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with ExitStack() as stack:
        stores, urls = {}, {}
        for name in ("", "north"):
            stores[name] = stack.enter_context(closing(EventStore(tmp_path / (name or "own"))))
            urls[name] = stack.enter_context(closing(StoreServer(stores[name], SECRET))).url
        for number, one in enumerate(EVENTS):
            store = stores["north" if number % 2 else ""]
            store.write(one)
            store.flush()
        auth = HttpAuth(None)
        forwarder = Forwarder(SECRET)
        merged = MergedEvents(lambda: urls, forwarder, auth)
        hooks: Any = {"on_startup": [forwarder.start], "on_cleanup": [forwarder.close]}
        server = stack.enter_context(closing(HttpServer(None, port=0, routes=merged.routes(), **hooks)))
        yield Running(server.url, stores, urls)


def test_events_of_all_machines_are_listed_in_one_order(running: Running) -> None:
    assert running.page()["after"] is None
    assert running.ids() == ["e3", "e2", "e1", "e0"]
    for limit in (1, 2, 3):
        pages = running.pages(limit)
        assert [one for page in pages for one in page] == ["e3", "e2", "e1", "e0"]
        assert {len(page) for page in pages[:-1]} <= {limit}
    assert running.ids("?stream=yard&label=truck") == ["e2", "e1"]
    assert running.ids("?stream=yard&stream=door") == running.ids("?stream=yard")  # a client may see the first alone
    assert running.ids("?q=dark%20re") == ["e1"]
    assert "away" not in running.page()


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("limit=0", "limit should be from 1 to 500"),
        ("colour=red", "there is no filter 'colour'"),
        ("after=e1", "after should be what the page before had"),
        ("until=5", "there is no filter 'until'"),
    ],
)
def test_a_bad_filter_is_one_line(running: Running, query: str, message: str) -> None:
    status, _, body = running.ask(f"/events?{query}")
    assert (status, json.loads(body)["error"].startswith(message)) == (422, True)


def test_a_clip_comes_from_the_machine_that_has_it(running: Running) -> None:
    north = running.stores["north"]
    north.write(event(9, has_clip=True, has_snapshot=True))
    north.flush()
    data = bytes(range(256)) * 8192  # more than is passed on in one piece
    put(north, "e9.mp4").write_bytes(data)
    put(north, "e9.jpg")
    assert json.loads(running.ask("/events/e9")[2])["id"] == "e9"
    status, headers, body = running.ask("/events/e9/clip.mp4", Range="bytes=16-31")
    assert (status, headers["Content-Type"], body) == (206, "video/mp4", data[16:32])
    assert headers["Content-Range"] == f"bytes 16-31/{len(data)}"
    status, headers, body = running.ask("/events/e9/clip.mp4")
    assert (status, headers["Content-Length"], body == data) == (200, str(len(data)), True)
    assert running.ask("/events/e9/clip.mp4", Range="bytes=9999999-")[0] == 416
    assert running.ask("/events/e9/snapshot.jpg")[1]["Content-Type"] == "image/jpeg"
    assert running.ask("/events/e0/clip.mp4")[0] == 404
    assert running.ask("/events/e9", "DELETE")[0] == 204
    for path in ("", "/clip.mp4", "/snapshot.jpg"):
        assert running.ask(f"/events/e9{path}")[0] == 404
    assert "e9" not in running.ids()


def test_rules_and_minutes_of_all_machines_are_merged(running: Running) -> None:
    counts = {"objects": {}, "zones": {}, "lines": {}}
    for number, store in enumerate(running.stores.values()):
        store.write(make_history_record(MinuteCounts("door", 120 - 60 * number, counts)))
        store.flush()
    assert json.loads(running.ask("/events/rules")[2]) == {"rules": ["parked", "visitor"]}
    minutes = json.loads(running.ask("/streams/door/history?since=0")[2])["minutes"]
    assert [minute["start"] for minute in minutes] == [60, 120]
    assert running.ask("/streams/door/history?since=x")[0] == 422


def test_a_machine_that_is_away_makes_the_answer_partial(running: Running) -> None:
    running.urls["north"] = f"http://127.0.0.1:{free_port()}"
    page = running.page()
    assert ([one["id"] for one in page["events"]], page["away"]) == (["e2", "e0"], ["north"])
    assert json.loads(running.ask("/events/e0")[2])["id"] == "e0"
    for method, path in (("GET", "/events/e1"), ("GET", "/events/e1/clip.mp4"), ("DELETE", "/events/e1")):
        status, _, body = running.ask(path, method)
        assert (status, "away: north" in json.loads(body)["error"]) == (503, True)
    assert json.loads(running.ask("/events/rules")[2])["away"] == ["north"]


def test_nobody_without_the_secret_is_answered(running: Running) -> None:
    for path in ("/stored", "/going-on", "/events/e0"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{running.urls['north']}{path}", timeout=30)
        assert refused.value.code == 401


@given(st.lists(st.sets(st.integers(0, 60)), min_size=1, max_size=4), st.integers(1, 9))
def test_pages_have_each_event_once_and_in_order(times: list[set[int]], limit: int) -> None:
    stores = [
        [({"id": f"{store}-{t}"}, float(t)) for t in sorted(found, reverse=True)] for store, found in enumerate(times)
    ]
    every = sorted((one for store in stores for one in store), key=lambda one: (one[1], one[0]["id"]), reverse=True)
    shown: list[Stored] = []
    after: tuple[float, str] | None = None
    while True:
        until = float("inf") if after is None else after[0]
        pages = [[one for one in store if one[1] <= until][: limit + 1] for store in stores]
        page, more = merge_pages(pages, limit, after)
        assert len(page) <= limit
        shown += page
        if not more:
            break
        assert page
        after = page[-1][1], page[-1][0]["id"]
    assert shown == every
