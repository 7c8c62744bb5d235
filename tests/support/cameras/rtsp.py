"""Cameras for the tests: real RTSP servers as processes on 127.0.0.1, and what their frames should look like."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import pytest

from benchmarks.ingest import burnt_in_age_ms
from saccade.sources import Frame, LiveSource, RgbImage

SYSTEM_PYTHON = "/usr/bin/python3"
SERVER = Path(__file__).parent / "rtsp_server.py"
PACKAGES = (
    "gir1.2-gst-rtsp-server-1.0 python3-gi gstreamer1.0-plugins-good gstreamer1.0-plugins-bad "
    "gstreamer1.0-plugins-ugly gstreamer1.0-rtsp gstreamer1.0-tools"
)
LONG_S = 30  # far beyond what any of these needs; only so that a hang fails
GREY = 95  # of the cameras' background in RGB, about

_NEEDED = (
    'import gi; gi.require_version("GstRtspServer", "1.0"); '
    "from gi.repository import Gst, GstRtspServer; Gst.init(None); "
    'assert all(map(Gst.ElementFactory.find, ("x264enc", "rtph264pay", "x265enc", "openjpegenc", "voaacenc")))'
)


def need_servers() -> None:
    """Skip where the Debian packages are absent, but never in CI, which installs them."""
    if Path(SYSTEM_PYTHON).exists():
        checked = subprocess.run([SYSTEM_PYTHON, "-c", _NEEDED], capture_output=True, text=True, check=False)
        if checked.returncode == 0:
            return
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must run the RTSP tests; apt-get install {PACKAGES}")
    pytest.skip(f"the RTSP servers need Debian's {PACKAGES}")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Camera:
    """A camera that can be switched off, on, frozen and thawed; always on the same port."""

    def __init__(self, *options: object) -> None:
        self.port = free_port()
        self.clients = 0
        self._options = [str(option) for option in options]
        self._process: subprocess.Popen[str] | None = None
        self._log: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.on()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.off()

    def url(self, path: str = "live", user: str = "") -> str:
        return f"rtsp://{user}127.0.0.1:{self.port}/{path}"

    def on(self) -> None:
        self.clients = 0
        process = subprocess.Popen(
            [SYSTEM_PYTHON, SERVER, str(self.port), *self._options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        self._process = process
        self._log = threading.Thread(target=self._count, args=(process,))
        self._log.start()

    def off(self) -> None:
        if self._process and self._log:
            self._process.kill()
            self._process.wait()
            self._log.join()
            assert self._process.stdout is not None
            self._process.stdout.close()
        self._process = None

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _count(self, process: subprocess.Popen[str]) -> None:
        for _ in process.stdout or ():
            self.clients += 1


class Watcher:
    """Reads a live source in a thread, as a run does; looks at every frame and keeps what the tests ask."""

    def __init__(self, source: LiveSource) -> None:
        self.source = source
        self.ages: list[tuple[float, float]] = []  # when, in monotonic seconds, and how old, in ms
        self.indices: list[int] = []
        self.pts: list[int] = []
        self.numbers: list[int] = []  # the sender's
        self.lost = 0
        self.bad = 0
        self.clocks: set[str] = set()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.source.close()
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()

    @property
    def state(self) -> str:
        return self.source.status.state

    def take(self, frame: Frame) -> None:
        now = time.time()
        age = burnt_in_age_ms(frame.image, now)
        self.bad += age is None or not -50 < age < 30_000 or torn(frame.image)
        self.ages.append((time.monotonic(), age if age is not None else -1))
        self.indices.append(frame.index)
        self.pts.append(frame.pts)
        self.numbers.append(burnt_in_number(frame.image))
        self.lost += frame.dropped_before
        self.clocks.add(frame.capture_clock)

    def _read(self) -> None:
        try:
            for frame in self.source:
                self.take(frame)
        except Exception as error:
            self.error = error


def burnt_in_number(image: RgbImage) -> int:
    """The sender's number of a frame, which `rtsp_server.py` writes below the clock."""
    width = image.shape[1]
    row = image[30, [(2 * bit + 1) * width // 64 for bit in range(32)]].mean(axis=1)
    return sum(1 << bit for bit in range(32) if row[bit] > 128)


def torn(image: RgbImage) -> bool:
    """Whether anything below the square's way is not the even grey that the camera sent."""
    below = image[220:350:3, ::3, 1].astype(np.int16)  # every third: this runs on every frame of every camera
    return bool(np.abs(below - GREY).max() > 25)


def wait_for(what: Callable[[], bool], within_s: float) -> float:
    """Wait until it is so; returns how long it took, in seconds."""
    begun = time.monotonic()
    while not what():
        assert time.monotonic() - begun < within_s, "it did not come to pass"
        time.sleep(0.02)
    return time.monotonic() - begun
