"""The SQLite file under a store: its schema as a ladder of migrations, and what is done with a damaged file.

`PRAGMA user_version` is the number of rungs that a file has climbed. Knows no events.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path

Ladder = Sequence[str]
"""Each rung is SQL that takes a file from the version before to the next one; statements end with `;` and a newline."""

_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_DAMAGED_EXTENDED = {sqlite3.SQLITE_IOERR_SHORT_READ, sqlite3.SQLITE_IOERR_CORRUPTFS}
_TROUBLE = {
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED),
    *(sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PROTOCOL),
}


class NewerError(Exception):
    """A file was written by a newer version of Saccade. It was not changed."""


def migrate(db: sqlite3.Connection, ladder: Ladder) -> None:
    """Bring a file to the newest version, each rung in one transaction: a crash leaves it at the version before.

    Raises:
        NewerError: if the file has more rungs than the ladder.
        sqlite3.Error: if it cannot be read or written.
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
    """Refuse a file of a newer version before anything else is read or written.

    Raises:
        NewerError: if it is one. A file that is missing or cannot be read passes: opening it tells why.
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
    """Whether an error says that the content of the file is wrong, and not that it cannot be written now."""
    code = _code(error)
    return code & 0xFF in _DAMAGED or code in _DAMAGED_EXTENDED


def is_index_damaged(error: Exception) -> bool:
    """Whether an error says that an index of words is wrong, which `is_sound` does not look into."""
    return _code(error) == sqlite3.SQLITE_CORRUPT_VTAB or "vtable constructor failed" in str(error)


def is_sound(db: sqlite3.Connection) -> bool:
    """Whether SQLite finds every page in order; reads the whole file."""
    try:
        return bool(db.execute("PRAGMA quick_check(1)").fetchall() == [("ok",)])
    except sqlite3.Error:
        return False


def is_trouble(error: Exception) -> bool:
    """Whether an error is of the disk or of another process, so that the same file may be usable later."""
    return isinstance(error, OSError) or (_code(error) & 0xFF in _TROUBLE and not is_damaged(error))


def move_aside(paths: Iterable[Path]) -> Path | None:
    """Move what is there of `paths`, all in one folder, into a new folder `damaged-TIME` beside them; return that.

    None if nothing is there.

    Raises:
        OSError: if they cannot be moved, such as on a disk that is read-only.
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
    raise FileExistsError(f"{stamp} is there a thousand times")


def _code(error: Exception) -> int:
    code: int = getattr(error, "sqlite_errorcode", 0) if isinstance(error, sqlite3.Error) else 0
    return code
