"""Scripted cameras with the faults of real ones: what they cost, and what they must not cost."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

import pytest

from saccade.sources import Frame, LiveError, LiveSource, open_source
from saccade.sources.rtsp.transport import TransportChoice
from tests.support.cameras.scripted import (
    LONG_S,
    SDP,
    STEP,
    Call,
    Packetizer,
    Request,
    ScriptedCamera,
    coded_frames,
    sender_report,
    without_parameter_sets,
)
from tests.support.clips import number_of

FRAMES = coded_frames(60)
LONG_GOP = coded_frames(60, gop=1000)


def live(url: str, **options: object) -> LiveSource:
    source = open_source(url, hwaccel="none", **options)  # type: ignore[arg-type]
    assert isinstance(source, LiveSource)
    return source


def numbers(frames: list[Frame]) -> list[int]:
    return [number_of(frame.image) for frame in frames]


def take(source: LiveSource, count: int) -> list[Frame]:
    with source:
        return list(itertools.islice(source, count))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a burst be handed on in full; the tests of lag set it back."""
    monkeypatch.setattr("saccade.sources.rtsp.connection.CATCH_UP_S", 10.0)


# ---- lag


@pytest.mark.parametrize("way", ["tcp", "udp"])
def test_a_stopped_reader_resumes_with_a_new_frame(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.sources.rtsp.connection.CATCH_UP_S", 0.2)

    def script(call: Call) -> None:
        packetizer = Packetizer()
        for number in range(250):
            call.send(*packetizer.frame(FRAMES[number % 60]))
            if call.wait(0.02):
                return

    frames: list[Frame] = []
    with ScriptedCamera(script) as camera, live(camera.url(), rtsp_transport=way) as source:
        for frame in source:
            frames.append(frame)
            if len(frames) == 20:
                time.sleep(2.0)
            if len(frames) == 60:
                break
    assert frames[20].decode_ms < 1500  # counted from its arrival at the socket
    assert frames[20].dropped_before > 10
    seen = [frame.pts // STEP for frame in frames]
    for before, after in itertools.pairwise(frames):
        assert after.pts // STEP - before.pts // STEP == after.dropped_before + 1
    assert seen[20] - seen[19] > 40


def test_a_slow_reader_gets_new_frames_and_the_count_of_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.sources.rtsp.connection.CATCH_UP_S", 0.1)

    def script(call: Call) -> None:
        call.play(FRAMES * 3, Packetizer(), 0.02)

    frames: list[Frame] = []
    with ScriptedCamera(script) as camera, live(camera.url()) as source:
        for frame in source:
            frames.append(frame)
            time.sleep(0.15)
            if len(frames) == 15:
                break
    assert max(frame.decode_ms for frame in frames[5:]) < 700
    for before, after in itertools.pairwise(frames):
        assert after.pts // STEP - before.pts // STEP == after.dropped_before + 1


# ---- the first GOP


@pytest.mark.parametrize("lead", [b"\x09\xf0", b"\x06\x05\x02\xaa\xbb\x80"])
def test_the_first_frames_are_shown_whatever_leads_them(lead: bytes) -> None:
    slices, attribute = without_parameter_sets(LONG_GOP)

    def script(call: Call) -> None:
        call.play([[lead, *unit] for unit in slices], Packetizer())
        call.linger()

    with ScriptedCamera(script, sdp=SDP + attribute) as camera:
        assert numbers(take(live(camera.url()), 30)) == list(range(30))


# ---- harmless packets


def test_packets_without_video_cost_no_frame() -> None:
    def script(call: Call) -> None:
        packetizer = Packetizer()
        for number, unit in enumerate(LONG_GOP):
            call.send(*packetizer.frame(unit))
            if number % 3 == 0:
                padding = bytearray(packetizer.packet(b"\0\0\0\4"))
                padding[0] |= 0x20
                call.send(bytes(padding))
            if number % 3 == 1:
                call.send(packetizer.packet(b"whatever", payload_type=107), packetizer.packet(b"\x0a"))
            if number % 3 == 2:
                call.send(packetizer.packet(b"\x1e\x00\x01"), packetizer.packet(b"\x0c\xff\x80"))
        call.linger()

    with ScriptedCamera(script) as camera, live(camera.url()) as source:
        frames = list(itertools.islice(source, 50))
        assert source.corrupt_packets == 0
    assert numbers(frames) == list(range(50))


def test_start_codes_inside_payloads_are_accepted() -> None:
    def script(call: Call) -> None:
        call.play([[b"\0\0\0\1".join(unit)] for unit in LONG_GOP], Packetizer())
        call.linger()

    with ScriptedCamera(script) as camera:
        assert numbers(take(live(camera.url()), 30)) == list(range(30))


# ---- slow streams


def test_a_stream_slower_than_the_limit_of_silence_stays_live(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.sources.live.reconnect.SILENCE_S", 0.6)
    monkeypatch.setattr("saccade.sources.rtsp.receiver._PROBE_S", 0.2)
    with ScriptedCamera(lambda call: call.play(FRAMES, Packetizer(), 1.0)) as camera, live(camera.url()) as source:
        frames = list(itertools.islice(source, 4))
        assert source.status.connections == 1
        assert any(request.method == "OPTIONS" for request in camera.calls[0].requests[4:])  # asked for a sign of life
    assert numbers(frames) == [0, 1, 2, 3]


def test_a_camera_that_answers_but_sends_no_more_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.sources.live.reconnect.SILENCE_S", 0.6)
    monkeypatch.setattr("saccade.sources.rtsp.receiver._PROBE_S", 0.2)

    def script(call: Call) -> None:
        call.play(FRAMES[:20], Packetizer(), 0.02)
        call.linger()

    with ScriptedCamera(script) as camera, live(camera.url()) as source:
        assert len(list(itertools.islice(source, 25))) == 25
        assert source.status.connections == 2


# ---- loss, and the way that packets come


def lossy(call: Call) -> None:
    """Loses the first packet of the 14th frame; keys are every 10th."""
    packetizer = Packetizer()
    for number, unit in enumerate(FRAMES):
        packets = packetizer.frame(unit)
        call.send(*(packets[1:] if number == 13 else packets))
        if call.wait(0.005):
            return
    call.linger()


def test_damaged_frames_are_hidden_or_shown_as_asked() -> None:
    with ScriptedCamera(lossy) as camera:
        hidden = take(live(camera.url(), rtsp_transport="tcp"), 30)
        shown = take(live(camera.url(), rtsp_transport="tcp", loss="show"), 30)
    assert numbers(hidden)[:20] == [*range(13), *range(20, 27)]
    assert not any(frame.damaged for frame in hidden)
    damaged = [frame.pts // STEP for frame in shown if frame.damaged]
    assert damaged
    assert set(damaged) <= set(range(13, 20))
    assert [frame.pts // STEP for frame in shown if not frame.damaged][:15] == [*range(13), 20, 21]


def test_a_key_frame_is_requested_where_the_camera_takes_it() -> None:
    with ScriptedCamera(lossy, sdp=f"{SDP}a=rtcp-fb:96 nack pli\r\n") as camera:
        with live(camera.url()) as source:
            for frame in source:
                if number_of(frame.image) > 25:
                    break
        requests = [data for call in camera.calls for data in call.rtcp if data[1] == 206]
    assert requests
    assert all(data[0] & 31 == 1 and data[8:12] == b"ssrc" for data in requests)


def refuse(way: str) -> Callable[[Call, Request], str | None]:
    def answer(call: Call, request: Request) -> str | None:
        refused = request.method == "SETUP" and ("TCP" in request.headers["transport"]) == (way == "tcp")
        return "RTSP/1.0 461 Unsupported Transport\r\n\r\n" if refused else None

    return answer


def test_auto_takes_udp_where_tcp_is_refused() -> None:
    with ScriptedCamera(lambda call: call.play(FRAMES, Packetizer(), 0.01), answer=refuse("tcp")) as camera:
        assert len(take(live(camera.url(), rtsp_transport="auto"), 20)) == 20
        assert [call.way for call in camera.calls] == ["", "udp"]


def test_a_refused_transport_is_named_with_what_to_set() -> None:
    with (
        ScriptedCamera(lambda call: None, answer=refuse("udp")) as camera,
        pytest.raises(LiveError, match=r"refuses udp .*; set rtsp_transport: auto, or tcp"),
    ):
        take(live(camera.url(), rtsp_transport="udp", retry=False), 1)


def test_auto_tries_the_other_way_after_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.sources.live.reconnect.NO_PACKETS_S", 1.0)
    monkeypatch.setattr("saccade.sources.rtsp.receiver._PROBE_S", 0.3)

    def script(call: Call) -> None:
        if call.way == "udp":
            call.play(FRAMES, Packetizer(), 0.01)
        call.linger()

    with ScriptedCamera(script) as camera:
        assert len(take(live(camera.url(), rtsp_transport="auto"), 20)) == 20
        assert [call.way for call in camera.calls] == ["tcp", "udp"]


def test_auto_leaves_udp_where_it_loses_packets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.sources.rtsp.transport.MIN_PACKETS", 100)
    choice = TransportChoice("auto")
    choice.way = "udp"
    monkeypatch.setattr("saccade.sources.factory.TransportChoice", lambda wanted: choice)

    def script(call: Call) -> None:
        packetizer = Packetizer()
        for number, unit in enumerate(FRAMES * 4):
            packets = packetizer.frame(unit)
            call.send(*(packets[1:] if call.way == "udp" and number % 10 == 3 else packets))
            if call.wait(0.01):
                return

    with ScriptedCamera(script) as camera, live(camera.url(), rtsp_transport="auto") as source:
        for _ in source:
            if len(camera.calls) == 2 and camera.calls[1].way:
                break
        assert [call.way for call in camera.calls] == ["udp", "tcp"]


def test_auto_goes_back_to_no_way_that_was_refused() -> None:
    choice = TransportChoice("auto")
    assert choice.way == "tcp"
    assert choice.refused()
    choice.failed()
    assert choice.way == "udp"
    assert not choice.is_lossy(100, 900)
    assert not choice.refused()
    assert not TransportChoice("udp").refused()


# ---- passwords


def test_a_refused_password_is_not_tried_again() -> None:
    def answer(call: Call, request: Request) -> str | None:
        return 'RTSP/1.0 401 Unauthorized\r\nWWW-Authenticate: Digest realm="r", nonce="n"\r\n\r\n'

    with ScriptedCamera(lambda call: None, answer=answer) as camera:
        source = live(camera.url(user="bob:wrong@"))
        reader = threading.Thread(target=lambda: list(source))
        reader.start()
        time.sleep(1.5)
        status = str(source.status)
        source.close()
        reader.join(LONG_S)
        asked = [request for call in camera.calls for request in call.requests]
    assert len([request for request in asked if "authorization" in request.headers]) == 1
    assert "auth failed, next attempt in" in status


def test_an_expired_nonce_is_no_refusal() -> None:
    def answer(call: Call, request: Request) -> str | None:
        fresh = f"n{len(call.requests)}"
        given = request.headers.get("authorization", "")
        if request.method == "DESCRIBE" and "n2" not in given and "n3" not in given:
            stale = ", stale=true" if given else ""
            return f'RTSP/1.0 401 No\r\nWWW-Authenticate: Digest realm="r", nonce="{fresh}"{stale}\r\n\r\n'
        return None

    with ScriptedCamera(lambda call: call.play(FRAMES, Packetizer(), 0.01), answer=answer) as camera:
        assert len(take(live(camera.url(user="bob:right@")), 3)) == 3


# ---- details of the protocol


def test_play_goes_to_the_url_of_the_session() -> None:
    sdp = "v=0\r\na=control:rtsp://127.0.0.1/everything\r\n" + SDP.removeprefix("v=0\r\n")
    with ScriptedCamera(lambda call: call.play(FRAMES, Packetizer(), 0.01), sdp=sdp) as camera:
        take(live(camera.url()), 3)
        urls = {request.method: request.url for request in camera.calls[0].requests}
    assert urls["PLAY"] == "rtsp://127.0.0.1/everything"
    assert urls["SETUP"] == "rtsp://127.0.0.1/everything/track1"


def test_packets_from_behind_a_nat_are_taken() -> None:
    def answer(call: Call, request: Request) -> str | None:
        if request.method != "SETUP":
            return None
        transport = call.camera._setup(call, request.headers["transport"])
        return f"RTSP/1.0 200 OK\r\nSession: 7\r\nTransport: {transport};source=192.0.2.1\r\n\r\n"

    with ScriptedCamera(lambda call: call.play(FRAMES, Packetizer(), 0.01), answer=answer) as camera:
        assert len(take(live(camera.url(), rtsp_transport="udp"), 10)) == 10


@pytest.mark.parametrize("off_s", [0.0, -315_360_000.0, 60.0])
def test_an_implausible_clock_of_the_sender_is_corrected(off_s: float) -> None:
    def script(call: Call) -> None:
        packetizer = Packetizer()
        call.send(*packetizer.frame(FRAMES[0]))
        call.send(sender_report(time.time() + off_s, packetizer.timestamp), rtcp=True)
        call.play(FRAMES[1:], packetizer, 0.02)

    with ScriptedCamera(script) as camera, live(camera.url()) as source:
        frames = list(itertools.islice(source, 20))
        stats = source.stats
    assert {frame.capture_clock for frame in frames[10:]} == {"rtcp"}
    assert all(abs(frame.captured_at - time.time()) < LONG_S for frame in frames)
    assert stats is not None
    assert stats.clock_off_s == pytest.approx(off_s, abs=10)


@pytest.mark.parametrize(("ssrc", "ends"), [(b"ssrc", True), (b"else", False)])
def test_only_the_senders_own_bye_ends_the_stream(ssrc: bytes, ends: bool) -> None:
    def script(call: Call) -> None:
        packetizer = Packetizer()
        call.play(FRAMES[:10], packetizer, 0.01)
        call.send(b"\x81\xcb\0\1" + ssrc, rtcp=True)
        call.play(FRAMES[10:], packetizer, 0.01)
        call.linger()

    with ScriptedCamera(script) as camera, live(camera.url()) as source:
        list(itertools.islice(source, 30))
        assert (source.status.connections > 1) == ends


def test_a_slow_description_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.sources.rtsp.client.REPLY_S", 0.3)

    def answer(call: Call, request: Request) -> str | None:
        if request.method == "DESCRIBE":
            time.sleep(0.8)
        return None

    with ScriptedCamera(lambda call: call.play(FRAMES, Packetizer(), 0.01), answer=answer) as camera:
        assert len(take(live(camera.url(), retry=False), 3)) == 3


def test_encryption_without_a_key_is_refused_in_one_line() -> None:
    sdp = SDP.replace("RTP/AVP", "RTP/SAVP")
    with (
        ScriptedCamera(lambda call: None, sdp=sdp) as camera,
        pytest.raises(LiveError, match=r"the server encrypts \(RTP/SAVP\) with no key"),
    ):
        take(live(camera.url(), retry=False), 1)
