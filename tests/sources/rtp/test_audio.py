"""Sound out of RTP packets: AAC in its access units, Opus and G.711 as they are, and nothing out of garbage."""

from __future__ import annotations

from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from saccade.sources.live.clock import LIVE_BASE
from saccade.sources.live.packets import adts_config
from saccade.sources.rtp.audio import AudioDepacketizer, opus_samples
from saccade.sources.rtp.rtcp import SenderReport
from saccade.sources.rtsp.audio import AudioReceiver
from saccade.sources.rtsp.sdp import parse_sdp
from saccade.sources.rtsp.session import rtp_time_of
from tests.support.cameras.scripted import Packetizer, sender_report

AAC = {"mode": "AAC-hbr", "config": "1190", "sizelength": "13", "indexlength": "3", "indexdeltalength": "3"}


def aac(rate: int = 48000) -> AudioDepacketizer:
    return AudioDepacketizer("MPEG4-GENERIC", rate, 2, AAC)


def units(*sizes: int) -> bytes:
    """Headers of access units and their bytes, as RFC 3640 has them in its mode AAC-hbr."""
    headers = b"".join((size << 3).to_bytes(2) for size in sizes)
    return (
        (16 * len(sizes)).to_bytes(2) + headers + b"".join(bytes([number]) * size for number, size in enumerate(sizes))
    )


def test_access_units_of_aac_follow_each_other() -> None:
    pieces = aac().push(5000, units(3, 0, 700), marker=True, gap=False)
    assert [(piece.timestamp, piece.data, piece.samples) for piece in pieces] == [
        (5000, bytes(3), 1024),
        (5000 + 2 * 1024, b"\2" * 700, 1024),
    ]


def test_an_access_unit_in_several_packets_is_whole_or_nothing() -> None:
    head, parts = (16).to_bytes(2) + (3000 << 3).to_bytes(2), [b"a" * 1400, b"b" * 1400, b"c" * 200]
    sound = aac()
    found = [sound.push(9, head + part, marker=number == 2, gap=False) for number, part in enumerate(parts)]
    assert [[len(piece.data) for piece in pieces] for pieces in found] == [[], [], [3000]]
    sound.push(9, head + parts[0], marker=False, gap=False)
    assert sound.push(9, head + parts[2], marker=True, gap=True) == []
    assert len(sound.push(10, units(7), marker=True, gap=False)) == 1


@pytest.mark.parametrize("change", [{"config": ""}, {"config": "xy"}, {"sizelength": "many"}, {"sizelength": "99"}])
def test_aac_without_what_it_needs_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="config"):
        AudioDepacketizer("MPEG4-GENERIC", 48000, 2, AAC | change)


@given(st.binary(max_size=200), st.booleans(), st.booleans())
def test_garbage_breaks_nothing(data: bytes, marker: bool, gap: bool) -> None:
    for sound in (aac(), AudioDepacketizer("OPUS", 48000, 2, {}), AudioDepacketizer("PCMA", 8000, 1, {})):
        for _ in range(3):
            for piece in sound.push(0, data, marker=marker, gap=gap):
                assert piece.data
                assert piece.samples > 0
    adts_config(data)


@pytest.mark.parametrize("duration", [2.5, 5, 10, 20, 40, 60])
def test_opus_packets_tell_how_long_they_are(duration: float) -> None:
    coder = av.CodecContext.create("libopus", "w")
    coder.sample_rate, coder.layout, coder.format = 48000, "stereo", "flt"
    coder.time_base, coder.options = Fraction(1, 48000), {"frame_duration": f"{duration:g}"}
    coder.open()
    frame = av.AudioFrame.from_ndarray(np.zeros((1, 2 * coder.frame_size), np.float32), format="flt", layout="stereo")
    frame.sample_rate, frame.pts = 48000, 0
    (packet, *_) = [*coder.encode(frame), *coder.encode(None)]
    assert opus_samples(bytes(packet)) == duration * 48


def test_adts_headers_become_a_config() -> None:
    coder = av.CodecContext.create("aac", "w")
    coder.sample_rate, coder.layout, coder.format, coder.time_base = 44100, "stereo", "fltp", Fraction(1, 44100)
    coder.open()
    header = bytes((0xFF, 0xF1, 1 << 6 | 4 << 2, 2 << 6, 0, 0, 0))
    config, data = adts_config(header + b"sound")
    assert (config, data) == (bytes(coder.extradata or b"")[:2], b"sound")


SDP = """m=audio 0 RTP/AVP 97
a=rtpmap:97 MPEG4-GENERIC/48000/2
a=fmtp:97 mode=AAC-hbr;config=1190;sizelength=13;indexlength=3;indexdeltalength=3
a=control:track2"""


def test_reports_place_sound_on_the_clock_of_the_video() -> None:
    (media,) = parse_sdp(SDP, "rtsp://c/d").medias
    assert (media.clock, media.channels) == (48000, 2)
    sound = AudioReceiver(media, in_order=True)
    packets = Packetizer(timestamp=2**32 - 2048, payload_type=97)
    video_time = 900_000

    def play(at: float) -> int:
        found = sound.take_rtp(packets.packet(units(100), True), at, (video_time, 100.0))
        packets.timestamp += 1024
        (piece,) = found or [None]
        return -1 if piece is None else piece.pts

    # Until there are reports, by when it arrives.
    assert sound.take_rtp(packets.packet(units(100), True), 99.0, None) == []
    assert play(100.5) == video_time + 45_000
    # The camera took this sound 0.2 s before that frame.
    report = sender_report(5000.0, packets.timestamp % 2**32)
    sound.take_rtcp(report, 101.0, SenderReport(5000.2, video_time), video_time)
    assert play(101.0) == video_time - 18_000
    assert play(101.5) == video_time - 18_000 + round(1024 / 48000 / LIVE_BASE)


def test_the_reply_to_play_places_sound_before_any_report() -> None:
    (media,) = parse_sdp(SDP, "rtsp://c/d").medias
    for began, pts in (((900_000, 5000), 900_000), ((900_000, 48000 * 60), 909_000)):  # the second is implausible
        sound = AudioReceiver(media, in_order=True, began=began)
        packets = Packetizer(timestamp=5000, payload_type=97)
        (piece,) = sound.take_rtp(packets.packet(units(100), True), 100.1, (900_000, 100.0))
        assert piece.pts == pts


@pytest.mark.parametrize(
    ("info", "control", "time"),
    [
        ("url=rtsp://c/d/v;seq=1;rtptime=77,url=rtsp://c/d/a;seq=2;rtptime=88", "rtsp://c/d/a", 88),
        ("url=v;seq=1;rtptime=77, url=a;rtptime=88", "rtsp://c/d/v", 77),
        ("url=rtsp://c/a,b/v;rtptime=77", "rtsp://c/a,b/v", 77),
        ("url=rtsp://c/d/v;seq=1", "rtsp://c/d/v", None),
        ("url=rtsp://c/d/v;rtptime=-1", "rtsp://c/d/v", None),
        ("", "rtsp://c/d/v", None),
    ],
)
def test_the_reply_to_play_tells_where_a_stream_begins(info: str, control: str, time: int | None) -> None:
    assert rtp_time_of(info, control) == time
