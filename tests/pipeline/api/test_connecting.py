"""What `allow_sources` forbids is never connected to: not by a name that changes, a redirect, a playlist or a key."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from saccade.pipeline.control.source_policy import NotAllowedError, SourcePolicy
from saccade.sources import LiveSource, SourceError, open_source
from tests.support.cameras.http_camera import http, mjpeg
from tests.support.cameras.onvif_device import onvif_device
from tests.support.cameras.rtmp_server import rtmp_server
from tests.support.cameras.scripted import Call, Packetizer, ScriptedCamera, coded_frames
from tests.support.clips import MakeClip

NAME = "camera.test"
INSIDE = "127.0.0.2"
ALLOWED = ["127.0.0.1/32"]


class Trap:
    """A port on a forbidden address; `calls` counts who came."""

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.create_server((INSIDE, port))
        self._listener.settimeout(0.05)
        self.port = int(self._listener.getsockname()[1])
        self.calls = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._stop.is_set():
            with suppress(TimeoutError):
                self._listener.accept()[0].close()
                self.calls += 1


@contextmanager
def trap(port: int = 0) -> Iterator[Trap]:
    made = Trap(port)
    try:
        yield made
    finally:
        made.close()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def files(folder: Path, moved: str = "") -> Callable[[BaseHTTPRequestHandler], None]:
    """A server of the folder's files, and of redirects at paths that begin with /moved."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        path = folder / Path(request.path).name
        data = path.read_bytes() if path.is_file() else b""
        request.send_response(302 if request.path.startswith("/moved") else 200 if data else 404)
        request.send_header("Location", moved)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    return answer


def playlist(folder: Path, *segments: str, key: str = "") -> None:
    head = f"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:2\n#EXT-X-MEDIA-SEQUENCE:0\n{key}"
    body = "".join(f"#EXTINF:1.6,\n{segment}\n" for segment in segments)
    (folder / "live.m3u8").write_text(f"{head}{body}#EXT-X-ENDLIST\n")


# ---- a name that leads elsewhere by the second time


@contextmanager
def a_file(folder: Path) -> Iterator[str]:
    with http(files(folder)) as url:
        yield f"http://{NAME}:{port_of(url)}/clip.mp4"


@contextmanager
def an_mjpeg_camera(folder: Path) -> Iterator[str]:
    with http(mjpeg) as url:
        yield f"http://{NAME}:{port_of(url)}/video"


@contextmanager
def a_playlist(folder: Path) -> Iterator[str]:
    playlist(folder, "clip.ts")
    with http(files(folder)) as url:
        yield f"http://{NAME}:{port_of(url)}/live.m3u8"


@contextmanager
def rtmp(folder: Path) -> Iterator[str]:
    with rtmp_server(folder / "clip.flv") as (port, _):
        yield f"rtmp://{NAME}:{port}/app/stream"


def play(call: Call) -> None:
    call.play(coded_frames(20), Packetizer(), 0.01)
    call.linger()


@contextmanager
def rtsp(folder: Path) -> Iterator[str]:
    with ScriptedCamera(play) as camera:
        yield camera.url().replace("127.0.0.1", NAME)


@contextmanager
def tcp(folder: Path) -> Iterator[str]:
    data = (folder / "clip.ts").read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError), listener.accept()[0] as call:
                call.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"tcp://{NAME}:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@contextmanager
def onvif(folder: Path) -> Iterator[str]:
    pytest.importorskip("onvif")
    with ScriptedCamera(play) as camera, onvif_device(f"rtsp://127.0.0.1:{camera.port}") as port:
        yield f"onvif://bob:secret@{NAME}:{port}"


WAYS: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "http": a_file,
    "mjpeg": an_mjpeg_camera,
    "hls": a_playlist,
    "rtmp": rtmp,
    "rtsp": rtsp,
    "tcp": tcp,
    "onvif": onvif,
}


@pytest.fixture
def folder(make_clip: MakeClip) -> Path:
    for name in ("clip.mp4", "clip.ts", "clip.flv"):
        path = make_clip(name, frames=40)
    return path.parent


def live(url: str, **options: Any) -> LiveSource:
    check = SourcePolicy(ALLOWED, open_by_default=False).check
    source = open_source(url, retry=False, check_address=check, **options)
    assert isinstance(source, LiveSource)
    return source


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", ["allowed", "forbidden"])
def test_a_name_is_connected_to_where_it_was_checked(
    way: str, first: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = socket.getaddrinfo, []

    def changing(host: Any, *rest: Any, **options: Any) -> Any:
        if host == NAME:
            asked.append(host)
            host = INSIDE if first == "forbidden" or len(asked) > 1 else "127.0.0.1"
        return real(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", changing)
    with WAYS[way](folder) as url, trap(int(url.split("/")[2].rpartition(":")[2])) as forbidden:
        with live(url) as source:
            if first == "forbidden" or way == "hls":
                with pytest.raises(NotAllowedError):
                    next(iter(source))
            else:
                assert len(list(itertools.islice(source, 2))) == 2
        assert asked
        assert forbidden.calls == 0


def test_services_of_a_device_are_asked_at_its_own_address() -> None:
    pytest.importorskip("onvif")
    with (
        trap() as forbidden,
        ScriptedCamera(play) as camera,
        onvif_device(f"rtsp://127.0.0.1:{camera.port}", services=f"http://{INSIDE}:{forbidden.port}/onvif") as port,
        live(f"onvif://bob:secret@127.0.0.1:{port}") as source,
    ):
        assert len(list(itertools.islice(source, 2))) == 2
        assert forbidden.calls == 0


# ---- addresses that a server gives


def in_segments(folder: Path, inside: str, allowed: str) -> str:
    playlist(folder, "clip.ts", f"{inside}/clip.ts")
    return f"{allowed}/live.m3u8"


def in_a_redirected_segment(folder: Path, inside: str, allowed: str) -> str:
    playlist(folder, "moved.ts")
    return f"{allowed}/live.m3u8"


def in_a_key(folder: Path, inside: str, allowed: str) -> str:
    playlist(folder, "clip.ts", key=f'#EXT-X-KEY:METHOD=AES-128,URI="{inside}/key"\n')
    return f"{allowed}/live.m3u8"


def in_variants(folder: Path, inside: str, allowed: str) -> str:
    (folder / "all.m3u8").write_text(f"#EXTM3U\n#EXT-X-STREAM-INF:BANDWIDTH=1\n{inside}/live.m3u8\n")
    return f"{allowed}/all.m3u8"


def in_a_redirect(folder: Path, inside: str, allowed: str) -> str:
    return f"{allowed}/moved"


def in_a_session_description(folder: Path, inside: str, allowed: str) -> str:
    (folder / "clip.sdp").write_text(
        f"v=0\no=- 0 0 IN IP4 {INSIDE}\ns=x\nc=IN IP4 {INSIDE}\nt=0 0\nm=video {inside.rpartition(':')[2]} RTP/AVP 96\n"
        "a=rtpmap:96 H264/90000\n"
    )
    return f"{allowed}/clip.sdp"


def in_a_list_of_files(folder: Path, inside: str, allowed: str) -> str:
    (folder / "all.ffconcat").write_text(f"ffconcat version 1.0\nfile {inside}/clip.ts\n")
    return f"{allowed}/all.ffconcat"


GIVEN = (
    in_segments,
    in_a_redirected_segment,
    in_a_key,
    in_variants,
    in_a_redirect,
    in_a_session_description,
    in_a_list_of_files,
)


@pytest.mark.parametrize("given", GIVEN, ids=[one.__name__ for one in GIVEN])
def test_what_a_server_gives_leads_to_allowed_addresses_only(
    given: Callable[[Path, str, str], str], folder: Path
) -> None:
    with trap() as forbidden:
        inside = f"http://{INSIDE}:{forbidden.port}"
        with http(files(folder, f"{inside}/clip.ts")) as allowed:
            url = given(folder, inside, allowed)
            follows = given not in (in_a_session_description, in_a_list_of_files)
            with live(url) as source, pytest.raises(NotAllowedError if follows else SourceError):
                list(source)
        assert forbidden.calls == 0
