"""Which sources the HTTP API may open, redirects included; the servers and sources are real."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from saccade.pipeline import ConfigError, Streams, serve
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.control.source_policy import NotAllowedError, SourcePolicy
from tests.pipeline.api.test_http_server import ask, error_of, wait_for
from tests.support.cameras.scripted import Call, Request, ScriptedCamera
from tests.support.control import controller_of
from tests.support.http_server import serving

REFUSED = "the HTTP API may not open this source; add it to allow_sources to permit it"


def allows(policy: SourcePolicy, source: str) -> bool:
    try:
        policy.check(source)
    except NotAllowedError:
        return False
    return True


@pytest.mark.parametrize(
    ("source", "allowed"),
    [
        ("a.mp4", True),
        ("rtsp://10.0.0.1/live", True),
        ("udp://127.0.0.1:5000", True),
        ("udp://0.0.0.0:5000", False),
        ("udp://:5000", False),
        ("udp://239.0.0.1:5000", False),
        ("UDP://0.0.0.0:5000", False),
        ("tcp://127.0.0.1:5000?listen=1", True),
        ("tcp://0.0.0.0:5000?listen=1", False),
        ("tcp://[::]:5000?listen", False),
        ("tcp://0.0.0.0:5000?listen=0&listen=1", False),
        ("tcp://camera.invalid:5000?listen=0", True),
        ("rtmp://0.0.0.0:5000/x?listen=1", False),
        ("http://0.0.0.0:5000/x?a=b&listen=2", False),
        ("srt://0.0.0.0:5000?mode=listener", False),
        ("tcp://camera.invalid:5000", True),
    ],
)
def test_on_loopback_only_open_ports_are_refused(source: str, allowed: bool) -> None:
    assert allows(SourcePolicy([], open_by_default=True), source) is allowed


@pytest.mark.parametrize(
    "source", ["a.mp4", "0", "rtsp://10.0.0.1/live", "webrtc:8081", "udp://127.0.0.1:1", "/dev/ptmx"]
)
def test_on_the_network_nothing_is_allowed_by_default(source: str) -> None:
    assert not allows(SourcePolicy([], open_by_default=False), source)


LISTED = [
    "/srv/videos/*.mp4",
    "0",
    "rtsp://127.0.0.1:8554/*",
    "rtsp://127.0.0.*/wide/*",
    "http://8.8.8.*/*",
    "127.0.0.8/30",
    "webrtc:9*",
    "udp://0.0.0.0:5000",
]


@pytest.mark.parametrize(
    ("source", "allowed"),
    [
        ("/srv/videos/a.mp4", True),
        ("/srv/videos/2026/a.mp4", True),
        ("/srv/videos/../../etc/a.mp4", False),
        ("/srv/videos/a.mkv", False),
        ("videos/a.mp4", False),
        ("0", True),
        ("1", False),
        ("rtsp://127.0.0.1:8554/live", True),  # the host is listed literally
        ("rtsp://me:secret@127.0.0.1:8554/live?x=1", True),
        ("RTSP://127.0.0.1:8554/live", True),
        ("rtsp://127.0.0.1:8555/live", False),
        ("rtsp://127.0.0.1/wide/live", False),  # private, and only matched by a wildcard
        ("http://8.8.8.8/live", True),  # public
        ("http://127.0.0.1/?u=http://8.8.8.8/", False),
        ("http://8.8.8.8@127.0.0.1/live", False),
        ("http://127.0.0.1#@8.8.8.8/live", False),
        ("http://127.0.0.9:81/anything", True),  # in the network
        ("http://127.0.0.12/anything", False),
        ("http://2130706433/", False),  # 127.0.0.1 as one number
        ("http://nowhere.invalid/", False),
        ("webrtc:9000", True),
        ("webrtc:8081", False),
        ("udp://0.0.0.0:5000", True),
        ("udp://0.0.0.0:5001", False),
    ],
)
def test_a_list_allows_what_it_names(source: str, allowed: bool) -> None:
    assert allows(SourcePolicy(LISTED, open_by_default=True), source) is allowed


def test_symbolic_links_are_followed_before_a_path_is_compared(tmp_path: Path) -> None:
    videos = tmp_path / "videos"
    videos.mkdir()
    (videos / "link.mp4").symlink_to(DEMO_CLIP)
    (tmp_path / "alias").symlink_to(videos)
    (videos / "own.mp4").write_bytes(b"x")
    policy = SourcePolicy([f"{tmp_path / 'alias'}/*"], open_by_default=False)
    assert allows(policy, str(videos / "own.mp4"))
    assert not allows(policy, str(videos / "link.mp4"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(videos)
        assert allows(policy, "own.mp4")
        assert not allows(policy, os.path.relpath(DEMO_CLIP))


def test_an_entry_that_is_no_network_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.0/99 is not a valid network"):
        SourcePolicy(["10.0.0.0/99"], open_by_default=True)


def test_the_api_refuses_what_is_not_listed(streams: Streams, tmp_path: Path) -> None:
    listed = serve(controller_of(streams, [str(DEMO_CLIP)]), port=0)
    network = serve(controller_of(streams, open_by_default=False), "0.0.0.0", 0, "sesame")
    body = {"source": str(DEMO_CLIP), "name": "clip", "detect": "person"}
    try:
        for source in (str(tmp_path), "rtsp://10.0.0.1/x", "tcp://0.0.0.0:1?listen=1"):
            answer = ask(listed, "POST", "/streams", {**body, "source": source})
            assert (answer.status, error_of(answer)) == (403, REFUSED)
        assert ask(listed, "POST", "/streams", body).status == 201
        assert ask(network, "POST", "/streams?token=sesame", {**body, "name": "b"}).status == 403
    finally:
        listed.close()
        network.close()


@contextmanager
def web_server(host: str, location: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """A server of the demo clip, or of redirects to `location`; its address, and the paths that were requested."""
    requested: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            if location and self.path == "/go":
                self.send_response(302)
                self.send_header("Location", location)
                self.end_headers()
            else:
                self.send_response(200)
                self.send_header("Content-Type", "video/mp4")
                self.send_header("Content-Length", str(DEMO_CLIP.stat().st_size))
                self.end_headers()
                self.wfile.write(DEMO_CLIP.read_bytes())

    with serving(Handler, host) as port:
        yield f"http://{host}:{port}", requested


def test_a_redirect_leads_to_listed_sources_only(streams: Streams) -> None:
    body = {"name": "film", "detect": "person"}
    with web_server("127.0.0.2") as (inside, reached), web_server("127.0.0.1", f"{inside}/secret") as (outside, _):
        server = serve(controller_of(streams, ["127.0.0.1/32"]), port=0)
        try:
            assert ask(server, "POST", "/streams", {**body, "source": f"{outside}/go"}).status == 201
            wait_for(lambda: ask(server, "GET", "/streams/film").json["state"] == "failed")
            assert ask(server, "GET", "/streams/film").json["reason"] == REFUSED
            assert reached == []
        finally:
            server.close()


def test_a_redirect_to_a_listed_source_is_followed(streams: Streams) -> None:
    body = {"name": "film", "detect": "person"}
    with web_server("127.0.0.1", "/film.mp4") as (address, _):
        server = serve(controller_of(streams, ["127.0.0.1/32"]), port=0)
        try:
            assert ask(server, "POST", "/streams", {**body, "source": f"{address}/go"}).status == 201
            wait_for(lambda: ask(server, "GET", "/streams/film").json["frames_out"] > 0)
            assert ask(server, "DELETE", "/streams/film").status == 204
        finally:
            server.close()


def test_a_camera_redirects_to_listed_sources_only(streams: Streams) -> None:
    with ScriptedCamera(lambda call: call.linger()) as inside:

        def answer(call: Call, request: Request) -> str | None:
            return f"RTSP/1.0 302 Moved\r\nLocation: {inside.url('secret')}\r\n\r\n"

        with ScriptedCamera(lambda call: call.linger(), answer=answer) as camera:
            server = serve(controller_of(streams, [f"{camera.url()}*"]), port=0)
            try:
                body = {"source": camera.url(), "name": "door", "detect": "person"}
                assert ask(server, "POST", "/streams", body).status == 201
                wait_for(lambda: ask(server, "GET", "/streams/door").json["state"] == "failed")
                assert ask(server, "GET", "/streams/door").json["reason"] == REFUSED
                assert inside.calls == []
            finally:
                server.close()
