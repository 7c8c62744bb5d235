"""The stores of two machines with one face: real stores, the other one called without Ray."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from saccade.pipeline.control.runner import Address
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import EventQuery, StoreError
from tests.pipeline.events.storage.test_store import event
from tests.support.cameras import wait_for

pytest.importorskip("ray", reason="the extra `ray` is not installed")
from saccade.pipeline.control import stores

LONG_S = 30.0
THERE = Address("http://127.0.0.1:9", {})


@dataclass
class Two:
    """The stores of this machine and of `other`, which can be away."""

    both: stores.MachineStores
    here: EventStore
    there: EventStore
    away: bool = False

    def ids(self, **query: Any) -> list[str]:
        return [record["id"] for record, _ in self.both.page(EventQuery(**query))]


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Two]:
    actor = stores.StoreActor(str(tmp_path), "there", None, None)
    here, there = EventStore(tmp_path / "here"), actor._store
    assert there is not None

    def ask(self: stores.RemoteStore, method: str, *arguments: Any) -> Any:
        self.away = made.away
        if made.away:
            raise StoreError("it does not answer")
        return getattr(actor, method)(*arguments)

    monkeypatch.setattr(stores.RemoteStore, "_ask", ask)
    monkeypatch.setattr(stores, "RETRY_S", 0.05)
    loaded: list[str] = []
    both = stores.MachineStores(here, lambda records, machine: loaded.append(machine), lambda machine: THERE)
    made = Two(both, here, there)
    both.register("other", "node")
    wait_for(lambda: loaded == ["other"], LONG_S)
    yield made
    made.away = False
    both.close()
    actor.close()
    here.close()


def fill(two: Two, count: int) -> list[str]:
    """Store events on both machines in turn; returns their ids, newest first."""
    for number in range(1, count + 1):
        two.both.write(event(number), "other" if number % 3 else "")
        wait_for(lambda number=number: f"e{number}" in two.ids(limit=100), LONG_S)
    return [f"e{number}" for number in range(count, 0, -1)]


def test_pages_have_every_event_once(two: Two) -> None:
    ids = fill(two, 11)
    for limit in (1, 2, 4, 11, 50):
        found: list[str] = []
        query = EventQuery(limit=limit)
        while page := two.both.page(query):
            found += [record["id"] for record, _ in page]
            query = replace(query, after=page[-1][1])
        assert found == ids
    assert [(record["id"], machine) for record, _, machine in two.both.walk_machines(EventQuery(limit=2))] == [
        (name, "other" if int(name[1:]) % 3 else "") for name in ids
    ]


def test_each_machine_answers_for_its_events(two: Two) -> None:
    fill(two, 3)
    assert (two.here.get("e3") is None, two.there.get("e1") is None) == (False, False)
    assert {name: two.both.get(name) is not None for name in ("e1", "e3", "e9")} == {
        "e1": True,
        "e3": True,
        "e9": False,
    }
    assert [two.both.machine_of(name) for name in ("e1", "e3", "e9")] == ["other", "", None]
    for name, store in (("e1", two.there), ("e3", two.here)):
        (store.media_folder / f"{name}.jpg").write_bytes(b"x")
        store.note_media(name, "snapshot")
        store.flush()
    assert two.both.media("e1", "snapshot") == THERE
    assert two.both.media("e3", "snapshot") == two.here.media_folder / "e3.jpg"
    assert two.both.rules() == sorted({*two.here.rules(), *two.there.rules()})
    assert two.both.delete("e1")
    assert not two.both.delete("e9")
    assert two.ids() == ["e3", "e2"]


def test_a_verdict_is_stored_on_this_machine(two: Two) -> None:
    fill(two, 3)
    two.both.write(event(4, box_norm=None), "other")
    wait_for(lambda: "e4" in two.ids(), LONG_S)
    stream = event(1)["stream"]
    assert {name: two.both.judge(name, false_alarm=True) for name in ("e1", "e3", "e9")} == {
        "e1": stream,
        "e3": stream,
        "e9": None,
    }
    with pytest.raises(ValueError, match="has no box, so it cannot be marked as a false alarm"):
        two.both.judge("e4", false_alarm=True)
    assert two.there.verdicts() == []
    assert [one.event for one in two.both.verdicts(stream)] == ["e1", "e3"]
    two.away = True
    assert two.both.judge("e1", false_alarm=False) == stream
    assert two.both.judge("e2", false_alarm=True) is None  # its machine is unreachable
    assert [one.event for one in two.both.verdicts(stream)] == ["e3"]
    two.away = False
    assert two.both.judge("e2", false_alarm=False) == stream


def test_records_wait_while_a_machine_is_away(two: Two) -> None:
    fill(two, 2)
    assert two.both.away == []
    two.away = True
    two.both.write(event(4), "other")
    assert two.ids() == []  # this machine has none
    assert two.both.away == ["other"]
    two.away = False
    wait_for(lambda: two.ids() == ["e4", "e2", "e1"], LONG_S)
    assert two.both.away == []
