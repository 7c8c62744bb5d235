"""The RTSP client against servers that behave badly: silent, cut off in mid-packet, no RTSP, not to be trusted."""

from __future__ import annotations

import itertools
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import av
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from saccade.sources import LiveError, LiveSource, open_source
from saccade.sources.rtsp.client import session_timeout
from tests.support.clips import number_of, numbered_image

LONG_S = 30
STEP = 3600

Talk = Callable[[socket.socket], object]


@contextmanager
def server(talk: Talk, scheme: str = "rtsp") -> Iterator[str]:
    """A server that does `talk` with everyone who calls; yields its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    calls: list[tuple[socket.socket, threading.Thread]] = []

    def answer(call: socket.socket) -> None:
        with suppress(OSError), call:
            talk(call)

    def accept() -> None:
        with suppress(OSError):
            while True:
                call, _ = listening.accept()
                thread = threading.Thread(target=answer, args=(call,))
                calls.append((call, thread))
                thread.start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"{scheme}://bob:secret@127.0.0.1:{listening.getsockname()[1]}/live"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(LONG_S)
        for call, one in calls:
            with suppress(OSError):
                call.shutdown(socket.SHUT_RDWR)
            one.join(LONG_S)


def coded_frames(count: int) -> list[list[bytes]]:
    """The NAL units of a short H.264 stream, frame by frame."""
    coder = av.CodecContext.create("libx264", "w")
    coder.width, coder.height, coder.pix_fmt, coder.framerate = 160, 120, "yuv420p", 25
    coder.options = {"tune": "zerolatency", "preset": "ultrafast", "g": "10"}
    packets = []
    for number in range(count):
        packets += coder.encode(av.VideoFrame.from_ndarray(numbered_image(number, 160, 120), format="rgb24"))
    packets += coder.encode(None)
    return [
        [nal for nal in bytes(packet).replace(b"\0\0\0\1", b"\0\0\1").split(b"\0\0\1") if nal] for packet in packets
    ]


def interleaved(frames: list[list[bytes]]) -> bytes:
    """The same as RTP packets within RTSP, one a NAL unit or in fragments of 1400 bytes."""
    data, sequence = b"", 65530
    for number, nals in enumerate(frames):
        payloads: list[bytes] = []
        for nal in nals:
            pieces = [nal[at : at + 1400] for at in range(1, len(nal), 1400)]
            for place, piece in enumerate(pieces):
                flags = 0x80 * (place == 0) | 0x40 * (place == len(pieces) - 1) | nal[0] & 31
                payloads.append(nal if len(pieces) == 1 else bytes((nal[0] & 0xE0 | 28, flags)) + piece)
        for place, payload in enumerate(payloads):
            marker = 0x80 * (place == len(payloads) - 1)
            head = bytes((0x80, marker | 96)) + (sequence % 65536).to_bytes(2, "big")
            packet = head + (STEP * number).to_bytes(4, "big") + b"ssrc" + payload
            data += b"$\0" + len(packet).to_bytes(2, "big") + packet
            sequence += 1
    return data


SDP = "v=0\r\nm=video 0 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\na=control:track1\r\n"


def camera(stream: bytes, then: Talk = lambda call: None) -> Talk:
    """A small camera: says what it must, sends `stream` and does `then`."""

    def talk(call: socket.socket) -> None:
        for line in call.makefile("rb"):
            if line.strip().endswith(b"RTSP/1.0"):
                method = line.split()[0].decode()
            elif line.lower().startswith(b"cseq:"):
                number = line.split(b":")[1].strip().decode()
            elif not line.strip():
                body = SDP if method == "DESCRIBE" else ""
                extra = {"SETUP": "Session: 7;timeout=60\r\nTransport: RTP/AVP/TCP;interleaved=0-1\r\n"}.get(method, "")
                head = f"RTSP/1.0 200 OK\r\nCSeq: {number}\r\n{extra}Content-Length: {len(body)}\r\n\r\n"
                call.sendall((head + body).encode())
                if method == "PLAY":
                    call.sendall(stream)
                    return then(call)
        return None

    return talk


def linger(call: socket.socket) -> None:
    call.recv(65536)
    time.sleep(0.2)


def live(url: str, **options: object) -> LiveSource:
    source = open_source(url, hwaccel="none", **options)  # type: ignore[arg-type]
    assert isinstance(source, LiveSource)
    return source


def refusal(url: str) -> LiveError:
    with pytest.raises(LiveError) as caught, live(url, retry=False) as source:
        for _ in source:
            pass
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    return caught.value


def test_every_frame_arrives_and_a_hangup_reconnects() -> None:
    with server(camera(interleaved(coded_frames(25)))) as url, live(url) as source:
        frames = list(itertools.islice(source, 45))
    assert [number_of(frame.image) for frame in frames] == [*range(25), *range(20)]
    assert [frame.pts for frame in frames[:25]] == [STEP * number for number in range(25)]
    assert all(before.pts < after.pts for before, after in itertools.pairwise(frames))
    assert {frame.dropped_before for frame in frames} == {0}


FRAMES = coded_frames(25)
STREAM = interleaved(FRAMES)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cut=st.integers(0, len(STREAM)), flips=st.lists(st.integers(0, len(STREAM) - 1), max_size=3))
def test_a_torn_or_damaged_stream_gives_whole_frames_or_none(cut: int, flips: list[int]) -> None:
    data = bytearray(STREAM)
    for at in flips:
        data[at] ^= 0x55
    frames = []
    with server(camera(bytes(data[:cut]))) as url, live(url, retry=False) as source, suppress(LiveError):
        frames += list(source)
    assert [frame.pts for frame in frames] == sorted({frame.pts for frame in frames})
    if not flips:  # a flipped bit inside a coded frame is the decoder's to notice, and not all can be noticed
        assert [number_of(frame.image) for frame in frames] == list(range(len(frames)))


def test_a_lost_packet_costs_the_frames_up_to_the_next_key() -> None:
    frames = coded_frames(25)
    first, second, third = (interleaved(frames)[: len(interleaved(frames[:n]))] for n in (13, 14, 25))
    data = first + third[len(second) :]  # all of the 14th frame is missing; keys are the 1st, 11th and 21st
    with server(camera(data)) as url, live(url, retry=False) as source, suppress(LiveError):
        frames = []
        for frame in source:
            frames.append(frame)
    assert [number_of(frame.image) for frame in frames] == [*range(13), *range(20, 25)]
    assert source.corrupt_packets == 2  # it has two slices
    assert [frame.dropped_before for frame in frames][13] >= 6


@pytest.mark.parametrize(
    ("talk", "reason"),
    [
        (lambda call: None, "connection failed"),
        (lambda call: call.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "connection failed"),
        (lambda call: call.sendall(b"\x16\x03\x01" * 100), "connection failed"),
        (
            lambda call: call.sendall(b"RTSP/1.0 200 OK\r\nCSeq: 1\r\nContent-Length: 999999999\r\n\r\n"),
            "connection failed",
        ),
        (lambda call: call.sendall(b"RTSP/1.0 403 Forbidden\r\nCSeq: 1\r\n\r\n"), "auth failed"),
        (
            lambda call: call.sendall(b"RTSP/1.0 401 No\r\nCSeq: 1\r\nWWW-Authenticate: Negotiate\r\n\r\n"),
            "auth failed",
        ),
        (lambda call: call.sendall(b"RTSP/1.0 503 Full\r\nCSeq: 1\r\n\r\n"), "connection failed"),
        (camera(b"", linger), "timeout"),
    ],
)
def test_what_is_wrong_has_its_code(talk: Talk, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.sources.live.reconnect.SILENCE_S", 0.5)
    with server(talk) as url:
        assert refusal(url).reason == reason


def test_a_server_that_says_nothing_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.sources.rtsp.client.REPLY_S", 0.5)
    with server(lambda call: time.sleep(1)) as url:
        assert refusal(url).reason == "timeout"


def test_close_ends_the_wait_for_a_silent_server() -> None:
    over = threading.Event()
    with server(lambda _: over.wait(LONG_S)) as url, live(url) as source:
        reader = threading.Thread(target=lambda: list(source))
        reader.start()
        time.sleep(0.2)
        begun = time.monotonic()
        source.close()
        reader.join(LONG_S)
        over.set()
        assert not reader.is_alive()
        assert time.monotonic() - begun < 2


def over_tls(talk: Talk, certificate: tuple[Path, Path]) -> Talk:
    def secured(call: socket.socket) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        with context.wrap_socket(call, server_side=True) as secure:
            talk(secure)

    return secured


def test_rtsps_needs_a_certificate_that_is_trusted(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(over_tls(camera(STREAM), certificate), "rtsps") as url:
        assert refusal(url).reason == "tls"
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        with live(url) as source:
            frames = list(itertools.islice(source, 25))
    assert [number_of(frame.image) for frame in frames] == list(range(25))


def test_no_tls_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.sources.network.stream_socket.CONNECT_S", 0.5)
    with server(camera(STREAM), "rtsps") as url:
        assert refusal(url).reason in ("tls", "connection failed", "timeout")


@pytest.mark.parametrize(
    ("parameters", "seconds"),
    [
        ("timeout=60", 60),
        (";timeout=5", 5),
        ("x=1; Timeout = 10", 10),
        ('timeout="20"', 20),
        ("timeout=0", 1),
        ("", 60),
        ("timeout=x", 60),
    ],
)
def test_the_timeout_of_a_session_is_read(parameters: str, seconds: float) -> None:
    assert session_timeout(parameters) == seconds
