"""A worker and its outbox, without Ray: what it tells the controller, which is this test."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saccade.engine.errors import EngineError
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import ListedStream
from saccade.pipeline.control.plan import Open
from saccade.pipeline.control.worker_calls import WorkerSettings
from saccade.pipeline.errors import ConfigError, StreamError
from saccade.pipeline.runtime.targets import Target
from saccade.pipeline.worker import MAX_MESSAGES, Outbox, Worker, WorkerActor, device_of, keep_outputs, room_for_another

LONG_S = 90.0
SETTINGS = WorkerSettings({"device": "cpu", "http": "127.0.0.1:0", "sinks": []}, threads=1)
ROOM = ListedStream(name="room", source=str(DEMO_CLIP), detect=["person"], loop=True)


def take(outbox: Outbox, kind: str) -> Any:
    """The next message of a kind."""
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        for found, value in outbox.take(1.0).messages:
            if found == kind:
                return value
    raise AssertionError(f"no {kind}")


@pytest.fixture(scope="module")
def worker() -> Iterator[tuple[Worker, Outbox]]:
    outbox = Outbox()
    one = Worker(SETTINGS, None, outbox)
    yield one, outbox
    one.close()


def test_what_was_prepared_runs_and_ends(worker: tuple[Worker, Outbox]) -> None:
    one, outbox = worker
    one.prepare(Open("room", ROOM), checked=True)
    assert one.local.names == []
    status = one.follow("room", ROOM)
    assert status is not None
    assert (status.name, status.config) == ("room", ROOM)
    deadline = time.monotonic() + LONG_S
    while not one.report().statuses[0].report.frames:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert one.report().rss_bytes > 1 << 20
    one.follow("room", None)
    assert take(outbox, "closed") == "room"
    one.prepare(Open("room", ROOM), checked=True)
    one.release("room")
    assert one.local.names == []


def test_a_file_that_ends_is_told_with_what_it_counted(worker: tuple[Worker, Outbox]) -> None:
    one, outbox = worker
    clip = ROOM.model_copy(update={"name": "clip", "loop": False, "end": 0.5})
    one.follow("clip", clip)
    ended = take(outbox, "ended")
    assert (ended.name, ended.error, ended.stopped, ended.config) == ("clip", None, False, clip)
    assert ended.status.report.frames == 5


def test_a_viewer_changes_a_stream_by_the_controller(worker: tuple[Worker, Outbox]) -> None:
    one, outbox = worker
    found: list[Any] = []

    def wish() -> None:
        try:
            found.append(one.wish("room", {"detect": ["cat"]}))
        except ConfigError as error:
            found.append(str(error))

    for answer in (ROOM, ConfigError("not that")):
        asking = threading.Thread(target=wish)
        asking.start()
        asked = take(outbox, "wish")
        assert (asked.stream, asked.values) == ("room", {"detect": ["cat"]})
        one.answer(asked.number, answer)
        asking.join(LONG_S)
    assert found == [ROOM, "not that"]


def status_of(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=LONG_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_its_server_answers_the_controller_alone(worker: tuple[Worker, Outbox]) -> None:
    one, _ = worker
    client = json.dumps({"name": "me", "role": "viewer"})
    for secret, status in (("wrong", 401), (one.secret, 200)):
        headers = {"Authorization": f"Bearer {secret}", "X-Saccade-Client": client}
        request = urllib.request.Request(f"{one.server.url}/names?of=bike", headers=headers)
        assert status_of(request) == status


def test_what_cannot_begin_says_why() -> None:
    answer = WorkerActor().start(WorkerSettings({**SETTINGS.values, "model": "/none"}), [])
    assert isinstance(answer, EngineError)


def test_an_actor_without_a_worker_refuses() -> None:
    assert isinstance(WorkerActor().call("follow", "room", ROOM), StreamError)


def test_only_the_newest_report_waits() -> None:
    outbox = Outbox()
    for number in range(3):
        outbox.put("report", number)
    outbox.put("event", {})
    outbox.put("report", 3)
    assert outbox.take(0).messages == [("report", 2), ("event", {}), ("report", 3)]
    assert outbox.take(0).messages == []


def test_the_oldest_message_is_lost_where_too_many_wait() -> None:
    outbox = Outbox()
    for number in range(MAX_MESSAGES + 5):
        outbox.put("event", number)
    assert outbox.take(0).messages[0] == ("event", 5)


def test_files_of_the_last_worker_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "room.jsonl"
    for number in range(2):
        path.write_text(str(number))
        keep_outputs("room", ROOM, [Target(str(tmp_path / "{stream}.jsonl"))])
    assert [(tmp_path / name).read_text() for name in ("room-1.jsonl", "room-2.jsonl")] == ["0", "1"]
    assert not path.exists()


def test_another_engine_is_begun_where_there_is_room(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert room_for_another(tmp_path, meminfo) is None  # nothing is known
    meminfo.write_text("MemTotal:  80000000 kB\nMemAvailable:  40000000 kB\n")
    assert room_for_another(tmp_path, meminfo) is None
    for name, text in (("memory.max", "5000000"), ("memory.current", "3000000"), ("memory.stat", "inactive_file 1\n")):
        (tmp_path / name).write_text(text)
    assert (room_for_another(tmp_path, meminfo) or "").startswith("1 MiB of memory are free, but one more engine needs")
    (tmp_path / "memory.max").write_text("max")
    assert room_for_another(tmp_path, meminfo) is None


@pytest.mark.parametrize(
    ("device", "index", "gpus", "taken"),
    [("auto", 0, 0, "auto"), ("auto", 3, 2, "cuda:1"), ("cuda", 2, 2, "cuda:0"), ("cuda:1", 2, 4, "cuda:1"),
     ("cpu", 1, 2, "cpu")],
)  # fmt: skip
def test_workers_take_one_gpu_after_the_other(device: str, index: int, gpus: int, taken: str) -> None:
    assert device_of(device, index, gpus) == taken
