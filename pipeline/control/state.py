"""Stores the desired streams in an SQLite file, with one transaction per change.

Only the owner of the file can read it, because sources contain credentials. Stored changes survive `kill -9` and a
power failure.
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
from saccade.pipeline.config.edit import sync_folder
from saccade.pipeline.errors import ConfigError, NotKeptError

_SCHEMA = "CREATE TABLE IF NOT EXISTS streams (of TEXT NOT NULL, place INTEGER NOT NULL, config TEXT NOT NULL)"
_BASE, _DESIRED = "base", "desired"


class StateFile:
    """Stores the desired streams of a run, and the streams that the configuration file had at the last save.

    Thread-safe. Only one process can use a file at a time.

    Args:
        path: path of the file. The first `save` creates the file and its folder.

    Raises:
        ConfigError: if the file cannot be used, or another process uses it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        if path.exists():
            self._open()

    def load(self, config: RunConfig) -> tuple[RunConfig, RunConfig] | None:
        """Return the saved configurations (base, desired). Return None if nothing is saved.

        Args:
            config: provides the settings that are not saved, which are all settings except the streams.

        Raises:
            ConfigError: if the file is not a valid state file.
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
                raise ConfigError(
                    f"{self.path}: not a valid state file for this version of Saccade: {reason}; delete the file"
                ) from None
        return (config.with_streams(kept[_BASE]), config.with_streams(kept[_DESIRED])) if saved else None

    def save(self, base: RunConfig, desired: RunConfig) -> None:
        """Save the base configuration (command line and file) and the desired configuration in one transaction.

        Raises:
            ConfigError: if the file cannot be written.
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
                raise NotKeptError(f"{self.path}: cannot store the change: {error}") from None

    def close(self) -> None:
        """Close the file, so that another process can use it. A second call does nothing."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def _open(self) -> None:
        path = self.path
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            path.chmod(0o600)  # SQLite creates its journal with the permissions of the file
            db = sqlite3.connect(path, timeout=0.1, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"{path}: cannot store changes in this file: {_reason(error)}") from None
        try:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")  # held from the first transaction until close
            db.execute("PRAGMA synchronous = FULL")
            with db:
                db.execute("BEGIN EXCLUSIVE")
                db.execute(_SCHEMA)
            sync_folder(path.parent)
        except (OSError, sqlite3.Error) as error:
            db.close()
            if "locked" in str(error):
                raise ConfigError(
                    f"{path}: another process is using this state file; use --state FILE to set another file"
                ) from None
            raise ConfigError(f"{path}: cannot store changes in this file: {_reason(error)}") from None
        self._db = db


def _reason(error: Exception) -> object:
    return error.strerror if isinstance(error, OSError) and error.strerror else error


def _rows(of: str, streams: Iterable[ListedStream]) -> Iterable[tuple[str, int, str]]:
    return ((of, place, json.dumps(plain(stream))) for place, stream in enumerate(streams))


def plain(stream: ListedStream) -> dict[str, Any]:
    """Return the explicitly set keys of a stream configuration, with their values as JSON values."""
    values: dict[str, Any] = stream.model_dump(mode="json", exclude_unset=True)
    return values
