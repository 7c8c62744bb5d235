"""Live sources without a network: states and patience, one clock over all connections, secrets, SDP and passwords."""

from __future__ import annotations

import base64
import hashlib
import itertools
import threading
import time
from collections.abc import Callable
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sources import LiveError, LiveSource, Reason, SourceError, open_source, redact
from saccade.sources.errors import StreamEndedError
from saccade.sources.live.connection import LiveFrame
from saccade.sources.live.reconnect import GOOD_S, LAST_DELAY_S, NO_FRAME_S, SILENCE_S, Link
from saccade.sources.live.source import LiveClock
from saccade.sources.rtsp.digest_auth import Credentials
from saccade.sources.rtsp.sdp import parse_sdp
from saccade.sources.urls import RtspAddress, stream_name

LONG_S = 20

reasons = st.sampled_from(["connection failed", "tls", "timeout", "not found", "codec unsupported"])


@given(reasons=st.lists(reasons, min_size=1, max_size=40), chance=st.floats(0, 1))
def test_backoff_doubles_from_half_a_second_to_thirty(reasons: list[Reason], chance: float) -> None:
    link = Link(lambda: chance)
    for number, reason in enumerate(reasons):
        delay = link.failed(reason)
        longest = min(LAST_DELAY_S, 0.5 * 2**number)
        assert 0.75 * longest <= delay <= longest
        assert link.status.reason == reason


@given(good_s=st.floats(0, 60), failures=st.integers(1, 20))
def test_backoff_resets_after_ten_good_seconds(good_s: float, failures: int) -> None:
    link = Link(lambda: 0.0)
    for _ in range(failures):
        link.failed("timeout")
    link.frame_arrived(100.0)
    link.frame_arrived(100.0 + good_s)
    expected = 0.5 if good_s >= GOOD_S else min(LAST_DELAY_S, 0.5 * 2**failures)
    assert link.failed("timeout") == expected


def test_a_refused_password_backs_off_to_the_longest_delay() -> None:
    assert Link(lambda: 0.0).failed("auth failed") == LAST_DELAY_S


events = st.lists(
    st.tuples(st.sampled_from(["attempt", "heard", "frame_arrived", "silent", "failed", "end"]), st.floats(0, 30)),
    max_size=60,
)


@given(events)
def test_every_state_follows_from_one_that_it_may_follow(events: list[tuple[str, float]]) -> None:
    may_follow = {
        "connecting": {"connecting", "live", "ended"},
        "live": {"live", "stalled", "reconnecting", "ended"},
        "stalled": {"stalled", "live", "reconnecting", "ended"},
        "reconnecting": {"reconnecting", "live", "ended"},
        "ended": {"ended"},
    }
    link, now = Link(lambda: 0.5), 0.0
    link.attempt(now)
    for name, passed in events:
        before, now = link.status, now + passed
        if name == "failed":
            link.failed("timeout")
        elif name == "end":
            link.end()
        elif name != "attempt" or before.state != "live":  # a live connection fails before the next is tried
            getattr(link, name)(now)
        after = link.status
        assert after.state in may_follow[before.state]
        assert after.connections - before.connections == (after.state == "live" != before.state)
        assert after.state != "live" or after.reason is None


def test_only_a_camera_that_was_live_can_be_stalled() -> None:
    link = Link()
    link.attempt(0.0)
    assert link.silent(SILENCE_S)
    assert link.status.state == "connecting"
    link.frame_arrived(10.0)
    link.heard(13.0)
    assert not link.silent(13.0 + SILENCE_S - 0.1)
    assert link.silent(13.0 + SILENCE_S)
    assert str(link.status) == "stalled (timeout)"
    link.attempt(18.0)
    assert link.status.state == "reconnecting"


def test_packets_without_pictures_are_silence_too_after_a_while() -> None:
    link = Link()
    link.frame_arrived(0.0)
    for now in range(int(NO_FRAME_S)):
        link.heard(now)
        assert not link.silent(now)
    link.heard(NO_FRAME_S)
    assert link.silent(NO_FRAME_S)


@given(st.lists(st.tuples(st.booleans(), st.none() | st.integers(-(2**40), 2**40), st.floats(0, 1000)), max_size=50))
def test_pts_grow_strictly_whatever_the_senders_do(steps: list[tuple[bool, int | None, float]]) -> None:
    clock, at, placed = LiveClock(), 0.0, []
    for restart, timestamp, passed in steps:
        at += passed
        if restart:
            clock.restart()
        placed.append(clock.place(timestamp, at))
    assert placed[:1] in ([], [0])
    assert all(type(pts) is int for pts in placed)
    assert all(before < after for before, after in itertools.pairwise(placed))


def test_intervals_hold_within_a_connection_and_time_between() -> None:
    clock = LiveClock()
    assert [clock.place(7_000_000 + step, 1.0 + step / 90_000) for step in (0, 3600, 7201)] == [0, 3600, 7201]
    clock.restart()
    assert clock.place(5, 11.08) == 7201 + 900_000 - 1  # 10 s later, rounded down
    assert clock.place(3605, 11.12) == 7201 + 900_000 - 1 + 3600


def live_frame(number: int, lost: int = 0) -> LiveFrame:
    decoded = av.VideoFrame.from_ndarray(np.full((48, 64, 3), number, np.uint8), format="rgb24")
    return LiveFrame(decoded, 3600 * number, time.monotonic(), None, lost)


class FakeConnection:
    """Gives what it is told to: frames, None for silence, or an error."""

    codec = decoder = "fake"
    rate = Fraction(25)
    damaged = 1

    def __init__(self, items: list[LiveFrame | Exception]) -> None:
        self._items = items
        self.heard_at = time.monotonic()
        self.closed = False

    def read(self, timeout_s: float) -> LiveFrame | None:
        if not self._items:
            time.sleep(0.01)
            return None
        item = self._items.pop(0)
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self.closed = True


def test_frames_continue_over_a_reconnect() -> None:
    connections = [
        FakeConnection([live_frame(0), live_frame(1), LiveError("connection failed", "hung up")]),
        FakeConnection([LiveError("not found", "not yet")]),
        FakeConnection([live_frame(0, lost=3), live_frame(1), StreamEndedError()]),
    ]
    given_out = iter(connections)
    states: list[str] = []
    with LiveSource("rtsp://a:b@c/d", lambda _: next(given_out), stream="c", link=Link(lambda: 1.0)) as source:
        frames = []
        for frame in source:
            states.append(source.status.state)
            frames.append(frame)
        assert [frame.index for frame in frames] == [0, 1, 2, 3]
        assert [frame.dropped_before for frame in frames] == [0, 0, 3, 0]
        assert all(before.pts < after.pts for before, after in itertools.pairwise(frames))
        assert {frame.capture_clock for frame in frames} == {"arrival"}
        assert abs(frames[-1].captured_at - time.time()) < LONG_S
        assert states == ["live"] * 4
        assert source.status.state == "ended"
        assert source.status.connections == 2
        assert source.corrupt_packets == 3
        assert all(connection.closed for connection in connections)
        assert (source.info.codec, source.info.width, source.info.height) == ("fake", 64, 48)
        assert (source.info.live, source.info.url) == (True, "rtsp://c/d")


def failing(_: threading.Event) -> FakeConnection:
    raise LiveError("auth failed", "no")


def test_without_retry_the_first_failure_is_the_last() -> None:
    with (
        LiveSource("rtsp://x", failing, stream="x", retry=False) as source,
        pytest.raises(LiveError, match="auth failed: no") as caught,
    ):
        next(iter(source))
    assert caught.value.reason == "auth failed"


@pytest.mark.parametrize("opener", [failing, lambda _: FakeConnection([])])
def test_close_ends_every_wait(opener: Callable[[threading.Event], FakeConnection]) -> None:
    source = LiveSource("rtsp://x", opener, stream="x")
    reader = threading.Thread(target=lambda: list(source))
    reader.start()
    time.sleep(0.1)
    source.close()
    reader.join(LONG_S)
    assert not reader.is_alive()
    assert source.status.state == "ended"


def test_vid_stride_keeps_numbers_and_losses() -> None:
    connection = FakeConnection(
        [live_frame(0), live_frame(1, lost=1), live_frame(2), live_frame(3, lost=2), StreamEndedError()]
    )
    with LiveSource("rtsp://x", lambda _: connection, stream="x", vid_stride=2) as source:
        assert [(frame.index, frame.dropped_before) for frame in source] == [(0, 0), (2, 1)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rtsp://bob:pass@cam/1", "rtsp://cam/1"),
        ("rtsp://bob:p@ss@cam:554/1", "rtsp://cam:554/1"),
        ("rtsp://bob:p@ss/word@cam/1", "rtsp://cam/1"),
        ("rtsp://bob:pass/word@cam/1", "rtsp://cam/1"),
        ("open rtsp://bob@cam/1 or http://b:c@d/e", "open rtsp://cam/1 or http://d/e"),
        ("rtsp://cam:554/a@b", "rtsp://cam:554/a@b"),
        ("http://cam/video?user=bob&password=pass&x=1", "http://cam/video?user=bob&password=***&x=1"),
        ("rtmp://cam/live?token=pass", "rtmp://cam/live?token=***"),
        ("rtmp://cam/live?token=…pass", "rtmp://cam/live?token=***"),
        ("use ws://HOST:PORT/PATH?token=…", "use ws://HOST:PORT/PATH?token=…"),
    ],
)
def test_secrets_are_not_shown(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_an_rtsp_address_is_taken_apart() -> None:
    address = RtspAddress.parse("rtsp://bob:p%40ss/w@cam:8554/live?x=1")
    assert (address.host, address.port, address.user, address.password) == ("cam", 8554, "bob", "p@ss/w")
    assert address.url == "rtsp://cam:8554/live?x=1"
    assert "p@ss" not in repr(address)
    assert RtspAddress.parse("rtsps://cam/x").port == 322
    assert RtspAddress.parse("RTSP://cam/x").port == 554
    assert stream_name("rtsp://bob:p@cam:8554/front/door?x=1") == "cam-8554-front-door"


@pytest.mark.parametrize(
    "target", ["rtsp://", "rtsp://cam:99999/x", "rtsp://u:secret@cam:port/x", "webrtcs://u:secret@x"]
)
def test_wrong_addresses_are_refused_in_one_line(target: str) -> None:
    with pytest.raises(SourceError) as caught:
        open_source(target)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_live_source_has_no_beginning_or_end() -> None:
    with pytest.raises(SourceError, match="start and end are for files"):
        open_source("rtsp://127.0.0.1/x", end=3)


SDP = """v=0
a=control:*
m=audio 0 RTP/AVP 97
a=rtpmap:97 MPEG4-GENERIC/48000
a=control:track0
m=video 0 RTP/AVP 96
a=rtpmap:96 H264/90000
a=fmtp:96 packetization-mode=1;sprop-parameter-sets=Z0IA,aM4=;profile-level-id=42
a=framerate:12.5
a=control:track1
"""


def test_what_a_camera_says_of_its_streams_is_read() -> None:
    audio, video = parse_sdp(SDP.replace("\n", "\r\n"), "rtsp://cam/live/")
    assert (audio.kind, audio.control) == ("audio", "rtsp://cam/live/track0")
    assert (video.kind, video.payload_type, video.encoding, video.rate) == ("video", 96, "H264", 12.5)
    assert video.control == "rtsp://cam/live/track1"
    assert video.parameter_sets == b"\0\0\0\1\x67\x42\x00\0\0\0\1\x68\xce"


@given(st.text(max_size=300))
def test_a_broken_description_never_raises(text: str) -> None:
    for media in parse_sdp(text + "\nm=video 0 RTP/AVP 96\na=" + text, "rtsp://cam/live"):
        assert isinstance(media.parameter_sets, bytes)


def test_a_digest_is_what_the_standard_has_for_an_example() -> None:
    # RFC 2617, 3.5, without the qop, whose cnonce is ours.
    credentials = Credentials("Mufasa", "Circle Of Life")
    assert credentials.answer("GET", "/") is None
    assert credentials.asked(['Basic realm="x"', 'Digest realm="testrealm@host.com", nonce="dcd98b", opaque="5ccc"'])
    told = credentials.answer("GET", "/dir/index.html") or ""
    secret = hashlib.md5(b"Mufasa:testrealm@host.com:Circle Of Life").hexdigest()
    request = hashlib.md5(b"GET:/dir/index.html").hexdigest()
    assert f'response="{hashlib.md5(f"{secret}:dcd98b:{request}".encode()).hexdigest()}"' in told
    assert 'opaque="5ccc"' in told
    assert "Circle" not in told
    assert credentials.asked(['Digest realm="r", nonce="n", algorithm=SHA-256, qop="auth"'])
    assert "qop=auth, nc=00000001" in (credentials.answer("PLAY", "x") or "")
    assert not credentials.asked(["Negotiate"])


def test_a_camera_that_knows_only_basic_gets_that() -> None:
    credentials = Credentials("bob", "p:w")
    assert credentials.asked(['Basic realm="x"'])
    assert credentials.answer("PLAY", "x") == "Basic " + base64.b64encode(b"bob:p:w").decode()
