"""Files over HTTP as servers really send them: parts, passwords, cookies, redirects, and what breaks off."""

from __future__ import annotations

import hashlib
import itertools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sources import LiveError, LiveSource, SourceError, open_source
from saccade.sources.network.dialer import Dialer
from saccade.sources.network.http_files import HttpFile, HttpFiles
from tests.support.cameras.http_camera import http, mjpeg
from tests.support.clips import MakeClip, number_of

DATA = bytes(range(256)) * 4000


@contextmanager
def kept_alive(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[tuple[str, list[int]]]:
    """A server of HTTP/1.1, and for each connection how many requests it carried."""
    requests: dict[Any, int] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            requests[self.client_address] = requests.get(self.client_address, 0) + 1
            with suppress(OSError):
                answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    counts: list[int] = []
    try:
        yield f"http://127.0.0.1:{server.server_port}", counts
    finally:
        counts += requests.values()
        server.shutdown()
        thread.join()
        server.server_close()


def send(request: BaseHTTPRequestHandler, data: bytes, status: int = 200, **headers: str) -> None:
    request.send_response(status)
    for name, value in {"Content_Length": str(len(data)), **headers}.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    request.wfile.write(data)


def parts(data: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    """A server that sends parts of a file."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers["Range"])
        assert asked
        first, last = int(asked[1]), min(len(data) - 1, int(asked[2] or len(data)))
        send(request, data[first : last + 1], 206, Content_Range=f"bytes {first}-{last}/{len(data)}")

    return answer


@pytest.fixture
def files() -> Iterator[HttpFiles]:
    made = HttpFiles(Dialer(threading.Event()), 5, 5)
    yield made
    made.close()


def rest_of(file: HttpFile) -> bytes:
    return b"".join(iter(lambda: file.read(50_000), b""))


def live(url: str) -> LiveSource:
    source = open_source(url, retry=False)
    assert isinstance(source, LiveSource)
    return source


@pytest.mark.parametrize("positions", [(0,), (700_000,), (10, 500), (900_000, 3), (1_023_999,), (1_024_000,)])
def test_a_file_is_read_from_anywhere(files: HttpFiles, positions: tuple[int, ...]) -> None:
    with http(parts(DATA)) as url:
        file = files.open_first(f"{url}/clip.mp4")
        assert file.seekable()
        assert file.seek(-1, 2) == len(DATA) - 1  # how FFmpeg asks for the size
        for position in positions:
            file.seek(position)
            assert file.read(10) == DATA[position : position + 10]
        file.seek(positions[-1])
        assert rest_of(file) == DATA[positions[-1] :]


@pytest.mark.parametrize("whole", [False, True], ids=["parts", "whole"])
def test_a_part_is_all_that_is_read_of_it(files: HttpFiles, whole: bool) -> None:
    with http((lambda request: send(request, DATA)) if whole else parts(DATA)) as url:
        first = files.open_first(f"{url}/live.m3u8")
        assert files.open("", 1, {}) is first
        part = files.open(f"{url}/all.mp4", 1, {"offset": "1000", "end_offset": "1300"})
        assert b"".join(iter(lambda: part.read(7), b"")) == DATA[1000:1300]


@pytest.mark.parametrize("whole", [False, True], ids=["parts", "whole"])
def test_a_film_with_its_index_at_the_end_is_played(whole: bool, make_clip: MakeClip) -> None:
    film = make_clip("clip.mp4", frames=30, noise=True).read_bytes()
    assert film.index(b"moov") > film.index(b"mdat")
    with http((lambda request: send(request, film)) if whole else parts(film)) as url, live(f"{url}/film") as source:
        assert [number_of(frame.image) for frame in source] == list(range(30))


def test_segments_share_a_connection(make_clip: MakeClip, tmp_path: Path) -> None:
    make_clip("clip.ts", frames=10)
    head = "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXT-X-MEDIA-SEQUENCE:0\n"
    entries = "#EXTINF:0.4,\nclip.ts\n#EXT-X-DISCONTINUITY\n" * 3
    (tmp_path / "live.m3u8").write_text(f"{head}{entries}#EXT-X-ENDLIST\n")
    with (
        kept_alive(lambda request: send(request, (tmp_path / request.path[1:]).read_bytes())) as (url, counts),
        live(f"{url}/live.m3u8") as source,
    ):
        assert len(list(source)) == 30
    assert sorted(counts) == [1, 3]  # the playlist stays open beside its segments


def test_a_missing_segment_is_skipped(make_clip: MakeClip, tmp_path: Path) -> None:
    make_clip("clip.ts", frames=10)
    head = "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXT-X-MEDIA-SEQUENCE:0\n"
    names = ("clip.ts", "gone.ts", "clip.ts")
    entries = "".join(f"#EXTINF:0.4,\n{name}\n#EXT-X-DISCONTINUITY\n" for name in names)
    (tmp_path / "live.m3u8").write_text(f"{head}{entries}#EXT-X-ENDLIST\n")

    def answer(request: BaseHTTPRequestHandler) -> None:
        path = tmp_path / request.path[1:]
        send(request, path.read_bytes() if path.exists() else b"", 200 if path.exists() else 404)

    with http(answer) as url, live(f"{url}/live.m3u8") as source:
        assert len(list(source)) == 20


def test_a_redirected_playlist_is_read_from_where_it_is(make_clip: MakeClip, tmp_path: Path) -> None:
    make_clip("clip.ts", frames=10)
    head = "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXT-X-MEDIA-SEQUENCE:0\n"

    def answer(request: BaseHTTPRequestHandler) -> None:
        if request.path == "/watch":
            send(request, b"", 302, Location="/there/now.m3u8?token=1")
        elif request.path == "/there/now.m3u8?token=1":
            send(request, f"{head}#EXTINF:0.4,\npart/clip.ts\n#EXT-X-ENDLIST\n".encode())
        elif request.path == "/there/part/clip.ts":
            send(request, (tmp_path / "clip.ts").read_bytes())
        else:
            send(request, b"", 404)

    with http(answer) as url, live(f"{url}/watch") as source:
        assert [number_of(frame.image) for frame in source] == list(range(10))


def test_a_camera_that_wants_a_digest_gets_one() -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        given = dict(re.findall(r'(\w+)="?([^",]+)', request.headers.get("Authorization", "")))

        def digest(text: str) -> str:
            return hashlib.md5(text.encode()).hexdigest()

        right = digest(f"{digest('bob:cam:p@ss')}:n1:{digest(f'GET:{request.path}')}")
        if given.get("response") == right:
            mjpeg(request)
        else:
            send(request, b"", 401, WWW_Authenticate='Digest realm="cam", nonce="n1"')

    with http(answer) as url:
        place = url.partition("//")[2]
        with live(f"http://bob:p%40ss@{place}/video?channel=1") as source:
            assert len(list(itertools.islice(source, 5))) == 5
        with live(f"http://bob:wrong@{place}/video") as source, pytest.raises(LiveError) as caught:
            next(iter(source))
    assert caught.value.reason == "auth failed"
    assert caught.value.refused
    assert "wrong" not in str(caught.value)


def test_cookies_of_a_playlist_come_with_its_segments(make_clip: MakeClip, tmp_path: Path) -> None:
    make_clip("clip.ts", frames=10)
    head = "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXT-X-MEDIA-SEQUENCE:0\n"

    def answer(request: BaseHTTPRequestHandler) -> None:
        if request.path == "/live.m3u8":
            data = f"{head}#EXTINF:0.4,\nclip.ts\n#EXT-X-ENDLIST\n".encode()
            send(request, data, Set_Cookie="pass=let-me-in; Path=/")
        elif "pass=let-me-in" in request.headers.get("Cookie", ""):
            send(request, (tmp_path / "clip.ts").read_bytes())
        else:
            send(request, b"", 403)

    with http(answer) as url, live(f"{url}/live.m3u8") as source:
        assert len(list(source)) == 10


@pytest.mark.parametrize("how", ["silent", "half a film", "headers only"])
def test_closing_wakes_whoever_reads(how: str, make_clip: MakeClip) -> None:
    film = make_clip("clip.ts", frames=30, noise=True).read_bytes()
    over = threading.Event()
    asked = threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> None:
        if how != "silent":
            request.send_response(200)
            request.end_headers()
        if how == "half a film":
            request.wfile.write(film[: len(film) // 2])
        asked.set()
        over.wait()

    with http(answer) as url, live(f"{url}/film.ts") as source:
        reader = threading.Thread(target=lambda: list(source))
        reader.start()
        try:
            assert asked.wait(30)
            source.close()
            reader.join(30)
            assert not reader.is_alive()
            deadline = time.monotonic() + 30
            while any(thread.name == "saccade stream" for thread in threading.enumerate()):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            over.set()


def test_a_file_that_breaks_off_is_an_error(files: HttpFiles) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        send(request, DATA[:1000], Content_Length=str(len(DATA)))

    with http(answer) as url:
        file = files.open_first(f"{url}/film")
        with pytest.raises(LiveError, match="the server closed the connection"):
            rest_of(file)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("/again", "redirects more than 8 times"),
        ("ftp://127.0.0.1/x", "redirects to another protocol"),
        ("file:///etc/passwd", "redirects to another protocol"),
        ("http://[", "connection failed"),
        ("http://:80/", "connection failed"),
    ],
)
def test_a_redirect_to_nowhere_is_one_line(files: HttpFiles, location: str, message: str) -> None:
    with http(lambda request: send(request, b"", 302, Location=location)) as url:
        with pytest.raises(LiveError, match=message) as caught:
            files.open_first(f"{url}/x")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "reply",
    [b"", b"\x00" * 100, b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200, b"HTTP/1.1 999999\r\n\r\n"],
    ids=["nothing", "zeros", "ssh", "headers", "status"],
)
def test_what_is_no_http_is_one_line(files: HttpFiles, reply: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as call:
                call.recv(1000)
                call.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(LiveError) as caught:
            files.open_first(f"http://127.0.0.1:{listener.getsockname()[1]}/x")
        thread.join()
    assert caught.value.reason == "connection failed"
    assert "\n" not in str(caught.value)


@given(st.text(max_size=60) | st.builds("http://{}/{}".format, st.text(max_size=20), st.text(max_size=20)))
def test_no_address_smuggles_a_line_into_a_request(url: str) -> None:
    files = HttpFiles(Dialer(threading.Event(), check=refuse), 1, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("127.0.0.1", 1))])  # asks nobody
        with pytest.raises(SourceError) as caught:
            files.open_first(url)
    assert isinstance(caught.value, LiveError) or str(caught.value) == "refused"


def refuse(url: str, _: object) -> None:
    """What is asked of the check is an address without control characters."""
    assert url.isprintable() or not set(url) & set(map(chr, [*range(32), 127]))
    raise SourceError("refused")
