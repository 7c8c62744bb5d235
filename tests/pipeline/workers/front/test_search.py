"""Stored events searched by the engines of two real workers, also while workers and machines go."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import cv2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from saccade.engine import Engine
from saccade.pipeline.api.http_server import HttpServer
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config.file import load
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import EventQuery
from saccade.pipeline.workers.auth import FrontAuth
from saccade.pipeline.workers.front.front import Front, opened_front
from saccade.pipeline.workers.front.search import WorkersSearch
from saccade.pipeline.workers.machines.store_server import StoreServer
from saccade.pipeline.workers.machines.stores import MachineStores
from saccade.pipeline.workers.snapshot_api import SnapshotApi
from saccade.pipeline.workers.states import WorkerSeat
from saccade.sources import open_source
from tests.pipeline.events.storage.test_store import event
from tests.support.cameras import free_port, wait_for
from tests.support.command import Command
from tests.support.worker_here import WorkerHere

LONG_S = 90.0  # far beyond what any of these needs; only so that a hang fails
COUNT = 40
SECRET = "sesame"


@pytest.fixture(scope="module")
def images() -> dict[bool, bytes]:
    """Snapshots with a person, and with none."""
    with open_source(DEMO_CLIP) as source:
        frames = {frame.index: frame.image for frame in source if frame.index in (0, 65)}
    return {index == 0: cv2.imencode(".jpg", image[..., ::-1])[1].tobytes() for index, image in frames.items()}


def fill(store: EventStore, numbers: range, images: dict[bool, bytes]) -> None:
    """Store events, every fourth of which shows a person."""
    for number in numbers:
        (store.media_folder / f"e{number}.jpg").write_bytes(images[number % 4 == 0])
        store.write(event(number, has_snapshot=True, label="thing"))
    store.flush()


@dataclass
class Running:
    front: Front
    url: str

    def open(self, path: str, **headers: str) -> Any:
        return urllib.request.urlopen(urllib.request.Request(f"{self.url}{path}", headers=headers), timeout=LONG_S)

    def search(self, query: str) -> list[dict[str, Any]]:
        with self.open(f"/events/search?{query}") as answer:
            return list(json.load(answer)["events"])

    def end(self, *numbers: int) -> None:
        for number in numbers:
            worker = self.front.supervisor.seats()[number].worker
            assert worker is not None
            worker.stop()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, images: dict[bool, bytes]) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("search") / "kept"
    with closing(EventStore(folder)) as store:
        fill(store, range(COUNT), images)
    values = {"store": str(folder), "detect": "person", "http": "127.0.0.1:0", "workers": 2, "device": "cpu"}
    with opened_front(load(None, values), WorkerHere) as front:
        front.start()
        assert front.url is not None
        wait_for(lambda: all(seat.ready for seat in front.supervisor.seats()), LONG_S)
        yield Running(front, front.url)


def steps(running: Running) -> dict[str, float]:
    with running.open("/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
    name = "saccade_worker_engine_steps_prefill_total"
    return {s.labels["worker"]: s.value for family in families for s in family.samples if s.name == name}


def test_workers_share_the_questions(running: Running) -> None:
    found = running.search(f"q=person&limit={COUNT}")
    assert len(found) == COUNT
    assert [one["match"] for one in found] == sorted((one["match"] for one in found), reverse=True)
    people = {f"e{number}" for number in range(0, COUNT, 4)}
    assert {one["id"] for one in found[: len(people)]} == people
    assert found[len(people) - 1]["match"] > 0.8 > 0.2 > found[len(people)]["match"]
    # Of those that match alike the newest is first; filters are those of the list.
    assert [one["id"] for one in running.search("q=person&since=1030&limit=2")] == ["e36", "e32"]
    asked = steps(running)
    assert set(asked) == {"1", "2"}
    assert min(asked.values()) > 0


def test_what_the_model_does_not_know_is_one_line(running: Running) -> None:
    for query, message in (("q=zebra", "nano knows no name in 'zebra'"), ("q=", "nothing to search for")):
        with pytest.raises(urllib.error.HTTPError) as refused:
            running.search(query)
        assert (refused.value.code, message in json.load(refused.value)["error"]) == (422, True)


def progress(answer: Any) -> Iterator[dict[str, Any]]:
    for line in answer:
        if line.startswith(b"data: "):
            yield json.loads(line.removeprefix(b"data: "))


PENDING = pytest.mark.skip(reason="not ported yet to workers that are Ray actors: it does not end")
ENDS = pytest.mark.skip(reason="a worker of the test's own process cannot die as an actor does")


@pytest.mark.parametrize(
    "ended", [(), pytest.param((0,), marks=ENDS), pytest.param((0, 1), marks=ENDS)], ids=["none", "one", "all"]
)
def test_a_search_goes_on_when_workers_end(running: Running, ended: tuple[int, ...]) -> None:
    wait_for(lambda: all(seat.ready for seat in running.front.supervisor.seats()), LONG_S)
    with running.open(f"/events/search?q=person&limit={COUNT}", Accept="text/event-stream") as answer:
        messages = progress(answer)
        seen = [next(messages)]
        running.end(*ended)
        seen += messages
    counts = [one["done"] for one in seen[:-1]]
    assert counts == sorted(counts)
    assert seen[-2] == {"done": COUNT, "of": COUNT}
    assert len(seen[-1]["events"]) == COUNT
    assert "away" not in seen[-1]


@PENDING
def test_snapshots_of_a_machine_without_workers_are_left_out(
    running: Running, tmp_path: Path, images: dict[bool, bytes]
) -> None:
    seats = running.front.supervisor.seats
    wait_for(lambda: all(seat.ready for seat in seats()), LONG_S)
    with ExitStack() as stack:
        north = stack.enter_context(closing(EventStore(tmp_path / "north")))
        fill(north, range(COUNT, COUNT + 8), images)
        url = stack.enter_context(closing(StoreServer(north, SECRET))).url
        own = stack.enter_context(closing(EventStore(tmp_path / "own")))
        fill(own, range(6), images)
        stores = stack.enter_context(closing(MachineStores(own, SECRET, lambda records, machine: None)))
        stores.meet("north", url)
        stores.meet("gone", f"http://127.0.0.1:{free_port()}")
        query, away = EventQuery(limit=3), set[str]()
        walked = list(stores.walk(query, away))
        assert [record["id"] for record, _ in walked] == [f"e{n}" for n in (*range(5, -1, -1), *range(47, 39, -1))]
        assert ([machine for _, machine in walked], away) == ([""] * 6 + ["north"] * 8, {"gone"})
        north.write(event(99))  # without a snapshot
        north.flush()
        assert list(stores.walk(replace(query, media=True), away)) == walked
        # The workers, which have no secret but the front's, are the front's own machine's.
        search = WorkersSearch(stores, seats, "no", away_s=0.2)
        assert search("person", query, lambda done, of: None).away == ["front", "gone", "north"]


@PENDING
def test_a_worker_whose_engine_has_ended_is_not_asked_again(
    tmp_path: Path, images: dict[bool, bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    worker: Any = SimpleNamespace(state="ready")
    seats = []
    with ExitStack() as stack:
        store = stack.enter_context(closing(EventStore(tmp_path / "kept")))
        fill(store, range(8), images)
        (store.media_folder / "e7.jpg").unlink()
        for ended in (True, False):
            engine = stack.enter_context(Engine.load("nano", device="cpu"))
            routes = SnapshotApi(engine, store.media_folder).routes()
            server = stack.enter_context(closing(HttpServer(None, port=0, access=FrontAuth(SECRET), routes=routes)))
            seats.append(WorkerSeat("1", worker, server.url))
            if ended:
                engine.close()
        stores = stack.enter_context(closing(MachineStores(store, SECRET, lambda records, machine: None)))
        searched = WorkersSearch(stores, lambda: seats, SECRET)("person", EventQuery(limit=8), lambda done, of: None)
        assert (len(searched.found), searched.away) == (7, [])
    assert "imread" not in capfd.readouterr().err


@PENDING
def test_the_command_has_a_running_saccade_search(running: Running, tmp_path: Path, saccade: Command) -> None:
    done = saccade("search", "person", "--url", running.url, "--json", "--limit", 2, cwd=tmp_path)
    assert [one["id"] for one in json.loads(done.stdout)["events"]] == ["e36", "e32"]
    lines = saccade("search", "person", "--url", running.url, "--since", "1038", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[-1] for line in lines] == [f"{running.url}/events/e{n}/snapshot.jpg" for n in (39, 38)]
    nobody = f"http://127.0.0.1:{free_port()}"
    for arguments, message in (
        (["zebra", "--url", running.url], "--url: nano knows no name in 'zebra'"),
        (["person", "--url", nobody], f"--url: {nobody} does not answer"),
        (["person", "--url", running.url, "--store", "kept"], "--url: a running saccade has its own store"),
        (["person", "--url", "127.0.0.1:8080"], "--url: should be the address of a running saccade"),
        (["person", "--url", "http://[::1"], "--url: should be the address of a running saccade"),
    ):
        done = saccade("search", *arguments, cwd=tmp_path)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize("accept", ["text/event-stream", "application/json"])
@PENDING
def test_a_search_that_nobody_waits_for_ends(running: Running, accept: str, caplog: pytest.LogCaptureFixture) -> None:
    wait_for(lambda: all(seat.ready for seat in running.front.supervisor.seats()), LONG_S)
    before = sum(steps(running).values())
    with closing(http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=LONG_S)) as client:
        client.request("GET", f"/events/search?q=person&limit={COUNT}", headers={"Accept": accept})
        wait_for(lambda: sum(steps(running).values()) > before, LONG_S)

    def again() -> bool:
        try:
            return running.search("q=person&stream=none") == []
        except urllib.error.HTTPError:  # 503: another search goes on
            return False

    wait_for(again, LONG_S)
    assert sum(steps(running).values()) - before < COUNT
    assert "failed" not in caplog.text
