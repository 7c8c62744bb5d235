from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import av
import httpx
import numpy as np
import pytest
from aiortc import AudioStreamTrack, RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from numpy.typing import NDArray

from saccade.sources import SourceError, open_source
from saccade.sources.frame import Frame
from saccade.sources.live.decoder import Decoder
from saccade.sources.live.packets import CodedPacket
from saccade.sources.rtp.depacketizer import AccessUnit
from saccade.sources.rtp.packet import RtpPacket
from saccade.sources.webrtc.listener import ListenTarget, WebRtcListener
from saccade.sources.webrtc.peer import choose_addresses
from saccade.sources.webrtc.source import SenderReport, WebRtcConnection
from tests.sources.rtp.test_packet import packetize, unit_of
from tests.support.clips import number_of, numbered_image
from tests.support.webrtc import LOOPBACK, Drawn, Served, leaving_no_thread, publishing, serving, small, until


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    with leaving_no_thread():
        yield


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    with serving() as make:
        yield make


def encoded_vp8(frames: int, keys: tuple[int, ...]) -> list[av.Packet]:
    encoder = av.CodecContext.create("libvpx", "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.time_base = 320, 240, "yuv420p", Fraction(1, 30)
    encoder.options = {"deadline": "realtime", "lag-in-frames": "0"}
    packets = []
    for number in range(frames):
        frame = av.VideoFrame.from_ndarray(small(number), format="rgb24")
        frame.pts = number
        frame.pict_type = av.video.frame.PictureType.I if number in keys else av.video.frame.PictureType.NONE
        packets += encoder.encode(frame)
    return packets


# ---- frames


@pytest.mark.parametrize("codec", ["VP8", "H264"])
def test_a_peer_publishes_and_every_frame_arrives(codec: str) -> None:
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
        return numbered_image(number % 256, *((320, 240) if number < 20 else (480, 360)))

    with WebRtcListener("webrtc:0", media_hosts=LOOPBACK) as source, publishing(source.url, codec, growing):
        frames = list(itertools.islice(source, 40))
        assert (source.info.width, source.info.height) == (480, 360)
    assert {(frame.width, frame.height) for frame in frames} == {(320, 240), (480, 360)}
    assert all((frame.width == 320) == (number_of(frame.image) < 20) for frame in frames)
    assert all(a.pts < b.pts for a, b in itertools.pairwise(frames))


def test_a_slow_reader_gets_the_newest_frame_and_a_count() -> None:
    with WebRtcListener("webrtc:0", media_hosts=LOOPBACK) as source, publishing(source.url):
        frames = []
        for frame in source:
            frames.append(frame)
            if len(frames) == 6:
                break
            time.sleep(0.2)  # six frames
    numbers = [number_of(frame.image) for frame in frames]
    missed = [b - a - 1 for a, b in itertools.pairwise(numbers)]
    assert [frame.dropped_before for frame in frames[1:]] == missed
    assert sum(missed) > 10


def test_a_gone_publishers_decoder_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[object]] = []

    class Noted(Decoder):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            made.append(weakref.ref(self))

    monkeypatch.setattr("saccade.sources.webrtc.source.Decoder", Noted)
    gc.disable()
    try:
        with WebRtcListener("webrtc:0", media_hosts=LOOPBACK) as source:
            frames = iter(source)
            for _ in range(2):
                with publishing(source.url):
                    next(frames)
                until(lambda: [one for one in made if one() is not None] == [])
            frames.close()  # type: ignore[attr-defined]
        assert len(made) == 2
    finally:
        gc.enable()


def test_every_nth_frame_on_request() -> None:
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
        async with httpx.AsyncClient(timeout=20) as http:
            response = await http.post(f"{served.url}/offer", json=body)
            answer = response.json()
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
            with publishing(source.url, "VP8", lambda n: numbered_image(n % 256, 160, 120)):
                assert any(frame.width == 160 for frame in itertools.islice(frames, 60))


# ---- the feed by itself


@pytest.fixture
def feed() -> Iterator[WebRtcConnection]:
    feed = WebRtcConnection({97: "VP8", 99: "H264"})
    yield feed
    feed.close()
    feed.join()


def vp8(number: int, data: bytes, parts: int = 1) -> list[RtpPacket]:
    """The packets of frame `number`, which has as many as all others."""
    size = -(-len(data) // parts)
    return [
        RtpPacket(
            part == parts - 1,
            97,
            (65530 + number * parts + part) % 65536,
            3000 * number,
            1,
            (b"\0" if part else b"\x10") + data[part * size : (part + 1) * size],
        )
        for part in range(parts)
    ]


def test_what_ends_the_decoding_is_raised_by_the_reader(feed: WebRtcConnection) -> None:
    def refuse(packet: CodedPacket) -> None:
        raise ValueError("no such packet")

    feed.taps.video.append(refuse)
    (key,) = encoded_vp8(1, keys=(0,))
    feed.take(*vp8(0, bytes(key)), time.monotonic())
    with pytest.raises(ValueError, match="no such packet"):
        feed.read(20.0)


def test_a_key_frame_is_requested_until_one_arrives(feed: WebRtcConnection) -> None:
    key, delta = (bytes(packet) for packet in encoded_vp8(2, keys=(0,)))
    feed.take(*vp8(0, delta), 0.0)
    assert [feed.asks_for_key_frame(now) for now in (1.0, 1.2, 1.6)] == [True, False, True]
    feed.take(*vp8(1, key), time.monotonic())
    assert not feed.asks_for_key_frame(3.0)
    frame = feed.read(5)
    assert frame is not None
    assert (frame.timestamp, frame.lost_before) == (3000, 0)
    assert feed.damaged == 0


@pytest.mark.parametrize("lost", [6, 7, 8])
def test_frames_after_a_lost_packet_wait_for_a_key_frame(feed: WebRtcConnection, lost: int) -> None:
    coded = [bytes(packet) for packet in encoded_vp8(6, keys=(0, 4))]
    packets = [one for number, data in enumerate(coded) for one in vp8(number, data, parts=3)]
    del packets[lost]  # of frame 2
    begin = time.monotonic() - 1.0
    asked = []
    for one in packets:
        number = one.timestamp // 3000
        feed.take(one, begin + 0.21 * number)  # so that the gap is not waited for beyond frame 3
        asked += [number] * feed.asks_for_key_frame(begin + 0.21 * number)
        if one.marker and number in (0, 1, 4, 5):
            frame = feed.read(5)
            assert frame is not None
            assert frame.timestamp == 3000 * number
            assert frame.lost_before == (2 if number == 4 else 0)
    assert feed.damaged == 1
    assert asked == [0, 4 if lost == 8 else 3]  # the last packet is missed when the next frame begins


def test_a_retransmitted_packet_loses_nothing(feed: WebRtcConnection) -> None:
    packets = [one for n, packet in enumerate(encoded_vp8(3, keys=(0,))) for one in vp8(n, bytes(packet), parts=3)]
    late = packets.pop(4)
    begin = time.monotonic()
    for one in [*packets, late, late]:
        feed.take(one, begin)
    until(lambda: feed._newest is not None and feed._newest.timestamp == 6000)
    assert feed.damaged == 0
    assert not feed._queue.dropped


def test_a_decoder_that_cannot_keep_up_resumes_at_a_key_frame(feed: WebRtcConnection) -> None:
    coded = [bytes(packet) for packet in encoded_vp8(90, keys=(0, 60))]
    begin = time.monotonic() - 3.0
    with feed._changed:  # the decoder is kept waiting
        for number, data in enumerate(coded):
            feed.take(*vp8(number, data), begin + number / 30)
        assert len(feed._queue) <= 30
        assert not feed.asks_for_key_frame(0.0)
    until(lambda: feed._newest is not None and feed._newest.timestamp == 89 * 3000)
    frame = feed.read(5)
    assert frame is not None
    assert frame.lost_before == 89
    assert feed._queue.dropped == 60
    assert feed.damaged == 0  # late is no damage


def test_without_a_key_frame_in_sight_a_late_decoder_asks_for_one(feed: WebRtcConnection) -> None:
    coded = [bytes(packet) for packet in encoded_vp8(90, keys=(0,))]
    begin = time.monotonic() - 3.0
    with feed._changed:
        for number, data in enumerate(coded):
            feed.take(*vp8(number, data), begin + number / 30)
        assert len(feed._queue) == 0
        assert feed.asks_for_key_frame(0.0)
    assert feed.read(0.01) is None


def test_the_sender_may_change_the_codec(feed: WebRtcConnection) -> None:
    coded = [bytes(packet) for packet in encoded_vp8(2, keys=(0,))]
    slices = unit_of("h264", True, [50])
    packets = [one for number, data in enumerate(coded) for one in vp8(number, data)]
    packets += packetize("h264", [slices, slices[-1:]], 1000)
    # The first frame refers to one before the change.
    packets += [one for number, data in enumerate([coded[1], *coded]) for one in vp8(number, data)]
    seen: list[tuple[str, bool]] = []
    feed.taps.video.append(lambda packet: seen.append((packet.codec, packet.key)))
    for number, one in enumerate(packets):
        payload_type = 97 if one.payload_type == 97 else 99
        numbered = replace(one, sequence=number, timestamp=3000 * number, payload_type=payload_type)
        feed.take(numbered, time.monotonic())
        assert feed._units.needs_key == (number == 4)
    until(lambda: len(seen) >= 6)
    assert [codec for codec, _ in seen] == ["libvpx"] * 2 + ["h264"] * 2 + ["libvpx"] * 2
    assert [key for _, key in seen[::2]] == [True] * 3


def test_a_clock_that_was_never_set_is_corrected(feed: WebRtcConnection) -> None:
    unit = AccessUnit(b"", 90_000, True, False, False, 0, time.monotonic(), "vp8")
    assert feed._captured_at(unit) is None
    feed.note_report(SenderReport(time.time() - 1, 0))
    assert feed._captured_at(unit) == pytest.approx(time.time(), abs=0.5)
    feed.note_report(SenderReport(4711.0, 0))
    assert feed._captured_at(unit) == pytest.approx(time.time(), abs=0.5)


# ---- what users type


def test_the_targets_that_users_type() -> None:
    assert ListenTarget.parse("webrtc:") == ListenTarget("127.0.0.1", 8081, "/whip", None, (), ())
    assert ListenTarget.parse("webrtc:9000").port == 9000
    target = ListenTarget.parse("webrtc://0.0.0.0:9000/door?token=sesame&origin=https://a.example&ice=stun:b.example")
    assert target == ListenTarget("0.0.0.0", 9000, "/door", "sesame", ("https://a.example",), ("stun:b.example",))


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("webrtc:door", "webrtc: invalid address"),
        ("webrtc:99999", "webrtc: invalid address"),
        ("webrtc://0.0.0.0:9000", "is reachable from the network: add a token"),
        ("webrtc://127.0.0.1?tokn=x", "unknown option 'tokn'"),
        ("webrtc://sesame@127.0.0.1", "write the token as"),
        ("webrtc://127.0.0.1:0?ice=http://x", "webrtc: an ICE server must be stun:HOST:PORT"),
    ],
)
def test_a_malformed_target_is_refused_in_one_line(target: str, line: str) -> None:
    with pytest.raises(SourceError, match=line) as error:
        WebRtcListener(target)
    assert "sesame" not in str(error.value)


def test_a_target_is_opened_like_any_other() -> None:
    with open_source("webrtc:0") as source:
        assert isinstance(source, WebRtcListener)
        assert source.status.state == "connecting"
        assert (source.name, source.info.live, source.info.url) == ("webrtc", True, source.url)
    with pytest.raises(SourceError, match="remove start and end"):
        open_source("webrtc:0", start=3)


def test_a_port_in_use_is_reported_in_one_line() -> None:
    with (
        WebRtcListener("webrtc:0", media_hosts=LOOPBACK) as first,
        pytest.raises(SourceError, match=r"webrtc: cannot listen on 127.0.0.1:\d+: address already in use$"),
    ):
        WebRtcListener(first.url.replace("http:", "webrtc:"))


def test_an_invalid_host_is_refused_in_one_line() -> None:
    with pytest.raises(SourceError, match=r"webrtc: cannot listen on a\.\.b:0: not a valid host name$"):
        WebRtcListener("webrtc://a..b:0?token=sesame")


def test_the_address_that_is_shown_bears_no_token() -> None:
    with WebRtcListener("webrtc://127.0.0.1:0/door?token=sesame") as source:
        assert source.info.url == source.url
        assert source.url.endswith("/door")
