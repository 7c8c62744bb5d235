"""A headless Chromium with a fake camera, for tests that need a real browser."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
def browsing(url: str, profile: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A browser on the page at `url` for as long as the block lasts."""
    assert CHROMIUM is not None, "CI needs Chromium"
    command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}", url]
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
