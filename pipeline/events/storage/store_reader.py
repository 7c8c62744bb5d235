"""Reads an event store. Defines the SQLite schema, and queries that return events in pages, newest first."""

from __future__ import annotations

import json
import math
import queue
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from saccade.pipeline.events.storage.database import NewerError, check_version
from saccade.pipeline.events.verdicts import Verdict
from saccade.pipeline.settings import read_seconds

_FIRST_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    stream TEXT NOT NULL, rule TEXT NOT NULL, label TEXT NOT NULL, zones TEXT NOT NULL, text TEXT NOT NULL,
    start_time REAL NOT NULL, end_time REAL,
    stored_at REAL NOT NULL,
    expires_at REAL,
    bytes INTEGER NOT NULL DEFAULT 0,
    pending INTEGER NOT NULL DEFAULT 0,
    record TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS events_stored ON events (stored_at);
CREATE INDEX IF NOT EXISTS events_expire ON events (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS events_open ON events (row) WHERE end_time IS NULL;
CREATE INDEX IF NOT EXISTS events_pending ON events (row) WHERE pending;
CREATE INDEX IF NOT EXISTS events_bytes ON events (row, bytes) WHERE bytes > 0;
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (stream, rule, label, zones, text, detail = column);
CREATE TABLE IF NOT EXISTS tracks (
    stream TEXT NOT NULL, number INTEGER NOT NULL, label TEXT NOT NULL,
    first_time REAL NOT NULL, last_time REAL NOT NULL, top_score REAL NOT NULL, path TEXT NOT NULL,
    stored_at REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS tracks_number ON tracks (stream, number);
CREATE INDEX IF NOT EXISTS tracks_stored ON tracks (stored_at);
CREATE TABLE IF NOT EXISTS minutes (
    stream TEXT NOT NULL, start INTEGER NOT NULL, counts TEXT NOT NULL, stored_at REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS minutes_start ON minutes (stream, start);
CREATE INDEX IF NOT EXISTS minutes_stored ON minutes (stored_at);
"""
_PREFIXES_AND_AGES = """
DROP TABLE words;
CREATE VIRTUAL TABLE words USING fts5 (
    stream, rule, label, zones, text, detail = column, prefix = '2 3 4 5 6 7 8'
);
INSERT INTO words (rowid, stream, rule, label, zones, text) SELECT row, stream, rule, label, zones, text FROM events;
ALTER TABLE events ADD COLUMN kept_from REAL NOT NULL DEFAULT 0;
UPDATE events SET kept_from = stored_at;
DROP INDEX IF EXISTS events_kept;
CREATE INDEX events_kept ON events (kept_from) WHERE expires_at IS NULL;
"""
_LOOKS_AND_VERDICTS = """
CREATE TABLE looks (event TEXT PRIMARY KEY, look BLOB NOT NULL, stored_at REAL NOT NULL);
CREATE INDEX looks_stored ON looks (stored_at);
CREATE TABLE verdicts (
    row INTEGER PRIMARY KEY AUTOINCREMENT,
    event TEXT NOT NULL UNIQUE, stream TEXT NOT NULL, label TEXT NOT NULL, score REAL NOT NULL, box TEXT NOT NULL,
    look BLOB
);
CREATE INDEX verdicts_stream ON verdicts (stream);
"""
_FIRST_BOX = """
ALTER TABLE events ADD COLUMN first_box TEXT;
"""
LADDER = (_FIRST_SCHEMA, _PREFIXES_AND_AGES, _LOOKS_AND_VERDICTS, _FIRST_BOX)
"""The schema migrations.

`row` grows with `stored_at`, a Unix time that never decreases, so pages are in this order. `zones` lists zone names
between bars. `pending` is 1 while media are being written. `path` is JSON, `[[time, x, y], …]`, and `counts` holds a
`Totals`. `first_box` is JSON, `[label, box]` of the object on the frame on which the event began. It is null if
this frame did not show the object, or an older version of Saccade stored the event.

Retention uses the store's own monotonic clock: `kept_from` of events, `stored_at` of tracks and minutes, and
`expires_at` of events whose rule has its own retention. Version 1 existed with three schemas, with and without word
prefixes and `events_kept`; the second migration unifies them.
"""

MAX_LIMIT = 500
_NEWEST = 20_000  # newest events whose rule names are listed
_BEFORE = "SELECT row FROM events WHERE stored_at < ? ORDER BY stored_at DESC LIMIT 1"
# Uses two small indexes: on 150,000 events without media this takes 0.1 ms, against 70 ms for a condition per row.
_WITH_MEDIA = "SELECT row FROM events WHERE bytes > 0 UNION ALL SELECT row FROM events WHERE pending"
_FIRST = "SELECT row FROM events WHERE stored_at >= ? ORDER BY stored_at LIMIT 1"
MEDIA = {"snapshot": ".jpg", "clip": ".mp4"}
LONG_S = 10.0
NEWER = "written by a newer version of saccade; update saccade, or use another folder"
_ID = re.compile(r"[\w.-]{1,100}")
_AGO = re.compile(r"\d+(\.\d+)?[smhd]")
_WORD = re.compile(r"[^\W_]+")  # the tokenization of the index


@dataclass(slots=True, frozen=True)
class EventQuery:
    """A query for stored events. An attribute that is None or empty matches every event.

    Attributes:
        stream, rule, label, zone: exact names.
        since: earliest `start_time`, in seconds.
        words: words that must all appear in labels, answers or attributes. The last word can be a prefix of two or
            more letters.
        after: return only events that were stored before this Unix time. For the next page, pass the storage time of
            the last event of the current page.
        media: return only events with a snapshot or clip, including files that are still being written.
        limit: maximum number of events.

    Raises:
        ValueError: if the limit is not from 1 to 500.
    """

    stream: str | None = None
    rule: str | None = None
    label: str | None = None
    zone: str | None = None
    since: float | None = None
    words: str = ""
    after: float | None = None
    limit: int = 50
    media: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= MAX_LIMIT:
            raise ValueError(f"limit (events per page) should be from 1 to {MAX_LIMIT}, got {self.limit}")

    def to_sql(self, first_row: int | None = None) -> tuple[str, list[object]]:
        """Return the SQL statement of the query and its parameters.

        The statement selects the columns `record` and `stored_at`.

        Args:
            first_row: lowest row ID of a matching event, to limit the search; None if unknown.
        """
        where: list[str] = []
        values: list[object] = []

        def add(condition: str, *given: object) -> None:
            where.append(condition)
            values.extend(given)

        source = "events"
        if match := self._match():
            source = "words JOIN events ON events.row = words.rowid"
            add("words MATCH ?", match)
        row = "words.rowid" if match else "events.row"
        for column in ("stream", "rule", "label"):
            if (value := getattr(self, column)) is not None:
                add(f"events.{column} = ?", value)
        if self.zone is not None:
            add("instr(events.zones, ?)", f"|{self.zone}|")
        if self.since is not None:
            add("events.start_time >= ?", self.since)
        if first_row is not None:
            add(f"{row} >= ?", first_row)
        if self.media:
            add(f"events.row IN ({_WITH_MEDIA})")
        if self.after is not None:
            add(f"{row} <= ({_BEFORE})", self.after)
        conditions = f" WHERE {' AND '.join(where)}" if where else ""
        return f"SELECT events.record, events.stored_at FROM {source}{conditions} ORDER BY {row} DESC LIMIT ?", [
            *values,
            self.limit,
        ]

    def _match(self) -> str:
        """Return the full-text search expression of SQLite for this query. Special characters in words are escaped."""
        parts = []
        for column, value in (
            ("stream", self.stream),
            ("rule", self.rule),
            ("label", self.label),
            ("zones", self.zone),
        ):
            parts += [f'{column} : "{word}"' for word in _WORD.findall(value or "")]
        words = _WORD.findall(self.words)
        parts += [f'"{word}"' for word in words[:-1]]
        # A one-letter prefix matches so many words that merging takes 50 ms; two to eight letters have an index.
        parts += [f'"{word}" *' if len(word) > 1 else f'"{word}"' for word in words[-1:]]
        return " AND ".join(parts)


def walk_pages(
    page: Callable[[EventQuery], list[tuple[dict[str, Any], float]]], query: EventQuery
) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield all events that match a query, with the time at which each event was stored.

    Args:
        query: the query. Its limit is the page size.
        page: returns the events of one page, plus the first event of the next page if there is one.
    """
    while True:
        found = page(query)
        yield from found[: query.limit]
        if len(found) <= query.limit:
            return
        query = replace(query, after=found[query.limit - 1][1])


def media_path(folder: Path, event: str, kind: str) -> Path | None:
    """Return the path of an event's snapshot or clip in the media folder.

    Return None for an invalid event ID.
    """
    return folder / f"{event}{MEDIA[kind]}" if _ID.fullmatch(event) else None


def time_of_text(text: str) -> float:
    """Parse a Unix time such as `1795262111`, or a duration before now such as `15m`. Return the Unix time in seconds.

    Raises:
        ValueError: if the text is neither a Unix time nor a duration.
    """
    if _AGO.fullmatch(text):
        return time.time() - cast(float, read_seconds(text))
    return finite(
        text, "since should be a Unix time in seconds, such as 1795262111, or a duration before now, such as 1d"
    )


def finite(text: str, complaint: str) -> float:
    """Parse a finite number (not infinite and not NaN).

    Args:
        text: text to parse.
        complaint: message of the ValueError.

    Raises:
        ValueError: if the text is not a finite number.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(complaint)
    return number


class StoreError(Exception):
    """Raised if an event store cannot be used. The message is one line for the user.

    Args:
        message: the message.
        disk: whether the database or the disk caused the error. If False, the request caused it.
    """

    def __init__(self, message: str, *, disk: bool = False) -> None:
        super().__init__(message)
        self.disk = disk


class EventReader:
    """Reads the event store in a folder. Another process can write the store at the same time. Thread-safe.

    Args:
        folder: folder of the store.
    """

    away: Sequence[str] = ()
    """Unreachable machines; always empty, because this is a single store."""

    def __init__(self, folder: Path) -> None:
        self.media_folder = folder / "media"
        self._path = folder / "events.db"
        self._readers: queue.SimpleQueue[tuple[int, sqlite3.Connection]] = queue.SimpleQueue()
        self._generation = 0  # generation of the file, which can be replaced
        self._opening = threading.Lock()  # held while the file is replaced

    @classmethod
    def open(cls, folder: Path) -> EventReader:
        """Open an existing event store for reading.

        Raises:
            StoreError: if the store does not exist or cannot be read.
        """
        reader = EventReader(folder)
        if not reader._path.is_file():
            raise StoreError(f"{folder}: this folder has no event store")
        try:
            check_version(reader._path, LADDER)
        except NewerError:
            raise StoreError(f"{folder}: {NEWER}") from None
        reader.search(EventQuery(limit=1))
        return reader

    def search(self, query: EventQuery) -> list[dict[str, Any]]:
        """Return the records of the events that match a query, newest first."""
        return [record for record, _ in self.page(query)]

    def page(self, query: EventQuery, more: int = 0) -> list[tuple[dict[str, Any], float]]:
        """Return the records of the events that match a query, newest first, each with its storage time.

        The storage time is a Unix time in seconds, and is unique in this store.

        Args:
            query: the query.
            more: number of events to return beyond the query's limit.
        """
        with self._reading() as db:
            first = None
            if query.since is not None:
                # No event is stored before it begins, so `since` also bounds the rows.
                first = db.execute(_FIRST, (query.since,)).fetchone()
                if first is None:
                    return []
            text, values = query.to_sql(None if first is None else first[0])
            rows = db.execute(text, [*values[:-1], query.limit + more])
            return [(json.loads(record), stored_at) for record, stored_at in rows]

    def walk(self, query: EventQuery) -> Iterator[tuple[dict[str, Any], float]]:
        """Yield all events that match a query, with their storage times. The query's limit is the page size."""
        return walk_pages(lambda query: self.page(query, 1), query)

    def get(self, event: str) -> dict[str, Any] | None:
        """Return the record of an event, including the paths of its tracked objects; None for an unknown event ID."""
        with self._reading() as db:
            found = db.execute("SELECT record FROM events WHERE id = ?", (event,)).fetchone()
            if found is None:
                return None
            record: dict[str, Any] = json.loads(found[0])
            marks = ", ".join("?" * len(record["tracks"]))
            end = record["frame_time"] if record["end_time"] is None else record["end_time"]
            rows = db.execute(
                f"SELECT number, label, path FROM tracks WHERE stream = ? AND number IN ({marks})"
                " AND first_time <= ? AND last_time >= ? ORDER BY stored_at",
                (record["stream"], *record["tracks"], end, record["since"]),
            )
            record["paths"] = [{"track_id": n, "label": label, "path": json.loads(path)} for n, label, path in rows]
            return record

    def verdicts(self, stream: str | None = None) -> list[Verdict]:
        """Return the events that users marked as false alarms, of one stream or of all streams, oldest first."""
        where, values = ("", ()) if stream is None else (" WHERE stream = ?", (stream,))
        with self._reading() as db:
            rows = db.execute(
                f"SELECT event, stream, label, score, box, look FROM verdicts{where} ORDER BY row", values
            )
            return [
                Verdict(event, of, label, score, tuple(json.loads(box)), look)
                for event, of, label, score, box, look in rows
            ]

    def rules(self, stream: str | None = None, most: int = 200) -> list[str]:
        """Return the sorted names of rules that have events, in one stream or in all streams."""
        where, values = ("", ()) if stream is None else (" WHERE stream = ?", (stream,))
        with self._reading() as db:
            # Only the newest events: 300,000 take 0.5 s, 20,000 take 11 ms.
            rows = db.execute(
                f"SELECT DISTINCT rule FROM (SELECT rule, stream FROM events ORDER BY row DESC LIMIT {_NEWEST}){where}"
                " LIMIT ?",
                (*values, most),
            )
            return sorted(rule for (rule,) in rows)

    def counts(self, stream: str, since: float) -> list[dict[str, Any]]:
        """Return the object counts of a stream for each minute that starts at or after the Unix time `since`."""
        with self._reading() as db:
            rows = db.execute(
                "SELECT start, counts FROM minutes WHERE stream = ? AND start >= ? ORDER BY start LIMIT 10080",
                (stream, since),
            )
            return [{"start": start, **json.loads(counts)} for start, counts in rows]

    def media(self, event: str, kind: str) -> Path | None:
        """Return the path of an event's snapshot or clip.

        Return None if the file does not exist.
        """
        path = self.media_path(event, kind)
        return path if path is not None and path.exists() else None

    def media_path(self, event: str, kind: str) -> Path | None:
        """Return the path at which an event's snapshot or clip is stored. Return None for an invalid event ID."""
        return media_path(self.media_folder, event, kind)

    def close(self) -> None:
        """Close all connections to the database."""
        with suppress(queue.Empty):
            while True:
                self._readers.get_nowait()[1].close()

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        """Provide a database connection for reading. If reading fails in the `with` block, StoreError is raised."""
        generation, db = self._generation, None
        try:
            with self._opening:
                generation = self._generation
                with suppress(queue.Empty):
                    while db is None:
                        opened, db = self._readers.get_nowait()
                        if opened != generation:
                            db.close()
                            db = None
                db = db or self._connect()
            yield db
        except sqlite3.Error as error:
            if db is not None:
                db.close()
                db = None
            self._found_unreadable(error, generation)
            raise StoreError(f"{self._path.parent}: the event store cannot be read: {error}", disk=True) from None
        finally:
            if db is not None:
                self._readers.put((generation, db))

    def _found_unreadable(self, error: sqlite3.Error, generation: int) -> None:
        """Called if the database cannot be read. A subclass can repair the database here."""

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=LONG_S, check_same_thread=False)
