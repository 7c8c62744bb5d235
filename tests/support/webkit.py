"""Debian's WebKit (WebKitGTK's MiniBrowser) on a screen in memory, driven over W3C WebDriver."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cameras import free_port, wait_for

LONG_S = 25  # far beyond what any of these needs; only so that a hang fails
PACKAGES = "webkit2gtk-driver xvfb"
MISSING = [name for name in ("WebKitWebDriver", "Xvfb") if shutil.which(name) is None]

needs_webkit = pytest.mark.skipif(
    bool(MISSING) and "CI" not in os.environ, reason=f"WebKit is not installed: apt-get install {PACKAGES}"
)

_LISTEN = """if (!window.faults) {
    window.faults = [];
    addEventListener("error", ({message, filename, lineno}) => faults.push(`${message} ${filename}:${lineno}`));
    addEventListener("unhandledrejection", ({reason}) => faults.push(`rejected: ${reason}`));
}"""


class WebKitPage:
    """The only page of a WebKit browser."""

    def __init__(self, driver: httpx.Client) -> None:
        self._driver = driver
        # "none", so that the page's errors are noted from the start.
        capabilities = {"alwaysMatch": {"pageLoadStrategy": "none"}}
        created = driver.post("/session", json={"capabilities": capabilities}).json()["value"]
        assert "sessionId" in created, created
        self._session = f"/session/{created['sessionId']}"

    def go(self, url: str) -> None:
        """Open the page at `url`, and wait until it is loaded."""
        self._ask("url", url=url)
        wait_for(lambda: self._loaded(url), LONG_S)

    @property
    def faults(self) -> list[str]:
        """The script errors since the page was opened."""
        noted: list[str] = self.eval("window.faults")
        return noted

    def eval(self, script: str) -> Any:
        """The value of an expression in the page."""
        return self._ask("execute/sync", script=f"return {script}", args=[])

    def until(self, script: str, seconds: float = LONG_S) -> Any:
        """The first value of an expression that is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.eval(script)):
            assert time.monotonic() < deadline, f"not within {seconds} s: {script}; its errors: {self.faults}"
            time.sleep(0.05)
        return value

    def shoot(self) -> bytes:
        """A screenshot, as PNG."""
        response = self._driver.get(f"{self._session}/screenshot")
        return base64.b64decode(response.json()["value"])

    def _loaded(self, url: str) -> bool:
        script = f"{_LISTEN} return document.readyState === 'complete' && location.href"
        answer = self._driver.post(f"{self._session}/execute/sync", json={"script": script, "args": []})
        return bool(answer.json()["value"] == url)  # an error while the old page is unloaded

    def _ask(self, command: str, **parameters: Any) -> Any:
        answer = self._driver.post(f"{self._session}/{command}", json=parameters)
        assert answer.is_success, answer.text
        return answer.json()["value"]


@contextmanager
def webkit(folder: Path) -> Iterator[WebKitPage]:
    """A WebKit browser for as long as the block lasts. It writes its files into `folder`."""
    assert not MISSING, f"CI needs {PACKAGES}"
    port = free_port()
    with _screen() as display:
        folders = {name: str(folder) for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME")}
        environment = {**os.environ, **folders, "DISPLAY": display, "GDK_BACKEND": "x11"}
        command = ["WebKitWebDriver", "--host=127.0.0.1", f"--port={port}"]
        quiet = subprocess.DEVNULL
        with subprocess.Popen(
            command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        ) as process:
            try:
                with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LONG_S) as driver:
                    wait_for(lambda: _answers(driver), LONG_S)
                    yield WebKitPage(driver)
            finally:
                os.killpg(process.pid, signal.SIGKILL)  # with the browser and all its processes


@contextmanager
def _screen() -> Iterator[str]:
    """The name of an X display in memory."""
    reads, writes = os.pipe()
    command = ["Xvfb", "-displayfd", str(writes), "-screen", "0", "1280x900x24", "-nolisten", "tcp"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, pass_fds=[writes], stdin=quiet, stdout=quiet, stderr=quiet) as process:
        os.close(writes)
        try:
            with os.fdopen(reads) as told:
                yield f":{told.readline().strip()}"
        finally:
            process.kill()


def _answers(driver: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return driver.get("/status").is_success
    return False
