"""Addresses with a zone, in both spellings: servers, sinks and sources. The loopback's zone is its number."""

from __future__ import annotations

import json
import socket
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from saccade.engine.results import Detections, Points, Result
from saccade.pipeline import load, opened_run
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import parse_place
from saccade.pipeline.control.source_policy import NotAllowedError, SourcePolicy
from saccade.sinks import Latency, open_sink
from saccade.sinks.websocket.access import FeedTarget
from saccade.sources import open_source
from saccade.sources.errors import LiveError
from saccade.sources.network.dialer import Dialer
from saccade.sources.network.stream_socket import StreamSocket
from saccade.sources.webrtc.listener import ListenTarget
from tests.support.command import LONG_S

ZONES = ["::1%{}", "::1%25{}"]


@pytest.fixture
def number() -> int:
    """The number of the loopback."""
    try:
        number = socket.if_nametoindex("lo")
        with socket.create_server((f"::1%{number}", 0), family=socket.AF_INET6):
            return number
    except OSError:
        pytest.skip("there is no IPv6 loopback called lo")


class _V6Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6


@pytest.mark.parametrize("zone", ZONES)
def test_the_server_of_a_run_listens_there(zone: str, number: int, tmp_path: Path) -> None:
    place = f"[{zone.format(number)}]:0"
    with opened_run(load(None, {"http": place})) as opened:
        assert opened.url is not None
        port = opened.url.rpartition(":")[2].rstrip("/")
        with urllib.request.urlopen(f"http://[::1]:{port}/healthz", timeout=LONG_S) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("zone", ZONES)
def test_a_webhook_and_a_source_are_reached_there(zone: str, number: int) -> None:
    posted: list[bytes] = []
    hosts: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            hosts.append(self.headers["Host"])
            posted.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def do_GET(self) -> None:
            hosts.append(self.headers["Host"])
            self.send_response(200)
            self.end_headers()
            self.wfile.write(DEMO_CLIP.read_bytes())

        def log_message(self, *_: object) -> None:
            pass

    server = _V6Server(("::1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    address = f"http://[{zone.format(number)}]:{server.server_port}"
    try:
        with open_source(f"{address}/clip.mp4", retry=False) as source:
            frame = next(iter(source))
        sink = open_sink(f"{address}/hook#send=all")
        sink.write(frame, Result(Detections((), 640, 360), Points((), 640, 360)), Latency())
        sink.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert json.loads(posted[0])["frame"] == frame.index
    assert hosts == [f"[::1]:{server.server_port}"] * 2


@pytest.mark.parametrize("zone", ["eth0", "25eth0"])
def test_both_spellings_are_one_place(zone: str) -> None:
    host = f"[fe80::1%{zone}]"
    assert parse_place(f"{host}:8080") == ("fe80::1%eth0", 8080)
    assert FeedTarget.parse(f"ws://{host}:8765?token=sesame").host == "fe80::1%eth0"
    assert ListenTarget.parse(f"webrtc://{host}:8081?token=sesame").host == "fe80::1%eth0"


@pytest.mark.parametrize("zone", ZONES)
def test_a_network_admits_its_addresses_with_a_zone(zone: str, number: int) -> None:
    SourcePolicy(["::1/128"], open_by_default=False).check(f"http://[{zone.format(number)}]/live")
    with pytest.raises(NotAllowedError):
        SourcePolicy(["fe80::/64"], open_by_default=False).check(f"http://[{zone.format(number)}]/live")


def test_what_a_name_is_looked_up_to_be_keeps_its_zone(number: int) -> None:
    host = f"fe80::1%{number}"
    assert Dialer(threading.Event()).look_up(f"http://[{host}]/", host) == [host]


def test_an_address_that_cannot_be_connected_to_is_named() -> None:
    with pytest.raises(LiveError, match=r"\[fe80::1\]:9: Invalid argument"):  # link-local, and without a zone
        StreamSocket("fe80::1", 9, threading.Event())
