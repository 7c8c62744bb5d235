"""Clips cut from coded packets: where they begin, that nothing is coded again, and what a ring keeps."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest

from saccade.pipeline.events.storage.clips import Moment, PacketRing, copy_clip, write_clip
from saccade.sources import FileSource, LiveSource, open_source
from saccade.sources.live.packets import CodedPacket
from tests.support.cameras.http_camera import http, mjpeg
from tests.support.clips import MakeClip
from tests.support.packets import coded, shown


def filled(packets: list[CodedPacket], keep_s: float = 60) -> PacketRing:
    ring = PacketRing(keep_s)
    for packet in packets:
        ring.add(packet)
    return ring


@pytest.mark.parametrize(("codec", "frames_ahead"), [("h264", 0), ("h264", 2), ("hevc", 0)])
def test_a_clip_begins_at_the_key_before_its_time(tmp_path: Path, codec: str, frames_ahead: int) -> None:
    packets = coded(60, codec=codec, frames_ahead=frames_ahead)
    cut = filled(packets).cut(Moment(1002.5), Moment(1004.45))
    assert cut == packets[20:45]
    seconds = write_clip(cut, tmp_path / "clip.mp4")
    frames = shown(tmp_path / "clip.mp4")
    assert seconds == pytest.approx(2.4, abs=0.31)
    assert [number for _, number in frames[:20]] == list(range(20, 40))
    assert frames[0][0] == pytest.approx(0, abs=0.21)
    steps = np.diff([time for time, _ in frames])
    assert steps[:20] == pytest.approx(0.1, abs=0.001)


@pytest.mark.parametrize("codec", ["mjpeg", "vp8"])
def test_what_browsers_play_from_no_mp4_is_coded_again(tmp_path: Path, codec: str) -> None:
    packets = coded(40, codec=codec)
    assert write_clip(packets, tmp_path / "clip.mp4") == pytest.approx(3.9)
    check_played(tmp_path / "clip.mp4", list(range(40)))


@pytest.mark.parametrize(("name", "codec"), [("clip.mkv", "mjpeg"), ("clip.webm", "libvpx"), ("clip.avi", "mpeg4")])
def test_so_is_what_a_file_holds(make_clip: MakeClip, tmp_path: Path, name: str, codec: str) -> None:
    file = make_clip(name, codec=codec, frames=40, rate=10)
    copy_clip(FileSource(file).index, 1.0, 2.0, tmp_path / "clip.mp4")
    check_played(tmp_path / "clip.mp4", list(range(10, 21)))


def check_played(path: Path, numbers: list[int]) -> None:
    assert [number for _, number in shown(path)] == numbers
    with av.open(str(path)) as container:
        coder = container.streams.video[0].codec_context
        assert (coder.name, coder.pix_fmt) == ("h264", "yuv420p")


def test_a_clip_is_cut_from_a_camera_of_jpegs(tmp_path: Path) -> None:
    ring = PacketRing(60)
    with http(mjpeg) as url, open_source(f"{url}/video") as source:
        assert isinstance(source, LiveSource)
        source.taps.video.append(ring.add)
        list(itertools.islice(source, 15))
    write_clip(ring.cut(Moment(0), Moment(9e9)), tmp_path / "clip.mp4")
    numbers = [number for _, number in shown(tmp_path / "clip.mp4")]
    first = numbers[0]  # what came while the connection was being opened may be lost
    assert numbers[:12] == list(range(first, first + 12))


def test_what_is_written_is_what_the_camera_sent(tmp_path: Path) -> None:
    packets = coded(20)
    write_clip(packets, tmp_path / "clip.mp4")
    written = (tmp_path / "clip.mp4").read_bytes()
    for packet in packets[1:9]:
        assert packet.data.rpartition(b"\0\0\1")[2] in written  # the slice behind its start code
    assert written.index(b"moov") < written.index(b"mdat")  # so that a browser plays before it has all


def test_parameter_sets_may_come_apart_from_the_frames(tmp_path: Path) -> None:
    packets = coded(20)
    head, start, slices = packets[0].data.rpartition(b"\0\0\1")
    bare = CodedPacket("h264", head, start + slices, packets[0].pts, packets[0].arrived_at, True)
    write_clip([bare, *packets[1:]], tmp_path / "clip.mp4")
    assert len(shown(tmp_path / "clip.mp4")) == 20


def test_a_ring_keeps_so_many_seconds_and_what_is_held() -> None:
    packets = coded(100)
    ring = filled(packets[:50], keep_s=2.0)
    assert ring.cut(Moment(0), Moment(9e9)) == packets[20:50]  # from the key before the last 2 s
    ring.hold("event", 1002.5)
    for packet in packets[50:90]:
        ring.add(packet)
    assert ring.cut(Moment(0), Moment(9e9)) == packets[20:90]
    ring.release("event")
    ring.release("event")
    ring.add(packets[90])
    assert ring.cut(Moment(0), Moment(9e9))[0] == packets[70]
    assert ring.newest == packets[90].arrived_at


def test_a_ring_begins_with_a_key() -> None:
    packets = coded(40)
    assert filled(packets[5:25]).cut(Moment(0), Moment(9e9)) == packets[10:25]
    assert PacketRing(1).newest is None
    assert PacketRing(1).cut(Moment(0), Moment(9e9)) == []


@pytest.mark.parametrize("codec", ["h264", "hevc", "mjpeg"])
@pytest.mark.parametrize("clock", [-300.0, -2.0, 12.0, 3000.0], ids=["far back", "back", "ahead", "far ahead"])
def test_a_clip_goes_on_where_the_clock_jumps(tmp_path: Path, codec: str, clock: float) -> None:
    """As after a reconnect, or where a server joins recordings; an outage takes as long as it did."""
    first, jumped = coded(20, codec=codec), coded(25, codec=codec, start=1003.0)
    ring = filled(first)
    for packet in jumped if codec == "mjpeg" else jumped[5:]:  # a key frame comes only after 0.5 s
        ring.add(replace(packet, pts=packet.pts + first[-1].pts + round(clock * 90_000)))
    packets = ring.cut(Moment(0), Moment(9e9))
    assert [packet.data for packet in packets] == [
        packet.data for packet in (*first, *(jumped if codec == "mjpeg" else jumped[10:]))
    ]
    outage_s = packets[20].arrived_at - packets[19].arrived_at
    assert write_clip(packets, tmp_path / "clip.mp4") == pytest.approx(len(packets) / 10 - 0.2 + outage_s, abs=0.011)
    steps = np.diff([time for time, _ in shown(tmp_path / "clip.mp4")])
    assert steps[:18] == pytest.approx(0.1, abs=0.001)
    assert steps[19] == pytest.approx(outage_s, abs=0.001)
    assert steps[20:] == pytest.approx(0.1, abs=0.001)


def test_another_camera_at_the_same_address_begins_anew() -> None:
    ring = filled(coded(20))
    other = coded(15, codec="hevc", start=1010.0)
    for packet in other:
        ring.add(replace(packet, pts=packet.pts - 90_000))
    assert ring.cut(Moment(0), Moment(9e9)) == [replace(packet, pts=packet.pts - 90_000) for packet in other]
    larger = [
        replace(one, pts=one.pts + 9_000_000, arrived_at=one.arrived_at + 20) for one in coded(15, size=(320, 240))
    ]
    ring = filled([*coded(20), *larger])
    assert ring.cut(Moment(0), Moment(9e9)) == larger


def test_a_ring_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    packets = coded(60)
    most = sum(len(packet.data) for packet in packets[:25])
    monkeypatch.setattr("saccade.pipeline.events.storage.clips._MOST_BYTES", most)
    ring = PacketRing(60)
    ring.hold("event", 0)
    for packet in packets:
        ring.add(packet)
    kept = ring.cut(Moment(0), Moment(9e9))
    assert kept[0].key
    assert sum(len(packet.data) for packet in kept) <= most


def test_a_ring_without_another_key_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = (replace(packet, key=not number) for number, packet in enumerate(coded(30)))
    most = sum(len(packet.data) for packet in [first, *others[:20]])
    monkeypatch.setattr("saccade.pipeline.events.storage.clips._MOST_BYTES", most)
    ring = filled([first, *others])
    assert ring.cut(Moment(0), Moment(9e9)) == []  # the rest cannot be decoded without what is dropped
    ring.add(key := replace(others[-1], pts=others[-1].pts + 3000, key=True))
    assert ring.cut(Moment(0), Moment(9e9)) == [key]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clips") / "numbers.mp4"
    write_clip(coded(60), path)
    return path


@pytest.mark.parametrize(
    ("begin", "end", "first", "last"), [(2.5, 4.0, 20, 40), (0.0, 1.0, 0, 10), (5.5, 99.0, 50, 59), (-3.0, 0.5, 0, 5)]
)
def test_a_clip_is_copied_out_of_a_file(
    file: Path, tmp_path: Path, begin: float, end: float, first: int, last: int
) -> None:
    copy_clip(FileSource(file).index, max(begin, 0.0), end, tmp_path / "clip.mp4")
    numbers = [number for _, number in shown(tmp_path / "clip.mp4")]
    assert numbers == list(range(first, last + 1))


def test_no_video_is_an_error_and_not_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no video of this time is available"):
        write_clip([], tmp_path / "clip.mp4")


@pytest.mark.parametrize(("codec", "frames_ahead"), [("h264", 0), ("h264", 2), ("hevc", 0)])
def test_a_clip_goes_on_behind_an_earlier_one(tmp_path: Path, codec: str, frames_ahead: int) -> None:
    clip = tmp_path / "clip.mp4"
    packets = coded(60, codec=codec, frames_ahead=frames_ahead)
    write_clip(packets[:20], clip)
    write_clip(packets[40:], tmp_path / "whole.mp4", before=clip)
    frames = shown(tmp_path / "whole.mp4")
    numbers = [number for _, number in frames]
    assert numbers[:17] == list(range(17))
    assert numbers[-17:] == list(range(43, 60))
    assert len(numbers) >= 38
    assert np.diff([time for time, _ in frames]).max() < 0.35  # what is missing takes no time


@pytest.mark.parametrize("content", [b"", b"no video", "small"])
def test_an_earlier_clip_that_does_not_fit_is_left_out(
    tmp_path: Path, content: bytes | str, make_clip: MakeClip
) -> None:
    clip = tmp_path / "clip.mp4"
    if isinstance(content, bytes):
        clip.write_bytes(content)
    else:
        clip = make_clip("small.mp4", frames=10, rate=10, size=(96, 64))
    write_clip(coded(20), tmp_path / "whole.mp4", before=clip)
    assert [number for _, number in shown(tmp_path / "whole.mp4")] == list(range(20))
