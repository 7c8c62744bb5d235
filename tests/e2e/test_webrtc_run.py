from __future__ import annotations

import itertools
import json
import signal
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import av
import pytest

from tests.support import REPO
from tests.support.command import start_saccade
from tests.support.webrtc import publishing

TOKEN = "sesame"

pytestmark = pytest.mark.e2e


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def demo_image() -> Any:
    with av.open(str(REPO / "pipeline" / "assets" / "demo.mp4")) as clip:
        return next(clip.decode(video=0)).to_ndarray(format="rgb24")


def test_the_config_that_ships_looks_at_what_is_published(tmp_path: Path) -> None:
    port, out = free_port(), tmp_path / "seen.mp4"
    source = f"webrtc://127.0.0.1:{port}/door?token={TOKEN}"
    config = str(REPO / "configs" / "webrtc-demo.yaml")
    run = start_saccade("run", "--config", config, source, "--out", out, "--conf", "0.2", cwd=tmp_path)
    killer = threading.Timer(50, run.kill)
    killer.start()
    try:
        assert run.stdout is not None
        records: list[dict[str, Any]] = []
        wait_for(port, run)
        frame = demo_image()
        url = f"http://127.0.0.1:{port}/door"
        with publishing(url, "H264", lambda _: frame, headers={"Authorization": f"Bearer {TOKEN}"}):
            while len(records) < 5:
                records.append(json.loads(run.stdout.readline()))
        run.send_signal(signal.SIGTERM)
        _, stderr = run.communicate()
    finally:
        killer.cancel()
        run.kill()
        run.wait()
    assert run.returncode == 0, stderr
    assert TOKEN not in stderr
    assert [record["stream"] for record in records] == ["webrtc"] * 5
    assert {record["capture_clock"] for record in records} <= {"arrival", "rtcp"}
    assert all(a["pts"] < b["pts"] for a, b in itertools.pairwise(records))
    assert any(seen["label"] == "person" for record in records for seen in record["objects"])
    with av.open(str(out)) as clip:
        assert sum(1 for _ in clip.decode(video=0)) >= 5


def wait_for(port: int, run: subprocess.Popen[str]) -> None:
    """Until the endpoint listens."""
    while run.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
    raise AssertionError(run.communicate()[1])
