"""The desired state on disk: SQLite, each change one transaction, readable by its owner alone.

Sources carry credentials. What `save` has returned for outlives `kill -9` and a loss of power. Knows streams and their
configurations, not what runs.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from saccade.pipeline.config import ListedStream, RunConfig
from saccade.pipeline.errors import ConfigError, NotKeptError

_SCHEMA = "CREATE TABLE IF NOT EXISTS streams (of TEXT NOT NULL, place INTEGER NOT NULL, config TEXT NOT NULL)"
_BASE, _DESIRED = "base", "desired"


class StateFile:
    """Holds the desired streams of one run, and those of the configuration that they come from.

    Its methods are callable from any thread. One process uses a file at a time.

    Args:
        path: of the file; it is made by the first `save`, with its folder.

    Raises:
        ConfigError: if it cannot be used, or another process uses it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        if path.exists():
            self._open()

    def load(self, config: RunConfig) -> tuple[RunConfig, RunConfig] | None:
        """The base and the desired configuration that were saved; None if nothing was.

        Args:
            config: has the settings of the whole run, which are not kept here.

        Raises:
            ConfigError: if the file holds something else.
        """
        with self._lock:
            if self._db is None:
                return None
            try:
                rows = self._db.execute("SELECT of, config FROM streams ORDER BY place").fetchall()
                kept: dict[str, list[ListedStream]] = {_BASE: [], _DESIRED: []}
                for of, text in rows:
                    kept[of].append(ListedStream.model_validate(json.loads(text)))
                saved = bool(self._db.execute("PRAGMA user_version").fetchone()[0])
            except (sqlite3.Error, ValidationError, ValueError, KeyError) as error:
                reason = " ".join(str(error).split())
                raise ConfigError(f"{self.path}: this is no state of this version: {reason}; remove it") from None
        return (config.with_streams(kept[_BASE]), config.with_streams(kept[_DESIRED])) if saved else None

    def save(self, base: RunConfig, desired: RunConfig) -> None:
        """Keep both: all of it, or if this raises, nothing.

        Raises:
            ConfigError: if it cannot be written.
        """
        rows = [*_rows(_BASE, base.named().values()), *_rows(_DESIRED, desired.named().values())]
        with self._lock:
            if self._db is None:
                self._open()
            assert self._db is not None
            try:
                with self._db as db:
                    db.execute("DELETE FROM streams")
                    db.executemany("INSERT INTO streams VALUES (?, ?, ?)", rows)
                    db.execute("PRAGMA user_version = 1")
            except sqlite3.Error as error:
                raise NotKeptError(f"{self.path}: the change cannot be kept: {error}") from None

    def close(self) -> None:
        """Let another process have it. A second call does nothing."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def _open(self) -> None:
        path = self.path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            path.chmod(0o600)  # SQLite makes its journal with the permissions of the file
            db = sqlite3.connect(path, timeout=0.1, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{path}: changes cannot be kept there: {_reason(error)}") from None
        try:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")  # from the first transaction until it is closed
            db.execute("PRAGMA synchronous = FULL")
            with db:
                db.execute("BEGIN EXCLUSIVE")
                db.execute(_SCHEMA)
            _sync_folder(path.parent)
        except (OSError, sqlite3.Error) as error:
            db.close()
            if "locked" in str(error):
                raise ConfigError(f"{path}: another process keeps its changes there; give this one --state") from None
            raise ConfigError(f"{path}: changes cannot be kept there: {_reason(error)}") from None
        self._db = db


def _reason(error: Exception) -> object:
    return error.strerror if isinstance(error, OSError) and error.strerror else error


def _rows(of: str, streams: Iterable[ListedStream]) -> Iterable[tuple[str, int, str]]:
    return ((of, place, json.dumps(plain(stream))) for place, stream in enumerate(streams))


def plain(stream: ListedStream) -> dict[str, Any]:
    """A stream as JSON: what it sets, to be validated again."""
    values: dict[str, Any] = stream.model_dump(mode="json", exclude_unset=True)
    return values


def _sync_folder(folder: Path) -> None:
    """Have the name of a new file outlive a loss of power."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
