"""No command waits for a resolver: lookups have a limit, and threads that nothing waits for at exit."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from saccade import lookups
from saccade.sources import LiveError, open_source
from saccade.sources.network.dialer import Dialer
from tests.support import REPO
from tests.support.command import environment, start_saccade

LONG_S = 120
CLIP = REPO / "pipeline" / "assets" / "demo.mp4"
# Put before the command by PYTHONPATH: names that hold "slow" are looked up for ten minutes.
SLOW = """
import socket, time
_real = socket.getaddrinfo
def getaddrinfo(host, *args, **more):
    if "slow" in str(host):
        time.sleep(600)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")
    return _real(host, *args, **more)
socket.getaddrinfo = getaddrinfo
"""


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Answers about "slow.example" when the event is set, with 192.0.2.1."""
    answer, real = threading.Event(), socket.getaddrinfo
    asked: list[str] = []

    def getaddrinfo(host: str, *given: object, **more: object) -> object:
        if host != "slow.example":
            return real(host, *given, **more)  # type: ignore[arg-type]
        asked.append(host)
        answer.wait(LONG_S)
        return real("192.0.2.1", *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield answer
    answer.set()
    for thread in threading.enumerate():
        if thread.name in ("saccade lookup", "saccade call"):
            thread.join(LONG_S)
    assert len(asked) <= 1, "one thread a name"
    lookups._pending.clear()


def test_a_lookup_has_a_limit_and_its_answer_is_for_who_asks_again(resolver: threading.Event) -> None:
    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"resolving slow\.example takes longer than 0\.05 s"):
            lookups.look_up("slow.example", 80, limit_s=0.05)
    resolver.set()
    assert lookups.look_up("slow.example", 80, limit_s=LONG_S)[0][4] == ("192.0.2.1", 80)


def test_numeric_addresses_ask_no_resolver() -> None:
    before = threading.active_count()
    assert lookups.look_up("127.0.0.1", 554)[0][4] == ("127.0.0.1", 554)
    assert lookups.look_up("::1", 554)[0][4][:2] == ("::1", 554)
    assert threading.active_count() == before


def test_a_source_that_is_closed_waits_no_longer(resolver: threading.Event) -> None:
    closed = threading.Event()
    threading.Timer(0.1, closed.set).start()
    with pytest.raises(LiveError, match="timeout"):
        Dialer(closed).look_up("rtsp://slow.example/", "slow.example")
    assert not resolver.is_set()


@pytest.mark.parametrize("url", ["rtsp://slow.example/live", "http://slow.example/video", "rtmp://slow.example/a/b"])
def test_a_live_source_says_that_the_resolver_does_not_answer(
    resolver: threading.Event, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups.look_up, "__kwdefaults__", {"limit_s": 0.1, "cancelled": None})
    with pytest.raises(LiveError, match=r"timeout: resolving slow\.example takes longer"):
        next(iter(open_source(url, retry=False)))


def test_a_loop_ends_while_a_call_hangs(resolver: threading.Event) -> None:
    async def main() -> str:
        for slow in (
            asyncio.get_running_loop().getaddrinfo("slow.example", 80),
            asyncio.to_thread(resolver.wait, LONG_S),
        ):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(slow, 0.05)
        return await asyncio.to_thread(lambda: "done")

    assert lookups.run(main()) == "done"
    assert not resolver.is_set()


def test_what_a_call_raises_comes_to_who_awaits_it() -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)

    lookups.run(main())


def start(folder: Path, *arguments: object) -> subprocess.Popen[str]:
    (folder / "sitecustomize.py").write_text(SLOW)
    known = environment()
    path = f"{folder}{os.pathsep}{known['PYTHONPATH']}"
    return start_saccade("run", *arguments, env={**known, "PYTHONPATH": path}, cwd=folder)


@pytest.mark.parametrize("sink", ["https://slow.example/hook#send=all", "mqtt://slow.example/home"])
def test_a_run_over_a_file_does_not_wait_for_the_name_of_a_sink(tmp_path: Path, sink: str) -> None:
    with start(tmp_path, CLIP, "--end", "0.5", "--detect", "person", "--sink", sink, "--jsonl", "all.jsonl") as process:
        _, stderr = process.communicate(timeout=LONG_S)  # the resolver takes ten minutes
    assert process.returncode == 0, stderr
    assert (tmp_path / "all.jsonl").read_text().count("\n") == 5


@pytest.mark.parametrize("source", ["rtsp://slow.example/live", "http://slow.example/video"])
def test_a_signal_ends_a_run_whose_camera_is_being_looked_up(tmp_path: Path, source: str) -> None:
    sinks = ("--sink", "https://slow.example/hook", "--sink", "mqtt://slow.example/home", "--jsonl", "all.jsonl")
    with start(tmp_path, CLIP, source, "--detect", "person", *sinks) as process:
        seen = tmp_path / "all.jsonl"
        deadline = time.monotonic() + LONG_S
        while not seen.exists() or seen.read_text().count("\n") < 5:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=LONG_S)
    assert "forced exit" not in stderr
    assert process.returncode == 0
    assert seen.read_text().endswith("\n")
