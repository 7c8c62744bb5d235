"""Clients that the server must survive: slow, deaf, endless, malformed and many. They know nothing of its framework."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from urllib.parse import urlsplit

import pytest

from saccade.pipeline.api.http_server import HttpServer, serve
from saccade.pipeline.control.controller import Controller
from saccade.pipeline.runtime.streams import Streams
from tests.pipeline.api.test_http_server import LONG_S, ask, wait_for
from tests.support.control import controller_of
from tests.support.http_routes import answering, connections, dripping, hanging, short_limits

SHORT_S = 0.5
HOST = "Host: localhost\r\n"
POST = f"POST /streams HTTP/1.1\r\n{HOST}Content-Type: application/json\r\n"


@pytest.fixture
def controller(streams: Streams) -> Controller:
    return controller_of(streams)


@pytest.fixture
def server(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    with short_limits(monkeypatch, SHORT_S):
        one = serve(controller, port=0, routes=[answering("/much", bytes(64 << 20))])
        yield one
        one.close()


@contextmanager
def connected(server: HttpServer) -> Iterator[socket.socket]:
    place = urlsplit(server.url)
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=LONG_S) as connection:
        yield connection


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    received = b""
    with suppress(ConnectionError):
        while data := connection.recv(65536):
            received += data
    return received


def statuses(received: bytes) -> list[int]:
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param("", id="nothing"),
        pytest.param("GET /livez HTT", id="half a line"),
        pytest.param(f"GET /livez HTTP/1.1\r\n{HOST}", id="half a header"),
    ],
)
def test_a_request_that_is_not_finished_is_not_waited_for(server: HttpServer, sent: str) -> None:
    with connected(server) as connection:
        connection.sendall(sent.encode())
        assert set(statuses(rest_of(connection))) <= {400, 408}
    wait_for(lambda: not connections(server))


def test_headers_that_drip_are_not_waited_for(server: HttpServer) -> None:
    with connected(server) as connection:
        connection.sendall(f"GET /livez HTTP/1.1\r\n{HOST}".encode())
        begun = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - begun < LONG_S:
                connection.sendall(b"X-A: 1\r\n")
                time.sleep(SHORT_S / 5)
        assert time.monotonic() - begun < LONG_S / 2


def test_a_connection_is_kept_for_the_next_request_but_not_for_ever(server: HttpServer) -> None:
    with connected(server) as connection:
        for _ in range(2):
            connection.sendall(f"GET /livez HTTP/1.1\r\n{HOST}\r\n".encode())
            received = b""
            while b"true" not in received:
                received += connection.recv(65536)
        assert rest_of(connection) == b""


def test_a_body_that_does_not_come_is_told(server: HttpServer) -> None:
    with connected(server) as connection:
        connection.sendall(f"{POST}Content-Length: 100\r\n\r\n{{".encode())
        received = rest_of(connection)
        assert statuses(received) == [408]
        assert b"a body was not received within" in received
    wait_for(lambda: not connections(server))


def test_a_body_that_drips_is_told(server: HttpServer) -> None:
    with connected(server) as connection:
        connection.sendall(f"{POST}Content-Length: 10000\r\n\r\n".encode())
        over = threading.Event()

        def drip() -> None:
            with suppress(OSError):
                while not over.wait(SHORT_S / 5):
                    connection.sendall(b" ")

        dripping_thread = threading.Thread(target=drip)
        dripping_thread.start()
        try:
            assert statuses(connection.recv(65536)) == [408]
        finally:
            over.set()
            dripping_thread.join()


@pytest.mark.parametrize("framing", ["Transfer-Encoding: chunked", f"Content-Length: {1 << 30}"])
def test_who_sends_too_much_is_told_so(server: HttpServer, framing: str) -> None:
    """Also a client that reads only once it has sent everything: its connection is not reset under the answer."""
    with connected(server) as connection:
        connection.sendall(f"{POST}{framing}\r\n\r\n".encode())
        data = b" " * 4096
        part = b"1000\r\n" + data + b"\r\n" if "chunked" in framing else data
        with suppress(OSError):
            for _ in range(100):
                connection.sendall(part)
        assert statuses(connection.recv(65536)) == [413]
    wait_for(lambda: not connections(server))


def test_who_never_stops_sending_is_cut_off(server: HttpServer) -> None:
    with connected(server) as connection:
        connection.sendall(f"{POST}Transfer-Encoding: chunked\r\n\r\n".encode())
        begun = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - begun < LONG_S:
                connection.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
        assert time.monotonic() - begun < LONG_S / 2
    wait_for(lambda: not connections(server))


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", id="TLS"),
        pytest.param(b"GET /livez\r\n\r\n", id="HTTP 0.9"),
        pytest.param(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n", id="no colon"),
        pytest.param(b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", id="not ASCII"),
        pytest.param(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n", id="long header"),
        pytest.param(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", id="long path"),
        pytest.param(
            b"POST /streams HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
            id="two lengths",
        ),
        pytest.param(
            b"POST /streams HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", id="a negative length"
        ),
        pytest.param(
            b"POST /streams HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
            id="no chunk",
        ),
    ],
)
def test_what_is_no_request_is_refused(server: HttpServer, request_: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with connected(server) as connection:
        with suppress(OSError):
            connection.sendall(request_)
        assert statuses(rest_of(connection)) in ([400], [431], [414], [])
    assert ask(server, "GET", "/livez").status == 200
    assert not caplog.records


def test_a_request_is_not_hidden_in_the_body_of_another(server: HttpServer) -> None:
    hidden = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = f"{POST}Content-Length: {len(hidden)}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode()
    with connected(server) as connection:
        connection.sendall(head + hidden)
        received = rest_of(connection)
    assert b"saccade_" not in received or statuses(received)[0] == 400
    assert ask(server, "GET", "/livez").status == 200


def test_requests_that_come_at_once_are_answered_in_order(server: HttpServer) -> None:
    with connected(server) as connection:
        one = f"GET /livez HTTP/1.1\r\n{HOST}\r\n"
        other = f"GET /nothing HTTP/1.1\r\n{HOST}\r\n"
        connection.sendall(f"{one}{other}{one}GET /livez HTTP/1.1\r\n{HOST}Connection: close\r\n\r\n".encode())
        assert statuses(rest_of(connection)) == [200, 404, 200, 200]


def test_head_gets_no_body(server: HttpServer) -> None:
    with connected(server) as connection:
        connection.sendall(f"HEAD /livez HTTP/1.1\r\n{HOST}Connection: close\r\n\r\n".encode())
        received = rest_of(connection)
    assert (statuses(received), received.endswith(b"\r\n\r\n")) == ([200], True)


def test_a_client_may_wait_for_the_server_to_want_its_body(server: HttpServer) -> None:
    body = b'{"source": "none.mp4", "detect": "person"}'
    with connected(server) as connection:
        connection.sendall(f"{POST}Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert statuses(connection.recv(65536)) == [422]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel has no such rule")
def test_a_client_that_takes_nothing_is_cut_off(server: HttpServer) -> None:
    with ExitStack() as stack:
        for _ in range(5):
            deaf = stack.enter_context(connected(server))
            deaf.sendall(f"GET /much HTTP/1.1\r\n{HOST}\r\n".encode())
        assert ask(server, "GET", "/livez").status == 200  # after which the server has seen the others
        wait_for(lambda: not connections(server))


def test_a_long_answer_is_not_cut_off_by_the_limit_of_requests(server: HttpServer) -> None:
    with connected(server) as connection:
        connection.sendall(f"GET /much HTTP/1.1\r\n{HOST}Connection: close\r\n\r\n".encode())
        received = 0
        pause = time.monotonic() + 3 * SHORT_S
        while data := connection.recv(1 << 20):
            received += len(data)
            if time.monotonic() < pause:
                time.sleep(SHORT_S / 10)
    assert received > 64 << 20


def test_it_closes_in_time_under_open_events_and_hanging_requests(controller: Controller) -> None:
    begun = [threading.Event() for _ in range(2)]
    server = serve(controller, port=0, routes=[dripping("/events-of-mine", begun[0]), hanging("/hang", begun[1])])
    with ExitStack() as stack:
        for path in ("/events-of-mine", "/hang", "/events-of-mine"):
            stack.enter_context(connected(server)).sendall(f"GET {path} HTTP/1.1\r\n{HOST}\r\n".encode())
        assert all(one.wait(LONG_S) for one in begun)
        asked = time.monotonic()
        server.close()
        assert time.monotonic() - asked < 5
    assert not [thread for thread in threading.enumerate() if thread.name == "saccade-http"]
