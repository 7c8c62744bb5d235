"""Everything at once for half an hour: faulty cameras, all sinks, badly behaving clients; nothing grows or is lost.

Runs with SACCADE_LONG=1 only. SACCADE_SOAK_S shortens it; what is compared then is from its second sixth on.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from websockets.sync.client import connect

from tests.support import REPO
from tests.support.cameras.faulty import FAULTS, FaultyCamera, coded_clip
from tests.support.command import environment
from tests.support.sinks.broker import Broker, Listener, free_ports, needs_mosquitto, wait_for
from tests.support.sinks.receiver import Receiver

SECONDS = float(os.environ.get("SACCADE_SOAK_S", "1800"))
CLIP = REPO / "pipeline/assets/demo.mp4"
CAMERAS = ("door", "hall", "gate", "yard")
RATE = 5

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.environ.get("SACCADE_LONG") != "1", reason="takes half an hour: set SACCADE_LONG=1"),
    needs_mosquitto,
]


@dataclass(slots=True)
class Sample:
    """What the process held at a time."""

    at_s: float
    rss_mb: float
    threads: int
    descriptors: int


class Api:
    """The HTTP API's requests."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"

    def __call__(self, method: str, path: str, body: object = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.base + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def up(self) -> bool:
        try:
            return self("GET", "/livez")[0] == 200
        except OSError:
            return False


def configure(folder: Path, cameras: dict[str, FaultyCamera], http: int, feed: int, whep: int, *sinks: str) -> Path:
    """The configuration of the run: four cameras, every kind of sink."""
    streams = [
        {"name": name, "source": f"rtsp://127.0.0.1:{camera.port}/live", "hwaccel": "none"}
        for name, camera in cameras.items()
    ]
    settings: dict[str, Any] = {
        "streams": streams,
        "detect": ["person"],
        "zones": {"left": "0,0,.5,0,.5,1,0,1"},
        "lines": {"middle": ".5,0,.5,1"},
        "http": f"127.0.0.1:{http}",
        "sinks": [
            f"ws://127.0.0.1:{feed}",
            f"whep:{whep}",
            f"{folder}/all.jsonl?max_mb=1&keep=3",
            f"{folder}/{{stream}}-%Y%m%d-%H%M%S.mp4?segment=30s&keep=2m",
            *sinks,
        ],
    }
    path = folder / "soak.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


@contextmanager
def background(work: Callable[[threading.Event], None]) -> Iterator[list[BaseException]]:
    """Run something in a thread until the block ends; what it raises ends up in the list."""
    stop, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            work(stop)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield errors
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def trouble(cameras: dict[str, FaultyCamera]) -> Callable[[threading.Event], None]:
    """Faults at random: the camera dies, freezes, sends garbage, or changes the size of its video."""

    def work(stop: threading.Event) -> None:
        chance = random.Random(12)
        while not stop.wait(chance.uniform(1, 4)):
            camera = cameras[chance.choice(CAMERAS)]
            camera.suffer(chance.choice((*FAULTS, "resize", "resize")), chance.choice((0.5, 2.0, 8.0)))

    return work


def change_streams(api: Api, source: str) -> Callable[[threading.Event], None]:
    """A client that adds, changes and deletes streams at random, and asks for what is not there."""

    def work(stop: threading.Event) -> None:
        chance, there = random.Random(18), set[str]()
        while not stop.wait(chance.uniform(0.5, 3)):
            name = f"extra{chance.randrange(3)}"
            if name not in there:
                where = chance.choice((source, str(CLIP), "/nonexistent.mp4"))
                status, body = api("POST", "/streams", {"name": name, "source": where, "detect": ["person"]})
                assert status in (201, 400, 409, 422), body
                if status == 201:
                    there.add(name)
            elif chance.random() < 0.5:
                status, body = api("PATCH", f"/streams/{name}", {"detect": chance.choice((["dog"], ["person", "car"]))})
                assert status in (200, 404, 409), body
            else:
                status, body = api("DELETE", f"/streams/{name}")
                assert status in (204, 404), body
                there.discard(name)
            for path in ("/healthz", "/metrics", "/streams"):
                assert api("GET", path)[0] in (200, 503)
        for name in there:
            api("DELETE", f"/streams/{name}")

    return work


def read_feed(port: int, seen: dict[str, int]) -> Callable[[threading.Event], None]:
    """A client that counts the records of each stream."""

    def work(stop: threading.Event) -> None:
        with connect(f"ws://127.0.0.1:{port}") as feed:
            while not stop.is_set():
                try:
                    message = json.loads(feed.recv(timeout=0.5))
                except TimeoutError:
                    continue
                if "frame" in message:
                    seen[message["stream"]] = seen.get(message["stream"], 0) + 1

    return work


def sample(pid: int, since: float) -> Sample:
    """What a process holds now."""
    place = Path(f"/proc/{pid}")
    pages = int((place / "statm").read_text().split()[1])
    threads, descriptors = (len(list((place / what).iterdir())) for what in ("task", "fd"))
    return Sample(time.monotonic() - since, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, threads, descriptors)


def median(samples: list[Sample], begin_s: float, end_s: float, what: str) -> float:
    """The median of one quantity between two times."""
    return float(statistics.median(getattr(one, what) for one in samples if begin_s <= one.at_s < end_s))


def never_reads(port: int) -> socket.socket:
    """A feed's client that reads its greeting and nothing else."""
    small = socket.socket()
    small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    small.connect(("127.0.0.1", port))
    key = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    small.sendall(f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{key}Sec-WebSocket-Version: 13\r\n\r\n".encode())
    assert b" 101 " in small.recv(4096)
    return small


def test_nothing_grows_or_is_lost(tmp_path: Path) -> None:
    plain, small = coded_clip(CLIP, (640, 360), rate=RATE), coded_clip(CLIP, (320, 180), rate=RATE)
    with ExitStack() as stack:
        cameras = {name: FaultyCamera(plain, rate=RATE, resized=small) for name in CAMERAS}
        for camera in cameras.values():
            stack.callback(camera.close)
        broker = stack.enter_context(Broker(tmp_path))
        receiver = Receiver()
        stack.callback(receiver.close)
        (http, feed), (whep, _) = free_ports(), free_ports()
        hook = receiver.url("/hook#send=events")
        config = configure(tmp_path, cameras, http, feed, whep, broker.url(), hook)
        log = (tmp_path / "stderr.log").open("w+")
        stack.callback(log.close)
        command = [sys.executable, "-m", "saccade", "run", "--config", str(config)]
        run = subprocess.Popen(command, stdout=log, stderr=log, env=environment(), cwd=tmp_path)
        stack.callback(run.kill)
        api, seen = Api(http), dict[str, int]()
        wait_for(api.up, 120)
        wait_for(lambda: _listens(feed), 120)
        stack.callback(never_reads(feed).close)
        listener = stack.enter_context(Listener(broker))
        extra = f"rtsp://127.0.0.1:{cameras['door'].port}/live"
        failures = [
            stack.enter_context(background(work))
            for work in (trouble(cameras), change_streams(api, extra), read_feed(feed, seen))
        ]
        began = time.monotonic()
        samples = list[Sample]()
        while time.monotonic() - began < SECONDS:
            time.sleep(SECONDS / 360)
            assert run.poll() is None, Path(log.name).read_text()[-3000:]
            assert failures == [[]] * len(failures)
            samples.append(sample(run.pid, began))
            if len(samples) % 12 == 0:
                print(samples[-1], dict(sorted(seen.items())), file=sys.stderr)
        before = {name: seen[name] for name in CAMERAS}
        for camera in cameras.values():
            camera.fault = ""
        wait_for(lambda: all(seen[name] > before[name] + 5 for name in CAMERAS), 60)
        states = json.loads(api("GET", "/streams")[1])
        metrics = api("GET", "/metrics")[1]
        run.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        assert run.wait(30) == 130
        ended_s = time.monotonic() - asked
        text = Path(log.name).read_text()
        print(json.dumps(states)[:2000], file=sys.stderr)
        sixth = SECONDS / 6
        for what in ("rss_mb", "threads", "descriptors"):
            early, late = (median(samples, begin, begin + sixth, what) for begin in (sixth, SECONDS - sixth))
            print(
                f"{what}: {early:.0f} → {late:.0f}; most {max(getattr(one, what) for one in samples):.0f}",
                file=sys.stderr,
            )
            assert late <= early * 1.1 + 5, what
        print(
            f"ended {ended_s:.1f} s after SIGTERM; {len(receiver.posts)} posts; {sum(seen.values())} records;"
            f" {len(listener.events())} MQTT events; {len(metrics)} bytes of metrics",
            file=sys.stderr,
        )
        assert "Traceback" not in text, text[-3000:]
        assert receiver.posts
        assert listener.events()
        assert list(tmp_path.glob("*.mp4"))
        assert not list(tmp_path.glob("*.part"))


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
