from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from aiortc import RTCIceServer
from aiortc.rtp import RtcpByePacket

from saccade.sources.frame import Frame
from saccade.sources.webrtc.signaling import MAX_OFFER_BYTES, link_of
from saccade.sources.webrtc.source import WebRtcSource
from tests.support.webrtc import Served, an_offer, leaving_no_thread, publishing, serving, until

TOKEN = "sesame"
WITH_TOKEN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    with leaving_no_thread():
        yield


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    with serving() as make:
        yield make


# ---- leaving


def test_a_peer_that_vanishes_is_gone(serve: Callable[..., Served]) -> None:
    served = serve(silence_s=1.5)
    with publishing(f"{served.url}/whip") as publisher:
        (source,) = served.sources
        frames: list[Frame] = []
        reader = threading.Thread(target=lambda: frames.extend(source))
        reader.start()
        until(lambda: len(frames) > 3)
        publisher.vanish()
        began = time.monotonic()
        until(lambda: served.server.peers == 0)
        assert time.monotonic() - began > 1
        reader.join(5)
        assert not reader.is_alive()  # the iteration has ended


@pytest.mark.parametrize(("good", "bad"), [("packetization-mode=1", "packetization-mode=0"), ("=42", "=64")])
def test_h264_that_aiortc_does_not_receive_is_refused_with_what_to_send(
    good: str, bad: str, serve: Callable[..., Served]
) -> None:
    served = serve()
    status, text, _ = served.post(an_offer(served, "H264").replace(good, bad))
    assert status == 422
    assert "send VP8, or H264 of the Baseline profile with packetization-mode=1" in text


def test_a_peer_that_never_connects_is_gone(serve: Callable[..., Served]) -> None:
    served = serve(silence_s=0.5)
    assert served.post(an_offer(served))[0] == 201
    assert served.server.peers == 1
    until(lambda: served.server.peers == 0)
    assert list(served.sources[0]) == []


def test_delete_ends_the_session(serve: Callable[..., Served]) -> None:
    served = serve(token=TOKEN)
    with publishing(f"{served.url}/whip", headers=WITH_TOKEN) as publisher:
        frames = iter(served.sources[0])
        next(frames)
        assert served.ask("DELETE", publisher.location)[0] == 401
        assert served.server.peers == 1
        assert served.ask("DELETE", publisher.location, headers=WITH_TOKEN)[0] == 200
        assert served.server.peers == 0
        assert served.ask("DELETE", publisher.location, headers=WITH_TOKEN)[0] == 404
    assert list(frames) == []


def test_closing_the_source_lets_the_peer_go(serve: Callable[..., Served]) -> None:
    served = serve()
    with publishing(f"{served.url}/whip") as publisher:
        with served.sources[0] as source:
            next(iter(source))
        until(lambda: served.server.peers == 0)
        until(lambda: publisher.connection.connectionState == "closed")


def test_a_goodbye_ends_the_source(serve: Callable[..., Served]) -> None:
    served = serve()
    with publishing(f"{served.url}/whip") as publisher:
        frames = iter(served.sources[0])
        next(frames)
        sender = publisher.connection.getSenders()[0]
        publisher.do(sender._send_rtcp([RtcpByePacket(sources=[sender._ssrc])]))
        until(lambda: served.server.peers == 0)
        assert list(frames) == []


# ---- who may come in


def test_whip_answers_as_rfc_9725_says(serve: Callable[..., Served]) -> None:
    served = serve()
    status, _, headers = served.ask("OPTIONS")
    assert (status, headers["Accept-Post"]) == (204, "application/sdp")
    status, answer, headers = served.post(an_offer(served))
    assert (status, headers["Content-Type"].split(";")[0]) == (201, "application/sdp")
    assert answer.startswith("v=0")
    assert "a=recvonly" in answer
    assert "127.0.0.1" in answer
    assert "Link" not in headers  # no ICE server by default
    session = headers["Location"]
    for method, path, allowed in (("PATCH", session, "DELETE"), ("GET", session, "DELETE"), ("PUT", "/whip", "POST")):
        status, _, headers = served.ask(method, path)
        assert status == 405
        assert allowed in headers["Allow"]


def test_ice_servers_are_reported_to_the_client() -> None:
    assert link_of(RTCIceServer(["stun:a.example"])) == '<stun:a.example>; rel="ice-server"'
    with_password = '; username="ann"; credential="s3cret"; credential-type="password"'
    assert (
        link_of(RTCIceServer("turn:a.example", "ann", "s3cret")) == f'<turn:a.example>; rel="ice-server"{with_password}'
    )


def test_a_plain_offer_in_json(serve: Callable[..., Served]) -> None:
    served = serve()
    offer = {"type": "offer", "sdp": an_offer(served)}
    status, text, _ = served.ask("POST", "/offer?stream=front door", json=offer)
    assert (status, json.loads(text)["type"]) == (200, "answer")
    assert served.sources[0].name == "frontdoor"
    for body in ({}, [], {"type": "answer", "sdp": "v=0"}, {"type": "offer", "sdp": 7}):
        assert served.ask("POST", "/offer", json=body)[0] == 400
    assert served.ask("POST", "/offer", content="{", headers={"Content-Type": "application/json"})[0] == 400


def test_without_the_token_nobody_comes_in(serve: Callable[..., Served], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    served = serve(token=TOKEN)
    offer = an_offer(served)
    for wrong in (
        {},
        {"Authorization": "Bearer sesam"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer ü"},
    ):
        status, text, headers = served.post(offer, wrong)
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert text.count("\n") == 1
    assert served.server.peers == 0
    assert b" 401 " in served.ask_raw(b"POST /whip HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
    assert served.post(offer, WITH_TOKEN)[0] == 201
    assert TOKEN not in caplog.text


def test_pages_of_other_origins_stay_outside(serve: Callable[..., Served]) -> None:
    served = serve(origins=["https://cameras.example"])
    offer = an_offer(served)
    host = served.url.removeprefix("http://")
    rebound = {"Origin": f"http://evil.example:{host.split(':')[1]}", "Host": f"evil.example:{host.split(':')[1]}"}
    for outside in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://["}, rebound):
        assert served.post(offer, outside)[0] == 403
        assert served.ask("OPTIONS", headers=outside)[0] == 403
    for inside in ("https://cameras.example", served.url):
        status, _, headers = served.ask("OPTIONS", headers={"Origin": inside})
        assert (status, headers["Access-Control-Allow-Origin"]) == (204, inside)
        assert served.post(offer, {"Origin": inside})[0] == 201


def test_a_failure_of_the_taker_lets_the_peer_go(serve: Callable[..., Served]) -> None:
    served = serve()

    def refuse(source: WebRtcSource) -> None:
        raise RuntimeError("no room")

    served.server._on_source = refuse
    assert served.post(an_offer(served))[0] == 500
    assert served.server.peers == 0


def test_only_so_many_peers(serve: Callable[..., Served]) -> None:
    served = serve(max_peers=2)
    offer = an_offer(served)
    assert [served.post(offer)[0] for _ in range(3)] == [201, 201, 503]
    assert [source.name for source in served.sources] == ["webrtc", "webrtc-2"]
    served.sources[0].close()
    until(lambda: served.server.peers == 1)
    assert served.post(offer)[0] == 201


# ---- bad offers


def test_an_oversized_offer_is_refused_before_it_is_read(serve: Callable[..., Served]) -> None:
    served = serve()
    assert served.post("v=0\r\n" * MAX_OFFER_BYTES)[0] == 413

    def in_pieces() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * 4096

    status, text, _ = served.ask("POST", content=in_pieces(), headers={"Content-Type": "application/sdp"})
    assert (status, text) == (413, f"an offer is too large: at most {MAX_OFFER_BYTES} bytes are allowed\n")


def test_a_malformed_offer_is_refused_in_one_line(serve: Callable[..., Served]) -> None:
    served = serve()
    good = an_offer(served)
    lines = good.splitlines(keepends=True)
    cases = {
        "": 400,
        "hello": 400,
        "v=0\r\n": 400,
        b"\xff\xfe": 400,
        good.replace("m=video", "m=audio"): 422,
        good.replace("VP8", "VP9"): 422,
        good.replace("a=sendrecv", "a=recvonly"): 422,
        "".join(line for line in lines if not line.startswith("a=fingerprint")): 400,
        "".join(line for line in lines if not line.startswith("a=ice-")): 400,
        good + "m=video 9 UDP/TLS/RTP/SAVPF 97\r\n" * 9: 422,
        good.replace("a=rtpmap:97 VP8/90000", "a=rtpmap:97"): 400,
        re.sub(r"m=video \d+", "m=video nine", good): 400,
    }
    for offer, expected in cases.items():
        status, text, _ = served.post(offer)
        assert (status, text.count("\n")) == (expected, 1), (expected, offer[-600:])
    for damaged in range(0, len(lines), 3):  # whatever is left out: an answer or a refusal, never a failure
        assert served.post("".join(lines[:damaged] + lines[damaged + 1 :]))[0] in (201, 400, 422, 503)
    assert served.post(good, {"Content-Type": "text/plain"})[0] == 415


def test_names_in_candidates_are_not_looked_up(serve: Callable[..., Served]) -> None:
    served = serve()
    offer = an_offer(served).replace(" 127.0.0.1 ", " 7ba9c5.local ")
    assert "7ba9c5.local" in offer
    assert served.post(offer)[0] == 201
    assert served.server.peers == 1
