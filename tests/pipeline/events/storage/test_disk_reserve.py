"""What a store does on a full disk with the space that it has kept."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from saccade.pipeline.config import RunConfig
from saccade.pipeline.control.local import opened_store
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import StoreError
from tests.pipeline.events.storage.test_store import event, ids, put
from tests.support.sinks.broker import wait_for
from tests.support.sinks.disk import full_disk


def test_a_store_is_opened_on_a_full_disk(tmp_path: Path) -> None:
    with full_disk(tmp_path / "disk", megabytes=4) as disk:
        if not disk.mounted:
            pytest.skip("no disk can be mounted here")
        with closing(EventStore(disk.folder)) as store:
            for number in range(3):
                store.write(event(number, "begin"))
            wait_for((disk.folder / "reserve").exists)
        disk.fill()
        with closing(EventStore(disk.folder)) as store:  # e0 to e2 are ended, which is written
            assert [record["type"] for record in store.ended] == ["end"] * 3
            assert ids(store) == ["e2", "e1", "e0"]
        disk.fill()
        with pytest.raises(StoreError, match="disk is full"):
            EventStore(disk.folder)


def test_an_event_is_deleted_on_a_full_disk_while_others_wait(tmp_path: Path) -> None:
    with full_disk(tmp_path / "disk", megabytes=4) as disk, closing(EventStore(disk.folder)) as store:
        if not disk.mounted:
            pytest.skip("no disk can be mounted here")
        store.write(event(0))
        put(store, "e0.jpg", 500_000)
        store.note_media("e0", "snapshot")
        wait_for((disk.folder / "reserve").exists)
        disk.fill()
        for number in range(1, 500):
            store.write(event(number))
        with pytest.raises(StoreError, match="the store cannot be written"):
            store.flush()
        assert store.delete("e0")
        wait_for(lambda: "e499" in ids(store))
        assert "e0" not in ids(store, limit=500)


def test_a_disk_without_space_stops_the_store_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with full_disk(tmp_path / "disk", megabytes=4) as disk:
        if not disk.mounted:
            pytest.skip("no disk can be mounted here")
        disk.fill()
        with opened_store(RunConfig(source="x.mp4", detect=["person"], store=str(disk.folder / "store"))) as store:
            assert store is None
        assert "no events are stored until Saccade is restarted" in caplog.text
