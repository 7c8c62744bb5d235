"""What bad clients of the WebSocket feed cost: never another client's time, nor memory."""

from __future__ import annotations

import asyncio
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import connect

from saccade.sinks.websocket.server import WebSocketSink
from tests.support import REPO
from tests.support.sinks.feed import ASKING, UNREAD, feed, hear, make_certificate, port_of, until, write


@pytest.mark.parametrize("received", [b"GET / HTTP/1.1\r\nX: " + b"x" * 8000, b"\x16\x03\x01 no HTTP at all\r\n\r\n"])
def test_an_endless_or_invalid_request_is_cut_off(received: bytes) -> None:
    with feed() as sink, socket.create_connection(("127.0.0.1", port_of(sink)), timeout=5) as untrusted_client:
        with pytest.raises((ConnectionError, StopIteration)):  # noqa: PT012 - whichever call notices first
            for _ in range(200):
                untrusted_client.sendall(received)
                time.sleep(0.001)
            if not untrusted_client.recv(65536):
                raise StopIteration
        with connect(sink.url) as client:
            hear(client)


def test_a_client_that_never_reads_does_not_delay_close() -> None:
    sink = WebSocketSink("ws://127.0.0.1:0")
    with connect(sink.url, **UNREAD):
        until(lambda: sink.clients == 1)
        while not sink.dropped:
            write(sink, size=200_000)
            time.sleep(0.001)
        begun = time.monotonic()
        sink.close()
        assert time.monotonic() - begun < 8  # 3 by itself


def test_a_client_that_takes_nothing_is_disconnected(caplog: pytest.LogCaptureFixture) -> None:
    with feed(write_timeout_s=0.3) as sink, connect(sink.url, **UNREAD) as dead, connect(sink.url) as alive:
        hear(alive)
        until(lambda: sink.clients == 2)
        written = 0
        while sink.clients == 2:
            write(sink, index=written, size=200_000)
            written += 1
            while "frame" not in hear(alive):
                pass
        assert "read nothing for 0.3 s" in caplog.text
        with pytest.raises(ConnectionClosedError):  # noqa: PT012 - behind what was still on the way
            while True:
                dead.recv(5)


def test_a_client_that_pings_and_never_reads_is_disconnected() -> None:
    ping = b"\x89\xfd" + bytes(4) + b"x" * 125  # masked by zeros
    with feed() as sink, socket.create_connection(("127.0.0.1", port_of(sink)), timeout=10) as client:
        client.sendall(ASKING)
        until(lambda: sink.clients == 1)
        with pytest.raises(ConnectionError):  # noqa: PT012 - the pongs, which it does not read, fill a bounded buffer
            while True:
                client.sendall(ping * 1000)
        until(lambda: sink.clients == 0)


def test_silent_connections_before_tls_are_bounded(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    sink = WebSocketSink(f"wss://127.0.0.1:0?max_clients=1&cert={certificate}&key={key}")
    untrusted = []
    try:
        for _ in range(120):
            untrusted.append(socket.create_connection(("127.0.0.1", port_of(sink)), timeout=5))
        gone = [untrusted_client for untrusted_client in untrusted[65:] if is_cut_off(untrusted_client)]
        assert len(gone) == 120 - 65
        begun = time.monotonic()
        sink.close()
        assert time.monotonic() - begun < 8
    finally:
        sink.close()
        for untrusted_client in untrusted:
            untrusted_client.close()


def is_cut_off(untrusted_client: socket.socket) -> bool:
    try:
        return untrusted_client.recv(1) == b""
    except ConnectionError:
        return True


# ---- what bad clients cost the process, measured in one of its own

SERVER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from tests.support.sinks.feed import WebSocketSink, write

def rss():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

sink = WebSocketSink("ws://127.0.0.1:0?token=sesame&max_clients=8")
print(sink.url, flush=True)
index, before = 0, 0
for line in sys.stdin:
    count, clients = map(int, line.split())
    while clients and sink.clients != clients:
        time.sleep(0.01)
    first, most = rss(), 0
    for _ in range(count):
        write(sink, index=index, size=20_000)
        index += 1
        time.sleep(0.003)
        most = max(most, rss())
    print(first, max(most, rss()), sink.dropped, flush=True)
sink.close()
"""

needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")


class Server:
    """A feed in a process of its own; `write` lets it write records of 20 kB, 300 a second."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._orders, self._replies = process.stdin, process.stdout
        self.url = self._replies.readline().strip()

    def write(self, count: int, clients: int = 0) -> tuple[int, int, int]:
        """Wait for so many clients, then write; bytes of memory before and at most, and records dropped so far."""
        print(count, clients, file=self._orders, flush=True)
        before, most, dropped = self._replies.readline().split()
        return int(before), int(most), int(dropped)


@pytest.fixture
def server() -> Iterator[Server]:
    command = [sys.executable, "-c", SERVER, str(REPO)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Server(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(20)
            finally:
                process.kill()


@needs_proc
def test_a_client_that_never_reads_costs_no_memory(server: Server) -> None:
    warm_up, count = 200, 3000
    heard: list[list[tuple[int, float]]] = [[], []]

    def listen(into: list[tuple[int, float]]) -> None:
        with connect(f"{server.url}?token=sesame", compression=None) as client:
            while len(into) < warm_up + count:
                record = hear(client)
                if "frame" in record:
                    into.append((record["frame"], time.time() - record["captured_at"]))

    threads = [threading.Thread(target=listen, args=(into,)) for into in heard]
    for thread in threads:
        thread.start()
    server.write(warm_up, clients=2)
    with connect(f"{server.url}?token=sesame", **UNREAD):
        before, most, dropped = server.write(count, clients=3)
    for thread in threads:
        thread.join(20)
    print(f"memory +{(most - before) / 1e6:.1f} MB, {dropped} records lost by the one that never reads")
    for each in heard:
        assert [index for index, _ in each] == list(range(warm_up + count))
        assert statistics.median(age for _, age in each) < 0.1
    assert dropped > count // 2
    assert most - before < 5e6


@needs_proc
def test_a_thousand_refused_connections_cost_no_memory(server: Server) -> None:
    host, port = server.url.removeprefix("ws://").rstrip("/").split(":")

    async def attempt(at_once: asyncio.Semaphore) -> bytes:
        async with at_once:
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(ASKING)
                return (await reader.read(65536)).split(b"\r\n", 1)[0]
            except ConnectionError:
                return b""  # one of too many at once
            finally:
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()

    async def attempts(count: int) -> Counter[bytes]:
        at_once = asyncio.Semaphore(20)
        return Counter(await asyncio.gather(*(attempt(at_once) for _ in range(count))))

    async def connections(count: int) -> int:
        """How many of those that connect and say nothing are kept."""
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(count)]
        await asyncio.to_thread(print_memory, "with a silent connections")
        for _ in range(20):
            kept = sum(not reader.at_eof() and reader.exception() is None for reader, _ in silent)
            if kept <= 8 + 64:
                break
            await asyncio.sleep(0.1)  # less than it takes until all of them have waited too long
        for _, writer in silent:
            writer.close()
        return kept

    grown: list[int] = []
    before, *_ = server.write(0)

    def print_memory(when: str) -> None:
        grown.append(server.write(0)[1] - before)
        print(f"memory {when}: +{grown[-1] / 1e6:.1f} MB")

    answers = asyncio.run(attempts(1000))
    assert set(answers) <= {b"HTTP/1.1 401 Unauthorized", b""}
    assert answers[b"HTTP/1.1 401 Unauthorized"] > 900
    print_memory("after a thousand refusals")
    assert asyncio.run(connections(200)) <= 8 + 64
    assert max(grown) < 5e6
    with connect(f"{server.url}?token=sesame") as client:
        hear(client)
