"""`saccade run --ray` on a real Ray cluster of this machine: workers and the command die, and streams go on."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import saccade.engine.models
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.events.machine import RESUME_S
from saccade.pipeline.events.storage.store_reader import EventQuery, EventReader
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
    away_s: list[float] = field(default_factory=list)

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

    def empty(self) -> dict[str, dict[str, Any]]:
        """The events of a rule that always holds, those that go on."""
        events = self.ask("/events?limit=500&rule=empty")["events"]
        return {one["id"]: one for one in events if one["end_time"] is None}

    def until(self, wanted: Callable[[dict[str, dict[str, Any]]], bool], limit_s: float = LONG_S) -> float:
        begun = time.monotonic()
        while not wanted(streams := self.streams()):
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < begun + limit_s, streams
            time.sleep(0.1)
        return time.monotonic() - begun


def whole_lines(path: Path) -> list[str]:
    return path.read_text().rpartition("\n")[0].splitlines()


def all_have_frames(streams: dict[str, dict[str, Any]]) -> bool:
    return streams.keys() >= NAMES and all(one["state"] == "live" and one["frames_out"] for one in streams.values())


def start(cluster: RayCluster, folder: Path) -> subprocess.Popen[str]:
    flags = ["--config", "cameras.yaml", "--ray", cluster.address, "--quiet"]
    return start_saccade("run", *flags, cwd=folder, env=cluster.environment)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("ray")
    camera = FaultyCamera(coded_clip(DEMO_CLIP, (640, 360), rate=5, seconds=12)[25:], rate=5)
    place = f"127.0.0.1:{free_port()}"
    config = {
        "streams": [{"name": name, "source": f"rtsp://127.0.0.1:{camera.port}/live"} for name in sorted(NAMES)],
        "zones": ["table=.4,.5,.75,.5,.75,1,.4,1", "corner=0,0,.02,0,.02,.02"],
        "rules": ["visitor=person in table", "empty=any absent from corner for 1s"],
        "clip_after": 1,
        "max_fps": 1,
        "store": str(folder / "kept"),
        "jsonl": str(folder / "all.jsonl"),
        "http": place,
        "workers": 2,
        "device": "cpu",
    }
    (folder / "cameras.yaml").write_text(json.dumps(config))
    with RayCluster(cpus=1, SACCADE_STORE=str(folder / "kept-by-the-other")) as cluster:
        cluster.add_node(1)  # on either of which the command may be
        one = Running(cluster, start(cluster, folder), f"http://{place}", folder, config)
        try:
            one.until(all_have_frames)
            yield one
        finally:
            one.process.kill()
            one.process.communicate()
            camera.close()
    assert cluster.processes() == {}


def test_streams_are_spread_over_the_actors(running: Running) -> None:
    assert sorted(one["worker"] for one in running.streams().values()) == ["1", "1", "2", "2"]
    assert len(running.cluster.processes("ray::WorkerActor")) == 2
    # What a worker has found comes to the shared output by the next call of its actor.
    running.until(lambda _: {json.loads(line)["stream"] for line in whole_lines(running.folder / "all.jsonl")} == NAMES)


def test_events_of_both_machines_are_listed_as_one(running: Running) -> None:
    def stored(folder: str) -> set[str]:
        with closing(EventReader(running.folder / folder)) as reader:
            return {one["id"] for one in reader.search(EventQuery(limit=500))}

    def with_clip(folder: str) -> list[str]:
        return [name for name in stored(folder) if (running.folder / folder / "media" / f"{name}.mp4").exists()]

    kept = ["kept", "kept-by-the-other"]
    running.until(lambda _: all(with_clip(folder) for folder in kept))
    ids, after = [], ""
    while True:
        page = running.ask(f"/events?limit=2{after}")
        assert "away" not in page
        ids += [one["id"] for one in page["events"]]
        if page["after"] is None:
            break
        after = f"&after={quote(page['after'])}"
    assert len(ids) == len(set(ids))
    assert not stored("kept") & stored("kept-by-the-other")
    assert set(ids) <= stored("kept") | stored("kept-by-the-other")
    for folder in kept:
        name = with_clip(folder)[0]
        assert name in ids
        request = urllib.request.Request(f"{running.url}/events/{name}/clip.mp4", headers={"Range": "bytes=4-7"})
        with urllib.request.urlopen(request, timeout=LONG_S) as answer:
            assert (answer.status, answer.read()) == (206, b"ftyp")


def test_events_of_both_machines_can_be_false_alarms(running: Running) -> None:
    def visitors(folder: str) -> list[str]:
        """Return the IDs of events that have ended, so that the appearance of their objects is stored."""
        with closing(EventReader(running.folder / folder)) as reader:
            events = reader.search(EventQuery(limit=500, rule="visitor"))
        return [str(one["id"]) for one in events if one["end_time"] is not None]

    def judge(name: str, false_alarm: bool) -> None:
        body = json.dumps({"false_alarm": false_alarm}).encode()
        url = f"{running.url}/events/{name}/verdict"
        with urllib.request.urlopen(
            urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=LONG_S
        ) as answer:
            assert answer.status == 204

    kept = ["kept", "kept-by-the-other"]
    running.until(lambda _: all(visitors(folder) for folder in kept))
    names = [visitors(folder)[0] for folder in kept]
    for name in names:
        judge(name, True)
    listed = running.ask("/events/verdicts")["verdicts"]
    assert [(one["event"], one["by_look"]) for one in listed] == [(name, True) for name in names]
    for name in names:
        assert running.ask(f"/events/{name}")["false_alarm"]
        judge(name, False)
    assert running.ask("/events/verdicts")["verdicts"] == []


def test_events_of_both_machines_are_searched_as_one(running: Running) -> None:
    def found() -> dict[str, Any]:
        return dict(running.ask("/events/search?q=person&limit=50"))

    def stored(folder: str) -> set[str]:
        return {path.stem for path in (running.folder / folder / "media").glob("*.jpg")}

    running.until(lambda _: any(one["match"] > 0.5 for one in found()["events"]))
    running.until(lambda _: {one["stream"] for one in found()["events"]} == NAMES)
    page = found()
    ids = {one["id"] for one in page["events"]}
    assert "away" not in page
    for folder in ("kept", "kept-by-the-other"):  # each asked about by the worker that is there
        assert ids & stored(folder)


def test_streams_of_a_killed_actor_are_back_soon(running: Running) -> None:
    running.until(lambda _: len(running.empty()) == len(NAMES))
    before = running.empty()
    worker = running.ask("/workers")["workers"][0]
    lost = set(worker["streams"])
    os.kill(worker["pid"], signal.SIGKILL)
    away_s = running.until(lambda streams: all(streams[name].get("worker") not in (None, "1") for name in lost))
    running.away_s.append(away_s + running.until(all_have_frames))
    print(f"\nseconds until frames came again: {running.away_s[0]:.1f}")
    mine = {name for name, one in before.items() if one["stream"] in lost}
    assert {before[name]["stream"] for name in mine} == lost != set()
    running.until(lambda _: {one["stream"] for one in running.empty().values()} == NAMES)
    if running.away_s[0] < RESUME_S - 2:  # their events go on, stored where they began
        running.until(lambda _: all(running.empty()[name]["type"] == "update" for name in mine))
    else:  # on a slow machine: they have ended, and others have begun
        running.until(lambda _: not running.empty().keys() & mine)
    assert running.empty().keys() >= before.keys() - mine  # those of the other worker never stopped
    assert len(running.empty()) == len(NAMES)


def test_no_stream_notices_that_the_command_is_killed(running: Running) -> None:
    running.ask("/streams", {**running.config["streams"][0], "name": "added", "detect": ["person"], "max_fps": 1})
    running.until(lambda _: all(one["state"] == "ready" for one in running.ask("/workers")["workers"]))
    # An event that begins less than a second before is not stored yet.
    running.until(lambda _: {one["stream"] for one in running.empty().values()} >= NAMES)
    running.process.kill()  # what was answered is stored
    running.process.communicate()
    assert (running.folder / "cameras.yaml.state").stat().st_mode & 0o777 == 0o600
    actors = set(running.cluster.processes("ray::WorkerActor"))
    running.process = start(running.cluster, running.folder)
    running.until(lambda streams: streams.keys() >= {*NAMES, "added"} and all_have_frames(streams))
    assert set(running.cluster.processes("ray::WorkerActor")) == actors
    running.until(lambda _: {json.loads(line)["stream"] for line in whole_lines(running.folder / "all.jsonl")} >= NAMES)
    running.until(lambda _: {one["stream"] for one in running.empty().values()} >= NAMES)


def test_streams_go_on_while_the_head_is_away(running: Running) -> None:
    if os.environ.get("SACCADE_LONG") != "1":
        pytest.skip("takes 20 s; set SACCADE_LONG=1")
    (head,) = running.cluster.processes("gcs_server")
    before = running.streams()
    os.kill(head, signal.SIGSTOP)
    try:
        time.sleep(20.0)
        during = running.streams()
    finally:
        os.kill(head, signal.SIGCONT)
    assert all(during[name]["frames_out"] > before[name]["frames_out"] + 10 for name in NAMES)
    running.until(all_have_frames)
    after = running.streams()
    assert all(after[name]["frames_out"] >= during[name]["frames_out"] for name in NAMES)


def test_a_changed_file_changes_the_changed_stream_alone(running: Running) -> None:
    before = running.streams()
    changed = {
        **running.config,
        "streams": [{**one, "conf": 0.4} if one["name"] == "b" else one for one in running.config["streams"]],
    }
    (running.folder / "new.yaml").write_text(json.dumps(changed))
    (running.folder / "new.yaml").replace(running.folder / "cameras.yaml")
    running.until(lambda streams: streams["b"]["conf"] == 0.4 and all_have_frames(streams))
    after = running.streams()
    assert all(after[name]["frames_out"] >= before[name]["frames_out"] for name in ("a", "c", "d", "added"))


def test_a_killed_store_of_a_machine_is_back(running: Running) -> None:
    before = {one["id"] for one in running.ask("/events?limit=500")["events"]}
    running.until(lambda _: bool(running.cluster.processes("ray::StoreActor")))
    pids = set(running.cluster.processes("ray::StoreActor"))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    running.until(lambda _: not pids & running.cluster.processes("ray::StoreActor").keys())
    running.until(lambda _: "away" not in running.ask("/events?limit=1"))
    assert {one["id"] for one in running.ask("/events?limit=500")["events"]} >= before


def test_a_changed_model_is_taken_while_streams_go_on(running: Running) -> None:
    model = running.folder / "model"
    shutil.copytree(Path(saccade.engine.models.__file__).parent / "nano", model)
    path = running.folder / "cameras.yaml"
    actors = set(running.cluster.processes("ray::WorkerActor"))
    records = running.folder / "all.jsonl"
    before = len(records.read_text().splitlines())
    (running.folder / "new.yaml").write_text(json.dumps(json.loads(path.read_text()) | {"model": str(model)}))
    (running.folder / "new.yaml").replace(path)
    begun = time.monotonic()
    while running.ask("/model")["model"] != "model":
        assert time.monotonic() < begun + LONG_S, running.ask("/workers")
        time.sleep(0.3)
    running.until(all_have_frames)
    assert set(running.cluster.processes("ray::WorkerActor")) == actors

    def lines_of(name: str) -> list[Any]:
        lines = [json.loads(line) for line in records.read_text().rpartition("\n")[0].splitlines()[before:]]
        return [line for line in lines if line["stream"] == name]

    while min(len(lines_of(name)) for name in NAMES) < 5:
        assert time.monotonic() < begun + LONG_S, running.ask("/workers")
        time.sleep(0.3)
    for name in NAMES:
        mine = lines_of(name)
        pairs = [(a, b) for a, b in itertools.pairwise(mine) if a["capture_clock"] == b["capture_clock"]]
        gaps = [b["captured_at"] - a["captured_at"] for a, b in pairs]
        assert min(gaps) > 0  # each frame once, in order
        print(f"\nlongest gap of {name} in seconds: {max(gaps):.2f}")


def test_events_are_stored_once(running: Running) -> None:
    events = running.ask("/events?limit=500")["events"]
    ids = [event["id"] for event in events]
    assert len(ids) == len(set(ids)) > 0
    if running.away_s[0] < RESUME_S - 2:
        begun = Counter(event["stream"] for event in events if event["rule"] == "empty")
        assert {begun[name] for name in NAMES} == {1}
    for name, rule in itertools.product(NAMES, ("visitor", "empty")):
        mine = [event for event in events if (event["stream"], event["rule"]) == (name, rule)]
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
