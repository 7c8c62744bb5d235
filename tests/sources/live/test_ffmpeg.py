"""What FFmpeg opens: MJPEG and HLS over HTTP, MPEG-TS over UDP, and what goes wrong with them, against real servers."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import av
import pytest

from saccade.sources import Frame, LiveError, LiveSource, SourceError, open_source
from tests.support.cameras.http_camera import FRAMES, http, jpeg, mjpeg
from tests.support.clips import MakeClip, number_of

LONG_S = 30


def live(url: str, **options: object) -> LiveSource:
    source = open_source(url, **options)  # type: ignore[arg-type]
    assert isinstance(source, LiveSource)
    return source


def status(code: int) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(code)
        request.send_header("Content-Length", "0")
        request.end_headers()

    return answer


def serve_folder(folder: Path) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(request: BaseHTTPRequestHandler) -> None:
        path = folder / Path(request.path.partition("?")[0]).name
        data = path.read_bytes() if path.exists() else b""
        request.send_response(200 if data else 404)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    return answer


def take(source: LiveSource, count: int) -> list[Frame]:
    with source:
        return list(itertools.islice(source, count))


def test_mjpeg_over_http_and_again_after_it_hangs_up() -> None:
    with http(mjpeg) as url, live(f"{url}/video") as source:
        frames = list(itertools.islice(source, FRAMES + 5))
        assert source.status.connections == 2
    assert source.info.codec == "mjpeg"
    assert [number_of(frame.image) for frame in frames[:3]] == [0, 1, 2]
    assert all(before.pts < after.pts for before, after in itertools.pairwise(frames))
    assert {frame.capture_clock for frame in frames} == {"arrival"}


PARTS = {
    "usual": ("multipart/x-mixed-replace; boundary=frame", "--frame\r\nContent-Type: image/jpeg\r\n\r\n", 0),
    "no type of the parts": (
        "multipart/x-mixed-replace; boundary=frame",
        "--frame\r\nContent-Length: {length}\r\n\r\n",
        0,
    ),
    "short": ("multipart/x-mixed-replace; boundary=frame", "--frame\r\nContent-Length: {length}\r\n\r\n", -50),
    "long": ("multipart/x-mixed-replace; boundary=frame", "--frame\r\nContent-Length: {length}\r\n\r\n", 500),
    "image/jpg, LF": ("multipart/x-mixed-replace;boundary=--frame", "--frame\nContent-Type: image/jpg\n\n", 0),
    "upper case": ("Multipart/X-Mixed-Replace;BOUNDARY=frame", "--frame\r\nCONTENT-TYPE: IMAGE/JPEG\r\n\r\n", 0),
    "quoted": ('multipart/x-mixed-replace; boundary="frame"', "--frame\r\nContent-Type: image/jpeg\r\n\r\n", 0),
    "no boundary": ("multipart/x-mixed-replace", "\r\nContent-Type: image/jpeg\r\n\r\n", 0),
    "no type": (None, "--frame\r\nContent-Type: image/jpeg\r\n\r\n", 0),
    "nothing between": ("video/x-motion-jpeg", "", 0),
}


@pytest.mark.parametrize("style", PARTS)
@pytest.mark.parametrize("first", [True, False])
def test_mjpeg_with_the_headers_of_any_camera(style: str, first: bool) -> None:
    content_type, head, wrong = PARTS[style]
    if not first and style == "no type":
        pytest.skip("then nothing tells that it is one")

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        if content_type:
            request.send_header("Content-Type", content_type)
        request.end_headers()
        for number in range(100):
            data = jpeg(number)
            between = head.format(length=len(data) + wrong).encode()
            request.wfile.write((between if number or first else b"") + data + b"\r\n")
            time.sleep(0.02)

    with http(answer) as url, live(f"{url}/video") as source:
        frames = list(itertools.islice(source, 8))
        assert source.status.connections == 1
    assert [number_of(frame.image) + 1 for frame in frames[:-1]] <= [number_of(frame.image) for frame in frames[1:]]
    assert source.info.codec == "mjpeg"
    assert source.corrupt_packets == 0


def test_an_image_comes_with_its_last_byte_and_not_with_the_next_image() -> None:
    more = threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        request.end_headers()
        request.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\n\r\n" + jpeg(7))
        more.wait(LONG_S)

    with http(answer) as url, live(f"{url}/video") as source:
        frame = next(iter(source))
        assert not more.is_set()
        more.set()
    assert number_of(frame.image) == 7


def test_a_slow_camera_is_waited_for_and_a_frozen_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("SILENCE_S", 0.3), ("NO_PACKETS_S", 4.0), ("NO_FRAME_S", 0.3)):
        monkeypatch.setattr(f"saccade.sources.live.reconnect.{name}", seconds)
    frozen = threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        request.end_headers()
        for number in range(5):
            request.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\n\r\n" + jpeg(number) + b"\r\n")
            time.sleep(0.8)
        frozen.wait(LONG_S)

    with http(answer) as url, live(f"{url}/video") as source:
        frames = iter(source)
        assert [number_of(frame.image) for frame in itertools.islice(frames, 5)] == list(range(5))
        assert source.status.connections == 1
        assert number_of(next(frames).image) == 0  # by another connection
        assert source.status.connections == 2
        frozen.set()


@pytest.mark.parametrize("sized", [True, False])
def test_a_photo_behind_an_address_is_one_frame(sized: bool) -> None:
    def answer(request: BaseHTTPRequestHandler) -> None:
        data = jpeg(5)
        request.send_response(200)
        request.send_header("Content-Type", "image/jpeg")
        if sized:
            request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    with http(answer) as url, live(f"{url}/snap.jpg") as source:
        assert [number_of(frame.image) for frame in source] == [5]


def test_hls_comes_in_bursts_and_is_handed_on_at_its_own_pace(make_clip: MakeClip, tmp_path: Path) -> None:
    clip = make_clip("segment0.ts", frames=40, rate=25)
    (tmp_path / "live.m3u8").write_text(
        "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:2\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:1.6,\n" + clip.name + "\n"
    )
    with http(serve_folder(tmp_path)) as url:
        begun = 0.0
        frames = []
        for frame in (source := live(f"{url}/live.m3u8")):
            begun = begun or time.monotonic()
            frames.append(frame)
            if len(frames) == 26:
                source.close()
    assert [number_of(frame.image) for frame in frames] == list(range(26))
    assert time.monotonic() - begun > 0.9


@pytest.mark.parametrize("moved", [-750, 1000])
def test_hls_stays_even_after_a_clock_that_falls_or_jumps(make_clip: MakeClip, tmp_path: Path, moved: int) -> None:
    for name, begin in (("a", 1000), ("b", 1000 + moved), ("c", 1025 + moved)):
        make_clip(f"{name}.ts", pts=range(begin, begin + 25), gop=25)
    (tmp_path / "live.m3u8").write_text(
        "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:1,\na.ts\n"
        "#EXT-X-DISCONTINUITY\n#EXTINF:1,\nb.ts\n#EXTINF:1,\nc.ts\n"
    )
    with http(serve_folder(tmp_path)) as url, live(f"{url}/live.m3u8") as source:
        frames = list(itertools.islice(source, 70))
    assert sum(frame.dropped_before for frame in frames) < 5  # a burst of 50 frames loses nearly all of them
    assert frames[-1].captured_at - frames[0].captured_at > 2
    assert float((frames[-1].pts - frames[0].pts) * frames[0].time_base) < LONG_S


def test_a_recording_behind_an_address_has_an_end(make_clip: MakeClip, tmp_path: Path) -> None:
    make_clip("clip.mp4", frames=15)
    with http(serve_folder(tmp_path)) as url, live(f"{url}/clip.mp4") as source:
        assert [number_of(frame.image) for frame in source] == list(range(15))
        assert source.status.state == "ended"


def test_mpeg_ts_over_udp(make_clip: MakeClip) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    data = make_clip("clip.ts", frames=60, gop=10, noise=True).read_bytes()
    stop = threading.Event()

    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
            while not stop.is_set():
                for at in range(0, len(data), 1316):
                    out.sendto(data[at : at + 1316], ("127.0.0.1", port))
                    if stop.wait(0.004):
                        return

    sender = threading.Thread(target=send)
    sender.start()
    try:
        frames = take(live(f"udp://127.0.0.1:{port}"), 30)
    finally:
        stop.set()
        sender.join()
    assert all(before.pts < after.pts for before, after in itertools.pairwise(frames))
    assert all(number_of(frame.image) < 60 for frame in frames)


@pytest.mark.parametrize(
    ("code", "reason"), [(401, "auth failed"), (403, "auth failed"), (404, "not found"), (500, "connection failed")]
)
def test_http_errors_map_to_reasons(code: int, reason: str) -> None:
    with http(status(code)) as url, pytest.raises(LiveError) as caught:
        take(live(f"{url.replace('//', '//bob:secret@')}/video", retry=False), 1)
    assert caught.value.reason == reason
    assert "secret" not in str(caught.value)


def test_an_html_page_is_codec_unsupported() -> None:
    def page(request: BaseHTTPRequestHandler) -> None:
        data = b"<html>Welcome to your camera</html>" * 100
        request.send_response(200)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    with http(page) as url, pytest.raises(LiveError) as caught:
        take(live(f"{url}/", retry=False), 1)
    assert caught.value.reason == "codec unsupported"


def test_a_page_of_unknown_length_is_no_video_either() -> None:
    def page(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Type", "text/html")
        request.end_headers()
        request.wfile.write(b"<html>login</html>" * 200)

    with http(page) as url, pytest.raises(LiveError, match=r"codec unsupported: .* is not a video that FFmpeg"):
        take(live(f"{url}/", retry=False), 1)


def test_an_absent_server_is_connection_failed() -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with pytest.raises(LiveError) as caught:
        take(live(f"http://127.0.0.1:{port}/x", retry=False), 1)
    assert caught.value.reason == "connection failed"


def test_an_unsupported_protocol_is_refused_in_one_line() -> None:
    if "v4l2" not in av.formats_available:
        for number in ("0", 0):
            with pytest.raises(SourceError, match="does not support webcams"):
                open_source(number)
    with pytest.raises(SourceError) as caught:
        take(live("srt://u:secret@127.0.0.1:9", retry=False), 1)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_insisting_on_a_missing_gpu_raises() -> None:
    try:
        av.CodecContext.create("h264", "r", hwaccel=av.codec.hwaccel.HWAccel("cuda", allow_software_fallback=True))
        pytest.skip("there is a GPU that decodes")
    except Exception:
        pass
    with http(mjpeg) as url, pytest.raises(SourceError, match="hwaccel cuda: FFmpeg found no GPU"):
        take(live(f"{url}/video", hwaccel="cuda"), 1)


@pytest.mark.parametrize(
    ("address", "opened"),
    [
        ("rtmp://host/app/x", "rtmp://127.0.0.1:1/app/x"),
        ("rtmps://host:443/app/x?a=b://c", "rtmp://127.0.0.1:1/app/x?a=b://c"),
        ("rtmps://u:p@host/app/x", "rtmp://u:p@127.0.0.1:1/app/x"),
        ("rtmps://ho\tst/app/x", "rtmp://127.0.0.1:1/app/x"),
        ("RTMPS://host", "rtmp://127.0.0.1:1"),
        ("rtmps://host?x", "rtmp://127.0.0.1:1?x"),
        ("rtmps://host#@other/x", "rtmp://127.0.0.1:1#@other/x"),
    ],
)
def test_behind_a_relay_ffmpeg_knows_no_other_host(address: str, opened: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class FakeRelay:
        port = 1

        def __init__(self, connect: object) -> None:
            pass

        def __enter__(self) -> FakeRelay:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def open_nothing(target: str, **_: object) -> None:
        asked.append(target)
        raise av.error.EOFError(1, "nothing")

    monkeypatch.setattr("saccade.sources.live.ffmpeg.Relay", FakeRelay)
    monkeypatch.setattr(av, "open", open_nothing)
    with pytest.raises(LiveError):
        take(live(address, retry=False), 1)
    assert asked == [opened]
