"""`saccade run --workers 2` on a local Ray, under four cameras of a real RTSP server.

Workers are killed or hang, their model is replaced, and the controller is killed. The server's frames show nobody, so
that a rule on absence has an event in each stream all the time. With SACCADE_LONG=1 there are eight cameras, each
worker is killed ten times, and every stream must be back within 10 s; otherwise one worker is killed once. An event
goes on under its id where its stream is back within `RESUME_S`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import saccade.engine.models
from saccade.pipeline.events.machine import RESUME_S
from tests.support.cameras import Camera, free_port, need_servers, wait_for

pytestmark = pytest.mark.e2e

LONG = os.environ.get("SACCADE_LONG") == "1"
KILLS = 20 if LONG else 1
LONG_S = 120.0  # far beyond what any of these needs; only so that a hang fails
BACK_S = 10.0  # what is promised
STREAMS = 8 if LONG else 4
RATE = 5


class Program:
    """The command as a process, in a session of its own by which whatever it leaves behind is found."""

    def __init__(self, folder: Path, camera: Camera, streams: int, **values: Any) -> None:
        self.port = free_port()
        config = {
            "streams": [{"name": f"c{number}", "source": camera.url()} for number in range(streams)],
            "zones": {"desk": {"polygon": ".1,.1,.9,.1,.9,.9,.1,.9"}},
            "rules": [{"name": "empty", "when": "person absent from desk for 1s"}],
            "clips": False,
            "max_fps": 1,
            "store": str(folder / "kept"),
            "sinks": [f"{folder}/events.jsonl?send=events", f"{folder}/all.jsonl"],
            "http": f"127.0.0.1:{self.port}",
            "device": "cpu",
            "workers": 2,
            **values,
        }
        self.file = folder / "cameras.yaml"
        if not self.file.exists():
            self.file.write_text(json.dumps(config))  # which is YAML
        self.port = int(json.loads(self.file.read_text())["http"].rpartition(":")[2])
        command = [sys.executable, "-m", "saccade", "run", "--config", str(self.file)]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.streams = streams

    def get(self, path: str) -> Any:
        return self.ask(path, "GET", None)

    def ask(self, path: str, method: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers, method=method)
        with urllib.request.urlopen(request, timeout=LONG_S) as answer:
            return json.loads(answer.read())

    def begun(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self.all_run()
        except OSError:
            return False

    def all_run(self) -> bool:
        """Whether every stream has had results where it runs now, and lately."""
        streams = self.get("/streams")["streams"]
        return len(streams) == self.streams and all(
            one["state"] == "live" and one["frames_out"] and one["age_ms"] < 5000 for one in streams
        )

    def kill_worker(self, number: int) -> tuple[float, float]:
        """Kill one, and wait until all streams run again; how long it and they took, in seconds."""
        back_s = self.lose_worker(number, signal.SIGKILL)
        wait_for(lambda: bool(self.get("/workers")["workers"][number]["pid"]), LONG_S)
        return next(iter(self.get("/workers")["workers"][number]["restarted_in_s"][-1:]), 0.0), back_s

    def lose_worker(self, number: int, by: signal.Signals) -> float:
        """Send one a signal, and wait until it is given up and all streams run; how long it took, in seconds."""
        before = self.get("/workers")["workers"][number]
        os.kill(before["pid"], by)
        begun = time.monotonic()
        wait_for(lambda: bool(self.get("/workers")["workers"][number]["pid"] != before["pid"]), LONG_S)
        wait_for(self.all_run, LONG_S)
        return time.monotonic() - begun

    def change(self, **values: Any) -> None:
        """Change the configuration file, and let the command read it."""
        self.file.write_text(json.dumps(json.loads(self.file.read_text()) | values))
        self.process.send_signal(signal.SIGHUP)

    def going_on(self) -> set[str]:
        return {one["id"] for one in self.get("/events?limit=500")["events"] if one["end_time"] is None}

    def rss_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def left(self) -> list[int]:
        """The processes of its session that are there, zombies aside."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.process.pid and fields[0] != "Z":
                found.append(int(path.parent.name))
        return found


@contextmanager
def running(folder: Path, camera: Camera, streams: int, **values: Any) -> Iterator[Program]:
    program = Program(folder, camera, streams, **values)
    try:
        wait_for(program.begun, LONG_S)
        yield program
    except BaseException:
        print(program.log.read_text())  # what it said, beside the failure
        raise
    finally:
        if program.process.poll() is None:
            program.process.kill()
        program.process.wait()
        wait_for(lambda: not program.left(), LONG_S)


@pytest.fixture(scope="module")
def camera() -> Iterator[Camera]:
    need_servers()
    with Camera("--fps", RATE, "--gop", RATE) as one:
        yield one


def replace_model(program: Program, folder: Path) -> None:
    """Let the workers take another model one after another; one that is not there changes nothing."""
    workers = program.get("/workers")["workers"]
    program.change(model=str(folder / "none"))
    wait_for(lambda: "nothing was changed" in program.log.read_text(), LONG_S)
    assert [one["name"] for one in program.get("/workers")["workers"]] == [one["name"] for one in workers]
    wait_for(program.all_run, LONG_S)
    shutil.copytree(Path(saccade.engine.models.__file__).parent / "nano", folder / "model")
    program.change(model=str(folder / "model"), conf=0.3)
    wait_for(lambda: "all workers were replaced" in program.log.read_text(), LONG_S)
    assert [one["pid"] for one in program.get("/workers")["workers"]] == [one["pid"] for one in workers]
    assert program.get("/model")["model"] == "model"
    wait_for(program.all_run, LONG_S)
    assert program.get("/streams/c0")["conf"] == 0.3


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def largest_gaps(records: list[dict[str, Any]]) -> dict[str, float]:
    """The longest time between the frames of two records of each stream, in seconds; no frame has two."""
    gaps: dict[str, list[float]] = {}
    last: dict[str, dict[str, Any]] = {}
    for record in records:
        before = last.get(record["stream"], record)
        if before is not record and before["capture_clock"] == record["capture_clock"]:
            gaps.setdefault(record["stream"], []).append(record["captured_at"] - before["captured_at"])
        last[record["stream"]] = record
    assert min(min(each) for each in gaps.values()) > 0
    return {stream: max(each) for stream, each in gaps.items()}


def test_streams_go_on_when_a_worker_is_killed_and_the_model_is_replaced(tmp_path: Path, camera: Camera) -> None:
    with running(tmp_path, camera, STREAMS) as program:
        wait_for(lambda: len(program.get("/events?limit=500")["events"]) >= STREAMS, LONG_S)
        assert [len(seat["streams"]) for seat in program.get("/workers")["workers"]] == [STREAMS // 2] * 2
        for worker in program.get("/workers")["workers"]:  # Ray's default is nice 15
            assert os.getpriority(os.PRIO_PROCESS, worker["pid"]) == os.getpriority(os.PRIO_PROCESS, 0)
        took, rss = [], []
        program.ask("/streams/c1", "PATCH", {"conf": 0.6, "weight": 3})
        zones = program.get("/streams/c1/zones")["zones"]
        zones["door"] = {"polygon": "0,0,.5,0,.5,1"}
        program.ask("/streams/c1/zones", "PUT", {"zones": zones})
        for kill in range(KILLS):
            before = program.going_on()
            took.append(program.kill_worker(kill % 2))
            rss.append(program.rss_bytes())
            time.sleep(1.5)  # for the rule's condition to hold
            if took[-1][1] < RESUME_S - 2:
                wait_for(lambda before=before: program.going_on() >= before, LONG_S)
        changed = next(one for one in program.get("/streams")["streams"] if one["name"] == "c1")
        assert (changed["conf"], changed["weight"]) == (0.6, 3)
        assert list(program.get("/streams/c1/zones")["zones"]) == ["desk", "door"]
        workers = program.get("/workers")["workers"]
        assert [seat["starts"] for seat in workers] == [1 + (KILLS + 1) // 2, 1 + KILLS // 2]
        print("\nseconds until the worker was ready, and until all streams ran:", took)
        print("MiB of the controller:", [size >> 20 for size in rss], "of workers:", workers)
        if LONG:
            assert max(back for _, back in took) <= BACK_S
            assert rss[-1] - rss[KILLS // 4] < 16 << 20
        replace_model(program, tmp_path)
        wait_for(lambda: len(program.going_on()) == STREAMS, LONG_S)
        stored = {one["id"] for one in program.get("/events?limit=500")["events"]}
        program.process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        assert program.process.wait(LONG_S) == 0
        print("seconds to end by SIGTERM:", time.monotonic() - begun)
    lines = read_records(tmp_path / "events.jsonl")
    begins = Counter(line["id"] for line in lines if line["type"] == "begin")
    ends = Counter(line["id"] for line in lines if line["type"] == "end")
    assert max(begins.values()) == max(ends.values()) == 1
    assert begins.keys() == ends.keys() >= stored
    print("events begun, in", STREAMS, "streams:", len(begins))
    if all(back_s < RESUME_S - 2 for _, back_s in took):  # reports of when events were seen come each second
        assert len(begins) == STREAMS
    gaps = largest_gaps(read_records(tmp_path / "all.jsonl"))
    print("longest gap of each stream in seconds:", gaps)
    assert gaps.keys() == {f"c{number}" for number in range(STREAMS)}


def test_a_worker_hangs_and_the_controller_is_killed(tmp_path: Path, camera: Camera) -> None:
    """Streams of a worker that hangs go on elsewhere, and no change is lost with the controller."""
    for kill in range(10 if LONG else 2):
        with running(tmp_path, camera, 2) as program:
            if not kill:
                print(f"\nseconds until all streams ran: {program.lose_worker(0, signal.SIGSTOP):.1f}")
            else:
                changed = program.get("/streams/c1")
                assert (changed["conf"], changed["weight"]) == (0.5 + kill / 100, kill)
            program.ask("/streams/c1", "PATCH", {"conf": 0.51 + kill / 100, "weight": kill + 1})
            program.process.kill()
            took = wait_for(lambda: not program.left(), LONG_S)
            print(f"\nseconds until nothing was left of a killed controller: {took:.2f}")


def test_a_signal_while_ray_starts_ends_everything(tmp_path: Path, camera: Camera) -> None:
    program = Program(tmp_path, camera, 2)
    try:
        wait_for(lambda: len(program.left()) > 2, LONG_S)  # of Ray
        program.process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        program.process.wait(LONG_S)
        wait_for(lambda: not program.left(), LONG_S)
        print(f"\nseconds to end: {time.monotonic() - begun:.1f}")
        assert program.process.returncode == 0
    finally:
        program.process.kill()
        program.process.wait()
