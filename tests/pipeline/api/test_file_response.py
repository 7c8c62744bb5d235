"""Files that change while they are sent, over a real server."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from saccade.pipeline.api.file_response import OpenFileResponse
from saccade.web.server import AppServer

BEFORE = bytes(range(256)) * 1100  # four chunks of a response, and a part of a fifth
LONGER = b"longer" * 100_000


def replaced(path: Path) -> None:
    path.with_suffix(".new").write_bytes(LONGER)
    path.with_suffix(".new").replace(path)


def extended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(LONGER)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "clip.mp4").write_bytes(BEFORE)
    return tmp_path / "clip.mp4"


@pytest.fixture(params=[replaced, extended, Path.unlink])
def url(path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of the file, which changes when a response has been made."""
    change: Callable[[Path], None] = request.param

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = OpenFileResponse(path.open("rb"), "video/mp4", "no-cache")
        change(path)
        await response(scope, receive, send)

    with closing(AppServer(app, "127.0.0.1", 0, "test")) as server:
        yield server.url


@pytest.mark.parametrize(
    ("asked", "status", "wanted"),
    [
        (None, 200, BEFORE),
        ("bytes=4-7", 206, BEFORE[4:8]),
        ("bytes=65530-", 206, BEFORE[65530:]),
        ("bytes=-10", 206, BEFORE[-10:]),
    ],
)
def test_a_changed_file_is_sent_as_it_was(url: str, asked: str | None, status: int, wanted: bytes) -> None:
    headers = {} if asked is None else {"Range": asked}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
        assert (answer.status, answer.headers["Content-Type"]) == (status, "video/mp4")
        assert int(answer.headers["Content-Length"]) == len(wanted)
        assert answer.read() == wanted


def test_several_ranges_and_the_head_are_those_of_the_old_file(url: str, path: Path) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Range": "bytes=0-1,8-9"}), timeout=20) as answer:
        body = answer.read()
        assert len(body) == int(answer.headers["Content-Length"])
        assert body.count(f"/{len(BEFORE)}".encode()) == 2
    path.write_bytes(BEFORE)
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=20) as answer:
        assert int(answer.headers["Content-Length"]) == len(BEFORE)
        assert answer.read() == b""


def test_the_file_is_closed_with_the_response(path: Path) -> None:
    file = path.open("rb")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await OpenFileResponse(file, "video/mp4", "no-cache")(scope, receive, send)

    with (
        closing(AppServer(app, "127.0.0.1", 0, "test")) as server,
        urllib.request.urlopen(server.url, timeout=20) as answer,
    ):
        assert answer.read() == BEFORE
    assert file.closed
