"""Session descriptions as cameras write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sources.rtsp.sdp import parse_sdp

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


def test_the_streams_of_a_description_are_read() -> None:
    session = parse_sdp(SDP.replace("\n", "\r\n"), "rtsp://cam/live/")
    audio, video = session.medias
    assert (audio.kind, audio.control) == ("audio", "rtsp://cam/live/track0")
    assert (video.kind, video.payload_type, video.encoding, video.rate) == ("video", 96, "H264", 12.5)
    assert video.control == "rtsp://cam/live/track1"
    assert video.parameter_sets == b"\0\0\0\1\x67\x42\x00\0\0\0\1\x68\xce"


@given(st.text(max_size=300))
def test_a_broken_description_never_raises(text: str) -> None:
    for media in parse_sdp(text + "\nm=video 0 RTP/AVP 96\na=" + text, "rtsp://cam/live").medias:
        assert isinstance(media.parameter_sets, bytes)


@pytest.mark.parametrize(
    ("lines", "base", "session", "video"),
    [
        ("a=control:*\r\n|a=control:track1", "rtsp://cam/live/", "rtsp://cam/live/", "rtsp://cam/live/track1"),
        ("a=control:rtsp://cam/all\r\n|a=control:track1", "rtsp://cam/x", "rtsp://cam/all", "rtsp://cam/all/track1"),
        ("|a=control:rtsp://cam/live/v", "rtsp://cam/live", "rtsp://cam/live", "rtsp://cam/live/v"),
        ("|a=control:trackID=1", "rtsp://cam/live?x=1", "rtsp://cam/live?x=1", "rtsp://cam/live?x=1/trackID=1"),
        ("|", "rtsp://cam/live", "rtsp://cam/live", "rtsp://cam/live"),
    ],
)
def test_control_urls_join_as_servers_mean_them(lines: str, base: str, session: str, video: str) -> None:
    above, _, below = lines.partition("|")
    described = parse_sdp(f"v=0\r\n{above}m=video 0 RTP/AVP 96\r\n{below}\r\n", base)
    assert (described.control, described.medias[0].control) == (session, video)


@pytest.mark.parametrize(("text", "rate"), [("25", 25.0), ("0.1", 0.1), ("0S", None), ("9" * 400, None), ("x", None)])
def test_only_plausible_frame_rates_are_read(text: str, rate: float | None) -> None:
    (video,) = parse_sdp(f"m=video 0 RTP/AVP 96\na=framerate:{text}", "rtsp://cam").medias
    assert video.rate == rate


def test_every_payload_type_of_a_line_is_offered() -> None:
    text = (
        "m=video 0 RTP/AVP 97 96\na=rtpmap:97 VP9/90000\na=rtpmap:96 H264/90000\na=fmtp:96 packetization-mode=1\n"
        "a=control:v\nm=audio 0 RTP/AVP 0 101\na=rtpmap:101 telephone-event/8000\na=control:a"
    )
    medias = parse_sdp(text, "rtsp://cam").medias
    found = [(one.kind, one.payload_type, one.encoding, one.control.rpartition("/")[2]) for one in medias]
    assert found == [
        ("video", 97, "VP9", "v"),
        ("video", 96, "H264", "v"),
        ("audio", 0, "PCMU", "a"),
        ("audio", 101, "TELEPHONE-EVENT", "a"),
    ]
    assert [one.parameters for one in medias[:2]] == [{}, {"packetization-mode": "1"}]
    assert len(parse_sdp("m=video 0 RTP/AVP" + " 96" * 1000, "rtsp://cam").medias) == 32
