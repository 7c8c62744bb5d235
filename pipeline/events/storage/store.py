"""Events, tracks and counts that stay: SQLite in a folder, with the images and clips of events beside it.

    FOLDER/events.db           what is in `store_reader.LADDER`; written by one thread, read by any
    FOLDER/media/ID.jpg, .mp4  named after their event; NAME.part while they are written
    FOLDER/reserve             space that is given up on a full disk, see `disk_reserve`
    FOLDER/damaged-TIME/       a database that could not be read, with its media

While the disk is full or cannot be written, records wait in memory; no caller waits for the disk. What is lost is
counted, and an event whose end was lost is ended. Whatever was committed outlives `kill -9`: on the next start events
that went on then are ended, unless they may go on; media of none are deleted, and media that were whole but not yet
noted are. A damaged file is moved aside, on opening and later, and an empty one takes its place. Knows records of
events; not who made them.
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
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from saccade.pipeline.events.storage.database import (
    NewerError,
    check_version,
    is_damaged,
    is_index_damaged,
    is_sound,
    is_trouble,
    migrate,
    move_aside,
)
from saccade.pipeline.events.storage.disk_reserve import DiskReserve
from saccade.pipeline.events.storage.store_reader import (
    LADDER,
    LONG_S,
    MEDIA,
    NEWER,
    EventReader,
    StoreError,
)
from saccade.sinks.os_errors import write_failure
from saccade.sinks.retention import elapsed_s

log = logging.getLogger(__name__)

PRUNE_S = 60.0
CLOSE_S = 5.0  # for what waits to be stored; a disk that hangs may never answer
_MAX_WAITING = 10_000
_MOST_STREAMS = 1000  # whose rules are known: streams that have ended among them, whose events may end yet
_BATCH = 500  # changes in one transaction
_OPEN = "SELECT id, record FROM events WHERE end_time IS NULL ORDER BY row"
_OLD = "SELECT id FROM events WHERE expires_at IS NULL AND kept_from < ? AND end_time IS NOT NULL"
_LAST_KEPT = (  # on the store's clock; each by an index
    "SELECT kept_from FROM events ORDER BY row DESC LIMIT 1",
    "SELECT stored_at FROM tracks ORDER BY stored_at DESC LIMIT 1",
    "SELECT stored_at FROM minutes ORDER BY stored_at DESC LIMIT 1",
)
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
        StoreError: if the folder cannot be used, another process writes it, or a newer version of Saccade has.
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
        self._identity, self._size = (0, 0), 0  # device and inode of the file, and bytes
        self._stored_at = 0.0
        self._ahead = 0.0  # of the store's clock, which is never set, before that of this machine's running time
        self._going: set[str] = set()  # the events that have begun and not ended
        self._deleted_media: list[Path] = []  # of a transaction that is not committed yet
        self._reserve = DiskReserve(folder / "reserve")
        try:
            check_version(self._path, LADDER)
            self._lock_file = self._lock(folder)
        except NewerError:
            raise StoreError(f"{folder}: {NEWER}") from None
        except BlockingIOError:
            raise StoreError(f"{folder}: another process stores events there") from None
        except OSError as error:
            wrong = isinstance(error, NotADirectoryError) or (folder.exists() and not folder.is_dir())
            raise StoreError(
                f"{folder}: events cannot be stored there: {write_failure(self._path, error)}", disk=not wrong
            ) from None
        try:
            self._open(keep_open)
            self._db = self._opened()
        except (sqlite3.Error, OSError) as error:
            os.close(self._lock_file)
            raise StoreError(f"{folder}: events cannot be stored there: {error}", disk=True) from None
        except NewerError:
            os.close(self._lock_file)
            raise StoreError(f"{folder}: {NEWER}") from None
        self._waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._unwritten: deque[_Job] = deque()  # that wait for the disk
        self._lost = 0  # since the disk could be written
        self.dropped = 0
        """Changes lost since the store was opened, because too many waited for the disk."""
        self._retry_at = 0.0
        self._unreadable: tuple[sqlite3.Error, int] | None = None  # what a reader met, and of which file
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="saccade store", daemon=True)
        self._thread.start()

    # ---- writing

    def write(self, record: Mapping[str, Any]) -> None:
        """Store the record of an event, of a track or of a minute's counts; returns at once.

        Beyond 10,000 that wait for the disk it is lost, which is counted and logged.

        Of the type `rules`, it says for how long events of a rule are kept.
        """
        kind = record["type"]
        if kind == "rules":
            self._rule_keep_s.pop(record["stream"], None)
            self._rule_keep_s[record["stream"]] = dict(record["keep_s"])
            if len(self._rule_keep_s) > _MOST_STREAMS:
                del self._rule_keep_s[next(iter(self._rule_keep_s))]
        if kind in ("begin", "update", "end"):
            with self._closing:
                (self._going.discard if kind == "end" else self._going.add)(record.get("id", ""))
            self._do(lambda db: self._write_event(db, record, self._expiry(record)), lasting=True)
        elif kind == "track":
            columns = ("stream", "number", "label", "first_time", "last_time", "top_score")
            values = [*(record[name] for name in columns), json.dumps(record["path"]), self._clock()]
            self._do(lambda db: db.execute(f"INSERT INTO tracks VALUES ({', '.join('?' * 8)})", values), lasting=True)
        elif kind == "media":
            self.note_media(record["event"], record["kind"])
        elif kind == "minute":
            row = record["stream"], record["start"], json.dumps(record["counts"]), self._clock()
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
        return bool(self._result(self._do(lambda db: self._delete(db, [event]), frees=True)))

    def flush(self) -> None:
        """Return when everything written so far is stored."""
        self._result(self._do(lambda db: None))

    def prune(self) -> int:
        """Delete what is too old or too much; return how many events."""
        count: int = self._result(self._do(self._prune, frees=True))
        return count

    def close(self) -> None:
        """Store what waits, for some seconds at most, and end. A second call does nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._waiting.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            waiting = self._lost + len(self._unwritten) + self._waiting.qsize()
            log.warning("%s: the disk does not answer; changes that may be lost: %d", self._path, waiting)
        else:
            super().close()

    # ---- within

    def _lock(self, folder: Path) -> int:
        """Make the folders, and hold the store; raises BlockingIOError if another process does."""
        folder.mkdir(parents=True, exist_ok=True)
        strange = [path for path in (self.media_folder, folder / "lock") if path.is_dir() != (path.name == "media")]
        if any(path.exists() for path in strange):
            log.warning("%s: what is in the way of a store was moved to %s", folder, move_aside(strange))
        self.media_folder.mkdir(exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def _open(self, keep_open: bool) -> None:
        """Bring the file up to date, after moving it aside if it cannot be used, or giving up the reserve."""
        if os.path.lexists(self._path) and not self._path.is_file():
            self._replace("it is no file")
        elif self._is_empty() and any(self.media_folder.iterdir()):
            self._replace("it is empty, and there are clips")  # which would be taken for those of no event
        try:
            self._recover(keep_open)
        except (sqlite3.Error, OSError, json.JSONDecodeError) as error:
            if not is_trouble(error):
                self._replace(error)
            elif not self._reserve.release():  # the disk may be full
                raise
            self._recover(keep_open)

    def _is_empty(self) -> bool:
        """Whether nothing was ever stored, as far as the files say."""
        files = [self._path, self._path.with_name(self._path.name + "-wal")]
        return not any(path.exists() and path.stat().st_size for path in files)

    def _replace(self, why: object) -> None:
        """Move the file and its media aside; raises OSError where that cannot be done."""
        paths = [self._path.with_name(self._path.name + suffix) for suffix in ("", "-wal", "-shm", "-journal")]
        elsewhere = self.media_folder.is_symlink()  # perhaps on another disk, where they stay
        aside = move_aside(paths if elsewhere else [*paths, self.media_folder])
        if aside is not None and elsewhere:
            kept = self.media_folder / aside.name
            kept.mkdir(exist_ok=True)
            for path in self.media_folder.iterdir():
                if path.is_file():
                    path.rename(kept / path.name)
        self._generation += 1
        self.media_folder.mkdir(parents=True, exist_ok=True)
        log.warning(
            "%s cannot be used (%s); a new store was begun%s",
            self._path,
            why,
            f". The old one and its media are in {aside}: delete that folder when you need nothing in it"
            if aside is not None
            else "",
        )

    def _trouble_with_file(self) -> str | None:
        """What has happened to the file while it was open, as SQLite does not see; None if nothing has."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return "it was deleted"
        except OSError:
            return None  # nothing is known
        if (found.st_dev, found.st_ino) != self._identity:
            return "another file has taken its place"
        if found.st_size < self._size:
            return "it was cut"
        self._size = found.st_size
        return None

    def _opened(self) -> sqlite3.Connection:
        """A connection for the thread that writes; takes note of the file."""
        db = self._connect()
        migrate(db, LADDER)
        found = self._path.stat()
        self._identity, self._size = (found.st_dev, found.st_ino), found.st_size
        return db

    def _result(self, done: Future[Any]) -> Any:
        try:
            return done.result(LONG_S)
        except TimeoutError:
            raise StoreError(f"{self._path}: the disk does not answer", disk=True) from None

    def _do(self, write: Write, *, lasting: bool = False, frees: bool = False) -> Future[Any]:
        job = _Job(write, lasting, frees)
        with self._closing:
            if self._closed:
                job.done.set_exception(StoreError("the store is closed"))
            elif lasting and self._waiting.qsize() >= _MAX_WAITING:
                self._lose("the disk does not answer")
            else:
                self._waiting.put(job)
        return job.done

    def _lose(self, why: object) -> None:
        self._lost += 1
        self.dropped += 1
        if self._lost == 1:
            log.warning("%s: %s; changes of events are lost from now on", self._path, why)

    def _found_unreadable(self, error: sqlite3.Error, generation: int) -> None:
        if is_damaged(error):
            self._unreadable = error, generation
        self._do(lambda db: None)  # so that the thread looks at the file

    def _work(self) -> None:
        try:
            self._work_until_closed()
            self._db.close()
        finally:
            os.close(self._lock_file)

    def _work_until_closed(self) -> None:
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
            found, self._unreadable = self._unreadable, None
            if found is not None and found[1] == self._generation:
                self._mend(found[0])
            elif (trouble := self._trouble_with_file()) is not None:
                self._begin_anew(trouble)
            if self._unwritten and (ending or time.monotonic() >= self._retry_at):
                jobs = [*self._unwritten, *jobs]
                self._unwritten.clear()
            if self._unwritten:
                self._put_off([job for job in jobs if not job.frees], None)
                jobs = [job for job in jobs if job.frees]
            self._commit(jobs)
            if time.monotonic() - pruned_at >= PRUNE_S:
                pruned_at = time.monotonic()
                self._prune_first()
                if not self._unwritten:
                    self._reserve.take()
        if self._unwritten:
            log.warning("%s: %d changes could not be stored", self._path, self._lost + len(self._unwritten))

    def _commit(self, jobs: list[_Job]) -> None:
        """Write jobs in one transaction; where that fails, one by one, so that one that fails costs no other."""
        results: list[Any] = []
        self._deleted_media.clear()
        try:
            with self._db:
                results = [job.write(self._db) for job in jobs]
                if recovered := bool(self._retry_at or self._lost) and any(job.lasting for job in jobs):
                    self._end_lost()
        except (sqlite3.Error, OSError, KeyError, TypeError, ValueError) as error:
            self._failed(jobs, error)
            return
        if recovered:
            with self._closing:
                self._retry_at, lost, self._lost = 0.0, self._lost, 0
            log.warning("%s: events are stored again; changes lost: %d", self._path, lost)
        self._unlink_deleted()  # only now: an event that a kill or an error keeps must keep its media
        for job, result in zip(jobs, results, strict=True):
            job.done.set_result(result)

    def _failed(self, jobs: list[_Job], error: Exception) -> None:
        """Write jobs again that failed together, put them off, or give up the one that is at fault."""
        if is_damaged(error):
            if self._begin_anew(error):
                self._commit(jobs)
            else:
                self._put_off(jobs, error)
        elif isinstance(error, sqlite3.OperationalError) or self._db_is_closed(error):
            # Full, or not to be written, or locked by another program; or an empty file could not be made.
            if any(job.frees for job in jobs) and self._reserve.release():
                self._commit(jobs)
            else:
                self._put_off(jobs, error)
        elif len(jobs) == 1:
            log.warning("an event could not be stored: %s", error)
            jobs[0].done.set_exception(StoreError(str(error)))
        else:
            for job in jobs:
                self._commit([job])

    def _db_is_closed(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.ProgrammingError) and "closed" in str(error)

    def _mend(self, error: Exception) -> bool:
        """Begin anew, unless the file is sound: what a reader met may be over. False if that cannot be done now."""
        return (is_sound(self._db) and not is_index_damaged(error)) or self._begin_anew(error)

    def _begin_anew(self, why: object) -> bool:
        """Put an empty file in the place of a damaged one; False if that cannot be done now."""
        damaged = self._db
        try:
            with self._opening:
                self._replace(why)
                # Before the new file is opened: SQLite deletes the files beside it by their names.
                with suppress(sqlite3.Error):
                    damaged.close()
                super().close()
                self._db = self._opened()
        except (sqlite3.Error, OSError) as failure:
            log.warning("%s cannot be used (%s) and cannot be moved aside: %s", self._path, why, failure)
            return False
        return True

    def _end_lost(self) -> None:
        """End the events whose end was lost: else whoever lists them waits for it until the next start."""
        with self._closing:
            going = set(self._going)
        left = [row for row in self._db.execute(_OPEN).fetchall() if row[0] not in going]
        _end_events(self._db, left)

    def _prune_first(self) -> None:
        """Prune; where that fails, for a full disk, the files of what is too old or too much go first."""
        pruning = _Job(self._prune, frees=True)
        self._commit([pruning])
        if pruning.done.exception() is not None and self._deleted_media:
            self._unlink_deleted()
            self._commit([_Job(self._prune, frees=True)])

    def _unlink_deleted(self) -> None:
        for path in self._deleted_media:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s could not be deleted: %s", path, error.strerror)

    def _put_off(self, jobs: list[_Job], error: Exception | None) -> None:
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
            with self._closing:
                self._lose(error or "the disk may be full")

    def _connect(self) -> sqlite3.Connection:
        db = super()._connect()
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")  # outlives a killed process; a power cut may cost the last seconds
        return db

    def _now(self) -> float:
        """The time, later than of any event that is stored."""
        self._stored_at = max(time.time(), self._stored_at + 1e-6)
        return self._stored_at

    def _clock(self) -> float:
        """Seconds on the store's clock, which nobody sets: Unix time on opening, or that of what was stored last."""
        return self._ahead + elapsed_s()

    def _expiry(self, record: Mapping[str, Any]) -> float | None:
        """When an event of a rule with a time of its own is to be deleted; None for one that is kept as all are."""
        keep_s = self._rule_keep_s.get(record["stream"], {}).get(record["rule"])
        return None if keep_s is None else self._clock() + keep_s

    def _recover(self, keep_open: bool) -> None:
        """Make the schema; end what went on when the last process ended; and bring media and events together."""
        begun = time.time()
        with closing(self._connect()) as db:
            migrate(db, LADDER)
            self._recover_from(db, keep_open, begun)

    def _recover_from(self, db: sqlite3.Connection, keep_open: bool, begun: float) -> None:
        with db:
            db.execute(
                f"PRAGMA user_version = {len(LADDER)}"
            )  # whatever it was: whether it can be written is known now
            self._stored_at = db.execute("SELECT coalesce(max(stored_at), 0) FROM events").fetchone()[0]
            newest = [found[0] for one in _LAST_KEPT if (found := db.execute(one).fetchone()) is not None]
            self._ahead = max([time.time(), *newest]) - elapsed_s()
            left = db.execute(_OPEN).fetchall()
            if keep_open:
                self._going = {event for event, _ in left}
                left = []
            _end_events(db, left)
            for path in self.media_folder.iterdir():
                known = db.execute("SELECT 1 FROM events WHERE id = ?", (path.stem,)).fetchone()
                if keep_open and path.stat().st_mtime > begun - _YOUNG_S:
                    continue  # a worker writes it
                if path.is_file() and (path.suffix not in MEDIA.values() or known is None):
                    path.unlink()
            ended = " AND end_time IS NOT NULL" if keep_open else ""
            for (event,) in db.execute(f"SELECT id FROM events WHERE pending{ended}").fetchall():
                for kind in MEDIA:
                    self._note(db, event, kind)
            for event, _ in left:
                (text,) = db.execute("SELECT record FROM events WHERE id = ?", (event,)).fetchone()
                self.ended.append(json.loads(text))

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

    def _write_event(self, db: sqlite3.Connection, record: Mapping[str, Any], expires_at: float | None) -> None:
        """Insert or update an event; what is known of its files since its beginning stays: notes of them say more."""
        zones = "".join(f"|{zone}|" for zone in record["entered_zones"])
        found = [record["sub_label"] or "", *record["answers"].values(), *record["attributes"].values()]
        text = " ".join((record["label"], record["rule"], *found))
        indexed = record["stream"], record["rule"], record["label"], zones, text
        columns = "row, record, stream, rule, label, zones, text"
        old = db.execute(f"SELECT {columns} FROM events WHERE id = ?", (record["id"],))
        if (row := old.fetchone()) is None:
            pending = any(record[f"has_{kind}"] for kind in MEDIA)
            times = record["start_time"], record["end_time"], self._now(), self._clock(), expires_at
            names = "id, stream, rule, label, zones, text, start_time, end_time"
            names += ", stored_at, kept_from, expires_at, pending, record"
            marks = ", ".join("?" * 13)
            number = db.execute(
                f"INSERT INTO events ({names}) VALUES ({marks})",
                (record["id"], *indexed, *times, pending, json.dumps(record)),
            ).lastrowid
            db.execute(
                "INSERT INTO words (rowid, stream, rule, label, zones, text) VALUES (?, ?, ?, ?, ?, ?)",
                (number, *indexed),
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
                "INSERT INTO words (rowid, stream, rule, label, zones, text) VALUES (?, ?, ?, ?, ?, ?)",
                (number, *indexed),
            )

    def _prune(self, db: sqlite3.Connection) -> int:
        now = self._clock()
        old = db.execute("SELECT id FROM events WHERE expires_at < ? AND end_time IS NOT NULL", (now,))
        count = self._delete(db, [event for (event,) in old.fetchall()])
        if self._keep_s is not None:
            # By the time of storing: also those that were stored while another `store_keep` was set, or none.
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


def _end_events(db: sqlite3.Connection, rows: list[tuple[str, str]]) -> None:
    """End events, each an id and a record, where a frame showed them last."""
    for event, text in rows:
        record = json.loads(text)
        record |= {"type": "end", "end_time": record["frame_time"], "count": 0}
        values = record["end_time"], json.dumps(record), event
        db.execute("UPDATE events SET end_time = ?, record = ? WHERE id = ?", values)
