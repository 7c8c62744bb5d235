"""What is asked of stored events, and the SQL for it: newest first, page by page. Knows the schema, no connections.

A condition on several columns is first put to the full-text index, which merges its sorted lists of rows: among a
million events the rarest condition decides how long that takes. Then it is checked exactly.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SCHEMA_VERSION = 1
SCHEMA = """
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
"""`row` grows with time; `zones` has each between bars; `pending` is 1 while media are being written; `path`
is JSON, `[[time, x, y], …]`, `counts` a `Totals`."""

MAX_LIMIT = 500
_WORD = re.compile(r"[^\W_]+")  # as the index divides text


@dataclass(slots=True, frozen=True)
class EventQuery:
    """Which events are wanted; what is None or empty does not matter.

    Attributes:
        stream, rule, label, zone: exactly.
        since: of `start_time`, in seconds.
        words: all of which are in labels, answers or attributes; the last may be the beginning of one.
        after: the id of an event; those stored before it are wanted, for the next page.
        limit: how many at most.

    Raises:
        ValueError: if the limit is not from 1 to 500.
    """

    stream: str | None = None
    rule: str | None = None
    label: str | None = None
    zone: str | None = None
    since: float | None = None
    words: str = ""
    after: str | None = None
    limit: int = 50

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= MAX_LIMIT:
            raise ValueError(f"limit should be from 1 to {MAX_LIMIT}, got {self.limit}")

    def to_sql(self) -> tuple[str, list[object]]:
        """A statement that selects `record`, and its values."""
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
            # No event is stored before it begins: bounds the rows, where the times alone would not.
            first = "SELECT row FROM events WHERE stored_at >= ? ORDER BY stored_at LIMIT 1"
            add(f"{row} >= coalesce(({first}), 9223372036854775807)", self.since)
        if self.after is not None:
            add(f"{row} < (SELECT row FROM events WHERE id = ?)", self.after)
        conditions = f" WHERE {' AND '.join(where)}" if where else ""
        return f"SELECT events.record FROM {source}{conditions} ORDER BY {row} DESC LIMIT ?", [*values, self.limit]

    def _match(self) -> str:
        """The condition on the index, whose words hold no syntax."""
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
        parts += [f'"{word}" *' for word in words[-1:]]
        return " AND ".join(parts)
