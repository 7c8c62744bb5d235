"""A change that was answered is there after `kill -9` at once and a restart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config.file import load
from tests.support.cameras import free_port
from tests.support.command import start_saccade

pytestmark = pytest.mark.e2e

LONG_S = 120  # far beyond what any of these needs; only so that a hang fails
ROUNDS = int(os.environ.get("SACCADE_KILLS", "3"))
FILE = """\
# the door
http: 127.0.0.1:{port}
{state}detect: [person]
streams:
  - name: door   # of the shop
    source: '{clip}'
    loop: true
    max_fps: 2
"""


class Killed:
    """`saccade run` of a file, killed and started again."""

    def __init__(self, folder: Path, state: str) -> None:
        self.path, self.port = folder / "cameras.yaml", free_port()
        self.path.write_text(FILE.format(port=self.port, clip=DEMO_CLIP, state=state))
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        arguments = ["run", "--config", self.path, "--quiet"]
        self._process = start_saccade(*arguments, stdout=None, stderr=None, cwd=self.path.parent)
        deadline = time.monotonic() + LONG_S
        while True:
            try:
                self.ask("GET", "/streams/door")
                return
            except (OSError, urllib.error.HTTPError):
                assert time.monotonic() < deadline
                assert self._process.poll() is None
                time.sleep(0.05)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=LONG_S) as answer:
            text = answer.read()
            return json.loads(text) if text else None

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


@pytest.mark.parametrize("state", ["", "state: config\n"])
def test_a_change_outlives_a_kill(state: str, tmp_path: Path) -> None:
    run = Killed(tmp_path, state)
    there = 0
    try:
        run.start()
        for number in range(ROUNDS):
            wanted = {"detect": ["person", ["cat", "dog"][number % 2]], "conf": round(0.2 + 0.01 * (number % 50), 2)}
            run.ask("PATCH", "/streams/door", wanted)
            run.kill()
            run.start()
            found = run.ask("GET", "/streams/door")
            there += {key: found[key] for key in wanted} == wanted
        print(f"{there} of {ROUNDS}")
        run.ask("PUT", "/streams/door/zones", {"zones": {"mat": ".1,.1,.9,.1,.9,.9"}})
        run.ask("POST", "/streams", {"name": "yard", "source": "rtsp://127.0.0.1:1/yard", "detect": ["car"]})
        run.kill()
        run.start()
        assert [one["name"] for one in run.ask("GET", "/streams")["streams"]] == ["door", "yard"]
        assert list(run.ask("GET", "/streams/door/zones")["zones"]) == ["mat"]
        run.ask("DELETE", "/streams/yard")
        run.kill()
        run.start()
        assert [one["name"] for one in run.ask("GET", "/streams")["streams"]] == ["door"]
    finally:
        run.kill()
    assert there == ROUNDS
    text = run.path.read_text()
    assert ("# the door" in text, "# of the shop" in text) == (True, True)
    saved = load(run.path, {}).named()["door"]
    assert (list(saved.zones) == ["mat"]) == bool(state)  # else they are beside it
