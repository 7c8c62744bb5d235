"""Saccade receives video from Janus over WebRTC: with lost packets, and after an outage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing

import pytest

from saccade.sources.webrtc.listener import WebRtcListener
from tests.support.cameras import LONG_S, Camera, Watcher, need_servers, wait_for
from tests.support.janus import Janus, RtpSender, needs_janus
from tests.support.webrtc import LOOPBACK

pytestmark = [pytest.mark.e2e, needs_janus]


@pytest.fixture(scope="module")
def janus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Janus]:
    with closing(Janus(tmp_path_factory.mktemp("janus"))) as opened:
        yield opened


def url_of(seen: Watcher) -> str:
    assert isinstance(seen.source, WebRtcListener)
    return seen.source.url


@pytest.fixture
def seen() -> Iterator[Watcher]:
    """The frames of a source that waits for a WebRTC publisher."""
    with WebRtcListener("webrtc:0", media_hosts=LOOPBACK) as source, Watcher(source) as watcher:
        yield watcher
    assert watcher.error is None
    assert watcher.bad == 0  # no torn image
    assert all(a < b for a, b in itertools.pairwise(watcher.numbers))


def test_a_camera_shows_no_torn_image_while_5_percent_of_the_packets_get_lost(janus: Janus, seen: Watcher) -> None:
    need_servers()
    with (
        Camera("--gop", 5) as camera,
        janus.mountpoint(type="rtsp", video=True, url=camera.url()) as mountpoint,
        mountpoint.publishing(url_of(seen)) as link,
    ):
        link.loss = 0.05
        wait_for(lambda: len(seen.numbers) > 60, LONG_S)
    assert link.lost > 3


def test_a_keyframe_is_requested_after_an_outage(janus: Janus, seen: Watcher) -> None:
    media: dict[str, object] = {"type": "video", "mid": "v", "pt": 96, "codec": "h264", "port": 0, "rtcpport": 0}
    media["fmtp"] = "packetization-mode=1;profile-level-id=42e01f"
    with (
        janus.mountpoint(type="rtp", media=[media]) as mountpoint,
        RtpSender(mountpoint.ports[0]["port"], mountpoint.ports[0]["rtcp_port"]) as sender,
        mountpoint.publishing(url_of(seen)) as link,
    ):
        wait_for(lambda: len(seen.numbers) > 10, LONG_S)
        requests, began = sender.requests, sender.number
        link.loss = 1
        wait_for(lambda: sender.number > began + 30, LONG_S)  # longer than Janus can retransmit
        link.loss = 0
        wait_for(lambda: seen.numbers[-1] > began + 50, LONG_S)
        assert sender.requests > requests
        wait_for(lambda: "rtcp" in seen.clocks, LONG_S)  # capture times from Janus's RTCP reports
