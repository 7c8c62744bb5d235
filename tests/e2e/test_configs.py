"""The configurations that ship, each run as it is, but for addresses and ports. webrtc-demo: test_webrtc_run.py."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import pytest
from websockets.sync.client import connect

from tests.support import REPO
from tests.support.cameras import LONG_S, Camera, free_port, need_servers, wait_for
from tests.support.command import Command, start_saccade

CONFIGS = REPO / "configs"

pytestmark = pytest.mark.e2e


@contextmanager
def running(folder: Path, name: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """`saccade run --config …` in a folder; ended in the end as by Ctrl-C, and then it must be well."""
    process = start_saccade("run", "--config", name, *arguments, cwd=folder)
    try:
        yield process
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=LONG_S)
        assert process.returncode == 130, stderr
        assert "secret" not in stderr
    finally:
        process.kill()
        process.wait()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=LONG_S) as answer:
        return json.loads(answer.read())


def reached(url: str) -> bool:
    try:
        with connect(url, open_timeout=LONG_S):
            return True
    except OSError:
        return False


def wait_listening(url: str, process: subprocess.Popen[str]) -> None:
    def listens() -> bool:
        assert process.poll() is None, process.communicate()
        return reached(url)

    wait_for(listens, 2 * LONG_S)


def test_file_runs_as_it_is_printed_in_an_empty_folder(tmp_path: Path, saccade: Command) -> None:
    (tmp_path / "mine.yaml").write_text(saccade("configs", "file", cwd=tmp_path).stdout)
    done = saccade("run", "--config", "mine.yaml", "--end", 2, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len((tmp_path / "file.jsonl").read_text().splitlines()) == 20
    with av.open(str(tmp_path / "file.mp4")) as container:
        assert sum(1 for _ in container.decode(video=0)) == 20


def test_rtsp(tmp_path: Path) -> None:
    need_servers()
    with Camera() as camera, running(tmp_path, str(CONFIGS / "rtsp.yaml"), camera.url(user="bob:secret@")) as process:
        assert process.stdout is not None
        records = [json.loads(process.stdout.readline()) for _ in range(5)]
    assert {record["stream"] for record in records} == {f"127.0.0.1-{camera.port}-live"}
    assert {record["width"] for record in records} == {640}


def test_rtsp_to_websocket(tmp_path: Path) -> None:
    need_servers()
    feed, http = f"ws://127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    name = str(CONFIGS / "rtsp-to-websocket.yaml")
    with (
        Camera() as camera,
        running(tmp_path, name, camera.url(user="bob:secret@"), "--sink", feed, "--http", http) as process,
    ):
        wait_listening(feed, process)
        with connect(f"{feed}?stream=door&mode=newest") as client:
            records: list[dict[str, Any]] = []
            while len(records) < 5:
                message = json.loads(client.recv(LONG_S))
                records += [message] if "frame" in message else []
        assert {record["stream"] for record in records} == {"door"}
        assert get(f"http://{http}/healthz") == {"ok": True, "streams": 1, "unhealthy": {}}
        (stream,) = get(f"http://{http}/streams")["streams"]
        assert (stream["state"], stream["source"], stream["detect"]) == ("live", camera.url(), ["person"])
        body = b'{"detect": ["cat"]}'
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://{http}/streams/door", body, headers, method="PATCH")
        with urllib.request.urlopen(request, timeout=LONG_S) as answer:
            assert json.loads(answer.read())["detect"] == ["cat"]


def test_many_cameras(tmp_path: Path) -> None:
    """One of the two is not there, which the other does not notice."""
    need_servers()
    (tmp_path / "out").mkdir()
    ports = {8554: 0, 8555: free_port(), 8765: free_port(), 8080: free_port()}
    with Camera() as door:
        ports[8554] = door.port
        text = (CONFIGS / "many-cameras.yaml").read_text()
        for written, port in ports.items():
            text, found = re.subn(rf"(127\.0\.0\.1:){written}\b", rf"\g<1>{port}", text)
            assert found, written
        (tmp_path / "many.yaml").write_text(text)
        with running(tmp_path, "many.yaml") as process:
            feed = f"ws://127.0.0.1:{ports[8765]}"
            wait_listening(feed, process)
            with connect(feed) as client:
                while "frame" not in (record := json.loads(client.recv(LONG_S))):
                    pass
            assert record["stream"] == "door"
            url = f"http://127.0.0.1:{ports[8080]}"
            wait_for(lambda: len(get(f"{url}/streams")["streams"]) == 2, LONG_S)
            one, other = get(f"{url}/streams")["streams"]
            assert (one["name"], one["state"], one["detect"]) == ("door", "live", ["person"])
            assert (other["name"], other["state"]) == ("yard", "connecting")
            assert (other["detect"], other["conf"]) == (["car", "truck", "bus"], 0.4)
            wait_for(lambda: get(f"{url}/streams")["streams"][0]["frames_out"] > 5, LONG_S)
    records = [json.loads(line) for line in (tmp_path / "out" / "all.jsonl").read_text().splitlines()]
    assert {record["stream"] for record in records} == {"door"}
    (video,) = (tmp_path / "out").glob("*.mp4")
    assert re.fullmatch(r"door-\d{8}-\d{6}\.mp4", video.name)
    with av.open(str(video)) as container:
        assert sum(1 for _ in container.decode(video=0)) == len(records)
