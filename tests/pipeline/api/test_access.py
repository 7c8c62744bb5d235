"""Who may use the servers and how: probes without a token, tokens from files, TLS, and text that is no Unicode."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from PIL import Image

from saccade.engine import Engine
from saccade.engine.tasks import Detect
from saccade.pipeline import ConfigError, Streams, load, opened_run
from saccade.pipeline.api.demo import Demo
from saccade.pipeline.api.http_server import serve
from saccade.pipeline.api.whep_sink import open_whep
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import Prompts
from saccade.sinks import SinkError, open_sink
from saccade.sources import SourceError, open_source
from saccade.web.tls import self_signed, server_context
from tests.pipeline.api.test_http_server import ask, error_of, wait_for
from tests.support.cameras import free_port
from tests.support.command import LONG_S, start_saccade
from tests.support.control import controller_of
from tests.support.sinks.feed import make_certificate


def ask_tls(url: str, path: str, context: ssl.SSLContext, **headers: str) -> tuple[int, Any]:
    place = urlsplit(url)
    assert place.scheme == "https"
    connection = http.client.HTTPSConnection(place.hostname or "", place.port, timeout=LONG_S, context=context)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_probes_need_no_token_and_give_no_detail(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(controller_of(streams), port=0, token="sesame")
    try:
        bad = {"source": "rtsp://127.0.0.1:1/door", "name": "door", "detect": "person"}
        assert ask(server, "POST", "/streams?token=sesame", bad).status == 201
        wait_for(lambda: ask(server, "GET", "/healthz?token=sesame").status == 503)
        for path in ("/livez", "/readyz"):
            assert (ask(server, "GET", path).status, ask(server, "GET", path).json) == (200, {"ok": True})
        assert ask(server, "GET", "/healthz").status == 401
        streams.close()
        assert (ask(server, "GET", "/livez").status, ask(server, "GET", "/readyz").status) == (200, 503)
        assert ask(server, "GET", "/readyz").json == {"ok": False}
    finally:
        server.close()


def test_a_stuck_model_is_alive_but_not_ready(streams: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.pipeline.runtime.streams._STUCK_S", -1.0)
    server = serve(controller_of(streams), port=0)
    try:
        streams.add("clip", open_source(DEMO_CLIP), [Detect("person")])
        assert (ask(server, "GET", "/livez").status, ask(server, "GET", "/readyz").status) == (200, 503)
    finally:
        server.close()


HALF = "\ud800"  # one half of a surrogate pair, which JSON can write and UTF-8 cannot


@pytest.mark.parametrize(
    ("method", "path", "body", "message"),
    [
        ("POST", "/streams", {"source": "a.mp4", "name": HALF, "detect": "person"}, "name"),
        ("POST", "/streams", {"source": HALF, "detect": "person"}, "source"),
        ("POST", "/streams", {"source": "a.mp4", "detect": [HALF]}, "detect"),
        ("POST", "/streams", {"source": "a.mp4", "detect": "person", HALF: 1}, "valid string"),
        ("POST", "/streams", {"source": f"{HALF}://a", "detect": "person"}, "source"),
        ("PATCH", "/streams/clip", {"detect": [HALF]}, "detect"),
        ("PATCH", "/streams/%ED%A0%80", {"detect": ["cat"]}, "does not exist"),
    ],
)
def test_half_a_character_is_a_bad_request(
    streams: Streams, method: str, path: str, body: dict[str, object], message: str
) -> None:
    server = serve(controller_of(streams), port=0)
    try:
        streams.add("clip", open_source(DEMO_CLIP), [Detect("person")])
        answer = ask(server, method, path, body)
        assert answer.status in (400, 404, 422)
        assert message in error_of(answer)
    finally:
        server.close()


def test_a_source_may_have_a_name_that_is_not_utf8(streams: Streams, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.png")
    Image.new("RGB", (64, 48)).save(path)
    server = serve(controller_of(streams), port=0)
    try:
        answer = ask(server, "POST", "/streams", {"source": str(path), "detect": "person"})
        assert (answer.status, answer.json["source"], answer.json["name"]) == (201, str(path), "caf")
        refused = ask(server, "POST", "/streams", {"source": f"{path}.mp4", "detect": "person"})
        assert (refused.status, error_of(refused)) == (422, f"no such file: {tmp_path}/caf\\udce9.png.mp4")
    finally:
        server.close()


def test_a_session_reads_its_token_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sesame\n")
    port = free_port()
    values = {"http": f"0.0.0.0:{port}", "http_token_file": str(tmp_path / "token")}
    with opened_run(load(None, values)):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)
        for token, status in (("sesame", 200), ("wrong", 401)):
            connection.request("GET", "/healthz", headers={"Authorization": f"Bearer {token}"})
            response = connection.getresponse()
            response.read()
            assert response.status == status
        connection.close()


@pytest.mark.parametrize("content", [None, b"", b"two words", b"\xff\xfe"])
def test_a_file_without_a_token_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    pattern = re.escape(str(path))
    with (
        pytest.raises(ConfigError, match=pattern),
        opened_run(load(None, {"http": "127.0.0.1:0", "http_token_file": str(path)})),
    ):
        pytest.fail("it was opened")
    with pytest.raises(SinkError, match=pattern):
        open_whep(f"whep://127.0.0.1:{free_port()}?token_file={path}")
    with pytest.raises(SinkError, match=pattern):
        open_sink(f"ws://127.0.0.1:0?token_file={path}")
    with pytest.raises(SourceError, match=pattern):
        open_source(f"webrtc://127.0.0.1:0?token_file={path}")


def test_an_address_on_the_network_takes_a_token_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("sesame")
    for options in (f"?token_file={tmp_path / 'token'}", ""):
        if not options:
            monkeypatch.setenv("SACCADE_TOKEN", "sesame")
        open_whep(f"whep://0.0.0.0:{free_port()}{options}").close()
        open_sink(f"ws://0.0.0.0:0{options}").close()
        open_source(f"webrtc://0.0.0.0:0{options}").close()
    monkeypatch.delenv("SACCADE_TOKEN")
    with pytest.raises(SinkError, match="token"):
        open_whep(f"whep://0.0.0.0:{free_port()}")


def test_every_server_speaks_tls_with_a_certificate(tmp_path: Path, streams: Streams) -> None:
    certificate, key = make_certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=str(certificate))
    server = serve(controller_of(streams), port=0, tls=server_context(str(certificate), str(key)))
    viewer = open_whep(f"whep://127.0.0.1:{free_port()}?cert={certificate}&key={key}")
    publisher = open_source(f"webrtc://127.0.0.1:0?cert={certificate}&key={key}")
    try:
        assert ask_tls(server.url, "/livez", trusting)[0] == 200
        assert ask_tls(viewer.url, "/streams", trusting) == (200, b'{"streams": []}')
        assert ask_tls(publisher.info.url, "/whip", trusting)[0] == 405  # only POST
    finally:
        publisher.close()
        viewer.close()
        server.close()


def test_a_session_serves_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    port = free_port()
    values = {"http": f"127.0.0.1:{port}", "http_cert": str(certificate), "http_key": str(key)}
    with opened_run(load(None, values)):
        trusting = ssl.create_default_context(cafile=str(certificate))
        assert ask_tls(f"https://127.0.0.1:{port}", "/readyz", trusting)[0] == 200
    with (
        pytest.raises(ConfigError, match="a TLS key is set without a certificate"),
        opened_run(load(None, {"http": "127.0.0.1:0", "http_key": str(key)})),
    ):
        pytest.fail("it was opened")


def test_a_self_signed_certificate_is_for_this_machine(engine: Engine) -> None:
    with Demo(engine, Prompts(detect=["person"]), port=0, tls=self_signed("127.0.0.1")) as demo:
        place = urlsplit(demo.url)
        pem = ssl.get_server_certificate((place.hostname or "", place.port or 0))
        assert ask_tls(demo.url, "/", ssl.create_default_context(cadata=pem))[0] == 200


def test_the_demo_command_makes_a_certificate() -> None:
    arguments = ["demo", "--port", "0", "--tls", "--no-browser", "--quiet", "--device", "cpu"]
    with start_saccade(*arguments, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"https://127\.0\.0\.1:(\d+)/", line)
            assert found, line
            pem = ssl.get_server_certificate(("127.0.0.1", int(found[1])))
            status, body = ask_tls(f"https://127.0.0.1:{found[1]}", "/model", ssl.create_default_context(cadata=pem))
            assert (status, json.loads(body)["model"]) == (200, "nano")
            process.terminate()
            deadline = time.monotonic() + LONG_S
            while process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            process.kill()
    assert process.returncode == 0
