"""Outputs that fail while everything else goes on: a reader that leaves, a disk that fills, a folder that goes."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from saccade.engine import Detect, Engine
from saccade.pipeline import Output, Streams
from saccade.pipeline.api.http_server import serve
from saccade.pipeline.api.prometheus import Metrics
from saccade.pipeline.control.local import Local
from saccade.sinks import JsonlSink, open_sink
from saccade.sinks import backoff as backoff_module
from saccade.sources import FileSource, open_source
from saccade.sources.replay import ReplaySource
from tests.support import REPO
from tests.support.command import start_saccade
from tests.support.control import controller_of
from tests.support.sinks.disk import full_disk

pytestmark = pytest.mark.e2e

CLIP = REPO / "pipeline" / "assets" / "demo.mp4"
LONG_S = 120


@pytest.mark.parametrize("alone", [True, False])
def test_head_ends_its_output_and_no_other(tmp_path: Path, alone: bool) -> None:
    """`saccade run … --jsonl - | head -1`, in a real pipe."""
    more = [] if alone else ["--sink", "all.jsonl", "--end", "4"]
    with start_saccade("run", CLIP, "--detect", "person", "--jsonl", "-", *more, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        head = subprocess.run(["head", "-1"], stdin=process.stdout, capture_output=True, timeout=LONG_S, check=True)
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(LONG_S) == 0, errors
    assert json.loads(head.stdout)["frame"] == 0
    assert "Traceback" not in errors
    if not alone:
        assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 40


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Streams]:
    """A stream that goes on and on, into records that can always be written."""
    monkeypatch.setattr(backoff_module, "LAST_S", 1.0)
    outputs = [Output(JsonlSink(tmp_path / "all.jsonl"), name="all.jsonl")]
    with Engine.load("nano", device="cpu") as engine, Streams(engine, outputs) as running:
        yield running


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def state_of(streams: Streams, number: int) -> str:
    own = [status for stream, status in streams.sink_statuses() if stream == "door"]
    return own[number].state


def metric(streams: Streams, name: str, sink: str) -> float:
    text = Metrics(Local(streams)).as_text().decode()
    (line,) = (line for line in text.splitlines() if line.startswith(name + "{") and f'sink="{sink}"' in line)
    return float(line.rpartition(" ")[2])


def test_a_disk_that_fills_pauses_its_sinks_until_it_is_freed(
    streams: Streams, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    everything = tmp_path / "all.jsonl"
    with full_disk(tmp_path / "disk", megabytes=4) as disk:
        targets = [f"{disk.folder}/%Y-%f.mp4", f"{disk.folder}/out.jsonl"]
        own = [Output(open_sink(target), name=target.rpartition("/")[2]) for target in targets]
        run = streams.add("door", ReplaySource(open_source(CLIP)), [Detect("person")], outputs=own)
        wait_for(lambda: lines(disk.folder / "out.jsonl") > 25)
        disk.fill()
        wait_for(lambda: state_of(streams, 0) == state_of(streams, 1) == "paused")
        assert metric(streams, "saccade_sink_up", "1 out.jsonl") == 0
        before = lines(everything)
        wait_for(lambda: lines(everything) > before + 20)  # nothing else is stopped
        assert streams.snapshot()[0].ok
        disk.free()
        wait_for(lambda: state_of(streams, 0) == state_of(streams, 1) == "ok")
        assert metric(streams, "saccade_sink_up", "1 out.jsonl") == 1
        assert metric(streams, "saccade_sink_lost_total", "1 out.jsonl") > 5
        before = lines(disk.folder / "out.jsonl")
        wait_for(lambda: lines(disk.folder / "out.jsonl") > before + 15)
        streams.remove("door")
        assert run.error is None
        records = [json.loads(line) for line in (disk.folder / "out.jsonl").read_bytes().splitlines()]
        lost = [status.lost for status in run.sink_statuses()]
        numbers = [(record["frame"], record["dropped_since_last"]) for record in records]
        assert all(b - a == missing + 1 for (a, _), (b, missing) in pairwise(numbers))  # every loss is reported
        videos = sorted(disk.folder.glob("*.mp4"))
        assert len(videos) >= 2
        written = sum(len(list(FileSource(path))) for path in videos)
        overtaken = sum(count for cause, count in run.report().drops.items() if cause.startswith("sink"))
        assert abs(written + lost[0] - len(records) - lost[1]) <= overtaken  # and counted
        assert not list(disk.folder.glob("*.part"))
    assert caplog.text.count("dropping results until a retry succeeds") == 2  # once a sink
    assert caplog.text.count("works again") == 2


def test_a_deleted_folder_pauses_its_sink_until_it_is_back(streams: Streams, tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    outputs = [Output(open_sink(f"{folder}/%f.mp4")), Output(open_sink(f"{folder}/out.jsonl"))]
    streams.add("door", ReplaySource(open_source(CLIP)), [Detect("person")], outputs=outputs)
    wait_for(lambda: lines(folder / "out.jsonl") > 5)
    shutil.rmtree(folder)
    wait_for(lambda: state_of(streams, 0) == state_of(streams, 1) == "paused")
    server = serve(controller_of(streams), "127.0.0.1", 0, None)
    try:
        with urllib.request.urlopen(f"{server.url}/healthz") as answer:  # 200: a restart would not help
            assert "records does not exist" in json.load(answer)["sinks"]["JsonlSink"]
    finally:
        server.close()
    folder.mkdir()
    wait_for(lambda: state_of(streams, 0) == state_of(streams, 1) == "ok")
    wait_for(lambda: lines(folder / "out.jsonl") > 25)
    streams.remove("door")
    assert len(list(folder.glob("*.mp4"))) == 1


def test_the_metrics_tell_how_every_sink_is_doing(tmp_path: Path) -> None:
    targets = {"http://127.0.0.1:9/hook#send=all": "http", "mqtt://127.0.0.1:9/eyes": "mqtt", "ws://127.0.0.1:0": "ws"}
    outputs = [Output(open_sink(target), name=name) for target, name in targets.items()]
    with Engine.load("nano", device="cpu") as engine, Streams(engine, outputs) as streams:
        run = streams.add("door", ReplaySource(open_source(CLIP)), [Detect("person")])
        wait_for(lambda: run.report().frames > 5)
        assert metric(streams, "saccade_sink_backlog", "0 http") >= 3
        assert metric(streams, "saccade_sink_backlog_age_seconds", "0 http") > 0
        assert metric(streams, "saccade_sink_dropped_total", "0 http") == 0
        assert metric(streams, "saccade_sink_connected", "1 mqtt") == 0
        assert metric(streams, "saccade_sink_backlog", "1 mqtt") >= 2
        assert metric(streams, "saccade_sink_clients", "2 ws") == 0
        assert all(
            metric(streams, "saccade_sink_up", f"{number} {name}") == 1 for number, name in enumerate(targets.values())
        )
