"""Stored events over HTTP: filters, pages, media in ranges, deletion; and who may not."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from saccade.pipeline.api import events
from saccade.pipeline.api.http_server import HttpServer
from saccade.pipeline.control.local import Local
from saccade.pipeline.events.record import MinuteCounts, make_history_record
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import EventQuery
from saccade.pipeline.runtime.streams import Streams
from tests.pipeline.events.storage.test_database import spoil_pages
from tests.pipeline.events.storage.test_store import EVENTS, event, put
from tests.support.sinks.broker import wait_for


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EventStore]:
    with_events = EventStore(tmp_path)
    for one in EVENTS:
        with_events.write(one)
    with_events.flush()
    yield with_events
    with_events.close()


def serving_events(store: EventStore, streams: Streams, token: str | None = None) -> HttpServer:
    stored = events.Stored(store, Local(streams, store=store))
    return HttpServer([events.routes], {events.Stored: stored}, port=0, token=token)


@pytest.fixture
def server(store: EventStore, streams: Streams) -> Iterator[HttpServer]:
    one = serving_events(store, streams)
    yield one
    one.close()


def ask(url: str, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method), timeout=30) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def listed(server: HttpServer, query: str) -> tuple[list[str], str | None]:
    status, _, body = ask(f"{server.url}/events{query}")
    assert status == 200
    page = json.loads(body)
    return [one["id"] for one in page["events"]], page["after"]


@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("", (["e3", "e2", "e1", "e0"], None)),
        ("?stream=yard&label=truck", (["e2", "e1"], None)),
        ("?q=dark%20re", (["e1"], None)),
        ("?zone=hall&rule=visitor", (["e0"], None)),
        ("?since=1d", ([], None)),
        ("?since=1002", (["e3", "e2"], None)),
    ],
)
def test_events_are_listed(server: HttpServer, query: str, page: tuple[list[str], str | None]) -> None:
    assert listed(server, query) == page


def test_pages_go_on_where_the_last_event_is_deleted(server: HttpServer, store: EventStore) -> None:
    found, after = listed(server, "?limit=2")
    assert found == ["e3", "e2"]
    assert after is not None
    for one in found:
        assert ask(f"{server.url}/events/{one}", "DELETE")[0] == 204
    assert listed(server, f"?limit=3&after={after}") == (["e1", "e0"], None)
    assert [record["id"] for record, _ in store.walk(EventQuery(limit=1))] == ["e1", "e0"]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("limit=0", "limit (events per page) should be from 1 to 500, got 0"),
        ("limit=many", "limit (events per page) should be a whole number"),
        ("since=yesterday", "since should be a Unix time in seconds"),
        ("since=nan", "since should be a Unix time in seconds"),
        ("after=e1", "after should be the value of `after` in the previous page"),
        ("after=inf", "after should be the value of `after` in the previous page"),
        ("colour=red", "unknown filter 'colour'; available: stream, rule"),
    ],
)
def test_a_bad_filter_is_one_line(server: HttpServer, query: str, message: str) -> None:
    status, _, body = ask(f"{server.url}/events?{query}")
    assert (status, json.loads(body)["error"].startswith(message)) == (422, True)


def test_an_event_its_media_and_its_deletion(server: HttpServer, store: EventStore) -> None:
    store.write(event(9, has_clip=True, has_snapshot=True))
    store.flush()
    base = f"{server.url}/events/e9"
    assert ask(f"{base}/clip.mp4")[0] == 404
    put(store, "e9.mp4").write_bytes(bytes(range(256)))
    put(store, "e9.jpg")
    assert json.loads(ask(base)[2])["id"] == "e9"
    status, headers, body = ask(f"{base}/clip.mp4", Range="bytes=16-31")
    assert (status, headers["Content-Type"], body) == (206, "video/mp4", bytes(range(16, 32)))
    assert headers["Content-Range"] == "bytes 16-31/256"
    assert ask(f"{base}/clip.mp4", Range="bytes=900-")[0] == 416
    assert ask(f"{base}/snapshot.jpg")[1]["Content-Type"] == "image/jpeg"
    assert ask(base, "DELETE")[0] == 204
    for path in ("", "/clip.mp4", "/snapshot.jpg"):
        assert ask(f"{base}{path}")[0] == 404
    assert ask(base, "DELETE")[0] == 404
    assert ask(f"{server.url}/events/..%2Fevents/clip.mp4")[0] == 404


def test_a_range_is_only_of_the_version_that_the_client_has(server: HttpServer, store: EventStore) -> None:
    store.write(event(9, has_clip=True))
    store.flush()
    url, path = f"{server.url}/events/e9/clip.mp4", put(store, "e9.mp4")
    path.write_bytes(b"old" * 100)
    os.utime(path, (1_000_000, 1_000_000))
    _, old, _ = ask(url)
    for condition in (old["ETag"], old["Last-Modified"]):
        status, headers, body = ask(url, Range="bytes=0-1", **{"If-Range": condition})
        assert (status, headers["Content-Range"], body) == (206, "bytes 0-1/300", b"ol")
    path.write_bytes(whole := b"new" * 200_000)
    os.utime(path, (2_000_000, 2_000_000))
    _, new, _ = ask(url)
    later = "Fri, 01 Jan 2100 00:00:00 GMT"
    for condition in (old["ETag"], old["Last-Modified"], f"W/{new['ETag']}", later, '"other"', "*", "", "nonsense"):
        status, headers, body = ask(url, Range="bytes=0-1", **{"If-Range": condition})
        assert (status, headers["Content-Range"], body == whole) == (200, None, True), condition
        assert (headers["ETag"], headers["Content-Length"]) == (new["ETag"], str(len(whole)))
        assert headers["Content-Type"] == "video/mp4"
    assert ask(url, Range="bytes=0-1", **{"If-Range": new["ETag"]})[0] == 206
    assert ask(url, **{"If-Range": old["ETag"]})[2] == whole


def test_stored_minutes_are_listed(server: HttpServer, store: EventStore) -> None:
    start = int(time.time() // 60) * 60
    counts = {"objects": {"person": 2}, "zones": {}, "lines": {}}
    store.write(make_history_record(MinuteCounts("door", start, counts)))
    store.flush()
    assert json.loads(ask(f"{server.url}/streams/door/history?since=1h")[2]) == {
        "minutes": [{"start": start, **counts}]
    }
    assert ask(f"{server.url}/streams/door/history?since=x")[0] == 422


def test_rules_that_have_events_are_listed(server: HttpServer) -> None:
    for query, rules in (("", ["parked", "visitor"]), ("?stream=yard", ["parked"]), ("?stream=none", [])):
        assert json.loads(ask(f"{server.url}/events/rules{query}")[2]) == {"rules": rules}


def test_events_need_the_token_where_there_is_one(store: EventStore, streams: Streams) -> None:
    server = serving_events(store, streams, token="sesame")
    try:
        assert ask(f"{server.url}/events")[0] == 401
        assert ask(f"{server.url}/events", Authorization="Bearer sesame")[0] == 200
        assert ask(f"{server.url}/events?token=sesame&limit=1")[0] == 200
    finally:
        server.close()


def test_a_damaged_store_is_told_and_replaced(
    server: HttpServer, store: EventStore, streams: Streams, tmp_path: Path
) -> None:
    for number in range(3000):
        store.write(event(number))
    store.close()
    with closing(EventStore(tmp_path)) as damaged, closing(serving_events(damaged, streams)) as one:
        damaged.flush()
        spoil_pages(tmp_path / "events.db")
        status, _, body = ask(f"{one.url}/events?q=person&limit=500")
        assert (status, b"cannot be read" in body) == (503, True)
        wait_for(lambda: ask(f"{one.url}/events")[0] == 200)
        assert listed(one, "") == ([], None)
