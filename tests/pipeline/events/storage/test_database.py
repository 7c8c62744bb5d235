"""Old files are migrated, newer ones refused as they are, and damaged ones moved aside without losing an event more."""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from saccade.pipeline.events.storage.database import NewerError, migrate
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import LADDER, EventQuery, EventReader, StoreError
from tests.pipeline.events.storage.test_store import LONG_S, event, ids, put
from tests.support import REPO
from tests.support.command import environment
from tests.support.sinks.broker import wait_for

OLD = sorted((REPO / "tests" / "data" / "stores").glob("*.db.gz"))


def schema_of(path: Path) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY type, name").fetchall()
        return [*rows, *db.execute("PRAGMA user_version").fetchall()]


def columns_of(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as db:
        return [row[1] for row in db.execute("PRAGMA table_info(events)")]


@pytest.mark.parametrize("old", OLD, ids=lambda path: path.name)
def test_an_old_store_is_migrated(tmp_path: Path, old: Path) -> None:
    EventStore(tmp_path / "new").close()
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "events.db").write_bytes(gzip.decompress(old.read_bytes()))
    with closing(EventReader.open(folder)) as reader:  # also before
        assert [one["id"] for one in reader.search(EventQuery())] == ["e2", "e1", "e0"]
    with closing(EventStore(folder)) as store:
        assert ids(store) == ["e2", "e1", "e0"]
        assert [one["id"] for one in store.ended] == ["e2"]
        assert ids(store, words="dark re") == ["e1"]
        assert ids(store, zone="yard") == ["e2"]
        assert [path["track_id"] for path in store.get("e0")["paths"]] == [7]  # type: ignore[index]
        assert [one["start"] for one in store.counts("door", 0)] == [960]
        assert store.prune() == 0
        store.write(event(9))
        store.flush()
        assert ids(store, limit=1) == ["e9"]
    assert columns_of(folder / "events.db") == columns_of(tmp_path / "new" / "events.db")
    names = [row[:2] for row in schema_of(folder / "events.db")]
    assert names == [row[:2] for row in schema_of(tmp_path / "new" / "events.db")]
    words = [row[2] for row in schema_of(folder / "events.db") if row[1:2] == ("words",)]
    assert words == [row[2] for row in schema_of(tmp_path / "new" / "events.db") if row[1:2] == ("words",)]


@pytest.mark.parametrize("old", OLD, ids=lambda path: path.name)
def test_retention_counts_from_when_an_old_store_was_written(tmp_path: Path, old: Path) -> None:
    (tmp_path / "events.db").write_bytes(gzip.decompress(old.read_bytes()))
    with closing(EventStore(tmp_path, keep_s=1e-6)) as store:
        store.prune()
        assert ids(store) == ["e1"]  # whose rule keeps it for a century


def test_a_rung_is_climbed_whole_or_not_at_all(tmp_path: Path) -> None:
    ladder = ("CREATE TABLE one (a);\n", "CREATE TABLE two (a);\nINSERT INTO missing VALUES (1);\n")
    with closing(sqlite3.connect(tmp_path / "x.db")) as db:
        with pytest.raises(sqlite3.OperationalError, match="missing"):
            migrate(db, ladder)
        assert db.execute("SELECT name FROM sqlite_schema").fetchall() == [("one",)]
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        migrate(db, (ladder[0], "CREATE TABLE two (a);\n"))
        migrate(db, (ladder[0], "CREATE TABLE two (a);\n"))
        with pytest.raises(NewerError):
            migrate(db, ladder[:1])


def test_a_newer_store_is_refused_unread(tmp_path: Path) -> None:
    EventStore(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "events.db")) as db:
        db.execute("DROP TABLE tracks")  # what a newer version may do
        db.execute(f"PRAGMA user_version = {len(LADDER) + 1}")
        db.execute("PRAGMA journal_mode = DELETE")
    before = (tmp_path / "events.db").read_bytes()
    for opening in (EventStore, EventReader.open):
        with pytest.raises(StoreError, match="newer version") as raised:
            opening(tmp_path)
        assert "\n" not in str(raised.value)
        assert not raised.value.disk
    assert (tmp_path / "events.db").read_bytes() == before
    assert not list(tmp_path.glob("damaged-*"))


def damaged_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xff" * 100)


def truncated(path: Path) -> None:
    os.truncate(path, 20_000)


def emptied_of_tables(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TABLE events")
        db.commit()


def no_text(path: Path) -> None:
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE events SET end_time = NULL, record = '{\"id'")
        db.commit()


def folder_in_its_place(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "x").write_text("x")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "header": damaged_header,
    "no database": lambda path: bool(path.write_bytes(b"no database at all" * 60)) and None,
    "truncated": truncated,
    "truncated to a part of a page": lambda path: os.truncate(path, 1000),
    "zeros": lambda path: bool(path.write_bytes(bytes(path.stat().st_size))) and None,
    "a table is gone": emptied_of_tables,
    "a record is no JSON": no_text,
    "emptied": lambda path: os.truncate(path, 0),
    "gone, with its clips left": lambda path: path.rename(path.with_name("elsewhere")),
    "a folder": folder_in_its_place,
    "a pipe": lambda path: path.unlink() or os.mkfifo(path),
    "a link to nothing": lambda path: path.unlink() or path.symlink_to("/nonexistent/events.db"),
    "a link to a device": lambda path: path.unlink() or path.symlink_to("/dev/null"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_store_is_moved_aside(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    with closing(EventStore(tmp_path)) as store:
        for number in range(200):
            store.write(event(number))
        store.flush()
        put(store, "e7.jpg")
    DAMAGES[damage](tmp_path / "events.db")
    with closing(EventStore(tmp_path)) as store:
        assert ids(store) == []
        store.write(event(300))
        store.flush()
        assert ids(store) == ["e300"]
    [aside] = tmp_path.glob("damaged-*")
    assert os.path.lexists(aside / "events.db") or damage.startswith("gone")
    assert (aside / "media" / "e7.jpg").exists()
    [warning] = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert str(aside) in warning
    assert "\n" not in warning


def test_what_is_in_the_way_of_a_store_is_moved_aside(tmp_path: Path) -> None:
    (tmp_path / "media").write_text("a file")
    (tmp_path / "lock").mkdir()
    (tmp_path / "reserve").mkdir()
    with closing(EventStore(tmp_path)) as store:
        store.write(event(1))
        store.flush()
        assert ids(store) == ["e1"]


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "film.mp4").write_text("a file")
    with pytest.raises(StoreError, match="cannot store events in this folder") as raised:
        EventStore(tmp_path / "film.mp4")
    assert not raised.value.disk
    assert not [thread for thread in threading.enumerate() if thread.name == "saccade store"]


def spoil_pages(path: Path) -> None:
    """All but the first pages, which hold the schema: what a disk does while the file is open."""
    with path.open("r+b") as file:
        for start in range(4096 * 8, path.stat().st_size, 4096):
            file.seek(start)
            file.write(b"\xa5" * 4096)


@pytest.mark.parametrize("found_by", ["writing", "reading"])
def test_damage_that_is_found_later_costs_no_event_more(
    tmp_path: Path, found_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(EventStore(tmp_path)) as store:
        for number in range(3000):
            store.write(event(number))
    with closing(EventStore(tmp_path)) as store:
        store.flush()
        spoil_pages(tmp_path / "events.db")
        if found_by == "reading":
            with pytest.raises(StoreError, match="cannot be read"):
                ids(store, limit=500, words="person")
            wait_for(lambda: list(tmp_path.glob("damaged-*")))
        for number in range(5000, 5003):
            store.write(event(number))
        store.flush()
        assert ids(store) == ["e5002", "e5001", "e5000"]
    assert "a new store was created" in caplog.text


def deleted(folder: Path) -> None:
    for path in folder.glob("events.db*"):
        path.unlink()


def replaced(folder: Path) -> None:
    (folder / "copy").write_bytes((folder / "events.db").read_bytes())
    (folder / "copy").replace(folder / "events.db")


WHILE_OPEN: dict[str, Callable[[Path], object]] = {
    "deleted": deleted,
    "deleted with its folder": shutil.rmtree,
    "replaced": replaced,
    "emptied": lambda folder: os.truncate(folder / "events.db", 0),
    "truncated": lambda folder: os.truncate(folder / "events.db", 20_000),
}


@pytest.mark.parametrize("what", WHILE_OPEN)
def test_a_file_that_goes_while_it_is_open_costs_no_event_more(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "store"
    with closing(EventStore(folder)) as store:
        for number in range(200):
            store.write(event(number))
    with closing(EventStore(folder)) as store:
        store.flush()
        WHILE_OPEN[what](folder)
        for number in range(900, 903):
            store.write(event(number))
        store.flush()
        assert ids(store) == ["e902", "e901", "e900"]
        put(store, "e902.jpg")
    with closing(EventStore(folder)) as store:
        assert ids(store) == ["e902", "e901", "e900"]


def test_a_damaged_index_of_words_is_damage(tmp_path: Path) -> None:
    with closing(EventStore(tmp_path)) as store:
        for number in range(200):
            store.write(event(number))
    with closing(sqlite3.connect(tmp_path / "events.db")) as db:
        db.execute("UPDATE words_data SET block = x'00000000ffffffffff' WHERE id = 10")
        db.commit()
    with closing(EventStore(tmp_path)) as store:
        with pytest.raises(StoreError, match="cannot be read"):
            ids(store, words="person")
        store.write(event(300))
        store.flush()
        assert ids(store, words="person") == ["e300"]
    assert len(list(tmp_path.glob("damaged-*"))) == 1


def test_a_reader_s_passing_error_moves_nothing(tmp_path: Path) -> None:
    with closing(EventStore(tmp_path)) as store:
        store.write(event(1))
        store.flush()
        passing = sqlite3.DatabaseError("disk I/O error")
        passing.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHORT_READ
        store._found_unreadable(passing, store._generation)
        store.flush()
        assert ids(store) == ["e1"]
    assert not list(tmp_path.glob("damaged-*"))


def test_media_behind_a_link_stay_on_their_disk(tmp_path: Path) -> None:
    disk, folder = tmp_path / "disk", tmp_path / "store"
    disk.mkdir()
    folder.mkdir()
    (folder / "media").symlink_to(disk)
    with closing(EventStore(folder)) as store:
        store.write(event(1))
        store.flush()
        put(store, "e1.jpg")
    damaged_header(folder / "events.db")
    for _ in range(2):
        with closing(EventStore(folder)) as store:
            store.flush()
    [kept] = disk.rglob("e1.jpg")
    assert kept.parent.name.startswith("damaged-")


def as_nobody(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code as a user whom permissions hold for, which they do not for root."""
    if os.geteuid() != 0:
        pytest.skip("only root can run a process as another user")
    for one in (folder, *folder.rglob("*")):
        os.chown(one, 65534, 65534)
    drop = "import os, sys; from pathlib import Path; from contextlib import closing; os.chdir('/');"
    drop += "from saccade.pipeline.events.storage.store import EventStore;"
    drop += "from tests.pipeline.events.storage.test_store import event, ids;"
    drop += "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    command = [sys.executable, "-c", drop + code, str(folder)]
    return subprocess.run(
        command, cwd=REPO, env=environment(), text=True, capture_output=True, timeout=LONG_S, check=False
    )


OPEN = """
with closing(EventStore(Path(sys.argv[1]))) as store:
    store.write(event(300))
    store.flush()
    print(ids(store))
"""


@pytest.fixture
def open_to_all() -> Any:
    """A folder that another user may reach, which those of pytest are not."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="saccade-store-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_read_only_file_is_moved_aside(open_to_all: Path) -> None:
    store = open_to_all / "store"
    with closing(EventStore(store)) as made:
        made.write(event(1))
    (store / "events.db").chmod(0o444)
    done = as_nobody(OPEN, store)
    assert done.stdout.split() == ["['e300']"], done.stderr
    assert len(list(store.glob("damaged-*"))) == 1


def test_a_read_only_folder_is_the_disk_s_fault(open_to_all: Path) -> None:
    store = open_to_all / "store"
    with closing(EventStore(store)) as made:
        made.write(event(1))
    (store / "events.db").chmod(0o444)
    (store / "lock").chmod(0o444)
    store.chmod(0o555)
    done = as_nobody(
        "try: EventStore(Path(sys.argv[1]))\nexcept Exception as error: print(type(error).__name__, error.disk)", store
    )
    assert done.stdout.split() == ["StoreError", "True"], done.stderr


class HangingDisk(EventStore):
    """A store whose disk stops answering once `hang` is set, until `go_on` is: each statement waits within SQLite."""

    def __init__(self, folder: Path) -> None:
        self.hang, self.go_on, self.hanging = threading.Event(), threading.Event(), threading.Event()
        super().__init__(folder)

    def _connect(self) -> sqlite3.Connection:
        db = super()._connect()
        db.set_progress_handler(self._progress, 1)
        return db

    def _progress(self) -> int:
        if self.hang.is_set():
            self.hanging.set()
            self.go_on.wait()
        return 0


def test_a_disk_that_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("saccade.pipeline.events.storage.store.CLOSE_S", 0.2)
    monkeypatch.setattr("saccade.pipeline.events.storage.store.LONG_S", 0.2)
    monkeypatch.setattr("saccade.pipeline.events.storage.store._MAX_WAITING", 100)
    store = HangingDisk(tmp_path)
    store.flush()
    store.hang.set()
    for number in range(300):
        store.write(event(number))
        if number == 0:
            assert store.hanging.wait(LONG_S)
    assert store.dropped in (199, 200)  # the thread may have hung before it took the first
    with pytest.raises(StoreError, match="does not respond"):
        store.flush()
    closing_it = threading.Thread(target=store.close, daemon=True)
    closing_it.start()
    closing_it.join(LONG_S)
    assert not closing_it.is_alive()
    assert "the disk does not respond" in caplog.text
    store.go_on.set()
    store._thread.join(LONG_S)
    with closing(EventStore(tmp_path)) as again:  # what waited was written when the disk answered
        assert len(ids(again, limit=500)) == 300 - store.dropped


def test_an_event_whose_end_was_lost_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("saccade.pipeline.events.storage.store._MAX_WAITING", 10)
    store = HangingDisk(tmp_path)
    for number in range(5):
        store.write(event(number, "begin"))
    store.flush()
    store.hang.set()
    store.write(event(100))
    assert store.hanging.wait(LONG_S)
    for number in range(101, 112):
        store.write(event(number))
    dropped = store.dropped
    for number in range(4):
        store.write(event(number))
    assert store.dropped == dropped + 4
    store.go_on.set()
    store.flush()
    store.write(event(200))
    store.flush()
    assert [one["id"] for one in store.going_on()] == ["e4"]
    assert store.get("e0")["end_time"] == 1002.0  # type: ignore[index]
    assert f"the disk is writable again; {dropped + 4} event changes were dropped" in caplog.text
    store.close()
