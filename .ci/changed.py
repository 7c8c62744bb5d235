"""Prints the test modules that a change affects: `changed.py [BASE]`. BASE is a commit, `main` by default.

A test module is affected if it was changed, or if it imports a changed module directly or indirectly. A change of
another file affects the test modules that mention its name.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]


def changed(base: str) -> set[Path]:
    """Return the files that this branch has changed since it left `base`, including uncommitted and new files."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=REPO, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    (ancestor,) = git("merge-base", base, "HEAD")
    names = [*git("diff", "--name-only", ancestor), *git("ls-files", "--others", "--exclude-standard")]
    return {REPO / name for name in names}


@cache
def imports(path: Path) -> frozenset[Path]:
    """Return the repository files that a Python file imports directly, and the `__init__.py` of their packages."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "saccade" and not (REPO / "saccade" / f"{'/'.join(parts[1:])}.py").is_file():
                parts = parts[1:]
            for depth in range(1, len(parts) + 1):
                place = REPO.joinpath(*parts[:depth])
                found |= {one for one in (place.with_suffix(".py"), place / "__init__.py") if one.is_file()}
    return frozenset(found)


def reached(test: Path, names: set[Path]) -> bool:
    """Return whether a test module imports one of the files `names`, directly or indirectly."""
    seen: set[Path] = set()
    waiting = [test, *(folder / "conftest.py" for folder in test.parents if (folder / "conftest.py").is_file())]
    while waiting:
        path = waiting.pop()
        if path in names:
            return True
        if path not in seen:
            seen.add(path)
            waiting += imports(path)
    text = test.read_text(encoding="utf-8")
    return any(path.suffix != ".py" and path.name in text for path in names)


def main() -> None:
    """Print the paths of the affected test modules, one per line."""
    names = changed(sys.argv[1] if len(sys.argv) > 1 else "main")
    for test in sorted((REPO / "tests").rglob("test_*.py")):
        if reached(test, names):
            print(test.relative_to(REPO))


if __name__ == "__main__":
    main()
