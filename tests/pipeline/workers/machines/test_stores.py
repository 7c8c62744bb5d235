"""Records on their way to the stores of other machines: in order, once, and when these are there again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import EventQuery
from saccade.pipeline.workers.machines import stores as module
from saccade.pipeline.workers.machines.store_server import StoreServer
from saccade.pipeline.workers.machines.stores import MachineStores
from tests.pipeline.events.storage.test_store import event
from tests.support.cameras import free_port, wait_for

LONG_S = 30.0
SECRET = "sesame"


@pytest.fixture(autouse=True)
def _ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    yield
    assert not [one for one in threading.enumerate() if one.name == "saccade remote store"]


def ids(store: EventStore) -> list[str]:
    return [one["id"] for one in store.search(EventQuery(limit=500))]


def test_records_go_to_the_machine_that_made_them(tmp_path: Path) -> None:
    loaded: list[tuple[list[str], str]] = []

    def load(records: Any, machine: str) -> None:
        loaded.append(([record["id"] for record in records], machine))

    with closing(EventStore(tmp_path / "own")) as own, closing(EventStore(tmp_path / "north")) as north:
        north.write(event(7, "begin"))
        north.flush()
        with closing(StoreServer(north, SECRET)) as server, closing(MachineStores(own, SECRET, load)) as stores:
            stores.serve_local()
            stores.meet("north", server.url)
            for number in range(300):
                stores.write(event(100 + number, "begin"), "north")
            stores.write({"type": "rules"}, "north")
            stores.write(event(7), "north")
            stores.write(event(8), "")
            assert set(stores.urls()) == {"", "north"}
            wait_for(lambda: not north.going_on()[:1] or len(ids(north)) == 301, LONG_S)
            wait_for(lambda: north.get("e7")["end_time"] is not None, LONG_S)  # type: ignore[index]
        own.flush()
        assert ids(own) == ["e8"]
        assert ids(north) == [*(f"e{number}" for number in range(399, 99, -1)), "e7"]
    assert loaded == [(["e7"], "north")]


def test_records_wait_for_a_machine_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 20)
    port = free_port()
    with closing(EventStore(tmp_path)) as north, closing(MachineStores(None, SECRET, lambda *_: None)) as stores:
        stores.meet("north", f"http://127.0.0.1:{port}")
        for number in range(25):
            stores.write(event(number), "north")
        wait_for(lambda: "wait until its store answers" in caplog.text, LONG_S)
        with closing(StoreServer(north, SECRET, port=port)):
            wait_for(lambda: len(ids(north)) == 20, LONG_S)
    assert ids(north) == [f"e{number}" for number in range(24, 4, -1)]
    assert [record.message for record in caplog.records][-1] == "events of north are stored again; changes lost: 5"


def test_an_end_does_not_wait_for_a_machine_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLOSE_S", 0.2)
    stores = MachineStores(None, SECRET, lambda *_: None)
    stores.meet("north", f"http://127.0.0.1:{free_port()}")
    stores.write(event(1), "north")
    begun = time.monotonic()
    stores.close()
    assert time.monotonic() - begun < LONG_S
