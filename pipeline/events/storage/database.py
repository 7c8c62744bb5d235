"""The SQLite file of an event store: migrates its schema, and recovers from a corrupt file.

`PRAGMA user_version` stores the number of migrations that have been applied.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path

Ladder = Sequence[str]
"""The migrations: each is SQL from one version to the next; statements end with `;` and a newline."""

_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_DAMAGED_EXTENDED = {sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS}
_TROUBLE = {
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED),
    *(sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PROTOCOL),
}


class NewerError(Exception):
    """Raised if a newer version of Saccade wrote the database. The database is not changed."""


def migrate(db: sqlite3.Connection, ladder: Ladder) -> None:
    """Migrate a database to the newest schema.

    Each migration is one transaction, so a crash leaves the previous schema.

    Raises:
        NewerError: if a newer version of Saccade has written the database.
        sqlite3.Error: if the database cannot be read or written.
    """
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > len(ladder):
        raise NewerError
    for number, rung in enumerate(ladder[version:], version + 1):
        with db:
            db.execute("BEGIN IMMEDIATE")
            for statement in rung.split(";\n"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {number}")


def check_version(path: Path, ladder: Ladder) -> None:
    """Check that the database was not written by a newer version of Saccade.

    Raises:
        NewerError: if a newer version wrote the database.
    """
    if not path.is_file():
        return
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error:
        return
    if version > len(ladder):
        raise NewerError


def is_damaged(error: Exception) -> bool:
    """Return whether an error means that the database file is corrupt."""
    code = _code(error)
    return code & 0xFF in _DAMAGED or code in _DAMAGED_EXTENDED


def is_index_damaged(error: Exception) -> bool:
    """Return whether an error means that a full-text index is corrupt."""
    return _code(error) == sqlite3.SQLITE_CORRUPT_VTAB or "vtable constructor failed" in str(error)


def is_sound(db: sqlite3.Connection) -> bool:
    """Return whether the integrity check of SQLite finds no error. The check reads the whole database file."""
    try:
        return bool(db.execute("PRAGMA quick_check(1)").fetchall() == [("ok",)])
    except sqlite3.Error:
        return False


def is_trouble(error: Exception) -> bool:
    """Return whether an error is temporary, such as a full disk or a lock of another process."""
    return isinstance(error, OSError) or (_code(error) & 0xFF in _TROUBLE and not is_damaged(error))


def move_aside(paths: Iterable[Path]) -> Path | None:
    """Move files to a new folder `damaged-TIME` next to them. Missing files are ignored.

    Args:
        paths: files, all in one folder.

    Returns:
        The new folder, or None if no file exists.

    Raises:
        OSError: if the files cannot be moved, for example on a read-only disk.
    """
    there = [path for path in paths if path.exists() or path.is_symlink()]
    if not there:
        return None
    stamp = f"damaged-{datetime.now():%Y%m%d-%H%M%S}"
    for number in range(1000):
        aside = there[0].with_name(f"{stamp}-{number}" if number else stamp)
        try:
            aside.mkdir()
        except FileExistsError:
            continue
        for path in there:
            path.rename(aside / path.name)
        return aside
    raise FileExistsError(f"1000 folders of damaged files named {stamp} already exist: delete some of them")


def _code(error: Exception) -> int:
    code: int = getattr(error, "sqlite_errorcode", 0) if isinstance(error, sqlite3.Error) else 0
    return code
