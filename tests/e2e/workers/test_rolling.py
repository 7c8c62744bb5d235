"""A changed model is taken by workers one after another, under cameras of a real RTSP server whose streams go on."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import saccade.engine.models
from tests.e2e.workers.test_killed_workers import LONG_S, Program, running
from tests.support.cameras import Camera, need_servers, wait_for

pytestmark = pytest.mark.e2e

STREAMS = 4
RATE = 4  # frames a second, and frames from one key frame to the next


@pytest.fixture(scope="module")
def camera() -> Iterator[Camera]:
    need_servers()
    with Camera("--fps", RATE, "--gop", RATE) as one:
        yield one


def change(program: Program, **values: Any) -> None:
    config = json.loads(program.file.read_text()) | values
    program.file.write_text(json.dumps(config))
    program.process.send_signal(signal.SIGHUP)


def names(program: Program) -> list[str]:
    return [seat["name"] for seat in program.get("/workers")["workers"]]


def largest_gaps(path: Path) -> dict[str, float]:
    """The longest time between the frames of two records of each stream, in seconds; no frame has two."""
    gaps: dict[str, list[float]] = {}
    last: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        before = last.get(record["stream"], record)
        if before is not record and before["capture_clock"] == record["capture_clock"]:
            gaps.setdefault(record["stream"], []).append(record["captured_at"] - before["captured_at"])
        last[record["stream"]] = record
    assert min(min(each) for each in gaps.values()) > 0
    return {stream: max(each) for stream, each in gaps.items()}


def began(folder: Path) -> list[str]:
    """The streams of the events that have begun, one for each."""
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return sorted(event["stream"] for event in events if event["type"] == "begin")


def test_a_model_is_replaced_while_streams_go_on(tmp_path: Path, camera: Camera) -> None:
    model = tmp_path / "model"
    shutil.copytree(Path(saccade.engine.models.__file__).parent / "nano", model)
    with running(tmp_path, camera, STREAMS, max_fps=None) as program:
        assert names(program) == ["1", "2"]
        pids = [worker["pid"] for worker in program.get("/workers")["workers"]]
        change(program, model=str(tmp_path / "none"))
        wait_for(lambda: "nothing was changed" in program.log.read_text(), LONG_S)
        assert names(program) == ["1", "2"]
        wait_for(program.all_run, LONG_S)
        wait_for(lambda: len(began(tmp_path)) == STREAMS, LONG_S)
        change(program, model=str(model), conf=0.3)
        wait_for(lambda: "all workers were replaced" in program.log.read_text(), LONG_S)
        assert [worker["pid"] for worker in program.get("/workers")["workers"]] == pids
        assert program.get("/model")["model"] == "model"
        wait_for(program.all_run, LONG_S)
        assert {one["conf"] for one in program.get("/streams")["streams"]} == {0.3}
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(LONG_S) == 0
    gaps = largest_gaps(tmp_path / "all.jsonl")
    print("\nlongest gap of each stream in seconds:", gaps)
    print(program.log.read_text())
    assert len(gaps) == STREAMS
    assert began(tmp_path) == sorted(gaps)  # they went on
