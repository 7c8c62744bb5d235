"""The relay: bytes both ways, several connections, and an end of every thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from saccade.sources import LiveError
from saccade.sources.network.dialer import Dialer
from saccade.sources.network.relay import Relay


@contextmanager
def echo() -> Iterator[int]:
    """A server that sends back what it gets, turned round, and hangs up at the client's end."""
    stop = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.05)

    def answer(call: socket.socket) -> None:
        call.settimeout(0.05)
        with call:
            while not stop.is_set():
                with suppress(TimeoutError):
                    data = call.recv(4096)
                    if not data or data == b"bye":
                        return
                    call.settimeout(10)
                    call.sendall(data * 2)
                    call.settimeout(0.05)

    threads = []

    def accept() -> None:
        while not stop.is_set():
            with suppress(TimeoutError):
                threads.append(threading.Thread(target=answer, args=(listener.accept()[0],)))
                threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        for thread in (accepting, *threads):
            thread.join()
        listener.close()


def relay_to(port: int) -> Relay:
    dialer = Dialer(threading.Event())
    return Relay(lambda: dialer.connect(f"tcp://127.0.0.1:{port}", "127.0.0.1", port, secure=False))


def read(call: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := call.recv(size - len(data))):
        data += more
    return data


def test_bytes_go_both_ways_over_each_connection() -> None:
    with echo() as port, relay_to(port) as relay:
        calls = [socket.create_connection(("127.0.0.1", relay.port), 30) for _ in range(3)]
        for number, call in enumerate(calls):
            with call:
                for _ in range(5):
                    call.sendall(bytes([number]) * 1000)
                    assert read(call, 2000) == bytes([number]) * 2000


def test_an_end_of_the_server_is_one_for_the_client() -> None:
    with echo() as port, relay_to(port) as relay, socket.create_connection(("127.0.0.1", relay.port), 30) as call:
        call.sendall(b"bye")
        assert call.recv(100) == b""


def test_closing_ends_its_connections_and_threads() -> None:
    with echo() as port:
        with relay_to(port) as relay, socket.create_connection(("127.0.0.1", relay.port), 30) as call:
            call.sendall(b"x")
            assert read(call, 2) == b"xx"
            relay.close()
            assert call.recv(100) == b""
        assert [thread for thread in threading.enumerate() if thread.name == "saccade relay"] == []


def test_a_server_that_is_absent_is_an_error_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    with pytest.raises(LiveError, match="refused"):
        relay_to(port)
