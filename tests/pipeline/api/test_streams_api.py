"""Restarting streams over HTTP, which must never lose one, and what a client may not have opened or ended."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from saccade.pipeline.api.http_server import serve
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import Changes, RunConfig, StreamConfig
from saccade.pipeline.config.file import load, load_text
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.control.local import Local
from saccade.pipeline.control.plan import differences
from saccade.pipeline.control.state import StateFile
from saccade.pipeline.errors import NotKeptError
from saccade.pipeline.events.settings import RuleSettings
from saccade.pipeline.runtime.streams import Streams
from tests.pipeline.api.test_http_server import ask, error_of, wait_for
from tests.support.cameras import free_port
from tests.support.command import start_saccade
from tests.support.control import controller_of

NOWHERE = "rtsp://127.0.0.1:1/door"
DOOR = {"name": "door", "source": NOWHERE, "detect": ["person"]}


class Elsewhere:
    """The address of a server in another process."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"


def listed(server: Any) -> list[tuple[str, str]]:
    return [(one["name"], one["state"]) for one in ask(server, "GET", "/streams?token=sesame").json["streams"]]


def test_a_stream_that_cannot_be_restarted_is_not_lost(streams: Streams, tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    shutil.copy(DEMO_CLIP, clip)
    controller = controller_of(streams)
    server = serve(controller, port=0)
    controller.add(StreamConfig(name="clip", source=str(clip), detect=["person"], loop=True))
    try:
        clip.rename(tmp_path / "away.mp4")
        for _ in range(2):
            answer = ask(server, "POST", "/streams/clip/restart")
            assert (answer.status, error_of(answer)) == (422, f"no such file: {clip}")
            health = ask(server, "GET", "/healthz")
            assert health.status == 503
            assert health.json["unhealthy"] == {"clip": f"failed: no such file: {clip}"}
        (tmp_path / "away.mp4").rename(clip)
        assert ask(server, "POST", "/streams/clip/restart").status == 200
        assert streams.names == ["clip"]
    finally:
        server.close()


def test_configured_streams_restart_whatever_clients_may_open(streams: Streams) -> None:
    controller = controller_of(streams, open_by_default=False, base=load(None, DOOR))  # where clients may open nothing
    controller.start()
    server = serve(controller, "0.0.0.0", 0, "sesame")
    try:
        for _ in range(2):
            assert ask(server, "POST", "/streams/door/restart?token=sesame").status == 200
        assert [name for name, _ in listed(server)] == ["door"]
        assert ask(server, "POST", "/streams?token=sesame", {**DOOR, "name": "other"}).status == 403
    finally:
        server.close()


def test_what_a_client_opened_restarts_by_the_rules_for_it(streams: Streams, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    link = tmp_path / "in" / "clip.mp4"
    shutil.copy(DEMO_CLIP, link)
    server = serve(controller_of(streams, [str(tmp_path / "in" / "*")]), port=0)
    try:
        assert ask(server, "POST", "/streams", {"name": "a", "source": str(link), "detect": "person"}).status == 201
        link.unlink()
        link.symlink_to(DEMO_CLIP)  # which is outside
        assert ask(server, "POST", "/streams/a/restart").status in (403, 404)  # 404: it has ended already
        assert ("a", "running") not in listed(server)
    finally:
        server.close()


def test_a_run_of_one_stream_outlives_its_restarts(tmp_path: Path) -> None:
    port = free_port()
    asked = ["run", NOWHERE, "--detect", "person", "--name", "door", "--http", port, "-q"]
    with start_saccade(*asked, stdout=None, stderr=None, cwd=tmp_path) as process:
        server: Any = Elsewhere(port)

        def serves() -> bool:
            try:
                return [name for name, _ in listed(server)] == ["door"]
            except OSError:
                return False

        try:
            wait_for(serves)
            for _ in range(3):
                assert ask(server, "POST", "/streams/door/restart").status == 200
            assert serves()
            assert process.poll() is None
        finally:
            process.terminate()
            process.wait(60)


def test_a_client_names_no_file_to_be_written(streams: Streams, tmp_path: Path) -> None:
    server = serve(controller_of(streams), port=0)
    try:
        answer = ask(server, "POST", "/streams", {**DOOR, "heatmap": str(tmp_path / "heat.png")})
        assert answer.status == 422
        assert error_of(answer).startswith("heatmap: not available over HTTP; use GET")
        assert not streams.names
    finally:
        server.close()


def test_too_many_streams_ended_at_once_is_no_hang(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = controller_of(streams)
    for number in range(9):
        controller.add(StreamConfig.model_validate({**DOOR, "name": f"door{number}"}))
    release, remove = threading.Event(), streams.remove

    def slowly(name: str) -> None:
        release.wait()
        remove(name)

    monkeypatch.setattr(streams, "remove", slowly)
    server = serve(controller, port=0)
    try:
        with ThreadPoolExecutor(9) as clients:
            ends = [clients.submit(ask, server, "DELETE", f"/streams/door{number}") for number in range(9)]
            wait_for(lambda: any(end.done() for end in ends))
            release.set()
            answers = sorted((end.result() for end in ends), key=lambda answer: answer.status)
        assert [answer.status for answer in answers] == [204] * 8 + [503]
        assert error_of(answers[-1]) == "too many streams are being stopped; try again"
    finally:
        release.set()
        server.close()


def test_a_change_that_cannot_be_stored_is_no_mistake_of_the_client(streams: Streams, tmp_path: Path) -> None:
    class FullDisk(StateFile):
        def save(self, base: RunConfig, desired: RunConfig) -> None:
            raise NotKeptError("the disk is full")

    controller = Controller(Local(streams), load(None, {**DOOR, "http": "8080"}), state=FullDisk(tmp_path / "a.state"))
    controller.start()
    server = serve(controller, port=0)
    try:
        for method, path, body in (
            ("PATCH", "/streams/door", {"detect": ["cat"]}),
            ("PUT", "/streams/door/zones", {"zones": {"a": "0,0,1,0,1,1"}}),
            ("DELETE", "/streams/door/rules", None),
            ("POST", "/streams", {**DOOR, "name": "other"}),
            ("DELETE", "/streams/door", None),
        ):
            answer = ask(server, method, path, body)
            expected = (204, "") if path.endswith("rules") else (503, "the disk is full")  # there were no rules
            assert (answer.status, error_of(answer) if answer.status != 204 else "") == expected
        shown = ask(server, "GET", "/streams/door").json
        assert (shown["detect"], shown["config"]["detect"], shown["config"]["zones"]) == (["person"], ["person"], {})
        assert [name for name, _ in listed(server)] == ["door"]
    finally:
        server.close()


def test_a_stream_shows_what_it_runs_by(streams: Streams) -> None:
    door = {
        **DOOR,
        "source": "rtsp://me:secret@127.0.0.1:1/door",
        "sinks": ["mqtt://me:secret@127.0.0.1:1/x"],
        "zones": {"mat": ".1,.1,.9,.1,.9,.9"},
        "rules": [{"name": "r", "when": "people in mat for 2s", "cooldown": "1m"}],
    }
    controller = controller_of(streams, base=load(None, {"conf": 0.3, "streams": [door]}))
    server = serve(controller, port=0)
    try:
        controller.start()
        shown = ask(server, "GET", "/streams/door")
        assert shown.json["detect"] == ["person"]
        assert "secret" not in shown.text
        text = ask(server, "GET", "/streams/door", Accept="application/yaml")
        assert (text.status, text.headers["Content-Type"]) == (200, "application/yaml; charset=utf-8")
        assert yaml.safe_load(text.text) == shown.json["config"]
        assert "secret" not in text.text
        (stream,) = load_text(text.text).named().values()
        assert differences(stream, controller.stream("door")) == {"source", "sinks"}
        assert (stream.conf, stream.zones) == (0.3, controller.stream("door").zones)
    finally:
        server.close()


def test_optional_fields_of_a_stream_may_be_null(streams: Streams) -> None:
    server = serve(controller_of(streams), port=0)
    optional = [key for key, field in StreamConfig.model_fields.items() if not field.is_required()]
    try:
        every = dict.fromkeys(optional) | {"source": str(DEMO_CLIP), "detect": ["person"], "name": "door"}
        assert ask(server, "POST", "/streams", every).status == 201
        nothing = dict.fromkeys(Changes.model_fields)
        was = ask(server, "PATCH", "/streams/door", {"max_fps": 5, "weight": 2}).json
        assert (was["max_fps"], was["weight"]) == (5, 2)
        now = ask(server, "PATCH", "/streams/door", nothing)
        # null is a value where a setting can be none, else it is as if left out
        assert (now.status, now.json["max_fps"], now.json["weight"], now.json["detect"]) == (200, None, 2, ["person"])
        zones = {"zones": {"all": {"polygon": [[0, 0], [1, 0], [1, 1]], "labels": None}}, "lines": None}
        assert ask(server, "PUT", "/streams/door/zones", zones).status == 200
        rule = dict.fromkeys(RuleSettings.model_fields) | {"name": "seen", "when": "person in all"}
        assert RuleSettings.model_validate(rule) == RuleSettings(name="seen", when="person in all")
        assert ask(server, "POST", "/streams", {"source": None, "detect": "person"}).status == 422
    finally:
        server.close()
