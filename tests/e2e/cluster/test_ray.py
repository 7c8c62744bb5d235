"""`saccade run --ray` on a real Ray cluster of this machine: workers and the supervisor die, and streams go on."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from saccade.pipeline.core.assets import DEMO_CLIP
from tests.support.cameras import free_port
from tests.support.cameras.faulty import FaultyCamera, coded_clip
from tests.support.command import LONG_S, start_saccade
from tests.support.ray_cluster import RayCluster

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = pytest.mark.e2e

NAMES = {"a", "b", "c", "d"}


@dataclass
class Running:
    cluster: RayCluster
    process: subprocess.Popen[str]
    url: str
    folder: Path
    config: dict[str, Any]

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=LONG_S) as answer:
            return json.load(answer)

    def streams(self) -> dict[str, dict[str, Any]]:
        try:
            return {one["name"]: one for one in self.ask("/streams")["streams"]}
        except OSError:
            return {}

    def until(self, wanted: Callable[[dict[str, dict[str, Any]]], bool], limit_s: float = LONG_S) -> float:
        begun = time.monotonic()
        while not wanted(streams := self.streams()):
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < begun + limit_s, streams
            time.sleep(0.1)
        return time.monotonic() - begun


def all_have_frames(streams: dict[str, dict[str, Any]]) -> bool:
    return streams.keys() >= NAMES and all(one["state"] == "live" and one["frames_out"] for one in streams.values())


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("ray")
    camera = FaultyCamera(coded_clip(DEMO_CLIP, (640, 360), rate=5, seconds=12)[25:], rate=5)
    place = f"127.0.0.1:{free_port()}"
    config = {
        "streams": [{"name": name, "source": f"rtsp://127.0.0.1:{camera.port}/live"} for name in sorted(NAMES)],
        "zones": "table=.4,.5,.75,.5,.75,1,.4,1",
        "rules": ["visitor=person in table"],
        "max_fps": 2,
        "store": str(folder / "kept"),
        "jsonl": str(folder / "all.jsonl"),
        "http": place,
        "workers": 2,
        "device": "cpu",
    }
    (folder / "cameras.yaml").write_text(json.dumps(config))
    with RayCluster(cpus=2) as cluster:
        flags = ["--config", "cameras.yaml", "--ray", cluster.address, "--quiet"]
        process = start_saccade("run", *flags, cwd=folder, env=cluster.environment)
        try:
            one = Running(cluster, process, f"http://{place}", folder, config)
            one.until(all_have_frames)
            yield one
        finally:
            process.kill()
            process.communicate()
            camera.close()
    assert cluster.processes() == {}


def test_streams_are_spread_over_the_actors(running: Running) -> None:
    assert sorted(one["worker"] for one in running.streams().values()) == ["1", "1", "2", "2"]
    assert len(running.cluster.processes("ray::WorkerActor")) == 2
    lines = [json.loads(line) for line in (running.folder / "all.jsonl").read_text().splitlines()]
    assert {line["stream"] for line in lines} == NAMES
    state = running.folder / "saccade-state" / "desired.db"
    assert state.stat().st_mode & 0o777 == 0o600


def test_streams_of_a_killed_actor_are_back_soon(running: Running) -> None:
    os.kill(next(iter(running.cluster.processes("ray::WorkerActor"))), signal.SIGKILL)
    running.until(lambda streams: any(one["state"] == "waiting" for one in streams.values()))
    running.until(all_have_frames)


def test_no_stream_notices_that_the_supervisor_is_killed(running: Running) -> None:
    running.ask("/streams", {**running.config["streams"][0], "name": "added", "detect": ["person"], "max_fps": 1})
    running.until(lambda streams: streams["added"]["frames_out"] > 0)
    time.sleep(1.0)  # the state is kept within 0.2 s
    before = running.streams()
    os.kill(next(iter(running.cluster.processes("ray::SupervisorActor"))), signal.SIGKILL)
    running.until(lambda streams: not streams)
    running.until(lambda streams: streams.keys() == before.keys() and all_have_frames(streams))
    after = running.streams()
    assert {name: one["worker"] for name, one in after.items()} == {name: one["worker"] for name, one in before.items()}
    more = {name: after[name]["frames_out"] - before[name]["frames_out"] for name in NAMES}
    assert min(more.values()) > 0, more  # none was opened again


def test_a_changed_file_restarts_the_changed_stream_alone(running: Running) -> None:
    before = running.streams()
    changed = {
        **running.config,
        "streams": [{**one, "conf": 0.4} if one["name"] == "b" else one for one in running.config["streams"]],
    }
    (running.folder / "new.yaml").write_text(json.dumps(changed))
    (running.folder / "new.yaml").replace(running.folder / "cameras.yaml")
    running.until(lambda streams: streams["b"]["frames_out"] < before["b"]["frames_out"] and all_have_frames(streams))
    after = running.streams()
    assert all(after[name]["frames_out"] >= before[name]["frames_out"] for name in ("a", "c", "d", "added"))


def test_events_are_stored_once(running: Running) -> None:
    events = running.ask("/events?limit=500")["events"]
    ids = [event["id"] for event in events]
    assert len(ids) == len(set(ids)) > 0
    for name in NAMES:
        mine = [event for event in events if event["stream"] == name]
        assert sum(event["end_time"] is None for event in mine) <= 1
        times = sorted((event["start_time"], event["end_time"] or float("inf")) for event in mine)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(times))


def test_a_signal_ends_every_actor(running: Running) -> None:
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(LONG_S) == 130
    deadline = time.monotonic() + LONG_S
    while running.cluster.processes("ray::") and time.monotonic() < deadline:
        left = running.cluster.processes("ray::")
        if not [line for line in left.values() if "Actor" in line]:
            break
        time.sleep(0.1)
    assert [line for line in running.cluster.processes("ray::").values() if "Actor" in line] == []
    assert running.cluster.processes("forkserver") == {}
