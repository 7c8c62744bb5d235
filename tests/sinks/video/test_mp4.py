"""Mp4Sink on real frames: exact clocks, audio, odd sizes, a kill in the middle, and unwritable output."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from saccade.sinks import Mp4Sink, SinkError
from saccade.sinks.video import part_file as part_file_module
from saccade.sources import FileSource, Frame
from tests.support import REPO
from tests.support.clips import MakeClip, number_of
from tests.support.sinks.disk import FullDisk
from tests.support.sinks.mp4 import audio_packets, frame_times, top_boxes
from tests.support.sinks.results import LATENCY, NOTHING, file_frame


def write(path: Path, stamps: list[int], base: Fraction, rate: Fraction | None = None) -> None:
    sink = Mp4Sink(path, rate=rate)
    for number, pts in enumerate(stamps):
        sink.write(file_frame(pts, base, number), NOTHING, LATENCY)
    sink.close()


CLOCKS = {
    "constant": ([n * 512 for n in range(60)], Fraction(1, 12800)),
    "variable, in milliseconds": ([0, 33, 100, 101, 150, 2400, 2433, 7200, 7233, 7299], Fraction(1, 1000)),
    "NTSC": ([n * 1001 for n in range(30)], Fraction(1, 30000)),
    "numerator": (list(range(30)), Fraction(1001, 30000)),
    "RTP": ([n * 3003 for n in range(30)], Fraction(1, 90000)),
    "microseconds": ([n * 33_333 for n in range(30)], Fraction(1, 1_000_000)),
    "a frame a second": (list(range(12)), Fraction(1)),
    "a late first frame": ([378 + n * 384 for n in range(30)], Fraction(1, 11456)),
}


@pytest.mark.parametrize("clock", CLOCKS)
def test_timestamps_come_back_exactly(tmp_path: Path, clock: str) -> None:
    stamps, base = CLOCKS[clock]
    write(tmp_path / "out.mp4", stamps, base)
    frames = list(FileSource(tmp_path / "out.mp4"))
    assert [f.pts * f.time_base for f in frames] == [pts * base for pts in stamps]
    assert [number_of(f.image) for f in frames] == list(range(len(stamps)))


def test_a_video_that_is_being_written_is_not_replaced(tmp_path: Path) -> None:
    path, base = tmp_path / "out.mp4", Fraction(1, 10)
    frames = [file_frame(number, base, number) for number in range(60)]
    first, second = Mp4Sink(path), Mp4Sink(path)  # neither has begun
    for number, frame in enumerate(frames):
        first.write(frame, NOTHING, LATENCY)
        if number in (0, 59):  # while it is called out.mp4.part, and when it has its name
            for write_there in (lambda: Mp4Sink(path), lambda: second.write(frames[0], NOTHING, LATENCY)):
                with pytest.raises(SinkError, match=r"cannot write .*out\.mp4: another run writes to this file"):
                    write_there()
    assert path.exists()
    first.close()
    assert len(frame_times(path)) == 60
    second.write(frames[0], NOTHING, LATENCY)
    second.close()
    assert len(frame_times(path)) == 1


def test_the_clock_starts_at_zero_if_the_first_frame_is_late(tmp_path: Path) -> None:
    base = Fraction(1, 90000)
    start = 2**33 - 5000
    write(tmp_path / "out.mp4", [start + n * 3600 for n in range(10)], base)
    assert frame_times(tmp_path / "out.mp4") == [n * 3600 * base for n in range(10)]


@pytest.mark.parametrize("name", ["one-by-one-person.mp4", "bottles.mp4"])
def test_a_demo_clip_keeps_its_clock_and_length(shared_clips: Path, tmp_path: Path, name: str) -> None:
    source = FileSource(shared_clips / name, end=5)
    sink = Mp4Sink(tmp_path / "out.mp4", rate=source.info.average_rate, audio_from=source.info.url)
    stamps = []
    for frame in source:
        stamps.append(frame.pts)
        sink.write(frame, NOTHING, LATENCY)
    sink.close()
    written = FileSource(tmp_path / "out.mp4")
    assert written.info.time_base == source.info.time_base
    assert [f.pts for f in written] == stamps


def test_the_last_frame_is_shown_as_long_as_the_others(tmp_path: Path) -> None:
    write(tmp_path / "out.mp4", [n * 40 for n in range(25)], Fraction(1, 1000))
    assert FileSource(tmp_path / "out.mp4").info.duration_s == 1.0


def test_a_single_frame_is_shown_for_one_frame_interval(tmp_path: Path) -> None:
    write(tmp_path / "out.mp4", [0], Fraction(1, 1000), rate=Fraction(10))
    assert FileSource(tmp_path / "out.mp4").info.duration_s == 0.1


def test_browsers_can_play_and_seek_it(tmp_path: Path) -> None:
    path = tmp_path / "out.mp4"
    write(path, [n * 100 for n in range(70)], Fraction(1, 1000))
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        keys = [p.pts for p in container.demux(stream) if p.is_keyframe]
    assert keys == [0, 2000, 4000, 6000]
    assert "moov" in top_boxes(path)
    assert "moof" not in top_boxes(path)  # an ordinary file, not a fragmented one


def test_colours_survive(tmp_path: Path) -> None:
    base = Fraction(1, 25)
    colors = np.array([[220, 30, 30], [30, 200, 40], [40, 60, 230], [250, 210, 60]], np.uint8)
    image = np.repeat(np.repeat(colors[None], 160, axis=0), 60, axis=1).copy()
    sink = Mp4Sink(tmp_path / "out.mp4")
    frame = file_frame(0, base)
    sink.write(Frame(image, *(getattr(frame, name) for name in list(Frame.__slots__)[1:])), NOTHING, LATENCY)
    sink.close()
    (read,) = FileSource(tmp_path / "out.mp4")
    for column, color in enumerate(colors):
        assert np.abs(read.image[120, 60 * column + 30].astype(int) - color).max() <= 6


@pytest.mark.parametrize("size", [(161, 120), (160, 121), (161, 121), (33, 17)])
def test_odd_sizes_are_padded_to_even_ones(tmp_path: Path, size: tuple[int, int]) -> None:
    sink = Mp4Sink(tmp_path / "out.mp4")
    for n in range(3):
        sink.write(file_frame(n, Fraction(1, 10), n, size), NOTHING, LATENCY)
    sink.close()
    width, height = size
    (first, *_) = FileSource(tmp_path / "out.mp4")
    assert (first.width, first.height) == (width + width % 2, height + height % 2)


def test_frames_of_another_size_are_fitted_in(tmp_path: Path) -> None:
    sink = Mp4Sink(tmp_path / "out.mp4")
    sink.write(file_frame(0, Fraction(1), 0, (160, 120)), NOTHING, LATENCY)
    sink.write(file_frame(1, Fraction(1), 1, (100, 300)), NOTHING, LATENCY)
    sink.close()
    _, tall = FileSource(tmp_path / "out.mp4")
    assert (tall.width, tall.height) == (160, 120)
    assert tall.image[60, [5, 155]].max() < 40  # black beside it
    assert tall.image[40, 80].min() > 80


def test_frames_of_another_aspect_are_fitted_in(tmp_path: Path) -> None:
    """As of a camera that is set from 4:3 to 16:9 on the same pixels."""
    sink = Mp4Sink(tmp_path / "out.mp4")
    sink.write(file_frame(0, Fraction(1), 0, (160, 120)), NOTHING, LATENCY)
    sink.write(replace(file_frame(1, Fraction(1), 1, (160, 120)), pixel_aspect=Fraction(2)), NOTHING, LATENCY)
    sink.close()
    _, wide = FileSource(tmp_path / "out.mp4")
    assert (wide.width, wide.height, wide.pixel_aspect) == (160, 120, 1)
    assert wide.image[[5, 115], 80].max() < 40  # black above and below it
    assert wide.image[40, 80].min() > 80


@pytest.mark.parametrize(
    ("name", "codec"), [("in.mp4", "aac"), ("in.ts", "aac"), ("in.mkv", "libopus"), ("in.mkv", "ac3")]
)
def test_audio_is_copied_packet_for_packet(make_clip: MakeClip, tmp_path: Path, name: str, codec: str) -> None:
    path = make_clip(name, frames=75, audio=codec)
    source = FileSource(path)
    sink = Mp4Sink(tmp_path / "out.mp4", audio_from=path)
    stamps = []
    for frame in source:
        stamps.append(frame.pts * frame.time_base)
        sink.write(frame, NOTHING, LATENCY)
    sink.close()
    before, after = audio_packets(path), audio_packets(tmp_path / "out.mp4")
    shift = stamps[0] if stamps[0] >= 1 else 0
    assert frame_times(tmp_path / "out.mp4") == [t - shift for t in stamps]
    # Packets after the last frame are left out, and those before the first where the clock is moved.
    assert len(before) - 3 <= len(after) <= len(before)
    offset = sum(t < shift for t, _ in before)
    kept = before[offset : offset + len(after)]
    assert [size for _, size in after] == [size for _, size in kept]
    assert [t for t, _ in after] == pytest.approx([t - float(shift) for t, _ in kept], abs=0.002)


def test_audio_follows_a_start_in_the_middle(make_clip: MakeClip, tmp_path: Path) -> None:
    path = make_clip(frames=100, audio="aac")
    sink = Mp4Sink(tmp_path / "out.mp4", audio_from=path)
    for frame in FileSource(path, start=2, end=3):
        sink.write(frame, NOTHING, LATENCY)
    sink.close()
    heard = [t for t, _ in audio_packets(tmp_path / "out.mp4")]
    assert frame_times(tmp_path / "out.mp4")[0] == 0
    assert 0 <= heard[0] < 0.03
    assert 0.95 < heard[-1] < 1.01


def test_audio_that_an_mp4_cannot_hold_is_left_out(
    make_clip: MakeClip, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_clip("in.mkv", audio="pcm_s16le")
    with caplog.at_level(logging.WARNING):
        sink = Mp4Sink(tmp_path / "out.mp4", audio_from=path)
        for frame in FileSource(path):
            sink.write(frame, NOTHING, LATENCY)
        sink.close()
    assert "pcm_s16le" in caplog.text
    assert len(frame_times(tmp_path / "out.mp4")) == 30
    assert not FileSource(tmp_path / "out.mp4").info.audio


KILLED = """
import sys, os, signal
from fractions import Fraction
sys.path.insert(0, sys.argv[1])
from tests.support.sinks.results import LATENCY, NOTHING, file_frame
from saccade.sinks import Mp4Sink
sink = Mp4Sink(sys.argv[2], audio_from=sys.argv[3] if len(sys.argv) > 3 else None)
for n in range(130):
    sink.write(file_frame(n * 3600, Fraction(1, 90000), n), NOTHING, LATENCY)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("audio", ["none", "as long", "short"])
def test_a_kill_loses_only_the_last_gop(make_clip: MakeClip, tmp_path: Path, audio: str) -> None:
    out = tmp_path / "out.mp4"
    arguments = [str(REPO), str(out)]
    if audio != "none":
        arguments.append(str(make_clip(frames=130 if audio == "as long" else 10, audio="aac")))
    ended = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
    assert ended.returncode == -signal.SIGKILL
    # 130 frames at 25 a second, a key frame every 2 s: 0–49 and 50–99 are whole groups, 100–129 was being written.
    frames = list(FileSource(out))
    assert [number_of(f.image) for f in frames[:100]] == list(range(100))
    assert [f.pts * f.time_base for f in frames[:100]] == [Fraction(n, 25) for n in range(100)]


def test_an_unwritable_output_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo.mp4")
    missing = tmp_path / "no" / "such" / "out.mp4"
    for path in (missing, tmp_path, tmp_path / "file" / "out.mp4", tmp_path / "fifo.mp4"):
        with pytest.raises(SinkError, match=r"^cannot write .+") as caught:
            Mp4Sink(path)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("frames", [1, 10, 49, 52, 130])
def test_a_kill_never_leaves_an_mp4_that_cannot_be_played(tmp_path: Path, frames: int) -> None:
    code = KILLED.replace("range(130)", f"range({frames})")
    ended = subprocess.run([sys.executable, "-c", code, str(REPO), str(tmp_path / "out.mp4")], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["out.mp4" if frames > 50 else "out.mp4.part"]
    for path in tmp_path.glob("*.mp4"):
        assert len(list(FileSource(path))) >= 50


def test_an_old_file_is_kept_until_the_new_one_can_be_played(tmp_path: Path) -> None:
    path = tmp_path / "out.mp4"
    path.write_bytes(b"old")
    sink = Mp4Sink(path)
    for n in range(60):
        sink.write(file_frame(n, Fraction(1, 25), n), NOTHING, LATENCY)
        if n == 49:
            assert path.read_bytes() == b"old"
    assert "moof" in top_boxes(path)
    sink.close()
    assert len(frame_times(path)) == 60


def test_a_full_disk_leaves_what_was_written_playable(full_disk: FullDisk) -> None:
    path = full_disk.folder / "out.mp4"
    sink = Mp4Sink(path)
    for n in range(125):
        sink.write(file_frame(n, Fraction(1, 25), n), NOTHING, LATENCY)
    full_disk.fill()
    refused = 0
    for n in range(125, 250):
        try:
            sink.write(file_frame(n, Fraction(1, 25), n), NOTHING, LATENCY)
        except SinkError as error:
            refused += 1
            assert re.fullmatch(r"cannot write .+out(-\d)?.mp4: .+", str(error))  # noqa: PT017
    assert refused
    assert [path.name for path in full_disk.folder.glob("*.mp4*")] == ["out.mp4"]
    assert [number_of(f.image) for f in FileSource(path)][:100] == list(range(100))
    full_disk.free()
    for n in range(60):
        sink.write(file_frame(n, Fraction(1, 25), n), NOTHING, LATENCY)
    sink.close()
    assert len(frame_times(full_disk.folder / "out-1.mp4")) == 60


def test_a_disk_full_at_the_end_leaves_a_playable_file(full_disk: FullDisk) -> None:
    path = full_disk.folder / "out.mp4"
    sink = Mp4Sink(path)
    for n in range(125):
        sink.write(file_frame(n, Fraction(1, 25), n), NOTHING, LATENCY)
    full_disk.fill()
    with pytest.raises(SinkError, match=r"^cannot finish .+out.mp4: "):
        sink.close()
    sink.close()
    assert [number_of(f.image) for f in FileSource(path)] == list(range(100))


@pytest.mark.parametrize("gone", ["unlinked", "moved"])
def test_a_file_that_disappears_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    monkeypatch.setattr(part_file_module, "_CHECK_S", 0.0)
    path, elsewhere = tmp_path / "out.mp4", tmp_path / "elsewhere.mp4"
    sink = Mp4Sink(path)
    for n in range(120):
        sink.write(file_frame(n, Fraction(1, 25), n), NOTHING, LATENCY)
        if n == 59:
            path.unlink() if gone == "unlinked" else path.rename(elsewhere)
    sink.close()
    assert [number_of(f.image) for f in FileSource(path)] == list(range(60, 120))
    if gone == "moved":  # it was finished there
        assert [number_of(f.image) for f in FileSource(elsewhere)] == list(range(60))
        assert "moof" not in top_boxes(elsewhere)


def test_the_source_itself_is_never_overwritten(make_clip: MakeClip) -> None:
    path = make_clip()
    before = path.read_bytes()
    with pytest.raises(SinkError, match="is the source itself"):
        Mp4Sink(path, audio_from=path)
    assert path.read_bytes() == before


def test_without_frames_nothing_is_left_and_nothing_replaced(tmp_path: Path) -> None:
    Mp4Sink(tmp_path / "new.mp4").close()
    assert not (tmp_path / "new.mp4").exists()
    (tmp_path / "old.mp4").write_bytes(b"old")
    sink = Mp4Sink(tmp_path / "old.mp4")
    sink.close()
    sink.close()
    assert (tmp_path / "old.mp4").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["old.mp4"]


def test_a_name_with_a_colon_is_a_file_and_not_a_protocol(
    make_clip: MakeClip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_clip("cam:1.mp4", frames=5, audio="aac")
    sink = Mp4Sink("out:1.mp4", audio_from="cam:1.mp4")
    for frame in FileSource("cam:1.mp4"):
        sink.write(frame, NOTHING, LATENCY)
    sink.close()
    assert len(frame_times(Path("out:1.mp4"))) == 5
    assert FileSource("out:1.mp4").info.audio


def test_a_gap_longer_than_an_mp4_can_hold_is_shortened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base, away = Fraction(1, 1_000_000), 3600
    with caplog.at_level(logging.WARNING):
        write(tmp_path / "out.mp4", [0, 40_000, away * 10**6, away * 10**6 + 40_000], base)
    assert "a gap between frames is too long for an MP4" in caplog.text
    first, second, third, fourth = frame_times(tmp_path / "out.mp4")
    assert (first, second, fourth - third) == (0, Fraction(40, 1000), Fraction(40, 1000))
    assert 2000 < third < away
