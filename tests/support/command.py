"""The command `saccade`: in this process, which spares it a start of Python and torch, or in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saccade.pipeline.cli.main import main
from tests.support import REPO
from tests.support.fork_server import ForkedProcess

LONG_S = 120  # far beyond what any of these needs; only so that a hang fails

_SET_BY_SACCADE = ("GOMP_SPINCOUNT", "MALLOC_ARENA_MAX", "OMP_WAIT_POLICY")
_FROM_OUTSIDE = ("DISPLAY", "SACCADE_DEBUG", "SACCADE_TOKEN", "WAYLAND_DISPLAY")

Done = subprocess.CompletedProcess[str]
Command = Callable[..., Done]
"""Takes the arguments of the command and, by name, the folder `cwd` to run it in."""


def environment() -> dict[str, str]:
    """This one, with the checkout first to be imported, and without what changes the command's behaviour.

    Nor does a command get what Saccade has set for this process, in tests that import or run it here.
    """
    paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
    kept = {name: value for name, value in os.environ.items() if name not in _FROM_OUTSIDE + _SET_BY_SACCADE}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


def start_saccade(
    *arguments: object, module: str = "saccade", fresh: bool = False, **options: Any
) -> subprocess.Popen[str]:
    """Start the command in a process of its own, its output in pipes; `options` are those of `Popen`.

    A fork of a warm process spares the imports; `fresh` starts a new interpreter, for tests of the start itself.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environment(), "text": True, **options}
    start = subprocess.Popen if fresh or not ForkedProcess.can_start(options) else ForkedProcess
    return start(command, **options)


def run_saccade(*arguments: object, module: str = "saccade", **options: Any) -> Done:
    """Run the command, or that of another module, in a process to its end; `options` are those of `Popen`."""
    with start_saccade(*arguments, module=module, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=LONG_S)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@pytest.fixture
def saccade(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process to its end."""

    def run_here(*arguments: object, cwd: Path) -> Done:
        monkeypatch.chdir(cwd)
        for name in _FROM_OUTSIDE:
            monkeypatch.delenv(name, raising=False)
        command = ["saccade", *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(command, int(str(ended.value.code)), *capfd.readouterr())

    return run_here
