"""A headless Chromium with a fake camera, for tests that need a real browser; and a hand on its pages."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # as root there is none
    "--disable-gpu",
    "--use-fake-device-for-media-stream=fps=30",
    "--use-fake-ui-for-media-stream",
    "--allow-loopback-in-peer-connection",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None and "CI" not in os.environ, reason="Chromium is not installed: apt-get install chromium"
)


@contextmanager
def browsing(url: str, profile: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A browser on the page at `url` for as long as the block lasts."""
    assert CHROMIUM is not None, "CI needs Chromium"
    command = [CHROMIUM, *_FLAGS, *flags, f"--user-data-dir={profile}", url]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True) as browser:
        try:
            yield browser
        finally:
            kill(browser)


def kill(browser: subprocess.Popen[bytes]) -> None:
    """End the browser with all its processes, without a chance to say goodbye."""
    if browser.poll() is None:
        os.killpg(browser.pid, 9)
        browser.wait()


class Tab:
    """A page to be read and driven over Chromium's DevTools protocol.

    Attributes:
        console: what the page wrote to its console, and what went wrong in it.
    """

    def __init__(self, url: str) -> None:
        self._socket = connect(url, max_size=None, compression=None).__enter__()
        self._numbers = itertools.count(1)
        self.console: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=20))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def eval(self, script: str) -> Any:
        """The value of an expression in the page, a promise's when it has come."""
        answer = self._evaluate(script)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, seconds: float = 15) -> Any:
        """The first value of an expression that is true; what it needs may not be there yet."""
        deadline = time.monotonic() + seconds
        while True:
            answer = self._evaluate(script)
            raised = answer.get("exceptionDetails")
            if not raised and (value := answer["result"].get("value")):
                return value
            console = [*self.console, raised] if raised else self.console
            assert time.monotonic() < deadline, f"not within {seconds} s: {script}; its console: {console}"
            time.sleep(0.05)

    def shape(self, width: int, height: int, scheme: str = "light", *, phone: bool = False) -> None:
        """Give the page a size and a colour scheme."""
        scale = 2 if phone else 1
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone)
        self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def shoot(self, path: Path) -> None:
        """Write a screenshot, as PNG."""
        path.write_bytes(base64.b64decode(self.do("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """Let go of the page, which stays open."""
        self._socket.close()

    def _evaluate(self, script: str) -> dict[str, Any]:
        return self.do("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(one.get("value", one.get("description"))) for one in parameters["args"]))
        elif message.get("method") == "Runtime.exceptionThrown":
            self.console.append(str(parameters["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded":
            self.console.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")


@contextmanager
def tab(url: str, profile: Path, *flags: str, camera: Path | None = None) -> Iterator[Tab]:
    """A browser's only page, at `url`; its camera shows `camera`, a .mjpeg or .y4m file, over and over."""
    film = [f"--use-file-for-fake-video-capture={camera}"] if camera else []
    remote = ("--remote-debugging-port=0", "--remote-allow-origins=*", "--autoplay-policy=no-user-gesture-required")
    with browsing("about:blank", profile, *remote, *film, *flags):
        listening = profile / "DevToolsActivePort"
        deadline = time.monotonic() + 20
        while not (listening.exists() and listening.read_text().count("\n")):
            assert time.monotonic() < deadline, "Chromium does not start"
            time.sleep(0.05)
        port = listening.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=10) as listed:
            pages = [one for one in json.load(listed) if one["type"] == "page"]
        page = Tab(pages[0]["webSocketDebuggerUrl"])
        page.do("Page.navigate", url=url)
        try:
            yield page
        finally:
            page.close()
