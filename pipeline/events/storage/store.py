"""The event store: events, tracks and counts in SQLite, and snapshots and clips in the same folder.

    FOLDER/events.db           the database, see `store_reader.LADDER`; one thread writes it, any thread reads it
    FOLDER/media/ID.jpg, .mp4  media files, named by event ID; NAME.part while a file is incomplete
    FOLDER/reserve             disk space that is released when the disk is full, see `disk_reserve`
    FOLDER/damaged-TIME/       a corrupt database with its media files

While the disk is full or read-only, records wait in memory, and callers never block. If too many records wait, changes
are dropped and counted. If the end of an event was dropped, the store ends the event later. Committed data survives
`kill -9`.

At the next start, the store ends open events, unless a worker can continue them. Media files without an event are
deleted. Complete media files that are missing in the database are added to it.

If the database is found to be corrupt, it is moved to a folder `damaged-TIME`, and a new, empty database is created.
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
from saccade.pipeline.events.verdicts import MOST_VERDICTS, Verdict
from saccade.sinks.os_errors import write_failure
from saccade.sinks.retention import elapsed_s

log = logging.getLogger(__name__)

PRUNE_S = 60.0
CLOSE_S = 5.0  # limit for storing queued records; a hanging disk may never answer
_MAX_WAITING = 10_000
_MOST_STREAMS = 1000  # whose rules are kept, including ended streams with open events
_BATCH = 500  # changes in one transaction
_OPEN = "SELECT id, record FROM events WHERE end_time IS NULL ORDER BY row"
_OLD = "SELECT id FROM events WHERE expires_at IS NULL AND kept_from < ? AND end_time IS NOT NULL"
_LAST_KEPT = (  # on the store's clock; each query uses an index
    "SELECT kept_from FROM events ORDER BY row DESC LIMIT 1",
    "SELECT stored_at FROM tracks ORDER BY stored_at DESC LIMIT 1",
    "SELECT stored_at FROM minutes ORDER BY stored_at DESC LIMIT 1",
)
_YOUNG_S = 60.0  # age of a file below which another process may still write it
_RETRY_S = 2.0  # wait after a failed write

Write = Callable[[sqlite3.Connection], Any]


@dataclass(slots=True, frozen=True)
class _Job:
    """A write for the database thread.

    Attributes:
        write: function that changes the database.
        lasting: whether to retry the write after a disk error.
        frees: whether the write deletes data. On a full disk, such a write uses the reserved disk space.
    """

    write: Write
    lasting: bool = False
    frees: bool = False
    done: Future[Any] = field(default_factory=Future)


class EventStore(EventReader):
    """The event store in a folder. Only one process at a time can write the store. Thread-safe.

    Args:
        folder: folder of the store. It is created if it is missing.
        keep_s: retention time of events in seconds, unless their rule sets a retention time. None retains events
            forever.
        max_bytes: limit of the total size of media files, in bytes. Above the limit, the oldest events and their media
            files are deleted. None sets no limit.
        keep_open: whether events that the previous process left open stay open, such as events of running workers.

    Raises:
        StoreError: if the folder is unusable, another process is writing it, or a newer version of Saccade wrote it.
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
        """Records of the events that were ended when the store was opened, because the previous process left them open.
        """
        self._keep_s, self._max_bytes = keep_s, max_bytes
        self._rule_keep_s: dict[str, dict[str, float]] = {}  # by stream and rule
        self._identity, self._size = (0, 0), 0  # device and inode of the file, and its size in bytes
        self._stored_at = 0.0
        self._ahead = 0.0  # offset of the store's monotonic clock from the machine's uptime
        self._going: set[str] = set()  # IDs of the open events
        self._deleted_media: list[Path] = []  # media deleted in the open transaction
        self._reserve = DiskReserve(folder / "reserve")
        try:
            check_version(self._path, LADDER)
            self._lock_file = self._lock(folder)
        except NewerError:
            raise StoreError(f"{folder}: {NEWER}") from None
        except BlockingIOError:
            raise StoreError(
                f"{folder}: another process is using this event store; stop it or use another folder"
            ) from None
        except OSError as error:
            wrong = isinstance(error, NotADirectoryError) or (folder.exists() and not folder.is_dir())
            raise StoreError(
                f"{folder}: cannot store events in this folder: {write_failure(self._path, error)}", disk=not wrong
            ) from None
        try:
            self._open(keep_open)
            self._db = self._opened()
        except (sqlite3.Error, OSError) as error:
            os.close(self._lock_file)
            raise StoreError(f"{folder}: cannot store events in this folder: {error}", disk=True) from None
        except NewerError:
            os.close(self._lock_file)
            raise StoreError(f"{folder}: {NEWER}") from None
        self._waiting: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._unwritten: deque[_Job] = deque()  # jobs that wait for the disk
        self._lost = 0  # dropped since the last successful write
        self.dropped = 0
        """Number of changes dropped since the store was opened, because too many waited for the disk."""
        self._retry_at = 0.0
        self._unreadable: tuple[sqlite3.Error, int] | None = None  # a reader's error, and the generation of its file
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="saccade store", daemon=True)
        self._thread.start()

    # ---- writing

    def write(self, record: Mapping[str, Any]) -> None:
        """Queue an event record for storage, without waiting. With 10,000 queued records, it is dropped.

        A record of type `rules` sets the retention times of a stream's rules, and is not stored.
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
        elif kind == "look":
            look = record["event"], record["look"], self._clock()
            self._do(lambda db: db.execute("INSERT OR REPLACE INTO looks VALUES (?, ?, ?)", look), lasting=True)
        elif kind == "minute":
            row = record["stream"], record["start"], json.dumps(record["counts"]), self._clock()
            self._do(lambda db: db.execute("INSERT INTO minutes VALUES (?, ?, ?, ?)", row), lasting=True)

    def going_on(self) -> list[dict[str, Any]]:
        """Return the records of the open events, oldest first."""
        with self._reading() as db:
            return [json.loads(text) for _, text in db.execute(_OPEN)]

    def note_media(self, event: str, kind: str) -> None:
        """Update the stored media state of an event: whether its clip or snapshot exists."""
        self._do(lambda db: self._note(db, event, kind), lasting=True)

    def delete(self, event: str) -> bool:
        """Delete an event and its media files. Return False if the event ID is unknown."""
        return bool(self._wait(lambda db: self._delete(db, [event]), frees=True))

    def judge(self, event: str, *, false_alarm: bool) -> str | None:
        """Mark an event as a false alarm, or remove the mark.

        A stream has at most `MOST_VERDICTS` marks. Beyond this limit, the oldest mark is removed.

        Returns:
            The stream of the event, or None if the event ID is unknown.

        Raises:
            ValueError: if the event has no bounding box.
        """
        stream: str | None = self._wait(lambda db: self._judge(db, event, false_alarm))
        return stream

    def verdict_on(self, event: str) -> Verdict | None:
        """Return the false-alarm mark for an event, without storing it. Return None if the event ID is unknown.

        Raises:
            ValueError: if the event has no bounding box.
        """
        verdict: Verdict | None = self._wait(lambda db: self._verdict_on(db, event))
        return verdict

    def keep_verdict(self, verdict: Verdict) -> None:
        """Store a false-alarm mark in this event store, even if another machine stores the marked event."""
        self._wait(lambda db: self._keep_verdict(db, verdict))

    def flush(self) -> None:
        """Wait until every queued record is stored."""
        self._wait(lambda db: None)

    def prune(self) -> int:
        """Delete expired events, and the oldest events beyond the size limit. Return the number of deleted events."""
        count: int = self._wait(self._prune, frees=True)
        return count

    def close(self) -> None:
        """Store the queued records and stop. Records that are not stored within a few seconds are dropped.

        A second call does nothing.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._waiting.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            waiting = self._lost + len(self._unwritten) + self._waiting.qsize()
            log.warning("%s: the disk does not respond; up to %d event changes may be lost", self._path, waiting)
        else:
            super().close()

    # ---- within

    def _lock(self, folder: Path) -> int:
        """Create the folder of the store, and lock it. Return the file descriptor of the lock file."""
        folder.mkdir(parents=True, exist_ok=True)
        strange = [path for path in (self.media_folder, folder / "lock") if path.is_dir() != (path.name == "media")]
        if any(path.exists() for path in strange):
            log.warning(
                "%s: unexpected files in the folder of the event store were moved to %s", folder, move_aside(strange)
            )
        self.media_folder.mkdir(exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def _open(self, keep_open: bool) -> None:
        """Open and migrate the database. Replace a corrupt database. If the disk is full, free the reserved space."""
        if os.path.lexists(self._path) and not self._path.is_file():
            self._replace("it is not a file")
        elif self._is_empty() and any(self.media_folder.iterdir()):
            # Otherwise the clips would be deleted as media without an event.
            self._replace("it is empty although clips exist")
        try:
            self._recover(keep_open)
        except (sqlite3.Error, OSError, json.JSONDecodeError) as error:
            if not is_trouble(error):
                self._replace(error)
            elif not self._reserve.release():  # the disk may be full
                raise
            self._recover(keep_open)

    def _is_empty(self) -> bool:
        files = [self._path, self._path.with_name(self._path.name + "-wal")]
        return not any(path.exists() and path.stat().st_size for path in files)

    def _replace(self, why: object) -> None:
        """Replace the corrupt database. The old database and its media files are moved to a new folder."""
        paths = [self._path.with_name(self._path.name + suffix) for suffix in ("", "-wal", "-shm", "-journal")]
        elsewhere = self.media_folder.is_symlink()  # possibly on another disk; the media stay there
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
            "event store %s is unusable (%s); a new store was created%s",
            self._path,
            why,
            f". The old store and its media are in {aside}; delete this folder when you no longer need it"
            if aside is not None
            else "",
        )

    def _trouble_with_file(self) -> str | None:
        """Return how the database file was changed from outside while it was open: deleted, replaced or truncated.

        Return None if it was not changed. SQLite does not detect these changes.
        """
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return "it was deleted"
        except OSError:
            return None  # unknown
        if (found.st_dev, found.st_ino) != self._identity:
            return "it was replaced by another file"
        if found.st_size < self._size:
            return "it was cut"
        self._size = found.st_size
        return None

    def _opened(self) -> sqlite3.Connection:
        """Open a database connection for the writer thread."""
        db = self._connect()
        migrate(db, LADDER)
        found = self._path.stat()
        self._identity, self._size = (found.st_dev, found.st_ino), found.st_size
        return db

    def _wait(self, write: Write, *, frees: bool = False) -> Any:
        """Run a write in the database thread and return its result. A returned ValueError is raised."""
        try:
            found = self._do(write, frees=frees).result(LONG_S)
        except TimeoutError:
            raise StoreError(f"{self._path}: the disk does not respond", disk=True) from None
        if isinstance(found, ValueError):
            raise found
        return found

    def _do(self, write: Write, *, lasting: bool = False, frees: bool = False) -> Future[Any]:
        job = _Job(write, lasting, frees)
        with self._closing:
            if self._closed:
                job.done.set_exception(StoreError("the store is closed"))
            elif lasting and self._waiting.qsize() >= _MAX_WAITING:
                self._lose("the disk does not respond")
            else:
                self._waiting.put(job)
        return job.done

    def _lose(self, why: object) -> None:
        self._lost += 1
        self.dropped += 1
        if self._lost == 1:
            log.warning("%s: %s; event changes are dropped until the disk is writable again", self._path, why)

    def _found_unreadable(self, error: sqlite3.Error, generation: int) -> None:
        if is_damaged(error):
            self._unreadable = error, generation
        self._do(lambda db: None)  # wakes the writer thread to check the file

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
                if is_index_damaged(found[0]) or not is_sound(self._db):  # otherwise the read error was temporary
                    self._begin_anew(found[0])
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
            log.warning("%s: %d event changes could not be stored", self._path, self._lost + len(self._unwritten))

    def _commit(self, jobs: list[_Job]) -> None:
        """Commit writes in one transaction. If this fails, commit each write separately."""
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
            log.warning("%s: the disk is writable again; %d event changes were dropped", self._path, lost)
        self._unlink_deleted()  # after the commit: an event that survives a crash must keep its media
        for job, result in zip(jobs, results, strict=True):
            job.done.set_result(result)

    def _failed(self, jobs: list[_Job], error: Exception) -> None:
        if is_damaged(error):
            if self._begin_anew(error):
                self._commit(jobs)
            else:
                self._put_off(jobs, error)
        elif isinstance(error, sqlite3.OperationalError) or self._db_is_closed(error):
            # The disk is full or read-only, another program has locked the file, or no empty file could be created.
            if any(job.frees for job in jobs) and self._reserve.release():
                self._commit(jobs)
            else:
                self._put_off(jobs, error)
        elif len(jobs) == 1:
            log.warning("an event was dropped, because it could not be stored: %s", error)
            jobs[0].done.set_exception(StoreError(str(error)))
        else:
            for job in jobs:
                self._commit([job])

    def _db_is_closed(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.ProgrammingError) and "closed" in str(error)

    def _begin_anew(self, why: object) -> bool:
        damaged = self._db
        try:
            with self._opening:
                self._replace(why)
                # Before the new file is opened, because SQLite deletes files beside it by name.
                with suppress(sqlite3.Error):
                    damaged.close()
                super().close()
                self._db = self._opened()
        except (sqlite3.Error, OSError) as failure:
            log.warning(
                "event store %s is unusable (%s) and could not be renamed to create a new store: %s",
                self._path,
                why,
                failure,
            )
            return False
        return True

    def _end_lost(self) -> None:
        """End stored events whose end record was dropped because the queue was full."""
        with self._closing:
            going = set(self._going)
        left = [row for row in self._db.execute(_OPEN).fetchall() if row[0] not in going]
        _end_events(self._db, left)

    def _prune_first(self) -> None:
        """Delete expired events.

        If this fails on a full disk, first delete the media files of expired events, then retry.
        """
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
        """Queue the failed writes that can be retried. Report the error to the callers of all other writes."""
        if error is not None:
            if not self._retry_at:
                log.warning(
                    "%s: cannot store events: %s; events stay in memory until the disk is writable again",
                    self._path,
                    error,
                )
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
        db.execute("PRAGMA synchronous = NORMAL")  # survives a killed process; a power cut may lose the last seconds
        return db

    def _now(self) -> float:
        """Return the current Unix time in seconds. The times of successive calls are strictly increasing."""
        self._stored_at = max(time.time(), self._stored_at + 1e-6)
        return self._stored_at

    def _clock(self) -> float:
        """Return the Unix time in seconds. It never goes backwards and is never earlier than the newest stored time."""
        return self._ahead + elapsed_s()

    def _expiry(self, record: Mapping[str, Any]) -> float | None:
        """Return the time at which an event expires according to its rule, in seconds.

        Return None if the rule sets no retention time.
        """
        keep_s = self._rule_keep_s.get(record["stream"], {}).get(record["rule"])
        return None if keep_s is None else self._clock() + keep_s

    def _recover(self, keep_open: bool) -> None:
        """Migrate the database, end events that the last process left open, and check their media files."""
        begun = time.time()
        with closing(self._connect()) as db, db:
            migrate(db, LADDER)
            db.execute(f"PRAGMA user_version = {len(LADDER)}")  # also checks that the file is writable
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
                    continue  # a worker is writing it
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
            if path is not None:  # its event was deleted in the meantime
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
            db.execute("DELETE FROM looks WHERE event = ?", (event,))
            count += 1
            self._deleted_media += [path for kind in MEDIA if (path := self.media(event, kind)) is not None]
        return count

    def _judge(self, db: sqlite3.Connection, event: str, false_alarm: bool) -> str | ValueError | None:
        known = db.execute("SELECT stream FROM verdicts WHERE event = ?", (event,)).fetchone()
        if known is not None:
            if not false_alarm:
                db.execute("DELETE FROM verdicts WHERE event = ?", (event,))
            return str(known[0])
        if not false_alarm:
            found = db.execute("SELECT stream FROM events WHERE id = ?", (event,)).fetchone()
            return None if found is None else str(found[0])
        verdict = self._verdict_on(db, event)
        if not isinstance(verdict, Verdict):
            return verdict
        self._keep_verdict(db, verdict)
        return verdict.stream

    def _verdict_on(self, db: sqlite3.Connection, event: str) -> Verdict | ValueError | None:
        row = db.execute("SELECT record, first_box FROM events WHERE id = ?", (event,)).fetchone()
        if row is None:
            return None
        record = json.loads(row[0])
        # The look is of the frame on which the event began, so the box must be of that frame, too. The score is the
        # highest of the event: with the score of one frame, noise lifts later detections of the same object above it.
        label, box = (record["label"], record["box_norm"]) if row[1] is None else json.loads(row[1])
        if box is None:
            return ValueError(f"event '{event}' has no box, so it cannot be marked as a false alarm")
        look = db.execute("SELECT look FROM looks WHERE event = ?", (event,)).fetchone()
        return Verdict(event, record["stream"], label, record["top_score"], tuple(box), look and look[0])

    def _keep_verdict(self, db: sqlite3.Connection, one: Verdict) -> None:
        db.execute(
            "INSERT OR IGNORE INTO verdicts (event, stream, label, score, box, look) VALUES (?, ?, ?, ?, ?, ?)",
            (one.event, one.stream, one.label, one.score, json.dumps(one.box), one.look),
        )
        db.execute(
            "DELETE FROM verdicts WHERE stream = ?1 AND row NOT IN"
            " (SELECT row FROM verdicts WHERE stream = ?1 ORDER BY row DESC LIMIT ?2)",
            (one.stream, MOST_VERDICTS),
        )

    def _write_event(self, db: sqlite3.Connection, record: Mapping[str, Any], expires_at: float | None) -> None:
        """Insert or update the record of an event. The stored state of its clip and snapshot does not change."""
        zones = "".join(f"|{zone}|" for zone in record["entered_zones"])
        found = [record["sub_label"] or "", *record["answers"].values(), *record["attributes"].values()]
        text = " ".join((record["label"], record["rule"], *found))
        indexed = record["stream"], record["rule"], record["label"], zones, text
        columns = "row, record, stream, rule, label, zones, text"
        stored = db.execute(f"SELECT {columns} FROM events WHERE id = ?", (record["id"],)).fetchone()
        if stored is None:
            pending = any(record[f"has_{kind}"] for kind in MEDIA)
            times = record["start_time"], record["end_time"], self._now(), self._clock(), expires_at
            first = record["label"], record["box_norm"]
            first_box = json.dumps(first) if record["type"] == "begin" and record["box_norm"] is not None else None
            names = "id, stream, rule, label, zones, text, start_time, end_time"
            names += ", stored_at, kept_from, expires_at, pending, first_box, record"
            marks = ", ".join("?" * 14)
            number = db.execute(
                f"INSERT INTO events ({names}) VALUES ({marks})",
                (record["id"], *indexed, *times, pending, first_box, json.dumps(record)),
            ).lastrowid
        else:
            number, known, *words = stored
            before = json.loads(known)
            record = {**record, **{key: before[key] for kind in MEDIA for key in (kind, f"has_{kind}")}}
            db.execute(
                "UPDATE events SET label = ?, zones = ?, text = ?, end_time = ?, record = ? WHERE row = ?",
                (record["label"], zones, text, record["end_time"], json.dumps(record), number),
            )
            if tuple(words) == indexed:
                return
            db.execute("DELETE FROM words WHERE rowid = ?", (number,))
        db.execute(
            "INSERT INTO words (rowid, stream, rule, label, zones, text) VALUES (?, ?, ?, ?, ?, ?)", (number, *indexed)
        )

    def _prune(self, db: sqlite3.Connection) -> int:
        now = self._clock()
        old = db.execute("SELECT id FROM events WHERE expires_at < ? AND end_time IS NOT NULL", (now,))
        count = self._delete(db, [event for (event,) in old.fetchall()])
        if self._keep_s is not None:
            # By storage time, so that rows stored under another `store_keep` expire, too.
            old = db.execute(_OLD, (now - self._keep_s,))
            count += self._delete(db, [event for (event,) in old.fetchall()])
            for table in ("tracks", "minutes", "looks"):
                db.execute(f"DELETE FROM {table} WHERE stored_at < ?", (now - self._keep_s,))
        if self._max_bytes is not None:
            # Uses the index on events with media: scanning a million events took 2 s.
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
    """End open events at the time of their last frame. Each row has the event ID and the JSON record of an event."""
    for event, text in rows:
        record = json.loads(text)
        record |= {"type": "end", "end_time": record["frame_time"], "count": 0}
        values = record["end_time"], json.dumps(record), event
        db.execute("UPDATE events SET end_time = ?, record = ? WHERE id = ?", values)
