"""Ways to a camera: redirects, tunnels through HTTP, multicast, encryption, certificates that match nothing."""

from __future__ import annotations

import base64
import hashlib
import ssl
from pathlib import Path

import pylibsrtp
import pytest

from saccade.sources import LiveError, SourceError, open_source
from tests.sources.rtsp.test_faults import live, numbers, take
from tests.support.cameras.scripted import SDP, Call, Packetizer, Request, ScriptedCamera, coded_frames

FRAMES = coded_frames(40)


def play(call: Call) -> None:
    call.play(FRAMES, Packetizer(), 0.01)
    call.linger()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.sources.rtsp.connection.CATCH_UP_S", 10.0)


def test_a_redirect_is_followed() -> None:
    with ScriptedCamera(play) as other:

        def answer(call: Call, request: Request) -> str | None:
            moved = f"RTSP/1.0 302 Moved\r\nLocation: {other.url('elsewhere')}\r\n\r\n"
            return moved if request.method == "DESCRIBE" else None

        with ScriptedCamera(play, answer=answer) as first:
            assert numbers(take(live(first.url(user="bob:right@")), 10)) == list(range(10))
        assert {request.url for request in other.calls[0].requests[:2]} == {other.url("elsewhere")}


def test_redirects_in_a_circle_end() -> None:
    def answer(call: Call, request: Request) -> str | None:
        return f"RTSP/1.0 301 Moved\r\nLocation: {call.camera.url()}\r\n\r\n"

    with (
        ScriptedCamera(play, answer=answer) as camera,
        pytest.raises(LiveError, match="redirects more than 4 times"),
    ):
        take(live(camera.url(), retry=False), 1)


@pytest.mark.parametrize(
    ("base", "url"),
    [("/sub/", "rtsp://127.0.0.1:{}/sub/track1"), ("other/", "rtsp://127.0.0.1:{}/other/track1")],
)
def test_a_relative_content_base_is_resolved(base: str, url: str) -> None:
    def answer(call: Call, request: Request) -> str | None:
        return f"RTSP/1.0 200 OK\r\nContent-Base: {base}\r\n\r\n{SDP}" if request.method == "DESCRIBE" else None

    with ScriptedCamera(play, answer=answer) as camera:
        take(live(camera.url()), 1)
        setup = next(request for request in camera.calls[0].requests if request.method == "SETUP")
        assert setup.url == url.format(camera.port)


def test_rtsp_is_tunnelled_through_http() -> None:
    with ScriptedCamera(play) as camera:
        assert numbers(take(live(camera.url(), rtsp_transport="http"), 30)) == list(range(30))
        assert camera.calls[0].way == "tcp"


def test_a_server_without_a_tunnel_is_refused_in_one_line() -> None:
    with ScriptedCamera(play) as camera:
        camera.tunnel_status = "404 Not Found"
        with pytest.raises(LiveError, match=r"does not support RTSP over HTTP \(404\)"):
            take(live(camera.url(), rtsp_transport="http", retry=False), 1)


def test_a_multicast_group_is_received() -> None:
    with ScriptedCamera(play) as camera:
        assert numbers(take(live(camera.url(), rtsp_transport="multicast"), 30)) == list(range(30))


@pytest.mark.parametrize("transport", ["tcp", "udp"])
def test_encrypted_packets_are_decrypted(transport: str) -> None:
    key = bytes(range(30))
    sdp = SDP.replace("RTP/AVP", "RTP/SAVP")
    sdp += f"a=crypto:1 AES_CM_128_HMAC_SHA1_80 inline:{base64.b64encode(key).decode()}|2^31\r\n"

    def script(call: Call) -> None:
        session = pylibsrtp.Session(pylibsrtp.Policy(key=key, ssrc_type=pylibsrtp.Policy.SSRC_ANY_OUTBOUND))
        packetizer = Packetizer()
        for unit in FRAMES:
            call.send(*(session.protect(packet) for packet in packetizer.frame(unit)))
            if call.wait(0.01):
                return
        call.linger()

    with ScriptedCamera(script, sdp=sdp) as camera:
        assert numbers(take(live(camera.url(), rtsp_transport=transport), 30)) == list(range(30))


def fingerprint(certificate: tuple[Path, Path]) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate[0].read_text())).hexdigest()


@pytest.mark.parametrize("tls", ["accept", "pin"])
def test_a_certificate_is_accepted_as_configured(certificate: tuple[Path, Path], tls: str) -> None:
    setting = f"sha256:{fingerprint(certificate)}" if tls == "pin" else tls
    with ScriptedCamera(play, certificate=certificate) as camera:
        url = camera.url(scheme="rtsps").replace("127.0.0.1", "localhost")
        assert numbers(take(live(url, tls=setting), 10)) == list(range(10))


def test_another_certificate_than_the_pinned_is_refused(certificate: tuple[Path, Path]) -> None:
    with (
        ScriptedCamera(play, certificate=certificate) as camera,
        pytest.raises(LiveError, match=f"is sha256:{fingerprint(certificate)}, not the pinned") as caught,
    ):
        take(live(camera.url(scheme="rtsps"), tls=f"sha256:{'0' * 64}", retry=False), 1)
    assert caught.value.reason == "tls"


def test_an_untrusted_certificate_is_named_with_what_to_set(certificate: tuple[Path, Path]) -> None:
    with (
        ScriptedCamera(play, certificate=certificate) as camera,
        pytest.raises(LiveError, match=f"set tls: sha256:{fingerprint(certificate)} to accept only this one"),
    ):
        take(live(camera.url(scheme="rtsps"), retry=False), 1)


@pytest.mark.parametrize("tls", ["", "sha256:12", "no", "sha256:" + "g" * 64])
def test_an_unknown_tls_setting_is_refused(tls: str) -> None:
    with pytest.raises(SourceError, match="tls must be verify, accept or sha256:"):
        open_source("rtsps://cam/x", tls=tls)
