"""Events found again by asking a model about their snapshots: nano by its names, and a model that talks."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import cv2
import pytest

from saccade.engine import Engine
from saccade.pipeline.api import events
from saccade.pipeline.api.http_server import HttpServer
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.control.local import Local
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import EventQuery, EventReader
from saccade.pipeline.runtime.streams import Streams
from saccade.pipeline.search import search_events
from saccade.sources import open_source
from tests.pipeline.events.storage.test_store import event
from tests.support.command import Command
from tests.support.engine import TINY, random_model, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four events: of e1 and e3 a person is on the snapshot, of e2 nobody, and e4 has none any more."""
    path = tmp_path_factory.mktemp("search") / "kept"
    store = EventStore(path)
    with open_source(DEMO_CLIP) as source:
        frames = [frame.image for frame in source if frame.index in (0, 65, 120)]
    for number, image in zip((1, 2, 3), frames, strict=True):
        cv2.imwrite(str(store.media_folder / f"e{number}.jpg"), image[..., ::-1])
    for number in (1, 2, 3, 4):
        store.write(event(number, has_snapshot=True, label="thing", attributes={"c": "green"} if number == 2 else {}))
    store.close()
    return path


@pytest.fixture(scope="module")
def nano() -> Iterator[Engine]:
    with Engine.load("nano", device="cpu") as engine:
        yield engine


def test_nano_finds_names_in_snapshots(folder: Path, nano: Engine) -> None:
    reader = EventReader.open(folder)
    shown: list[tuple[int, int]] = []
    found = search_events(reader, nano, "green people", progress=lambda *done: shown.append(done))
    assert {one.event["id"] for one in found[:2]} == {"e1", "e3"}
    assert min(one.p_yes for one in found[:2]) > 0.8
    assert (found[2].event["id"], found[2].p_yes < 0.2) == ("e2", True)
    assert shown == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [one.event["id"] for one in search_events(reader, nano, "person", EventQuery(since=1003.0))] == ["e3"]
    # Those with the words are asked about first.
    assert [one.event["id"] for one in search_events(reader, nano, "green person", candidates=1)] == []
    assert [one.event["id"] for one in search_events(reader, nano, "green dog", EventQuery(words="green"))] == ["e2"]
    for text in ("", "zebra crossing"):
        with pytest.raises(ConfigError, match=r"search text is empty|nano cannot search for 'zebra crossing'"):
            search_events(reader, nano, text)
    reader.close()


def test_a_model_that_talks_is_asked_with_yes_or_no(folder: Path, tmp_path: Path) -> None:
    reader = EventReader.open(folder)
    with Engine.load(str(write_model(tmp_path, TINY, random_model(TINY))), "cpu") as engine:
        found = search_events(reader, engine, "a zebra crossing", EventQuery(limit=2))
    assert len(found) == 2
    assert 1 > found[0].p_yes >= found[1].p_yes > 0
    reader.close()


def test_the_command_lists_the_likeliest_first(folder: Path, tmp_path: Path, saccade: Command) -> None:
    done = saccade("search", "person", "--store", folder, "--json", "--limit", 2, cwd=tmp_path)
    found = json.loads(done.stdout)["events"]
    assert {one["id"] for one in found} == {"e1", "e3"}
    assert found[0]["match"] >= found[1]["match"] > 0.8
    lines = saccade("search", "person", "--store", folder, cwd=tmp_path).stdout.splitlines()
    assert [line.endswith(".jpg") for line in lines] == [True] * 3
    for arguments, message in (
        (["--store", "none"], "none: this folder has no event store"),
        (["--store", folder, "--since", "long ago"], "--since: "),
    ):
        done = saccade("search", "person", *arguments, cwd=tmp_path)
        assert (done.returncode, message in done.stderr) == (2, True)
    assert not (tmp_path / "none").exists()
    with closing(EventStore(tmp_path / "without")) as store:
        store.write(event(1))
    found = saccade("search", "person", "--store", "without", cwd=tmp_path).stdout
    assert found == "no events with a snapshot found\n"


def ask(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_search_over_http(folder: Path, nano: Engine) -> None:
    store = EventStore(folder)
    asking = events.Stored(store, Local(Streams(nano), store=store))
    server = HttpServer([events.routes], {events.Stored: asking}, port=0)
    try:
        status, page = ask(f"{server.url}/events/search?q=person&limit=1")
        assert (status, len(page["events"]), page["events"][0]["match"] > 0.8) == (200, 1, True)
        for accept in ("application/json", "text/event-stream"):
            headers = {"Accept": accept, "Origin": server.url}
            with urllib.request.urlopen(
                urllib.request.Request(f"{server.url}/events/search?q=person", headers=headers), timeout=60
            ) as answer:
                assert (answer.headers["Access-Control-Allow-Origin"], answer.read()[:1] != b"") == (server.url, True)
        status, page = ask(f"{server.url}/events/search?q=zebra")
        assert (status, "nano cannot search for" in page["error"]) == (422, True)
    finally:
        server.close()
        store.close()
