from __future__ import annotations

import itertools
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import aiohttp
import av
import numpy as np
import pytest
from aiohttp import web
from aiortc import AudioStreamTrack, RTCConfiguration, RTCIceServer, RTCPeerConnection, RTCSessionDescription
from aiortc.rtp import RtcpByePacket
from conftest import number_of, numbered_picture
from numpy.typing import NDArray
from webrtc_support import LOOPBACK, Drawn, Publisher, offer_of, own_loop, publishing, small

from sources import SourceError, open_source
from sources.frame import Frame
from sources.jitter import CodedPicture
from sources.webrtc import SenderReport, WebRtcFeed, WebRtcSource, is_key_frame
from sources.webrtc_listen import ListenTarget, WebRtcListener
from sources.webrtc_peer import choose_addresses
from sources.webrtc_server import MAX_OFFER_BYTES, WebRtcServer, link_of

TOKEN = "sesame"
WITH_TOKEN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == set()


class Served:
    """A `WebRtcServer` on an application of its own, as the pipeline will have one, and a client to ask it."""

    def __init__(self, loop: Any, **settings: Any) -> None:
        self.sources: list[WebRtcSource] = []
        self._loop = loop
        self.server = WebRtcServer(self.sources.append, media_hosts=LOOPBACK, **settings)
        self.url = ""

    def do(self, work: Any) -> Any:
        return Publisher(self._loop).do(work)

    async def open(self) -> None:
        application = web.Application()
        application.add_routes(self.server.routes())
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self.server.close()
        await self._runner.cleanup()

    def ask(self, method: str, path: str = "/whip", **how: Any) -> tuple[int, str, Any]:
        """Status, text and headers of a response."""

        async def asked() -> tuple[int, str, Any]:
            async with aiohttp.ClientSession() as http, http.request(method, self.url + path, **how) as response:
                return response.status, await response.text(), response.headers

        result: tuple[int, str, Any] = self.do(asked())
        return result

    def ask_raw(self, request: bytes) -> bytes:
        """The first bytes of the response to something that no client would send."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=5) as client:
            client.sendall(request)
            return client.recv(1000)

    def post(self, offer: str | bytes, headers: dict[str, str] | None = None) -> tuple[int, str, Any]:
        return self.ask("POST", data=offer, headers={"Content-Type": "application/sdp", **(headers or {})})


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    with own_loop() as loop:
        opened: list[Served] = []

        def make(**settings: Any) -> Served:
            served = Served(loop, **settings)
            served.do(served.open())
            opened.append(served)
            return served

        yield make
        for served in opened:
            served.do(served.close())


def an_offer(served: Served) -> str:
    async def made() -> str:
        connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        try:
            return await offer_of(connection, "VP8", Drawn(small))
        finally:
            await connection.close()

    offer: str = served.do(made())
    return offer


def encoded_vp8(pictures: int, keys: tuple[int, ...]) -> list[av.Packet]:
    encoder = av.CodecContext.create("libvpx", "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.time_base = 320, 240, "yuv420p", Fraction(1, 30)
    encoder.options = {"deadline": "realtime", "lag-in-frames": "0"}
    packets = []
    for number in range(pictures):
        frame = av.VideoFrame.from_ndarray(small(number), format="rgb24")
        frame.pts = number
        frame.pict_type = av.video.frame.PictureType.I if number in keys else av.video.frame.PictureType.NONE
        packets += encoder.encode(frame)
    return packets


def until(done: Callable[[], object], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


# ---- pictures


@pytest.mark.parametrize("codec", ["VP8", "H264"])
def test_a_peer_publishes_and_every_picture_arrives(codec: str) -> None:
    with WebRtcListener("webrtc:0", media_hosts=LOOPBACK, stream="door") as source, publishing(source.url, codec):
        assert source.info.live
        frames = list(itertools.islice(source, 60))
        assert source.info.codec == codec.lower()
        assert (source.info.width, source.info.height) == (320, 240)
        assert source.corrupt_packets == 0
    numbers = [number_of(frame.image) for frame in frames]
    assert [b - a - 1 for a, b in itertools.pairwise(numbers)] == [frame.dropped_before for frame in frames[1:]]
    assert all(frame.image.shape == (240, 320, 3) and frame.stream == "door" for frame in frames)
    assert all(a.pts < b.pts and a.index < b.index for a, b in itertools.pairwise(frames))
    # 30 a second in units of 1/90000 s, however the frames were delayed.
    assert frames[-1].pts - frames[0].pts == pytest.approx(3000 * (numbers[-1] - numbers[0]), abs=30)
    assert abs(frames[-1].captured_at - time.time()) < 10
    assert frames[0].capture_clock == "arrival"
    assert frames[-1].capture_clock == "rtcp"  # aiortc reports within 1.5 s


@pytest.mark.parametrize("codec", ["VP8", "H264"])
def test_the_size_may_change_in_mid_stream(codec: str) -> None:
    def growing(number: int) -> NDArray[np.uint8]:
        return numbered_picture(number % 256, *((320, 240) if number < 20 else (480, 360)))

    with WebRtcListener("webrtc:0", media_hosts=LOOPBACK) as source, publishing(source.url, codec, growing):
        frames = list(itertools.islice(source, 40))
        assert (source.info.width, source.info.height) == (480, 360)
    assert {(frame.width, frame.height) for frame in frames} == {(320, 240), (480, 360)}
    assert all((frame.width == 320) == (number_of(frame.image) < 20) for frame in frames)
    assert all(a.pts < b.pts for a, b in itertools.pairwise(frames))


def test_a_slow_reader_gets_the_newest_picture_and_is_told_what_it_missed() -> None:
    with WebRtcListener("webrtc:0", media_hosts=LOOPBACK) as source, publishing(source.url):
        frames = []
        for frame in source:
            frames.append(frame)
            if len(frames) == 6:
                break
            time.sleep(0.2)  # six pictures
    numbers = [number_of(frame.image) for frame in frames]
    missed = [b - a - 1 for a, b in itertools.pairwise(numbers)]
    assert [frame.dropped_before for frame in frames[1:]] == missed
    assert sum(missed) > 10


def test_every_nth_picture_on_request() -> None:
    with WebRtcListener("webrtc:0", media_hosts=LOOPBACK, vid_stride=3) as source, publishing(source.url):
        frames = list(itertools.islice(source, 5))
    assert [frame.index % 3 for frame in frames] == [0] * 5


def test_one_publisher_after_the_other_on_one_clock() -> None:
    with WebRtcListener("webrtc:0", media_hosts=LOOPBACK) as source:
        frames: list[Frame] = []
        reader = threading.Thread(target=lambda: frames.extend(source))
        reader.start()
        for codec in ("VP8", "H264"):
            seen = len(frames)
            with publishing(source.url, codec):
                until(lambda seen=seen: len(frames) > seen + 5)  # type: ignore[misc]
        source.close()
        reader.join(5)
        assert not reader.is_alive()
    assert all(a.pts < b.pts and a.index < b.index for a, b in itertools.pairwise(frames))
    passed = frames[-1].decoded_at - frames[0].decoded_at
    assert float((frames[-1].pts - frames[0].pts) * frames[0].time_base) == pytest.approx(passed, abs=0.5)


def test_sound_and_data_beside_the_video_do_no_harm(serve: Callable[..., Served]) -> None:
    served = serve()
    connection = RTCPeerConnection(RTCConfiguration(iceServers=[]))

    async def publish() -> None:
        connection.addTrack(AudioStreamTrack())
        connection.createDataChannel("boxes")
        connection.addTrack(Drawn(small))
        for transceiver in connection.getTransceivers():
            choose_addresses(transceiver, LOOPBACK)
        assert connection.sctp is not None
        await connection.setLocalDescription(await connection.createOffer())
        body = {"type": "offer", "sdp": connection.localDescription.sdp}
        async with aiohttp.ClientSession() as http, http.post(f"{served.url}/offer", json=body) as response:
            answer = await response.json()
        assert "a=inactive" in answer["sdp"]  # the sound
        await connection.setRemoteDescription(RTCSessionDescription(answer["sdp"], answer["type"]))

    served.do(publish())
    try:
        frames = list(itertools.islice(served.sources[0], 10))
        assert all(frame.width == 320 for frame in frames)
    finally:
        served.do(connection.close())


def test_a_new_publisher_takes_the_place_of_the_old() -> None:
    with WebRtcListener("webrtc:0", media_hosts=LOOPBACK) as source:
        frames = iter(source)
        with publishing(source.url, "VP8"):
            assert next(frames).width == 320
            with publishing(source.url, "VP8", lambda n: numbered_picture(n % 256, 160, 120)):
                assert any(frame.width == 160 for frame in itertools.islice(frames, 60))


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
        assert 1 < time.monotonic() - began < 5
        reader.join(5)
        assert not reader.is_alive()  # the iteration has ended


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


def test_ice_servers_are_told_to_the_client() -> None:
    assert link_of(RTCIceServer(["stun:a.example"])) == '<stun:a.example>; rel="ice-server"'
    with_password = '; username="ann"; credential="s3cret"; credential-type="password"'
    assert (
        link_of(RTCIceServer("turn:a.example", "ann", "s3cret")) == f'<turn:a.example>; rel="ice-server"{with_password}'
    )


def test_a_plain_offer_in_json(serve: Callable[..., Served]) -> None:
    served = serve()
    offer = {"type": "offer", "sdp": an_offer(served)}
    status, text, _ = served.ask("POST", "/offer?stream=front door", json=offer)
    assert (status, '"type": "answer"' in text) == (200, True)
    assert served.sources[0].name == "frontdoor"
    for body in ({}, [], {"type": "answer", "sdp": "v=0"}, {"type": "offer", "sdp": 7}):
        assert served.ask("POST", "/offer", json=body)[0] == 400
    assert served.ask("POST", "/offer", data="{", headers={"Content-Type": "application/json"})[0] == 400


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

    async def in_pieces() -> Any:
        for _ in range(40):
            yield b"x" * 4096

    status, text, _ = served.ask("POST", data=in_pieces(), headers={"Content-Type": "application/sdp"})
    assert (status, text) == (413, f"an offer has at most {MAX_OFFER_BYTES} bytes\n")


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


# ---- the feed by itself


@pytest.fixture
def feed() -> Iterator[WebRtcFeed]:
    feed = WebRtcFeed({97: "VP8"})
    yield feed
    feed.close()
    feed.join()


def test_pictures_that_build_on_lost_ones_are_not_shown(feed: WebRtcFeed) -> None:
    feed.take(CodedPicture(b"\x01" * 40, 0, 97, 0.0, after_loss=False))
    until(lambda: feed.damaged == 1)
    assert feed.read(0.01) is None
    assert [feed.asks_for_key_frame(now) for now in (1.0, 1.2, 1.6)] == [True, False, True]


def test_pictures_after_a_loss_wait_for_a_key_frame(feed: WebRtcFeed) -> None:
    coded = [bytes(packet) for packet in encoded_vp8(6, keys=(0, 4))]
    for number, data in enumerate(coded):
        feed.take(CodedPicture(data, 3000 * number, 97, time.monotonic(), after_loss=number == 2))
        if number in (0, 1, 4, 5):
            picture = feed.read(5)
            assert picture is not None
            assert picture.timestamp == 3000 * number
            assert picture.lost_before == (2 if number == 4 else 0)
    assert feed.damaged == 2


def test_a_decoder_that_cannot_keep_up_begins_anew(feed: WebRtcFeed) -> None:
    key, delta = (bytes(packet) for packet in encoded_vp8(2, keys=(0,)))
    with feed._changed:  # the decoder is kept waiting
        for number in range(70):
            feed.take(CodedPicture(delta if number else key, number, 97, 0.0, after_loss=False))
        assert len(feed._coded) < 65
    until(lambda: feed.damaged == 70)
    assert feed.asks_for_key_frame(1.0)


def test_a_report_of_a_clock_that_was_never_set_is_not_believed(feed: WebRtcFeed) -> None:
    picture = CodedPicture(b"", 90_000, 97, time.monotonic(), after_loss=False)
    assert feed._captured_at(picture) is None
    feed.note_report(SenderReport(time.time() - 1, 0))
    assert feed._captured_at(picture) == pytest.approx(time.time(), abs=0.5)
    feed.note_report(SenderReport(4711.0, 0))
    assert feed._captured_at(picture) is None


def test_key_frames_are_told_from_others() -> None:
    assert is_key_frame("VP8", b"\x10\x02\x00\x9d\x01\x2a\x40\x01")
    assert not is_key_frame("VP8", b"\x11\x02\x00\x9d\x01\x2a\x40\x01")
    start = b"\x00\x00\x00\x01"
    assert is_key_frame("H264", start + b"\x67abc" + start + b"\x68a" + start + b"\x65picture")
    assert not is_key_frame("H264", start + b"\x41picture")
    assert not is_key_frame("H264", b"the rest of something" + start + b"\x65picture")
    assert not is_key_frame("H264", b"")


# ---- what users type


def test_the_targets_that_users_type() -> None:
    assert ListenTarget.parse("webrtc:") == ListenTarget("127.0.0.1", 8081, "/whip", None, (), ())
    assert ListenTarget.parse("webrtc:9000").port == 9000
    target = ListenTarget.parse("webrtc://0.0.0.0:9000/door?token=sesame&origin=https://a.example&ice=stun:b.example")
    assert target == ListenTarget("0.0.0.0", 9000, "/door", "sesame", ("https://a.example",), ("stun:b.example",))


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("webrtc:door", "webrtc: give a port"),
        ("webrtc:99999", "webrtc: give a port"),
        ("webrtc://0.0.0.0:9000", "can be reached by others, so a token is needed"),
        ("webrtc://127.0.0.1?tokn=x", "no such setting as 'tokn'"),
        ("webrtc://sesame@127.0.0.1", "a token is given as"),
        ("webrtc://127.0.0.1:0?ice=http://x", "webrtc: malformed uri"),
    ],
)
def test_a_wrong_target_is_told_in_one_line(target: str, line: str) -> None:
    with pytest.raises(SourceError, match=line) as error:
        WebRtcListener(target)
    assert "sesame" not in str(error.value)


def test_a_target_is_opened_like_any_other() -> None:
    with open_source("webrtc:0") as source:
        assert isinstance(source, WebRtcListener)
        assert source.status.state == "connecting"
        assert (source.name, source.info.live, source.info.url) == ("webrtc", True, source.url)
    with pytest.raises(SourceError, match="start and end are for files"):
        open_source("webrtc:0", start=3)


def test_a_port_in_use_is_told_in_one_line() -> None:
    with (
        WebRtcListener("webrtc:0", media_hosts=LOOPBACK) as first,
        pytest.raises(SourceError, match=r"webrtc: cannot listen on 127.0.0.1:\d+: .+"),
    ):
        WebRtcListener(first.url.replace("http:", "webrtc:"))


def test_the_address_that_is_shown_bears_no_token() -> None:
    with WebRtcListener("webrtc://127.0.0.1:0/door?token=sesame") as source:
        assert source.info.url == source.url
        assert source.url.endswith("/door")
