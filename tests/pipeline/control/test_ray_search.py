"""A search while workers end, are away and come back: which snapshots are asked about, and what is told of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from saccade.engine.errors import EngineError
from saccade.pipeline.control import ray_search
from saccade.pipeline.errors import StreamError
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import EventQuery
from saccade.pipeline.search import AT_ONCE
from tests.pipeline.events.storage.test_store import event

pytest.importorskip("ray", reason="the extra `ray` is not installed")

COUNT = 3 * AT_ONCE + 1


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EventStore]:
    one = EventStore(tmp_path_factory.mktemp("search"))
    for number in range(1, COUNT + 1):
        (Path(one.media_folder) / f"e{number}.jpg").write_bytes(b"x")
        one.write(event(number, has_snapshot=True))
    one.flush()
    yield one
    one.close()


class Machine:
    """Answers that a snapshot shows it by the event's number; fails as the script says, then works."""

    def __init__(self, *script: object) -> None:
        self.script = list(script)
        self.asked: list[list[str]] = []

    def __call__(self, machine: str, text: str, events: Sequence[str]) -> list[float | None] | None:
        self.asked.append(list(events))
        step = self.script.pop(0) if self.script else "answers"
        if isinstance(step, Exception):
            raise step
        return None if step is None else [int(one[1:]) / 100 for one in events]


def test_every_snapshot_is_asked_about_once(store: EventStore) -> None:
    machine, shown = Machine(), list[tuple[int, int]]()
    found = ray_search.search_workers(
        store, machine, 2, "person", EventQuery(limit=3), lambda *done: shown.append(done)
    )
    assert [one.event["id"] for one in found.found] == [f"e{COUNT - number}" for number in range(3)]
    assert (found.away, shown[-1]) == ([], (COUNT, COUNT))
    assert sorted(one for piece in machine.asked for one in piece) == sorted(f"e{n}" for n in range(1, COUNT + 1))
    assert max(map(len, machine.asked)) == AT_ONCE


@pytest.mark.parametrize("script", [(StreamError("ended"),), (None, None), (StreamError("ended"), None)])
def test_what_a_worker_was_asked_that_ends_another_is(store: EventStore, script: tuple[object, ...]) -> None:
    found = ray_search.search_workers(store, Machine(*script), 1, "person", EventQuery(limit=200), lambda *done: None)
    assert (len(found.found), found.away) == (COUNT, [])


def test_snapshots_that_end_each_worker_are_given_up(store: EventStore) -> None:
    machine = Machine(*[StreamError("ended")] * 3)
    found = ray_search.search_workers(store, machine, 1, "person", EventQuery(limit=200), lambda *done: None)
    assert (len(found.found), found.away) == (COUNT - AT_ONCE, ["controller"])


def test_a_machine_without_a_worker_is_given_up(store: EventStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_search, "AWAY_S", 0.3)
    shown: list[tuple[int, int]] = []
    found = ray_search.search_workers(
        store, lambda machine, text, events: None, 4, "person", EventQuery(), lambda *done: shown.append(done)
    )
    assert (found.found, found.away) == ([], ["controller"])
    assert len(shown) > 1  # told while it waits, so that who has gone can end it


def test_what_the_model_refuses_ends_the_search(store: EventStore) -> None:
    with pytest.raises(EngineError, match="no such name"):
        ray_search.search_workers(store, Machine(EngineError("no such name")), 1, "x", EventQuery(), lambda *done: None)


def test_a_search_that_nobody_waits_for_ends(store: EventStore) -> None:
    def gone(*done: int) -> None:
        raise TimeoutError

    machine = Machine(*[None] * 10_000)
    with pytest.raises(TimeoutError):
        ray_search.search_workers(store, machine, 1, "person", EventQuery(), gone)
