"""Who may know whom."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support import REPO

HOUSE = {"engine", "pipeline", "sinks", "sources"}

MAY_KNOW = {
    "sources": set(),
    "engine": set(),
    "sinks": {"sources.frame", "engine.results"},
    "pipeline": {"engine", "sinks", "sources"},
}


def imports_of(path: Path) -> set[str]:
    """Every module of the house that the file imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:  # a relative one cannot leave its package
            names.add(node.module or "")
    return {name for name in names if name.split(".")[0] in HOUSE}


@pytest.mark.parametrize("package", sorted(HOUSE))
def test_packages_import_only_whom_they_may_know(package: str) -> None:
    allowed = MAY_KNOW[package] | {package}
    strangers = {
        (str(path.relative_to(REPO)), name)
        for path in (REPO / package).rglob("*.py")
        for name in imports_of(path)
        if not any(name == known or name.startswith(f"{known}.") for known in allowed)
    }
    assert strangers == set()
