"""The desired state on disk: SQLite, each change one transaction, readable by its owner alone.

Sources and tokens in it carry credentials. Whatever `save` has returned for outlives `kill -9` and a loss of power.
Knows what a state is, not what it is for.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import threading
from pathlib import Path

from saccade.pipeline.errors import ConfigError
from saccade.pipeline.workers.desired.state import DesiredState

_SCHEMA = """
CREATE TABLE IF NOT EXISTS streams (place INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, config TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class StateFile:
    """Holds the state of one supervisor at a time. Methods are callable from any thread.

    Args:
        path: of the file, made if it is not there, with its folder; both for their owner alone.

    Raises:
        ConfigError: if it cannot be used, or another process holds it.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite makes its journal with the permissions of the file.
            self._file = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{path}: the state cannot be kept there: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            path.chmod(0o600)
            self._db = sqlite3.connect(path, check_same_thread=False)
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
            self._state = self._load()
        except BlockingIOError:
            os.close(self._file)
            raise ConfigError(f"{path}: another process uses this state") from None
        except (OSError, sqlite3.Error, ValueError) as error:
            os.close(self._file)
            raise ConfigError(f"{path}: the state cannot be kept there: {error}") from None

    @property
    def state(self) -> DesiredState:
        """The state that was saved last."""
        with self._lock:
            return self._state

    def save(self, state: DesiredState) -> None:
        """Keep a state: all of it, or if that raises, nothing.

        Raises:
            OSError: if it cannot be written.
        """
        with self._lock:
            difference = state.difference(self._state.streams)
            try:
                with self._db as db:
                    db.executemany("DELETE FROM streams WHERE name = ?", ((name,) for name in difference.close))
                    rows = ((json.dumps(state.streams[name]), name) for name in difference.change)
                    db.executemany("UPDATE streams SET config = ? WHERE name = ?", rows)
                    new = ((name, json.dumps(state.streams[name])) for name in difference.open)
                    db.executemany("INSERT INTO streams (name, config) VALUES (?, ?)", new)
                    if state.settings != self._state.settings:
                        db.execute("DELETE FROM settings")
                        settings = ((name, json.dumps(value)) for name, value in state.settings.items())
                        db.executemany("INSERT INTO settings VALUES (?, ?)", settings)
                    db.execute(f"PRAGMA user_version = {state.revision:d}")
            except sqlite3.Error as error:
                raise OSError(f"the state cannot be written: {error}") from None
            self._state = state

    def close(self) -> None:
        """Let another process have it. A second call does nothing."""
        with self._lock:
            self._db.close()
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _load(self) -> DesiredState:
        streams = self._db.execute("SELECT name, config FROM streams ORDER BY place")
        settings = self._db.execute("SELECT name, value FROM settings")
        (revision,) = self._db.execute("PRAGMA user_version").fetchone()
        return DesiredState(
            revision,
            {name: json.loads(config) for name, config in streams},
            {name: json.loads(value) for name, value in settings},
        )
