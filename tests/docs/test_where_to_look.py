"""The table "Where to look" of docs/architecture.md: each file exists, and each name is defined in its file."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support import REPO

TABLE = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Where to look")[2]
FILES = sorted({path for path in re.findall(r"`([\w/.]+/[\w.]*)`", TABLE) if not path.startswith("tests/")})


def names_of(cell: str) -> list[tuple[str, str]]:
    """Pairs of a name and the file that follows it: "`A.b` and `A.c` in `file.py`" has two."""
    found: list[tuple[str, str]] = []
    waiting: list[str] = []
    for word, path in re.findall(r"`([A-Za-z_][\w.]*)`|in `([\w/.]+\.py)`", cell):
        if path:
            found += [(name, path) for name in waiting]
            waiting = []
        else:
            waiting.append(word)
    return found


NAMES = [pair for line in TABLE.splitlines() if line.startswith("| ") for pair in names_of(line.split("|")[2])]


def defined(path: str) -> set[str]:
    """Names of a module and of its classes, such as `Class.method`."""
    found: set[str] = set()

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(prefix + node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)
            elif isinstance(node, ast.Assign):
                found.update(prefix + name.id for name in node.targets if isinstance(name, ast.Name))
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{node.name}.")

    add(ast.parse((REPO / path).read_text(encoding="utf-8")).body, "")
    return found


def test_the_table_is_read() -> None:
    assert len(NAMES) > 30
    assert len(FILES) > 20


@pytest.mark.parametrize("path", FILES)
def test_each_file_exists(path: str) -> None:
    assert (REPO / path).exists()


@pytest.mark.parametrize(("name", "path"), NAMES)
def test_each_name_is_defined_in_its_file(name: str, path: str) -> None:
    assert name in defined(path)
