"""What CI says of tests that fail once: they pass, and are named last."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import REPO

SUITE = """
from pathlib import Path

def test_good():
    pass

def test_once():
    marker = Path("ran")
    ran = marker.exists()
    marker.touch()
    assert ran or {steady}

def test_always():
    assert {healthy}
"""
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:randomly"]


@pytest.mark.parametrize(
    ("steady", "healthy", "code", "last"),
    [
        (True, True, 0, ["flaky: 0"]),
        (False, True, 0, ["flaky: 1", "  test_suite.py::test_once"]),
        (True, False, 1, ["flaky: 0", "failed: 1", "  test_suite.py::test_always"]),
        (False, False, 1, ["flaky: 1", "  test_suite.py::test_once", "failed: 1", "  test_suite.py::test_always"]),
    ],
)
def test_what_passes_only_the_second_time_is_named_last(
    tmp_path: Path, steady: bool, healthy: bool, code: int, last: list[str]
) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE.format(steady=steady, healthy=healthy))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    again = [*PYTEST, "--last-failed", "--last-failed-no-failures=none"]
    command = [sys.executable, str(REPO / ".ci" / "rerun.py"), *PYTEST, "--", *again]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout
    assert done.stdout.splitlines()[-len(last) :] == last
    assert (tmp_path / "out" / "flaky.txt").read_text().splitlines() == last


def test_what_fails_without_a_test_is_not_excused(tmp_path: Path) -> None:
    command = [sys.executable, str(REPO / ".ci" / "rerun.py"), "false", "--", "true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "flaky: 0\nfailed: 0\n")


def test_ci_runs_the_tests_so() -> None:
    assert "python3 .ci/rerun.py make test -- make test PYTEST='--last-failed" in (REPO / ".ci" / "run").read_text()
