"""The demo's server, asked over HTTP and by an aiortc peer that publishes; the page itself is in tests/e2e."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import pytest

from saccade.engine import Engine
from saccade.pipeline.api.demo import Demo
from saccade.pipeline.api.static_files import FILES
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import Prompts, StreamConfig
from saccade.pipeline.errors import ConfigError
from tests.support.command import Command, start_saccade
from tests.support.webrtc import Drawn, Publisher, leaving_no_thread, offer_of, own_loop, until

TOKEN = "sesame"
PERSON = Prompts(detect=["person"])


@pytest.fixture(scope="module")
def demo(engine: Engine) -> Iterator[Demo]:
    with Demo(engine, PERSON, port=0) as opened:
        yield opened


def ask(url: str, data: bytes | None = None, **headers: str) -> tuple[int, bytes, Any]:
    """Status, body and headers of a response."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=10) as response:
            return response.status, response.read(), response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


def put_json(url: str, value: object) -> tuple[int, bytes]:
    request = urllib.request.Request(
        url, json.dumps(value).encode(), {"Content-Type": "application/json"}, method="PUT"
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def get_json(url: str) -> Any:
    return json.loads(ask(url)[1])


# ---- over HTTP


def test_pages_are_served_with_a_strict_security_policy(demo: Demo) -> None:
    for place, path in FILES.items():
        status, body, headers = ask(demo.url + place[1:])
        assert status == 200
        assert body == path.read_bytes()
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        text = path.read_text()
        assert not {"https://", "//cdn", "style="} & {part for part in ("https://", "//cdn", "style=") if part in text}
    assert ask(f"{demo.url}clip.mp4", Range="bytes=0-9")[0] == 206
    for escape in ("../demo.py", "%2e%2e/demo.py", "demo.py", "README.md"):
        assert ask(demo.url + escape)[0] == 404


def test_what_the_model_knows_and_what_it_calls_things(demo: Demo) -> None:
    model = get_json(f"{demo.url}model")
    assert (model["model"], model["prompts"]["detect"]) == ("nano", ["person"])
    assert "dining table" in model["classes"]
    assert model["colors"]["person"].startswith("#")
    assert get_json(f"{demo.url}names?of=people%20or%20bikes")["names"] == ["person", "bicycle"]
    unknown = get_json(f"{demo.url}names?of=zebra%20crossing")["error"]
    assert "zebra crossing" in unknown
    assert "dining table" in unknown  # it lists what it knows
    assert "error" in get_json(f"{demo.url}names")


def test_bodies_that_are_too_large_are_refused(demo: Demo) -> None:
    large = b"v=0\r\n" + b"x" * 100_000
    assert ask(f"{demo.url}whip", large, **{"Content-Type": "application/sdp"})[0] == 413
    assert ask(f"{demo.url}offer", b'{"a": "' + large + b'"}', **{"Content-Type": "application/json"})[0] == 413
    assert ask(f"{demo.url}streams", b'{"a": "' + large + b'"}', **{"Content-Type": "application/json"})[0] == 413
    deep = b"[" * 60_000
    assert ask(f"{demo.url}offer", deep, **{"Content-Type": "application/json"})[0] == 400


def test_with_a_token_only_the_page_itself_is_open(engine: Engine) -> None:
    with Demo(engine, PERSON, port=0, token=TOKEN) as demo:
        assert ask(demo.url)[0] == 200
        assert ask(f"{demo.url}video/link.js")[0] == 200
        for closed in ("model", "names?of=cat", "streams", "metrics"):
            assert ask(demo.url + closed)[0] == 401
            assert ask(demo.url + closed, Authorization=f"Bearer {TOKEN}")[0] == 200
        sdp = {"Content-Type": "application/sdp"}
        assert ask(f"{demo.url}whip", b"v=0", **sdp)[0] == 401
        assert ask(f"{demo.url}whep/door", b"v=0", **sdp)[0] == 401


def test_it_is_not_open_to_others_without_a_token(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="token"):
        Demo(engine, PERSON, host="0.0.0.0", port=0)


def test_a_file_runs_on_and_on_at_its_own_pace(engine: Engine) -> None:
    with leaving_no_thread(), Demo(engine, PERSON, port=0) as demo:
        begun = time.monotonic()
        demo.controller.add(StreamConfig(source=str(DEMO_CLIP), detect=["person"], name="clip", loop=True))
        until(lambda: get_json(f"{demo.url}streams")["streams"][0]["frames_out"] >= 5)
        (stream,) = get_json(f"{demo.url}streams")["streams"]
        assert (stream["name"], stream["live"]) == ("clip", True)
        assert stream["frames_in"] <= 2 + 10 * (time.monotonic() - begun)  # the clip has ten a second


# ---- a peer


class Page:
    """What a page is: a peer that publishes one image over and over, and talks over a data channel."""

    def __init__(self, loop: asyncio.AbstractEventLoop, url: str) -> None:
        self.publisher = Publisher(loop)
        self.messages: list[dict[str, Any]] = []
        self.publisher.do(self._begin(url))

    @property
    def records(self) -> list[dict[str, Any]]:
        return [one for one in self.messages if "schema" in one]

    @property
    def answers(self) -> list[dict[str, Any]]:
        return [one for one in self.messages if "schema" not in one]

    def send(self, message: object) -> dict[str, Any]:
        """Send a message, and return the answer."""
        before = len(self.answers)
        text = message if isinstance(message, str) else json.dumps(message)
        self.publisher.loop.call_soon_threadsafe(self.channel.send, text)
        until(lambda: len(self.answers) > before)
        return self.answers[-1]

    async def _begin(self, url: str) -> None:
        import httpx
        from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription

        with av.open(str(DEMO_CLIP)) as clip:
            image = next(clip.decode(video=0)).to_ndarray(format="rgb24")
        self.publisher.connection = connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.channel = connection.createDataChannel("results")
        self.channel.on("message", lambda text: self.messages.append(json.loads(text)))
        other = connection.createDataChannel("other")
        other.on("message", lambda text: self.messages.append({"wrong": text}))
        offer = await offer_of(connection, "VP8", Drawn(lambda _: image))
        async with httpx.AsyncClient(timeout=20) as http:
            response = await http.post(f"{url}whip", content=offer, headers={"Content-Type": "application/sdp"})
        if response.status_code != 201:
            await connection.close()
        assert response.status_code == 201, response.text
        await connection.setRemoteDescription(RTCSessionDescription(response.text, "answer"))


def test_a_surplus_page_gets_a_clear_refusal(engine: Engine) -> None:
    with own_loop() as loop, Demo(engine, PERSON, port=0) as demo:
        demo.streams._max = 0
        with pytest.raises(AssertionError, match="the limit of 0 running streams is reached"):
            Page(loop, demo.url)
        assert demo.whip.peers == 0


@contextmanager
def publishing_page(demo: Demo) -> Iterator[Page]:
    with own_loop() as loop:
        page = Page(loop, demo.url)
        try:
            until(lambda: page.records)
            yield page
        finally:
            page.publisher.do(page.publisher.connection.close())
            until(lambda: demo.whip.peers == 0 and not demo.streams.names)


def test_a_data_channel_carries_records_and_changes_prompts(demo: Demo) -> None:
    with publishing_page(demo) as page:
        until(lambda: any(page.records[-1]["objects"]))
        assert {one["label"] for one in page.records[-1]["objects"]} == {"person"}
        answer = page.send({"point": ["people"], "detect": [], "conf": 0.3})
        assert (answer["prompts"]["point"], answer["prompts"]["conf"]) == (["person"], 0.3)
        until(lambda: page.records[-1]["points"] and not page.records[-1]["objects"])
        assert page.send({})["prompts"]["point"] == ["person"]  # which changes nothing


def test_a_published_stream_takes_zones_and_rules(demo: Demo) -> None:
    zones = {"hall": "0,0,1,0,1,1,0,1"}
    rules = [{"name": "entry", "when": "person in hall"}]
    with publishing_page(demo):
        address = f"{demo.url}streams/{demo.streams.names[0]}"
        for path, value in (("zones", {"zones": zones}), ("rules", {"rules": rules})):
            status, text = put_json(f"{address}/{path}", value)
            assert status == 200, (path, text)
        until(lambda: [one["name"] for one in get_json(f"{address}/rules/state")["rules"] or ()] == ["entry"])


def test_an_invalid_message_is_answered_and_changes_nothing(demo: Demo) -> None:
    with publishing_page(demo) as page:
        cases: list[tuple[object, str]] = [
            ({"detect": ["unicorn"]}, "unicorn"),
            ({"detect": []}, "no prompts"),
            ("{", "not JSON"),
            ("[" * 4000, "not JSON"),
            ({"query": ["why?"]}, "does not support query"),
            ({"conf": 7}, "conf"),
            ({"source": "street.mp4"}, "unknown key"),
            ([], "should be"),
        ]
        for message, reason in cases:
            answer = page.send(message)
            assert reason in answer["error"]
            assert "\n" not in answer["error"]
        assert page.send({})["prompts"]["detect"] == ["person"]
        assert not [one for one in page.messages if "wrong" in one]


# ---- the command


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    running = start_saccade(*arguments)
    killer = threading.Timer(60, running.kill)
    killer.start()
    try:
        yield running
    finally:
        killer.cancel()
        running.kill()
        running.communicate()


def test_the_command_prints_the_address_and_ends_on_sigint() -> None:
    with command("demo", "--port", "0", "--source", str(DEMO_CLIP)) as running:
        assert running.stdout is not None
        line = running.stdout.readline()
        url = line.split()[2]
        assert url.startswith("http://127.0.0.1:"), line
        until(lambda: get_json(f"{url}streams/demo")["frames_out"] > 0)
        running.send_signal(signal.SIGTERM)
        _, errors = running.communicate(timeout=30)
        assert running.returncode == 0, errors


def test_where_others_can_reach_it_a_token_is_made_up() -> None:
    with command("demo", "--host", "0.0.0.0", "--port", "0") as running:
        assert running.stdout is not None
        address, _, token = running.stdout.readline().split()[2].partition("?token=")
        port = address.rstrip("/").rpartition(":")[2]
        assert len(token) >= 16
        assert ask(f"http://127.0.0.1:{port}/model")[0] == 401
        assert ask(f"http://127.0.0.1:{port}/model?token={token}")[0] == 200
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=30)
    with command("demo", "--host", "0.0.0.0", "--port", "0", "--token", TOKEN) as running:
        assert running.stdout is not None
        assert TOKEN not in running.stdout.readline()  # who chose it knows it, and what is printed may be kept


@pytest.mark.parametrize("arguments", [["--detect", "unicorn"], ["--port", "70000"], ["--source", "missing.mp4"]])
def test_wrong_input_is_reported_in_one_line(arguments: list[str], tmp_path: Path, saccade: Command) -> None:
    done = saccade("demo", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout.count("open http")) == (2, 0)
    assert done.stderr.count("\n") == 1
