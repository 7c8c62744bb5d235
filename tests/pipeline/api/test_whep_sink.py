from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request

import pytest

from saccade.pipeline.api.whep_sink import ViewerSink, open_whep
from saccade.sinks import SinkError
from tests.support.webrtc import leaving_no_thread


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("whep:door", "not a valid address"),
        ("whep:99999", "not a valid address"),
        ("whep:0", "not a valid address"),
        ("whep://", "not a valid address"),
        ("whep://127.0.0.1:8082/door", "only host, port"),
        ("whep:8082?tokn=x", "did you mean 'token'"),
        ("whep:8082?ice=turn:me:sesame@", "turn:USER:PASSWORD@HOST:PORT"),
        ("whep:8082?ice=http://x", "stun:HOST:PORT"),
        ("whep://0.0.0.0:8082", "token"),
        ("whep://192.0.2.1:8082?token=sesame", "cannot listen"),
    ],
)
def test_a_bad_address_is_refused_in_one_line_without_its_secret(target: str, message: str) -> None:
    with leaving_no_thread(), pytest.raises(SinkError) as caught:
        open_whep(target)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "sesame" not in str(caught.value)


def test_the_page_is_public_and_the_streams_need_the_token() -> None:
    port = free_port()
    with leaving_no_thread():
        sink = open_whep(f"whep:{port}")
        try:
            assert sink.shared
            assert sink.url == f"http://127.0.0.1:{port}/"
            for name in ("", "demo.js", "video/link.js", "demo.css", "model"):
                assert status(sink.url + name) == 200
            with urllib.request.urlopen(f"{sink.url}streams", timeout=5) as response:
                assert json.load(response) == {"streams": []}
            assert status(f"{sink.url}whep/door") == 405
            with pytest.raises(SinkError, match="cannot listen"):
                open_whep(f"whep:{port}")
        finally:
            sink.close()
            sink.close()


def test_with_a_token_only_the_page_is_open() -> None:
    with leaving_no_thread():
        sink = ViewerSink(port=0, token="sesame")
        try:
            assert status(sink.url) == 200
            assert status(f"{sink.url}streams") == 401
            assert status(f"{sink.url}streams?token=sesame") == 200
        finally:
            sink.close()
