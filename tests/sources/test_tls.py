"""Certificates on every way to a video: each address is reached with one that is right, wrong, expired or pinned."""

from __future__ import annotations

import base64
import itertools
import os
import select
import socket
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.padding import PKCS7

from saccade.sources import LiveError, LiveSource, SourceError, open_source
from tests.support.cameras.http_camera import http, mjpeg
from tests.support.cameras.rtmp_server import rtmp_server
from tests.support.cameras.rtsp import Camera, need_servers
from tests.support.certificates import Certificate, Front, front, make, trust
from tests.support.clips import MakeClip, number_of
from tests.support.http_server import serving

FRAMES = 8
KEY = bytes(range(16))
Way = Callable[[Path, Certificate], AbstractContextManager[tuple[str, Front]]]

# ---- the ways: each yields an address, and the TLS server that it or what it leads to needs


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def files(folder: Path, moved: str = "") -> Callable[[BaseHTTPRequestHandler], None]:
    """A server of the folder's files, and at /moved of a redirect."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        path = folder / Path(request.path.partition("?")[0]).name
        data = path.read_bytes() if path.is_file() else b""
        request.send_response(302 if request.path == "/moved" else 200 if data else 404)
        request.send_header("Location", moved)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    return answer


def playlist(folder: Path, segment: str, key: str = "") -> None:
    head = "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:2\n#EXT-X-MEDIA-SEQUENCE:0\n"
    (folder / "live.m3u8").write_text(f"{head}{key}#EXTINF:1.6,\n{segment}\n#EXT-X-ENDLIST\n")


@contextmanager
def a_file(folder: Path, certificate: Certificate) -> Iterator[tuple[str, Front]]:
    with http(files(folder)) as url, front(port_of(url), certificate) as tls:
        yield f"https://127.0.0.1:{tls.port}/clip.mp4", tls


@contextmanager
def a_redirect(folder: Path, certificate: Certificate) -> Iterator[tuple[str, Front]]:
    with (
        http(files(folder)) as inner,
        front(port_of(inner), certificate) as tls,
        http(files(folder, f"https://127.0.0.1:{tls.port}/clip.mp4")) as url,
    ):
        yield f"{url}/moved", tls


@contextmanager
def an_mjpeg_camera(folder: Path, certificate: Certificate) -> Iterator[tuple[str, Front]]:
    with http(mjpeg) as url, front(port_of(url), certificate) as tls:
        yield f"https://127.0.0.1:{tls.port}/video", tls


@contextmanager
def a_playlist(folder: Path, certificate: Certificate) -> Iterator[tuple[str, Front]]:
    playlist(folder, "clip.ts")
    with http(files(folder)) as url, front(port_of(url), certificate) as tls:
        yield f"https://127.0.0.1:{tls.port}/live.m3u8", tls


@contextmanager
def segments(folder: Path, certificate: Certificate) -> Iterator[tuple[str, Front]]:
    with http(files(folder)) as url, front(port_of(url), certificate) as tls:
        playlist(folder, f"https://127.0.0.1:{tls.port}/clip.ts")
        yield f"{url}/live.m3u8", tls


@contextmanager
def variants(folder: Path, certificate: Certificate) -> Iterator[tuple[str, Front]]:
    playlist(folder, "clip.ts")
    with http(files(folder)) as url, front(port_of(url), certificate) as tls:
        (folder / "all.m3u8").write_text(
            f"#EXTM3U\n#EXT-X-STREAM-INF:BANDWIDTH=100000\nhttps://127.0.0.1:{tls.port}/live.m3u8\n"
        )
        yield f"{url}/all.m3u8", tls


@contextmanager
def keys(folder: Path, certificate: Certificate) -> Iterator[tuple[str, Front]]:
    padder, iv = PKCS7(128).padder(), bytes(16)
    encryptor = Cipher(algorithms.AES(KEY), modes.CBC(iv)).encryptor()
    padded = padder.update((folder / "clip.ts").read_bytes()) + padder.finalize()
    (folder / "coded.ts").write_bytes(encryptor.update(padded) + encryptor.finalize())
    (folder / "key").write_bytes(KEY)
    with http(files(folder)) as url, front(port_of(url), certificate) as tls:
        method = f'#EXT-X-KEY:METHOD=AES-128,URI="https://127.0.0.1:{tls.port}/key",IV=0x{iv.hex()}\n'
        playlist(folder, "coded.ts", method)
        yield f"{url}/live.m3u8", tls


@contextmanager
def rtmps(folder: Path, certificate: Certificate) -> Iterator[tuple[str, Front]]:
    with rtmp_server(folder / "clip.flv") as (port, _), front(port, certificate) as tls:
        yield f"rtmps://127.0.0.1:{tls.port}/app/stream", tls


def rtsps(path: str) -> Way:
    @contextmanager
    def way(folder: Path, certificate: Certificate) -> Iterator[tuple[str, Front]]:
        need_servers()
        with Camera() as camera, front(camera.port, certificate) as tls:
            yield f"rtsps://127.0.0.1:{tls.port}/{path}", tls

    return way


WAYS: dict[str, Way] = {
    "https file": a_file,
    "redirect to https": a_redirect,
    "https mjpeg": an_mjpeg_camera,
    "https hls": a_playlist,
    "hls segments": segments,
    "hls variants": variants,
    "hls keys": keys,
    "rtmps": rtmps,
    "rtsps h264": rtsps("live"),
    "rtsps mjpeg": rtsps("jpeg"),
}

# ---- what each of them does


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Certificate]]:
    """All but the stranger's are trusted, so that nothing but their own fault is one."""
    folder = tmp_path_factory.mktemp("certificates")
    made = {
        "right": make(folder / "right.pem"),
        "of another name": make(folder / "wrong.pem", name="camera.invalid"),
        "expired": make(folder / "expired.pem", days=-1),
        "of a stranger": make(folder / "stranger.pem"),
    }
    trusted = trust([one for name, one in made.items() if name != "of a stranger"], folder / "trusted.pem")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "SSL_CERT_FILE", str(trusted))
        yield made


@pytest.fixture
def folder(make_clip: MakeClip) -> Path:
    """What the servers serve."""
    for name in ("clip.mp4", "clip.ts", "clip.flv"):
        path = make_clip(name, frames=40)
    return path.parent


def live(url: str, tls: str) -> LiveSource:
    source = open_source(url, tls=tls, retry=False)
    assert isinstance(source, LiveSource)
    return source


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("certificate", "tls"),
    [
        ("right", "verify"),
        ("of another name", "accept"),
        ("of another name", "pin"),
        ("expired", "pin"),
        ("of a stranger", "pin"),
    ],
)
def test_a_certificate_that_is_wanted_is_accepted(
    way: str, certificate: str, tls: str, certificates: dict[str, Certificate], folder: Path
) -> None:
    shown = certificates[certificate]
    setting = f"sha256:{shown.fingerprint}" if tls == "pin" else tls
    with WAYS[way](folder, shown) as (url, server), live(url, setting) as source:
        frames = list(itertools.islice(source, FRAMES))
        assert len(frames) == FRAMES
        if not way.startswith("rtsps"):
            assert [number_of(frame.image) for frame in frames] == list(range(FRAMES))
        assert server.carried > 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("certificate", "tls"),
    [
        ("of another name", "verify"),
        ("expired", "verify"),
        ("of a stranger", "verify"),
        ("right", "of another"),
    ],
)
def test_a_certificate_that_is_not_wanted_is_refused(
    way: str, certificate: str, tls: str, certificates: dict[str, Certificate], folder: Path
) -> None:
    setting = tls if tls == "verify" else f"sha256:{certificates['expired'].fingerprint}"
    with WAYS[way](folder, certificates[certificate]) as (url, server):
        with live(url, setting) as source, pytest.raises(LiveError) as caught:
            next(iter(source))
        assert caught.value.reason == "tls"
        if tls == "verify":
            assert f"sha256:{certificates[certificate].fingerprint}" in caught.value.message
        assert server.carried == 0


def test_the_second_connection_to_a_camera_is_verified(certificates: dict[str, Certificate]) -> None:
    """MJPEG over RTSP: our own client finds out what it is, and FFmpeg plays it over another connection."""
    need_servers()
    with Camera() as camera, front(camera.port, certificates["right"], certificates["of a stranger"]) as tls:
        with live(f"rtsps://127.0.0.1:{tls.port}/jpeg", "verify") as source, pytest.raises(LiveError) as caught:
            next(iter(source))
        assert caught.value.reason == "tls"
        assert tls.calls >= 2


def test_a_segment_is_verified_though_its_playlist_was(certificates: dict[str, Certificate], folder: Path) -> None:
    playlist(folder, "clip.ts")
    with http(files(folder)) as url, front(port_of(url), certificates["right"], certificates["expired"]) as tls:
        with live(f"https://127.0.0.1:{tls.port}/live.m3u8", "verify") as source, pytest.raises(LiveError) as caught:
            next(iter(source))
        assert caught.value.reason == "tls"


def test_a_playlist_on_disk_opens_no_connection(certificates: dict[str, Certificate], folder: Path) -> None:
    with http(files(folder)) as url, front(port_of(url), certificates["right"]) as tls:
        playlist(folder, f"https://127.0.0.1:{tls.port}/clip.ts")
        with pytest.raises(SourceError), open_source(folder / "live.m3u8") as source:
            list(source)
        assert tls.calls == 0


@contextmanager
def proxy() -> Iterator[tuple[int, list[str]]]:
    """A proxy that wants a password, and the first lines of what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self._allowed():
                with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(self.path) as answer:
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(answer.read())

        def do_CONNECT(self) -> None:
            if not self._allowed():
                return
            host, _, port = self.path.rpartition(":")
            self.send_response(200)
            self.end_headers()
            with socket.create_connection((host, int(port))) as server:
                while True:
                    for one in select.select([server, self.connection], [], [], 30)[0]:
                        data = one.recv(65536)
                        if not data:
                            return
                        (self.connection if one is server else server).sendall(data)

        def _allowed(self) -> bool:
            asked.append(self.requestline)
            if self.headers["Proxy-Authorization"] == f"Basic {base64.b64encode(b'me:it').decode()}":
                return True
            self.send_error(407)
            return False

    with serving(Handler) as port:
        yield port, asked


@pytest.mark.parametrize(
    ("certificate", "login", "reason"),
    [("right", "me:it@", ""), ("expired", "me:it@", "tls"), ("right", "", "connection failed")],
)
def test_tls_through_a_proxy_is_verified(
    certificate: str,
    login: str,
    reason: str,
    certificates: dict[str, Certificate],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with proxy() as (port, asked), a_file(folder, certificates[certificate]) as (url, tls):
        monkeypatch.setenv("http_proxy", f"http://{login}127.0.0.1:{port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with live(url, "verify") as source:
            if reason:
                with pytest.raises(LiveError) as caught:
                    next(iter(source))
                assert caught.value.reason == reason
                assert tls.carried == 0
            else:
                assert len(list(itertools.islice(source, FRAMES))) == FRAMES
        assert asked[0] == f"CONNECT 127.0.0.1:{tls.port} HTTP/1.1"


@pytest.mark.parametrize("used", ["proxy", "no_proxy", "checked"])
def test_a_proxy_is_used_where_it_may_be(used: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with proxy() as (port, asked), http(files(folder)) as url:
        monkeypatch.setenv("http_proxy", f"me:it@127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1" if used == "no_proxy" else "")
        check = (lambda _url, _addresses: None) if used == "checked" else None
        with open_source(f"{url}/clip.ts?a=b", retry=False, check_address=check) as source:
            next(iter(source))  # through a proxy its length is unknown, so it is live and may drop the others
        assert asked == ([f"GET {url}/clip.ts?a=b HTTP/1.1"] if used == "proxy" else [])
