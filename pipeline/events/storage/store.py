"""Events, tracks and counts that stay: SQLite in a folder, with the images and clips of events beside it.

    FOLDER/events.db           what is in `store_reader.SCHEMA`; written by one thread, read by any
    FOLDER/media/ID.jpg, .mp4  named after their event; NAME.part while they are written
    FOLDER/reserve             space that is given up on a full disk, see `disk_reserve`

While the disk is full or cannot be written, records wait in memory. Whatever was committed outlives `kill -9`: on the
next start events that went on then are ended, unless they may go on; media of none are deleted, and media that were
whole but not yet noted are. Knows records of events; not who made them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade.pipeline.events.storage.disk_reserve import DiskReserve
from saccade.pipeline.events.storage.store_reader import LONG_S, MEDIA, SCHEMA, SCHEMA_VERSION, EventReader, StoreError

log = logging.getLogger(__name__)

PRUNE_S = 60.0
_MAX_WAITING = 10_000
_BATCH = 500  # changes in one transaction
_OPEN = "SELECT id, record FROM events WHERE end_time IS NULL ORDER BY row"
_OLD = "SELECT id FROM events WHERE expires_at IS NULL AND stored_at < ? AND end_time IS NOT NULL"
_YOUNG_S = 60.0  # of a file that another process may be writing
_RETRY_S = 2.0  # after the disk could not be written

Write = Callable[[sqlite3.Connection], Any]


@dataclass(slots=True, frozen=True)
class _Job:
    """What the thread is to do.

    Attributes:
        write: the changes.
        lasting: also later if the disk cannot be written now: nobody waits for it.
        frees: it deletes, so on a full disk it is done at once, in the reserve.
    """

    write: Write
    lasting: bool = False
    frees: bool = False
    done: Future[Any] = field(default_factory=Future)


class EventStore(EventReader):
    """The store in a folder, which one process at a time may write. Every method is callable from any thread.

    Args:
        folder: made if it is not there.
        keep_s: events older than this are deleted, but for rules with a time of their own; None to keep all.
        max_bytes: of all media; beyond it those of the oldest events are deleted with them; None for no limit.
        keep_open: leave events open that went on when the last process ended: whatever writes them goes on.

    Raises:
        StoreError: if the folder cannot be used, or another process writes it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_s: float | None = None,
        max_bytes: int | None = None,
        keep_open: bool = False,
    ) -> None:
        super().__init__(folder)
        self.ended: list[dict[str, Any]] = []
        """The records of the events that were ended on opening: they went on when the last process ended."""
        self._keep_s, self._max_bytes = keep_s, max_bytes
        self._rule_keep_s: dict[str, dict[str, float]] = {}  # by stream and rule
        self._stored_at = 0.0
        self._deleted_media: list[Path] = []  # of a transaction that is not committed yet
        self._reserve = DiskReserve(folder / "reserve")
        try:
            self.media_folder.mkdir(parents=True, exist_ok=True)
            self._lock_file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"{folder}: events cannot be stored there: {error.strerror}") from None
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                self._recover(keep_open)
            except (sqlite3.OperationalError, OSError):
                if not self._reserve.release():
                    raise
                self._recover(keep_open)
        except BlockingIOError:
            os.close(self._lock_file)
            raise StoreError(f"{folder}: another process stores events there") from None
        except (sqlite3.Error, OSError) as error:
            os.close(self._lock_file)
            raise StoreError(f"{folder}: events cannot be stored there: {error}") from None
        self._waiting: queue.Queue[_Job | None] = queue.Queue(_MAX_WAITING)
        self._unwritten: deque[_Job] = deque()  # that wait for the disk
        self._lost = 0  # since the disk could be written
        self._retry_at = 0.0
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="saccade store", daemon=True)
        self._thread.start()

    # ---- writing

    def write(self, record: Mapping[str, Any]) -> None:
        """Store the record of an event, of a track or of a minute's counts; waits where too many do.

        Of the type `rules`, it says for how long events of a rule are kept.
        """
        kind = record["type"]
        if kind == "rules":
            self._rule_keep_s[record["stream"]] = dict(record["keep_s"])
        if kind in ("begin", "update", "end"):
            self._do(lambda db: _write_event(db, record, self._expiry(record), self._now()), lasting=True)
        elif kind == "track":
            columns = ("stream", "number", "label", "first_time", "last_time", "top_score")
            values = [*(record[name] for name in columns), json.dumps(record["path"]), time.time()]
            self._do(lambda db: db.execute(f"INSERT INTO tracks VALUES ({', '.join('?' * 8)})", values), lasting=True)
        elif kind == "media":
            self.note_media(record["event"], record["kind"])
        elif kind == "minute":
            row = record["stream"], record["start"], json.dumps(record["counts"]), time.time()
            self._do(lambda db: db.execute("INSERT INTO minutes VALUES (?, ?, ?, ?)", row), lasting=True)

    def going_on(self) -> list[dict[str, Any]]:
        """The records of the events that have not ended, oldest first."""
        with self._reading() as db:
            return [json.loads(text) for _, text in db.execute(_OPEN)]

    def note_media(self, event: str, kind: str) -> None:
        """Note that a file of an event is whole, or has gone."""
        self._do(lambda db: self._note(db, event, kind), lasting=True)

    def delete(self, event: str) -> bool:
        """Delete an event with its media; False if there is none of that id."""
        return bool(self._do(lambda db: self._delete(db, [event]), frees=True).result(LONG_S))

    def flush(self) -> None:
        """Return when everything written so far is stored."""
        self._do(lambda db: None).result(LONG_S)

    def prune(self) -> int:
        """Delete what is too old or too much; return how many events."""
        count: int = self._do(self._prune, frees=True).result(LONG_S)
        return count

    def close(self) -> None:
        """Store what waits, and end. A second call does nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._waiting.put(None)
        self._thread.join(LONG_S)
        super().close()
        os.close(self._lock_file)

    # ---- within

    def _do(self, write: Write, *, lasting: bool = False, frees: bool = False) -> Future[Any]:
        job = _Job(write, lasting, frees)
        with self._closing:
            if self._closed:
                job.done.set_exception(StoreError("the store is closed"))
            else:
                self._waiting.put(job)
        return job.done

    def _work(self) -> None:
        db = self._connect()
        pruned_at = -PRUNE_S
        ending = False
        while not ending:
            batch = []
            with suppress(queue.Empty):
                batch.append(self._waiting.get(timeout=_RETRY_S if self._unwritten else PRUNE_S))
                while len(batch) < _BATCH:
                    batch.append(self._waiting.get_nowait())
            ending = None in batch
            jobs = [job for job in batch if job is not None]
            if self._unwritten and (ending or time.monotonic() >= self._retry_at):
                jobs = [*self._unwritten, *jobs]
                self._unwritten.clear()
            if self._unwritten:
                self._put_off([job for job in jobs if not job.frees], None)
                jobs = [job for job in jobs if job.frees]
            self._commit(db, jobs)
            if time.monotonic() - pruned_at >= PRUNE_S:
                pruned_at = time.monotonic()
                self._prune_first(db)
                if not self._unwritten:
                    self._reserve.take()
        if self._unwritten:
            log.warning("%s: %d changes could not be stored", self._path, self._lost + len(self._unwritten))
        db.close()

    def _commit(self, db: sqlite3.Connection, jobs: list[_Job]) -> None:
        """Write jobs in one transaction; where that fails, one by one, so that one that fails costs no other."""
        results: list[Any] = []
        self._deleted_media.clear()
        try:
            with db:
                results = [job.write(db) for job in jobs]
        except sqlite3.OperationalError as error:  # full, or not to be written, or locked by another program
            if any(job.frees for job in jobs) and self._reserve.release():
                self._commit(db, jobs)
            else:
                self._put_off(jobs, error)
            return
        except (sqlite3.Error, OSError, KeyError, TypeError, ValueError) as error:
            if len(jobs) == 1:
                log.warning("an event could not be stored: %s", error)
                jobs[0].done.set_exception(StoreError(str(error)))
            else:
                for job in jobs:
                    self._commit(db, [job])
            return
        if self._retry_at and any(job.lasting for job in jobs):
            log.warning("%s: events are stored again; changes lost: %d", self._path, self._lost)
            self._retry_at, self._lost = 0.0, 0
        self._unlink_deleted()  # only now: an event that a kill or an error keeps must keep its media
        for job, result in zip(jobs, results, strict=True):
            job.done.set_result(result)

    def _prune_first(self, db: sqlite3.Connection) -> None:
        """Prune; where that fails, for a full disk, the files of what is too old or too much go first."""
        pruning = _Job(self._prune, frees=True)
        self._commit(db, [pruning])
        if pruning.done.exception() is not None and self._deleted_media:
            self._unlink_deleted()
            self._commit(db, [_Job(self._prune, frees=True)])

    def _unlink_deleted(self) -> None:
        for path in self._deleted_media:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s could not be deleted: %s", path, error.strerror)

    def _put_off(self, jobs: list[_Job], error: sqlite3.OperationalError | None) -> None:
        """Keep what is lasting until the disk can be written again, and fail the rest."""
        if error is not None:
            if not self._retry_at:
                log.warning("%s: events cannot be stored: %s; they wait until they can", self._path, error)
            self._retry_at = time.monotonic() + _RETRY_S
        for job in jobs:
            if job.lasting:
                self._unwritten.append(job)
            else:
                job.done.set_exception(StoreError(f"the store cannot be written: {error or 'the disk may be full'}"))
        while len(self._unwritten) > _MAX_WAITING:
            self._unwritten.popleft()
            self._lost += 1

    def _connect(self) -> sqlite3.Connection:
        db = super()._connect()
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")  # outlives a killed process; a power cut may cost the last seconds
        return db

    def _now(self) -> float:
        """The time, later than of any event that is stored."""
        self._stored_at = max(time.time(), self._stored_at + 1e-6)
        return self._stored_at

    def _expiry(self, record: Mapping[str, Any]) -> float | None:
        """When an event of a rule with a time of its own is to be deleted; None for one that is kept as all are."""
        keep_s = self._rule_keep_s.get(record["stream"], {}).get(record["rule"])
        return None if keep_s is None else time.time() + keep_s

    def _recover(self, keep_open: bool) -> None:
        """Make the schema; end what went on when the last process ended; and bring media and events together."""
        begun = time.time()
        db = self._connect()
        with db:
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version > SCHEMA_VERSION:
                raise sqlite3.DatabaseError("it was written by a newer version of saccade")
            db.executescript(SCHEMA)
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            self._stored_at = db.execute("SELECT coalesce(max(stored_at), 0) FROM events").fetchone()[0]
            left = [] if keep_open else db.execute(_OPEN).fetchall()
            for event, text in left:
                record = json.loads(text)
                record |= {"type": "end", "end_time": record["frame_time"], "count": 0}
                values = record["end_time"], json.dumps(record), event
                db.execute("UPDATE events SET end_time = ?, record = ? WHERE id = ?", values)
            for path in self.media_folder.iterdir():
                known = db.execute("SELECT 1 FROM events WHERE id = ?", (path.stem,)).fetchone()
                if keep_open and path.stat().st_mtime > begun - _YOUNG_S:
                    continue  # a worker writes it
                if path.suffix not in MEDIA.values() or known is None:
                    path.unlink()
            ended = " AND end_time IS NOT NULL" if keep_open else ""
            for (event,) in db.execute(f"SELECT id FROM events WHERE pending{ended}").fetchall():
                for kind in MEDIA:
                    self._note(db, event, kind)
            for event, _ in left:
                (text,) = db.execute("SELECT record FROM events WHERE id = ?", (event,)).fetchone()
                self.ended.append(json.loads(text))
        db.close()

    def _note(self, db: sqlite3.Connection, event: str, kind: str) -> None:
        row = db.execute("SELECT record FROM events WHERE id = ?", (event,)).fetchone()
        path = self.media(event, kind)
        if row is None:
            if path is not None:  # its event was deleted meanwhile
                self._deleted_media.append(path)
            return
        record = json.loads(row[0])
        record[f"has_{kind}"] = path is not None
        record[kind] = f"/events/{event}/{kind}{MEDIA[kind]}" if path is not None else None
        pending = any(record[f"has_{name}"] and self.media(event, name) is None for name in MEDIA)
        total = sum(one.stat().st_size for name in MEDIA if (one := self.media(event, name)) is not None)
        values = json.dumps(record), total, pending, event
        db.execute("UPDATE events SET record = ?, bytes = ?, pending = ? WHERE id = ?", values)

    def _delete(self, db: sqlite3.Connection, events: list[str]) -> int:
        count = 0
        for event in events:
            row = db.execute("SELECT row FROM events WHERE id = ?", (event,)).fetchone()
            if row is None:
                continue
            db.execute("DELETE FROM words WHERE rowid = ?", row)
            db.execute("DELETE FROM events WHERE row = ?", row)
            count += 1
            self._deleted_media += [path for kind in MEDIA if (path := self.media(event, kind)) is not None]
        return count

    def _prune(self, db: sqlite3.Connection) -> int:
        now = time.time()
        old = db.execute("SELECT id FROM events WHERE expires_at < ? AND end_time IS NOT NULL", (now,))
        count = self._delete(db, [event for (event,) in old.fetchall()])
        if self._keep_s is not None:
            # By the time of storing: also those that were stored while another time was set, or none.
            old = db.execute(_OLD, (now - self._keep_s,))
            count += self._delete(db, [event for (event,) in old.fetchall()])
            for table in ("tracks", "minutes"):
                db.execute(f"DELETE FROM {table} WHERE stored_at < ?", (now - self._keep_s,))
        if self._max_bytes is not None:
            # By the index on those with media: of a million events, all took 2 s.
            total = db.execute("SELECT coalesce(sum(bytes), 0) FROM events WHERE bytes > 0").fetchone()[0]
            beyond = []
            for event, size in db.execute("SELECT id, bytes FROM events WHERE bytes > 0 ORDER BY row"):
                if total <= self._max_bytes:
                    break
                total -= size
                beyond.append(event)
            count += self._delete(db, beyond)
        return count


def _write_event(db: sqlite3.Connection, record: Mapping[str, Any], expires_at: float | None, now: float) -> None:
    """Insert or update an event; what is known of its files since its beginning stays: notes of them say more."""
    zones = "".join(f"|{zone}|" for zone in record["entered_zones"])
    found = [record["sub_label"] or "", *record["answers"].values(), *record["attributes"].values()]
    text = " ".join((record["label"], record["rule"], *found))
    indexed = record["stream"], record["rule"], record["label"], zones, text
    columns = "row, record, stream, rule, label, zones, text"
    old = db.execute(f"SELECT {columns} FROM events WHERE id = ?", (record["id"],))
    if (row := old.fetchone()) is None:
        pending = any(record[f"has_{kind}"] for kind in MEDIA)
        given = (record["id"], *indexed, record["start_time"], record["end_time"], now, expires_at, pending)
        names = "id, stream, rule, label, zones, text, start_time, end_time, stored_at, expires_at, pending, record"
        marks = ", ".join("?" * 12)
        number = db.execute(f"INSERT INTO events ({names}) VALUES ({marks})", (*given, json.dumps(record))).lastrowid
        db.execute(
            "INSERT INTO words (rowid, stream, rule, label, zones, text) VALUES (?, ?, ?, ?, ?, ?)", (number, *indexed)
        )
        return
    number, known, *words = row
    before = json.loads(known)
    record = {**record, **{key: before[key] for kind in MEDIA for key in (kind, f"has_{kind}")}}
    db.execute(
        "UPDATE events SET label = ?, zones = ?, text = ?, end_time = ?, record = ? WHERE row = ?",
        (record["label"], zones, text, record["end_time"], json.dumps(record), number),
    )
    if tuple(words) != indexed:
        db.execute("DELETE FROM words WHERE rowid = ?", (number,))
        db.execute(
            "INSERT INTO words (rowid, stream, rule, label, zones, text) VALUES (?, ?, ?, ?, ?, ?)", (number, *indexed)
        )
