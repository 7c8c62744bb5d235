"""`saccade mcp`, driven by the protocol's own client: over standard input and output, and over HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from saccade.engine import Engine
from saccade.pipeline.api.demo import Demo
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.cli.api_client import ApiClient
from saccade.pipeline.cli.mcp.serve import serve
from saccade.pipeline.cli.mcp.tools import make_server
from saccade.pipeline.config import Prompts, StreamConfig
from saccade.pipeline.config.file import load
from saccade.pipeline.errors import ConfigError
from saccade.pipeline.run import OpenedRun, opened_run
from tests.support import REPO
from tests.support.cameras import free_port
from tests.support.webrtc import until

mcp = pytest.importorskip("mcp")
TOKEN = "sesame"
COMMAND = [sys.executable, "-m", "saccade", "mcp"]


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    with (
        Engine.load("nano", device="cpu") as engine,
        Demo(engine, Prompts(detect=["person"]), port=0, token=TOKEN) as opened,
    ):
        opened.controller.add(
            StreamConfig(source=str(DEMO_CLIP), name="hall", detect=["person"], vid_stride=5, loop=True)
        )
        until(lambda: "hall" in opened.videos.streams, seconds=30)
        yield opened


def environment() -> dict[str, str]:
    return {**os.environ, "SACCADE_TOKEN": TOKEN, "PYTHONPATH": str(REPO)}


async def use_tools(target: Any) -> dict[str, Any]:
    async with mcp.Client(target) as client:
        named = {tool.name for tool in (await client.list_tools()).tools}
        streams = await client.call_tool("list_streams", {})
        shown = await client.call_tool("look", {"stream": "hall"})
        found = await client.call_tool("detect", {"stream": "hall", "objects": ["person"]})
        asked = await client.call_tool("ask", {"stream": "hall", "question": "Who is it?"})
        missing = await client.call_tool("look", {"stream": "nowhere"})
        events = await client.call_tool("events", {})
        assert "stores no events" in events.content[0].text
        return {"named": named, "streams": streams, "look": shown, "detect": found, "ask": asked, "missing": missing}


def check(used: dict[str, Any]) -> None:
    assert used["named"] == {"list_streams", "look", "detect", "ask", "watch", "events", "clip"}
    (stream,) = used["streams"].structured_content["result"]
    assert (stream["name"], stream["ok"], stream["detect"]) == ("hall", True, ["person"])
    (shown,) = used["look"].content
    with Image.open(io.BytesIO(base64.b64decode(shown.data))) as image:
        assert (shown.mime_type, image.size) == ("image/jpeg", (640, 360))
    assert not used["detect"].is_error
    assert isinstance(used["detect"].structured_content["result"], list)
    assert (used["ask"].is_error, used["missing"].is_error) == (True, True)
    assert "nano can detect and point, not query" in used["ask"].content[0].text
    assert "this stream does not exist" in used["missing"].content[0].text


def test_its_own_client_uses_the_tools_over_stdio(demo: Demo) -> None:
    command = mcp.StdioServerParameters(command=COMMAND[0], args=[*COMMAND[1:], "--url", demo.url], env=environment())
    check(asyncio.run(use_tools(mcp.stdio_client(command))))


def test_its_own_client_uses_the_tools_over_http(demo: Demo) -> None:
    from mcp.client.streamable_http import streamable_http_client

    place = f"127.0.0.1:{free_port()}"
    command = [*COMMAND, "--url", demo.url, "--http", place]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            assert b"/mcp" in process.stderr.readline()
            url = f"http://{place}/mcp"
            until(lambda: status_of(url) is not None, seconds=20)
            assert status_of(url) == 401  # without the token
            import httpx

            async def over_http() -> dict[str, Any]:
                headers = {"Authorization": f"Bearer {TOKEN}"}
                async with httpx.AsyncClient(headers=headers, timeout=60) as http:
                    return await use_tools(streamable_http_client(url, http_client=http))

            check(asyncio.run(over_http()))
        finally:
            process.terminate()
            process.wait(20)


def test_its_own_client_waits_for_a_rule_and_sees_it(tmp_path: Path) -> None:
    path, port = tmp_path / "camera.yaml", free_port()
    rules = "[{name: visitor, when: person in door for 1s}]"
    stream = f"{{name: hall, source: '{DEMO_CLIP}', end: 3, zones: {{door: '0,0,1,0,1,1,0,1'}}, rules: {rules}}}"
    path.write_text(f"http: '{port}'\nstore: '{tmp_path / 'store'}'\ndetect: [person]\nstreams: [{stream}]\n")

    async def use(opened: OpenedRun) -> tuple[Any, Any, Any]:
        url = f"http://127.0.0.1:{port}"
        async with ApiClient(url) as api, mcp.Client(make_server(api, "test")) as client:
            waiting = asyncio.create_task(client.call_tool("watch", {"rule": "visitor"}))
            await asyncio.sleep(1)  # it has looked what there was before
            (run,) = opened.controller.start()
            event = (await waiting).structured_content["result"]
            assert await asyncio.to_thread(run.join, 60)
            listed = await client.call_tool("events", {"stream": "hall"})
            return event, listed, await client.call_tool("clip", {"event": event["id"]})

    with opened_run(load(path, {})) as opened:
        event, listed, clip = asyncio.run(use(opened))
    assert (event["rule"], event["stream"], event["label"]) == ("visitor", "hall", "person")
    assert [one["id"] for one in listed.structured_content["result"]] == [event["id"]]
    image, text = clip.content
    assert (image.mime_type, event["id"] in text.text) == ("image/jpeg", True)


def status_of(url: str) -> int | None:
    request = urllib.request.Request(url, json.dumps({}).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        time.sleep(0.05)
        return None


@pytest.mark.parametrize(
    ("url", "http", "message"),
    [
        ("rtsp://127.0.0.1", None, "expected the address of a running Saccade"),
        ("http://127.0.0.1:1", "0.0.0.0:9000", "requires a token"),
        ("http://127.0.0.1:1", "a b:c", "expected an address HOST:PORT"),
    ],
)
def test_a_bad_address_is_one_line(url: str, http: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve(url, None, None, http)
