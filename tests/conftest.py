"""Real clips for the tests, encoded on the spot, and the shared demo clips where they are."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from pathlib import Path

import av
import numpy as np
import pytest

from tests.support import REPO
from tests.support.clips import MakeClip, numbered_image
from tests.support.command import saccade as saccade

# Workers side by side, each with a thread for every core, would mostly wait for each other's: before torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

gc.disable()  # until the tests are collected, which takes 8.8 s of CPU with it and 7.5 s without, in each worker

# Ray reads it when it is imported, which modules of this process do before a run sets it.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_worker_niceness", "0")

# What a shell ignores for its background jobs, and nohup, would stay ignored in the processes that the tests start.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


_STARTS_SOMETHING = re.compile(
    r"\b(subprocess|multiprocessing|Engine\.load|load_engine|random_engine|write_model|CpuExecutor|compare_devices|"
    r"opened_run|run_soak|time_(questions|drafts|webrtc)|RtspServer|serving|run_saccade|start_saccade|chromium)\b|"
    r"tests\.support\.(command|cameras|browser|training|webrtc|whep|http_server|ray_cluster|worker_here|control|"
    r"scripted_workers|sinks)|tests\.support import cameras"
)
"""What a test module mentions that starts processes, cameras, brokers or browsers, encodes video, or loads a model."""
_WAITING = (
    "sources",
    "e2e/test_camera_recording.py",
    "e2e/test_clock_steps.py",
    "e2e/test_random_faults.py",
    "e2e/test_rtsp.py",
    "e2e/test_two_streams.py",
)
_SLOW_FIXTURES = {"saccade", "shared_clips", "engine"}


@cache
def _starts_something(module: Path) -> bool:
    return _STARTS_SOMETHING.search(module.read_text(encoding="utf-8")) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import the modules of which `make test-fast` runs no test."""
    only_fast = config.option.markexpr == "not slow" and collection_path.match("test_*.py")
    return True if only_fast and _starts_something(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that `make test-fast` leaves out, and order the modules."""
    for item in items:
        marked = any(item.get_closest_marker(name) for name in ("e2e", "gpu", "image"))
        slow_fixture = not _SLOW_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
        if marked or slow_fixture or _starts_something(item.path):
            item.add_marker("slow")
    _spread(items)


def _spread(items: list[pytest.Item]) -> None:
    """Run the modules whose tests wait for cameras between those of the engine, whose tests compute.

    In the order of their names, they leave 40 % of two cores idle for three minutes.
    """
    order = {path: float(number) for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    engine = [path for path in order if path.is_relative_to(REPO / "tests" / "engine")]
    waiting = [path for path in order if any(path.is_relative_to(REPO / "tests" / name) for name in _WAITING)]
    for number, path in enumerate(waiting if engine else []):
        order[path] = order[engine[0]] + (number + 0.5) * len(engine) / len(waiting)
    items.sort(key=lambda item: order[item.path])


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def shared_clips() -> Path:
    """The folder of demo clips beside the checkout."""
    folder = REPO.parent / "shared" / "clips"
    if not folder.is_dir():
        pytest.skip("the demo clips (../shared/clips) are not on this machine")
    return folder


@pytest.fixture
def make_clip(tmp_path: Path) -> MakeClip:
    """Encode a small clip whose frames are `numbered_image(0)`, `numbered_image(1)`, …"""

    def make(
        name: str = "clip.mp4",
        *,
        frames: int = 30,
        size: tuple[int, int] = (160, 120),
        codec: str = "libx264",
        rate: int = 25,
        time_base: Fraction | None = None,
        pts: Sequence[int] | None = None,
        gop: int = 10,
        rotation: int | None = None,
        noise: bool = False,
        audio: str | None = None,
        video: bool = True,
    ) -> Path:
        path = tmp_path / name
        base = time_base or Fraction(1, rate)
        stamps = list(range(frames)) if pts is None else list(pts)
        # Units of at least the given fineness, so that MP4 keeps the integers of the caller.
        options = {"video_track_timescale": str(base.denominator)} if name.endswith(".mp4") else {}
        with av.open(str(path), "w", options=options) as container:
            video_stream = None
            if video:
                video_stream = container.add_stream(codec, rate=rate)
                video_stream.width, video_stream.height = size
                video_stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
                video_stream.time_base = video_stream.codec_context.time_base = base
                video_stream.codec_context.gop_size = gop
                if rotation is not None:
                    video_stream.set_display_rotation(rotation)
            audio_stream = container.add_stream(audio, rate=48000) if audio else None
            if video_stream is not None:
                for number, stamp in enumerate(stamps):
                    image = numbered_image(number, *size)
                    if noise:
                        grain = np.random.default_rng(number).integers(0, 60, image.shape, dtype=np.uint8)
                        image = np.clip(image, 0, 190) + grain
                    frame = av.VideoFrame.from_ndarray(image, format="rgb24")
                    frame.pts, frame.time_base = stamp, base
                    container.mux(video_stream.encode(frame))
                container.mux(video_stream.encode(None))
            if audio_stream is not None:
                seconds = float((stamps[-1] + 1) * base)
                block = 1024
                for begin in range(0, int(48000 * seconds), block):
                    wave = np.sin(np.arange(begin, begin + block) * 0.06).astype(np.float32) * 0.3
                    layout = audio_stream.codec_context.layout.name
                    planes = audio_stream.codec_context.layout.nb_channels
                    tone = av.AudioFrame.from_ndarray(np.tile(wave, (planes, 1)), format="fltp", layout=layout)
                    tone.sample_rate, tone.pts, tone.time_base = 48000, begin, Fraction(1, 48000)
                    container.mux(audio_stream.encode(tone))
                container.mux(audio_stream.encode(None))
        return path

    return make


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    paths = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    try:
        subprocess.run([*command, "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    return paths
