"""How a run ends on signals: files are whole, and the process ends within 5 s whatever hangs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
import pytest

from saccade.pipeline.asset_files import DEMO_CLIP
from tests.support.command import LONG_S, environment, start_saccade

# The command with a stage that takes its time, as a user would add one.
WITH_STAGE = """
import sys, time
from saccade.pipeline.analytics import STAGES
from saccade.pipeline.cli.main import main
seconds = float(sys.argv.pop(1))
class Slow:
    def process(self, frame, result):
        time.sleep(seconds if frame.index >= 10 else 0)
        return result
STAGES["slow"] = Slow
main()
"""


@contextmanager
def running(folder: Path, slow_s: float) -> Iterator[subprocess.Popen[str]]:
    """A run into out.mp4 and out.jsonl whose stage takes so long for each frame from the tenth on."""
    (folder / "with_stage.py").write_text(WITH_STAGE)
    asked = [slow_s, "run", DEMO_CLIP, "--detect", "person", "--out", "out.mp4", "--jsonl", "out.jsonl"]
    process = start_saccade(*asked, "--stage", "slow", module="with_stage", cwd=folder, start_new_session=True)
    try:
        deadline = time.monotonic() + LONG_S
        while not (folder / "out.jsonl").exists() or (folder / "out.jsonl").read_bytes().count(b"\n") < 10:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.communicate()


def assert_whole(folder: Path) -> None:
    records = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [record["frame"] for record in records] == list(range(len(records)))
    with av.open(str(folder / "out.mp4")) as container:
        assert sum(1 for _ in container.decode(video=0)) == len(records) >= 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("module", ["typer", "pydantic", "torch"])
def test_a_signal_during_an_import_prints_nothing(module: str, number: signal.Signals) -> None:
    command = [sys.executable, "-v", "-m", "saccade", "bench", "frame", "--frames", "1"]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:  # where -v tells what is imported
            if f"/{module}/__init__.py" in line:
                break
        process.send_signal(number)
        rest = process.stderr.read()
        assert process.wait(LONG_S) == 130
    assert [line for line in rest.splitlines() if not line.startswith(("#", "import "))] == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.parametrize("module", ["typer", "torch"])
def test_sigterm_is_no_failure_while_a_run_starts(module: str, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-v", "-m", "saccade", "run", str(DEMO_CLIP), "--detect", "person"]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if f"/{module}/__init__.py" in line:
                break
        process.send_signal(number)
        process.stderr.read()
        assert process.wait(LONG_S) == code


NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]


@pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode != 0
    if shutil.which("unshare")
    else True,
    reason="needs unshare and the right to make a PID namespace",
)
@pytest.mark.parametrize("module", ["typer", "torch"])
def test_the_first_process_of_a_container_ends_on_sigterm(module: str) -> None:
    """PID 1 gets no signal that it has no handler for: docker stop waited 10 s, and killed."""
    command = [*NAMESPACE, sys.executable, "-v", "-m", "saccade", "bench", "frame", "--frames", "1"]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as unshare:
        try:
            assert unshare.stderr is not None
            for line in unshare.stderr:
                if f"/{module}/__init__.py" in line:
                    break
            children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGTERM)
            unshare.stderr.read()
            assert unshare.wait(LONG_S) == 130
        finally:
            unshare.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_every_file(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, 0.2) as process:
        process.send_signal(number)
        _, stderr = process.communicate(timeout=LONG_S)
    assert (process.returncode, stderr) == (0 if number == signal.SIGTERM else 130, "")
    assert_whole(tmp_path)


@pytest.mark.parametrize("again", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_while_closing_finishes_every_file(tmp_path: Path, again: signal.Signals) -> None:
    with running(tmp_path, 0.7) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert process.poll() is None  # the stage has a frame
        process.send_signal(again)
        process.send_signal(again)
        _, stderr = process.communicate(timeout=LONG_S)
    assert (process.returncode, stderr) == (130, "")
    assert_whole(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_process_ends_in_5_s_whatever_hangs(tmp_path: Path, number: signal.Signals) -> None:
    with running(tmp_path, 1000) as process:
        sent_at = time.monotonic()
        process.send_signal(number)
        _, stderr = process.communicate(timeout=LONG_S)
        assert time.monotonic() - sent_at < 10  # 4.7 s, and what a busy machine adds
    assert process.returncode == 1
    assert stderr == "saccade: forced exit, because closing took longer than 5 s after the signal\n"
