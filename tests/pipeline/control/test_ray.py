"""A controller over two actors of a local Ray: cameras of a real RTSP server, and what happens when an actor dies."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import saccade.engine.models
from saccade.engine.errors import EngineError
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import RunConfig, StreamConfig
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.control.state import StateFile
from saccade.pipeline.errors import ConfigError, StreamError
from saccade.pipeline.events.settings import RuleSettings
from saccade.pipeline.events.storage.store_reader import EventQuery
from saccade.pipeline.run import opened_run
from saccade.pipeline.settings import PlacedError
from saccade.sources import SourceError
from tests.support.cameras.faulty import FaultyCamera, coded_clip
from tests.support.webrtc import asked, own_loop
from tests.support.whep import Watcher

# Not by importing it: what it reads of the environment is set by the run.
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="the extra `ray` is not installed")

LONG_S = 120.0
PLACE = {"zones": {"desk": {"polygon": "0,0,.02,0,.02,.02"}}}
RULES = [{"name": "empty", "when": "any absent from desk for 1s"}]


@dataclass
class Running:
    controller: Controller
    camera: str
    folder: Path
    url: str

    @property
    def runner(self) -> Any:
        return self.controller.runner

    def until(self, wanted: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + LONG_S
        while not (found := wanted()):
            assert time.monotonic() < deadline, self.runner.statuses()
            time.sleep(0.1)
        return found

    def run_again(self) -> bool:
        statuses = self.runner.statuses()
        return all(one.state == "live" and one.report.frames for one in statuses if one.state != "failed")

    def going_on(self) -> dict[str, str]:
        found = self.runner.store.search(EventQuery(limit=100))
        return {one["stream"]: one["id"] for one in found if one["end_time"] is None}


@contextmanager
def small_camera() -> Iterator[str]:
    """The address of an RTSP camera that loops over 4 s of the demo clip."""
    one = FaultyCamera(coded_clip(DEMO_CLIP, (320, 180), rate=5, seconds=4), rate=5)
    yield f"rtsp://127.0.0.1:{one.port}/live"
    one.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("workers")
    with small_camera() as camera:
        config = RunConfig.model_validate(
            {
                "streams": [{"name": name, "source": camera} for name in ("a", "b")],
                **PLACE,
                "rules": RULES,
                "detect": ["person"],
                "max_fps": 2,
                "workers": 2,
                "device": "cpu",
                "http": "127.0.0.1:0",
                "store": str(folder / "kept"),
                "state": str(folder / "state"),
                "sinks": [str(folder / "all.jsonl")],
            }
        )
        with opened_run(config) as opened:
            opened.controller.start()
            assert opened.url is not None
            one = Running(opened.controller, camera, folder, opened.url)
            one.until(one.run_again)
            yield one


def test_streams_are_spread(running: Running) -> None:
    assert sorted(one.worker for one in running.runner.statuses()) == ["1", "2"]
    assert [one.state for one in running.runner.workers()] == ["ready", "ready"]
    assert (running.runner.model.name, running.runner.model.device) == ("nano", "cpu")
    running.until(lambda: (running.folder / "all.jsonl").read_text().count("\n") > 4)


def test_a_change_is_stored_before_it_returns(running: Running) -> None:
    assert running.controller.update("a", {"conf": 0.25}).conf == 0.25
    shutil.copy(running.folder / "state", running.folder / "copy")
    copy = StateFile(running.folder / "copy")
    loaded = copy.load(running.controller.config)
    copy.close()
    assert loaded is not None
    assert loaded[1].named()["a"].conf == 0.25
    status = running.runner.status("a")
    assert (status.config.conf, status.state) == (0.25, "live")


def test_what_cannot_be_opened_is_refused_and_forgotten(running: Running) -> None:
    before = running.controller.config
    with pytest.raises(SourceError, match=r"none\.mp4"):
        running.controller.add(StreamConfig(name="gone", source="/none.mp4", detect=["person"]))
    with pytest.raises(EngineError, match="unheard"):
        running.controller.update("a", {"detect": ["unheard"]})
    with pytest.raises(StreamError, match="already"):
        running.controller.add(StreamConfig(name="a", source=running.camera, detect=["person"]))
    with pytest.raises(StreamError, match="does not exist"):
        running.controller.remove("none")
    with pytest.raises(PlacedError, match="door"):
        running.controller.check_rules("a", {"rules": _rules("person in door")})
    assert running.controller.config == before
    assert sorted(running.runner.names) == ["a", "b"]


def _rules(when: str) -> list[RuleSettings]:
    values = {"source": "x", "zones": {"door": {"polygon": "0,0,1,0,1,1"}}, "rules": [{"name": "r", "when": when}]}
    return RunConfig.model_validate(values).rules


def test_a_stream_is_added_and_removed(running: Running) -> None:
    status = running.controller.add(StreamConfig(name="c", source=running.camera, detect=["person"], max_fps=1))
    assert (status.name, status.worker) == ("c", running.runner.status("c").worker)
    running.until(running.run_again)
    totals, minutes = running.runner.counts("c", 0.0)
    assert (totals.zones, minutes) == ({}, minutes)
    running.controller.remove("c")
    assert sorted(running.runner.names) == ["a", "b"]
    with pytest.raises(StreamError):
        running.runner.status("c")


def test_a_file_ends_by_itself(running: Running) -> None:
    source = str(DEMO_CLIP)
    running.controller.add(StreamConfig(name="clip", source=source, detect=["person"], end=0.5))
    running.until(lambda: "clip" not in running.controller.config.named())
    records = (running.folder / "all.jsonl").read_text().splitlines()
    assert sum(json.loads(record)["stream"] == "clip" for record in records) == 5


def test_events_and_streams_of_a_killed_actor_go_on(running: Running) -> None:
    running.until(lambda: set(running.going_on()) == {"a", "b"})
    before = running.going_on()
    worker = running.runner.status("a").worker
    (pid,) = [one.pid for one in running.runner.workers() if one.name == worker]
    begun = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    running.until(lambda: running.runner.status("a").worker not in (None, worker))
    running.until(running.run_again)
    took_s = time.monotonic() - begun
    print(f"\nseconds until frames came again: {took_s:.1f}")
    assert running.runner.status("a").config.conf == 0.25
    running.until(lambda: set(running.going_on()) == {"a", "b"})
    assert running.going_on()["b"] == before["b"]
    if took_s < 8:
        assert running.going_on()["a"] == before["a"]
    running.until(lambda: [one.state for one in running.runner.workers()] == ["ready", "ready"])
    (again,) = [one for one in running.runner.workers() if one.name == worker]
    assert (again.starts, len(again.restarted_in_s)) == (2, 1)


def test_a_change_is_stored_while_no_worker_is_ready(running: Running) -> None:
    running.until(lambda: all(one.state == "ready" for one in running.runner.workers()))
    for one in running.runner.workers():
        os.kill(one.pid, signal.SIGKILL)
    running.until(lambda: not running.runner.ready)
    status, text, _ = asked("PATCH", f"{running.url}/streams/a", json={"conf": 0.35})
    assert (status, json.loads(text)["conf"]) == (200, 0.35)
    new = {"name": "new", "source": running.camera, "detect": ["person"]}
    status, text, _ = asked("POST", f"{running.url}/streams", json=new)  # nobody can check its source
    assert (status, "no worker is ready" in text) == (503, True)
    running.until(running.run_again)
    assert running.runner.status("a").config.conf == 0.35


def test_a_search_ends_while_its_worker_is_killed(running: Running) -> None:
    running.until(lambda: running.runner.store.search(EventQuery(limit=100, media=True)))
    worker = running.runner.status("a").worker
    (pid,) = [one.pid for one in running.runner.workers() if one.name == worker]
    killed: list[int] = []

    def progress(done: int, of: int) -> None:
        if not killed:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    found = running.runner.search("person", EventQuery(limit=10), progress)
    assert found.away == []
    assert all(0 <= one.p_yes <= 1 for one in found.found)
    running.until(lambda: pid not in [one.pid for one in running.runner.workers()])
    running.until(running.run_again)
    with pytest.raises(ConfigError, match="the search text is empty"):
        running.runner.search(" ", EventQuery(), lambda done, of: None)


def test_a_search_that_nobody_waits_for_ends(running: Running) -> None:
    def gone(done: int, of: int) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        running.runner.search("person", EventQuery(limit=10), gone)


def test_workers_are_replaced_by_others_of_another_model(running: Running) -> None:
    running.until(lambda: all(one.state == "ready" for one in running.runner.workers()))
    running.until(running.run_again)
    config = running.controller.config
    before, pids = running.going_on(), [one.pid for one in running.runner.workers()]
    with pytest.raises(EngineError):
        running.controller.apply(config.model_copy(update={"model": str(running.folder / "none")}))
    assert (running.controller.config, running.run_again()) == (config, True)
    model = running.folder / "other"
    shutil.copytree(Path(saccade.engine.models.__file__).parent / "nano", model)
    running.controller.apply(config.model_copy(update={"model": str(model)}))
    assert running.runner.model.name == str(model)
    assert [one.pid for one in running.runner.workers()] == pids
    running.until(running.run_again)
    running.until(lambda: set(running.going_on()) == {"a", "b"})
    print("\nevents that went on:", running.going_on() == before)


def test_a_viewer_of_a_worker_s_video_changes_prompts_by_the_controller(running: Running) -> None:
    def shown() -> bytes:
        try:
            with urllib.request.urlopen(f"{running.url}/streams/b/frame.jpg", timeout=LONG_S) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError:  # the replaced worker has not opened the stream yet
            return b""

    assert running.until(shown)[:3] == b"\xff\xd8\xff"
    with own_loop() as loop:

        async def watch() -> Watcher:
            return Watcher(("VP8", "H264"))

        def do(work: Any) -> Any:
            return asyncio.run_coroutine_threadsafe(work, loop).result(LONG_S)

        viewer = do(watch())
        try:
            offer, headers = do(viewer.offer()), {"Content-Type": "application/sdp"}
            status, text, _ = asked("POST", f"{running.url}/whep/b", content=offer, headers=headers)
            assert status == 201, text
            do(viewer.take(text))
            running.until(lambda: viewer.records and viewer.sizes)
            assert viewer.records[0]["stream"] == "b"
            loop.call_soon_threadsafe(viewer.channel.send, json.dumps({"detect": ["dog"], "conf": 0.3}))
            running.until(lambda: any(record.get("prompts", {}).get("detect") == ["dog"] for record in viewer.records))
            assert running.controller.stream("b").detect == ["dog"]
            assert running.runner.status("b").config.conf == 0.3
            loop.call_soon_threadsafe(viewer.channel.send, json.dumps({"detect": ["unheard"]}))
            running.until(lambda: any("unheard" in record.get("error", "") for record in viewer.records))
            assert running.controller.stream("b").detect == ["dog"]
        finally:
            do(viewer.close())
