"""What was recorded of a camera, over HTTP: its times, one MP4, HLS that FFmpeg plays, and who may not."""

from __future__ import annotations

import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import pytest

from saccade.engine import Engine
from saccade.pipeline import Streams
from saccade.pipeline.api.http_server import HttpServer, serve
from saccade.pipeline.asset_files import DEMO_CLIP
from saccade.pipeline.config import StreamConfig
from tests.pipeline.api.conftest import TOKEN
from tests.support.cameras.faulty import FaultyCamera, coded_clip
from tests.support.control import controller_of

LONG_S = 60  # far beyond what any of these needs; only so that a hang fails


@pytest.fixture(scope="module")
def camera() -> Iterator[FaultyCamera]:
    one = FaultyCamera(coded_clip(DEMO_CLIP, (320, 180), rate=10, seconds=6), rate=10)
    yield one
    one.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recording")


@pytest.fixture(scope="module")
def server(engine: Engine, camera: FaultyCamera, folder: Path) -> Iterator[HttpServer]:
    """A server with a camera of which some seconds are recorded."""
    url = f"rtsp://127.0.0.1:{camera.port}/live"
    with Streams(engine) as streams:
        controller = controller_of(streams)
        controller.add(StreamConfig(name="door", source=url, record=f"{folder}?segment=3"))
        controller.add(StreamConfig(name="yard", source=url, detect=["person"], max_fps=1))
        one = serve(controller, port=0, token=TOKEN)
        deadline = time.monotonic() + LONG_S
        while sum(span["end"] - span["begin"] for span in read(one, "door/recording/spans?from=1h")["spans"]) < 7:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield one
        one.close()


def ask(server: HttpServer, path: str, token: str | None = TOKEN, **headers: str) -> tuple[int, Any, bytes]:
    given = {"Authorization": f"Bearer {token}", **headers} if token else headers
    request = urllib.request.Request(f"{server.url}/streams/{path}", headers=given)
    try:
        with urllib.request.urlopen(request, timeout=LONG_S) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def read(server: HttpServer, path: str) -> Any:
    status, _, body = ask(server, path)
    assert status == 200, body
    return json.loads(body)


def test_a_time_is_given_as_one_mp4(server: HttpServer, folder: Path, tmp_path: Path) -> None:
    (span,) = read(server, "door/recording/spans?from=1h")["spans"]
    assert span["after"] == "the recording began"
    begin = span["begin"]
    status, headers, body = ask(server, f"door/recording?from={begin + 2.1}&to={begin + 5.05}")
    assert (status, headers["content-type"]) == (200, "video/mp4")
    assert "attachment" in headers["content-disposition"]
    (tmp_path / "part.mp4").write_bytes(body)
    with av.open(str(tmp_path / "part.mp4")) as part:
        assert 25 <= sum(1 for _ in part.decode(video=0)) <= 45
    assert not list(folder.rglob(".export-*"))


def test_hls_plays_over_files(server: HttpServer) -> None:
    path = f"door/recording/index.m3u8?from=1h&token={TOKEN}"
    status, headers, body = ask(server, path, token=None)
    assert (status, headers["content-type"]) == (200, "application/vnd.apple.mpegurl")
    assert body.count(b"#EXT-X-MAP") >= 2
    with av.open(f"{server.url}/streams/{path}") as stream:
        frames = sum(1 for _ in itertools.islice(stream.decode(video=0), 90))
    assert frames == 90  # the last of them had not been recorded when it was opened
    longer = ask(server, path, token=None)[2]
    assert longer.startswith(body)
    assert longer != body


def test_parts_are_bytes_of_files(server: HttpServer, tmp_path: Path) -> None:
    parts = read(server, "door/recording/spans?from=1h&parts=true")["parts"]
    assert all(part["codecs"].startswith("avc1.") for part in parts)
    one = parts[0]
    path = f"door/recording/files/{one['file']}"
    _, _, head = ask(server, path, Range=f"bytes=0-{one['head'] - 1}")
    status, _, data = ask(server, path, Range=f"bytes={one['offset']}-{one['offset'] + one['size'] - 1}")
    assert status == 206
    (tmp_path / "part.mp4").write_bytes(head + data)
    with av.open(str(tmp_path / "part.mp4")) as part:
        assert sum(1 for _ in part.decode(video=0)) == pytest.approx(10 * one["duration"], abs=1)


@pytest.mark.parametrize(
    ("path", "status", "complaint"),
    [
        ("door/recording?from=9&to=10", 404, "nothing was recorded"),
        ("door/recording?from=10&to=9", 422, "from should be earlier than to"),
        ("door/recording/spans?from=tomorrow", 422, "times in seconds"),
        ("door/recording/files/..%2f..%2fetc%2fpasswd", 404, "the recording has no file"),
        ("yard/recording", 404, "is not recorded"),
        ("gate/recording/spans", 404, "does not exist"),
    ],
)
def test_what_there_is_not_is_said(server: HttpServer, path: str, status: int, complaint: str) -> None:
    found, _, body = ask(server, path)
    assert (found, complaint in json.loads(body)["error"]) == (status, True), body


def test_without_a_token_nothing_is_shown(server: HttpServer) -> None:
    for path in ("recording", "recording/spans", "recording/index.m3u8", "recording/files/x.mp4"):
        assert ask(server, f"door/{path}", token=None)[0] == 401
