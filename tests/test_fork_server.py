"""Processes that the tests fork from a warm one are like those that a new interpreter starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.command import LONG_S, environment, run_saccade, start_saccade

TOLD = """
import json, os, sys, tempfile
files = sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}"))
print(json.dumps([
    sys.argv[1:], os.getcwd(), sys.path[0], __name__, files, os.environ["SACCADE_WORD"], tempfile.gettempdir(),
    sys.stdin.read(), [(one.encoding, one.errors, one.name) for one in (sys.stdin, sys.stdout, sys.stderr)],
    os.getppid(), os.getsid(0) == os.getpid(),
]))
sys.exit(7)
"""


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_forked_process_is_as_a_new_one(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "told.py").write_text(TOLD)
    (tmp_path / "in").write_text("read")
    env = {**environment(), "SACCADE_WORD": "x", "TMPDIR": str(tmp_path), "PYTHONIOENCODING": encoding}
    told = []
    for fresh in (True, False):
        with (tmp_path / "in").open() as file:
            options = {"stdin": file, "cwd": tmp_path, "env": env, "start_new_session": True}
            done = run_saccade("a", 1, module="told", fresh=fresh, **options)
        assert (done.returncode, done.stderr) == (7, "")
        told.append(json.loads(done.stdout))
    assert told[0] == told[1]
    assert told[1][:2] == [["a", "1"], str(tmp_path)]
    assert told[1][-2:] == [os.getpid(), True]


def test_what_is_raised_is_printed_and_a_signal_ends_it(tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text("raise ValueError('so')\n")
    done = run_saccade(module="raises", cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "ValueError: so")
    (tmp_path / "waits.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(1000)\n")
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        with start_saccade(module="waits", cwd=tmp_path) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.01)
            process.send_signal(number)
            assert process.wait(LONG_S) == -number
