"""One HTTP face over two real workers: what is forwarded, what is merged, and what becomes of a stream that changes."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config.file import load
from saccade.pipeline.events.storage.store import EventStore
from saccade.pipeline.events.storage.store_reader import EventQuery
from saccade.pipeline.workers.front.front import Front, opened_front
from tests.support.cameras import wait_for
from tests.support.cameras.faulty import FaultyCamera, coded_clip
from tests.support.sinks.rule_events import BEGIN
from tests.support.worker_here import WorkerHere

LONG_S = 90.0  # far beyond what any of these needs; only so that a hang fails
RATE = 5
TOKEN = "sesame"


@dataclass
class Running:
    front: Front
    url: str
    folder: Path

    def ask(self, path: str, method: str = "GET", body: Any = None, token: str = TOKEN) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=LONG_S) as answer:
                text, status = answer.read(), answer.status
        except urllib.error.HTTPError as error:
            text, status = error.read(), error.code
        try:
            return status, json.loads(text) if text else None
        except ValueError:
            return status, text

    def stream(self, name: str) -> dict[str, Any]:
        status, found = self.ask(f"/streams/{name}")
        assert status == 200, found
        return dict(found)

    def until_frames(self, name: str, more: int = 1) -> float:
        return wait_for(lambda: self.stream(name)["frames_out"] >= more, LONG_S)


@pytest.fixture(scope="module")
def camera() -> Iterator[str]:
    frames = coded_clip(DEMO_CLIP, (640, 360), rate=RATE, seconds=12)[5 * RATE :]
    one = FaultyCamera(frames, rate=RATE)
    yield f"rtsp://127.0.0.1:{one.port}/live"
    one.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, camera: str) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("workers")
    values = {
        "streams": [{"source": camera, "name": "room"}, {"source": camera, "name": "hall"}],
        "zones": "table=.4,.5,.75,.5,.75,1,.4,1",
        "rules": ["visitor=person in table"],
        "clip_after": 1,
        "max_fps": RATE,
        "store": str(folder / "kept"),
        "jsonl": str(folder / "all.jsonl"),
        "sinks": [f"{folder}/{{stream}}.jsonl"],
        "http": "127.0.0.1:0",
        "http_token": TOKEN,
        "workers": 2,
        "device": "cpu",
    }
    with opened_front(load(None, values), WorkerHere) as front:
        front.start()
        wait_for(front.check, LONG_S)
        assert front.url is not None
        yield Running(front, front.url, folder)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("saccade ")] == []


def test_streams_are_spread_and_listed_as_one(running: Running) -> None:
    streams = running.ask("/streams")[1]["streams"]
    assert {one["name"] for one in streams} == {"room", "hall"}
    assert {one["worker"] for one in streams} == {"1", "2"}
    assert {seat["name"]: len(seat["streams"]) for seat in running.ask("/workers")[1]["workers"]} == {"1": 1, "2": 1}
    for name in ("room", "hall"):
        running.until_frames(name)
    assert running.ask("/healthz")[0] == running.ask("/readyz")[0] == 200


def test_records_of_all_workers_come_to_one_file(running: Running) -> None:
    def streams() -> set[str]:
        return {json.loads(line)["stream"] for line in (running.folder / "all.jsonl").read_text().splitlines()}

    wait_for(lambda: streams() == {"room", "hall"}, LONG_S)
    record = json.loads((running.folder / "all.jsonl").read_text().splitlines()[0])
    own = running.folder / f"{record['stream']}.jsonl"
    assert (record["width"], record["height"]) == (640, 360)
    assert record["frame"] in [json.loads(line)["frame"] for line in own.read_text().splitlines()]


def test_the_metrics_are_those_of_one_process_and_of_each_worker(running: Running) -> None:
    text = running.ask("/metrics")[1].decode()
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["saccade_stream_up", ("stream", "room")] == 1
    steps = "engine_steps_prefill_total"
    each = [values[f"saccade_worker_{steps}", ("worker", number)] for number in ("1", "2")]
    assert values[(f"saccade_{steps}",)] == sum(each) > 0
    assert min(each) > 0
    assert not [key for key in values if "RelaySink" in str(key)]
    assert values["saccade_sink_up", ("sink", "0 BroadcastSink"), ("stream", "")] == 1  # of which each worker has one
    assert len(values) == len([line for line in text.splitlines() if not line.startswith("#")])  # none twice


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/streams/none", None, 404),
        ("GET", "/streams/none/frame.jpg", None, 404),
        ("PATCH", "/streams/room", {"detect": []}, 422),
        ("PATCH", "/streams/room", {"conf": 7}, 422),
        ("PUT", "/streams/room/zones", [], 422),
        ("POST", "/streams", {"source": "rtsp://127.0.0.1:9/x"}, 422),
        ("POST", "/streams", {"source": "rtsp://127.0.0.1:9/x", "name": "room", "detect": "person"}, 409),
        ("POST", "/streams", {"source": "not-there.mp4", "detect": "person"}, 422),
        ("POST", "/whep/none", {}, 404),
        ("POST", "/whep/room", {}, 415),
        ("DELETE", "/whep/room/nonsense", None, 404),
        ("GET", "/events?limit=0", None, 422),
        ("GET", "/names?of=bike", None, 200),
        ("GET", "/model", None, 200),
        ("GET", "/v1/models", None, 200),
        ("GET", "/", None, 200),
    ],
)
def test_requests_are_answered_as_by_one_process(
    running: Running, method: str, path: str, body: Any, status: int
) -> None:
    answered, found = running.ask(path, method, body)
    assert (answered, found if answered >= 400 else None) == (status, found if status >= 400 else None)
    if status >= 400:
        assert list(found) == ["error"]


def test_headers_of_a_worker_s_answer_come_back(running: Running) -> None:
    token = {"Authorization": f"Bearer {TOKEN}"}
    url = f"{running.url}/v1/models"
    with urllib.request.urlopen(urllib.request.Request(url, None, token), timeout=LONG_S) as answer:
        size = len(answer.read())
    head = urllib.request.Request(url, None, token, method="HEAD")
    with urllib.request.urlopen(head, timeout=LONG_S) as answer:
        assert (answer.headers["Content-Length"], answer.read()) == (str(size), b"")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(url, None, token, method="DELETE"), timeout=LONG_S)
    with refused.value:
        assert (refused.value.code, refused.value.headers["Allow"]) == (405, "GET,HEAD")


def test_nobody_without_the_token_is_forwarded(running: Running) -> None:
    for path in ("/streams", "/streams/room", "/workers", "/metrics", "/events", "/model", "/streams/room/frame.jpg"):
        assert running.ask(path, token="other")[0] == 401
    url = running.front.supervisor.any_url()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{url}/streams", timeout=LONG_S)
    assert refused.value.code == 401


def test_frames_and_events_of_any_stream_can_be_had(running: Running) -> None:
    for name in ("room", "hall"):
        running.until_frames(name)
        assert running.ask(f"/streams/{name}/frame.jpg?width=320")[1][:2] == b"\xff\xd8"
    wait_for(lambda: {one["stream"] for one in running.ask("/events")[1]["events"]} >= {"room", "hall"}, LONG_S)
    event = running.ask("/events?limit=1")[1]["events"][0]
    wait_for(lambda: running.ask(f"/events/{event['id']}/snapshot.jpg")[0] == 200, LONG_S)


def test_a_stream_is_added_restarted_and_removed(running: Running, camera: str) -> None:
    status, added = running.ask("/streams", "POST", {"source": camera, "name": "third", "detect": "person"})
    assert (status, added["name"], added["detect"]) == (201, "third", ["person"])
    running.until_frames("third")
    assert running.ask("/streams/third/restart", "POST", {})[0] == 200
    assert running.ask("/streams/third", "DELETE")[0] == 204
    assert running.ask("/streams/third")[0] == 404


def test_events_outlive_the_process_in_front(tmp_path: Path, running: Running) -> None:
    kept = tmp_path / "kept"
    with closing(EventStore(kept)) as store:
        for name in ("room", "none"):
            store.write({**BEGIN, "id": f"e-{name}", "stream": name})
    values = {"streams": [{"source": "rtsp://127.0.0.1:9/x", "name": "room"}], "detect": ["person"], "device": "cpu"}
    with opened_front(load(None, {**values, "store": str(kept), "workers": 1}), WorkerHere) as front:
        front.start()
        assert [one["id"] for one in front.events.of("room")] == ["e-room"]
        assert front.events.of("none") == []
        front._load([{**BEGIN, "id": f"far-{name}", "rule": "far", "stream": name} for name in ("room", "none")], "far")
        assert [one["id"] for one in front.events.of("room")] == ["e-room", "far-room"]
        assert front.events.of("none") == []
    with closing(EventStore(kept)) as store:
        records = store.search(EventQuery())
    assert {(one["id"], one["type"], one["end_time"]) for one in records if one["rule"] != "far"} == {
        ("e-room", "end", BEGIN["frame_time"]),
        ("e-none", "end", BEGIN["frame_time"]),
    }
